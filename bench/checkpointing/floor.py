"""What the machine allows, under the same load: one copy of the state, packed O_DIRECT writes of it, reads with BLAKE3.

Invariant: the same bytes as the others', without names, deduplication or commit: nobody who does more can be faster but by luck.
Failure behaviour: a file system without O_DIRECT is written through the page cache and fsynced.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from headrace.bench.checkpointing.built import SECONDS, Built, Wait
from headrace.bench.checkpointing.training import State, Training

_PAGE, _BLOCK, _THREADS, _READERS = 4096, 16 << 20, 2, 4
_READ = 4 << 20
"""What a read asks for; the disks that were tried give most so."""
Bytes = npt.NDArray[np.uint8]


class Area:
    """Memory that was there before, one run for each tensor."""

    def __init__(self, values: State) -> None:
        self.places, end = {}, 0
        for name, tensor in values.items():
            self.places[name] = (end, tensor.nbytes)
            end += -(-tensor.nbytes // _PAGE) * _PAGE
        self.size = -(-end // _BLOCK) * _BLOCK
        self.bytes: Bytes = np.frombuffer(mmap.mmap(-1, self.size), np.uint8)
        self.bytes.fill(0)


def floor(where: str, training: Training) -> Built:
    """In a directory."""
    os.makedirs(where, exist_ok=True)
    areas, paths, rooms = [Area(training.state())], list[str](), _Room()
    pool, readers, writer = ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(_READERS), ThreadPoolExecutor(1)
    writers = ThreadPoolExecutor(_THREADS)

    def save(values: State) -> Wait:
        if set(values) - set(areas[0].places):
            areas[0] = Area(values)
        area = areas[0]
        _all(pool, lambda name: np.copyto(_at(area, name), _bytes(values[name])), values)
        paths.append(f"{where}/{len(paths)}")  # to replace a file takes longer than to make one
        done: Future[None] = writer.submit(_write, paths[-1], area, writers)
        return lambda: done.result(SECONDS)

    def restore(target: State) -> None:
        fd = _open(paths[-1], os.O_RDONLY)

        def one(name: str) -> None:
            place, length = areas[0].places[name]
            wanted = _bytes(target[name])
            for at in range(0, length, _READ):
                size = min(_READ, length - at)
                room = rooms.bytes[: -(-size // _PAGE) * _PAGE]
                os.preadv(fd, [room], place + at)
                blake3(room[:size]).digest()
                np.copyto(wanted[at : at + size], np.frombuffer(room[:size], np.uint8))

        try:
            _all(readers, one, target)
        finally:
            os.close(fd)

    return Built(save, restore)


class _Room(threading.local):
    """A buffer of this thread that O_DIRECT can fill."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, _READ))


def _all(pool: ThreadPoolExecutor, work: Callable[[str], object], names: State) -> None:
    for done in [pool.submit(work, name) for name in names]:
        done.result(SECONDS)


def _at(area: Area, name: str) -> Bytes:
    at, length = area.places[name]
    return area.bytes[at : at + length]


def _bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _write(path: str, area: Area, writers: ThreadPoolExecutor) -> None:
    fd = _open(f"{path}.new", os.O_WRONLY | os.O_CREAT)
    try:
        blocks = range(0, area.size, _BLOCK)
        list(writers.map(lambda at: os.pwrite(fd, area.bytes[at : at + _BLOCK].data, at), blocks))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(f"{path}.new", path)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
