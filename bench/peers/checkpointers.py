"""The candidates of `headrace bench checkpoint`.

Each function builds one, as `function(where, training, **options) -> Built`. Headrace saves in the trainer's process or
through a sidecar on another core. The peers are torch.save, safetensors, torch.distributed.checkpoint (DCP) in its
variants, torch_checkpointing and s3torchconnector. `floor` shows the limit of the machine: one copy of the state,
packed O_DIRECT writes, and reads with BLAKE3, without names, deduplication or commit.

Invariant: the wait of a save returns only when the state is durable: fsynced, or acknowledged by the object store.
This module fsyncs files that a library leaves in the page cache.

Failure behaviour: a candidate fails if it raises an exception, or if its daemon does not start.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as tdc
from blake3 import blake3

from headrace.bench.core.processes import daemon
from headrace.bench.workloads.training import Guard, State, Training
from headrace.checkpoint import Checkpointer

_REGION = "us-east-1"


class _Paths:
    """A new path for every save."""

    def __init__(self, where: str) -> None:
        self._where, self._count = where, 0
        if "://" not in where:
            os.makedirs(where, exist_ok=True)

    def next(self) -> str:
        self._count += 1
        return self.last

    @property
    def last(self) -> str:
        return f"{self._where}/{self._count}"


def torch_save(where: str, training: Training) -> Built:
    paths = _Paths(where)

    def save(values: State) -> Wait:
        with open(paths.next(), "wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in torch.load(paths.last, weights_only=True).items():
            target[name].copy_(tensor)

    return Built(save, restore)


def safetensors(where: str, training: Training) -> Built:
    library: Any = importlib.import_module("safetensors.torch")
    paths = _Paths(where)

    def save(values: State) -> Wait:
        library.save_file({name: tensor.contiguous() for name, tensor in values.items()}, paths.next())
        _sync(paths.last)
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in library.load_file(paths.last).items():
            target[name].copy_(tensor)

    return Built(save, restore)


def dcp(where: str, training: Training, *, kind: str) -> Built:
    """DCP with its file storage.

    `kind` is sync, thread, process, or stager (a thread, with DCP's cached staging area).
    """
    paths = _Paths(where)

    def writer() -> Any:
        return tdc.FileSystemWriter(paths.next(), thread_count=2)

    return _dcp(writer, lambda: tdc.FileSystemReader(paths.last), kind)


def _dcp(writer: Callable[[], Any], reader: Callable[[], Any], kind: str) -> Built:
    group, owns_group = _group()
    more: dict[str, Any] = {}
    if kind == "stager":
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        plain = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        more["async_stager"] = DefaultStager(plain)
    elif kind == "process":
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        more["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

    def save(values: State) -> Wait:
        if kind == "sync":
            tdc.save(values, storage_writer=writer(), process_group=group)
            return lambda: None
        response: Any = tdc.async_save(values, storage_writer=writer(), process_group=group, **more)
        future = getattr(response, "upload_completion", response)
        return lambda: future.result(SECONDS)

    def restore(target: State) -> None:
        tdc.load(target, storage_reader=reader(), process_group=group)

    return Built(save, restore, dist.destroy_process_group if owns_group else (lambda: None))


def _group() -> tuple[Any, bool]:
    """Return a process group for a saver's background communication, and whether it had to create the default group."""
    if dist.is_initialized():
        return dist.new_group(backend="gloo"), False
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))  # DCP's process reads both
    dist.init_process_group("gloo", rank=0, world_size=1)
    return None, True


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torch_checkpointing(where: str, training: Training) -> Built:
    """Asynchronous saves, with staging in the background and a writer process. The wait then fsyncs the files."""
    library: Any = importlib.import_module("torch_checkpointing.checkpoint_manager")
    config: Any = importlib.import_module("torch_checkpointing.config")
    staging: Any = importlib.import_module("torch_checkpointing.staging")
    storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    stager = staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = library.CheckpointManager(
        library.CheckpointManager.Config(
            save=config.AsyncCheckpointSaverConfig(staging_config=stager),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),  # its O_DIRECT fails on ext4
        )
    )
    paths = _Paths(where)

    def save(values: State) -> Wait:
        future = manager.save(paths.next(), {"state": values})

        def wait() -> None:
            future.result(SECONDS)
            for path in Path(paths.last).rglob("*"):
                _sync(str(path))

        return wait

    def restore(target: State) -> None:
        loaded = manager.load(paths.last, into={"state": target})["state"]
        for name, tensor in target.items():
            if loaded[name] is not tensor:
                tensor.copy_(loaded[name])

    return Built(
        save, restore, manager.close, manager.lock, lambda: manager.prewarm_staging({"state": training.state()})
    )


def s3torchconnector(where: str, training: Training) -> Built:
    """Synchronous saves to s3torchconnector's DCP storage, as its documentation shows."""
    library: Any = importlib.import_module("s3torchconnector.dcp")
    client: Any = importlib.import_module("s3torchconnector")
    config = client.S3ClientConfig(force_path_style=True)
    paths = _Paths(where)

    def writer() -> Any:
        return library.S3StorageWriter(region=_REGION, path=paths.next(), s3client_config=config, thread_count=2)

    def reader() -> Any:
        return library.S3StorageReader(region=_REGION, path=paths.last, s3client_config=config)

    return _dcp(writer, reader, "sync")


def dcp_fsspec(where: str, training: Training) -> Built:
    """Saves to DCP's own storage for object stores, through s3fs."""
    fsspec: Any = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    paths = _Paths(where)
    options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    return _dcp(
        lambda: fsspec.FsspecWriter(paths.next(), thread_count=2, sync_files=False, **options),
        lambda: fsspec.FsspecReader(paths.last, **options),
        "sync",
    )


def _sync(path: str) -> None:
    with contextlib.suppress(IsADirectoryError), open(path, "rb+") as file:
        os.fsync(file.fileno())


Wait = Callable[[], object]
SECONDS = 240


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Built:
    """A checkpointer under test.

    `save` returns when training may continue. Its result is a function that waits until the state is durable. The
    optimizer steps only within `guard`. The result of the wait may have `wait_seconds`: the time that the trainer
    waited after `save`.
    """

    save: Callable[[State], Wait]
    restore: Callable[[State], object]
    close: Callable[[], object] = _do_nothing
    guard: Guard = contextlib.nullcontext
    warm_up: Callable[[], object] = _do_nothing
    """A trainer may call this once, after its first steps."""


def headrace(where: str, training: Training, *, sidecar: str | None = None, **options: Any) -> Built:
    """Headrace, which saves in the trainer's process unless `sidecar` is a socket."""
    checkpointer = Checkpointer(where, run="bench", sidecar=sidecar, **options)
    steps = iter(range(1, 10_000))

    def given() -> dict[str, Any]:
        # The optimizer's tensors are those of the state, so they are stored once.
        # A lazy save copies them late and makes the optimizer's step wait, so it needs the optimizer.
        more = {"optimizer": training.optimizer} if options.get("staging") == "lazy" else {}
        return {"state": training.state(), **more}

    def save(values: State) -> Wait:
        handle = checkpointer.save(next(steps), given())
        return partial(handle.result, SECONDS)

    def restore(target: State) -> None:
        checkpointer.restore({"state": target}, include="state/*")

    return Built(save, restore, checkpointer.close, warm_up=lambda: checkpointer.warm_up(given()))


def with_sidecar(where: str, training: Training, **options: Any) -> Built:
    """Headrace with a sidecar.

    If there are several cores, the trainer is pinned to the first one, and the daemon to the others.
    """
    cores, stack = sorted(os.sched_getaffinity(0)), contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mr-"))
    running = stack.enter_context(daemon(Path(folder), http_port="off"))
    os.sched_setaffinity(running.pid, cores[1:] or cores)
    os.sched_setaffinity(0, cores[:1])
    inner = headrace(where, training, sidecar=str(running.socket), **options)
    stack.callback(inner.close)
    return Built(inner.save, inner.restore, stack.close, warm_up=inner.warm_up)


_PAGE, _BLOCK, _THREADS, _READERS = 4096, 16 << 20, 2, 4
_READ = 4 << 20
"""The size of a read in bytes. The tested disks reach their highest rate with this size."""
Bytes = npt.NDArray[np.uint8]


class Area:
    """Preallocated memory, with one range for each tensor."""

    def __init__(self, values: State) -> None:
        self.places, end = {}, 0
        for name, tensor in values.items():
            self.places[name] = (end, tensor.nbytes)
            end += -(-tensor.nbytes // _PAGE) * _PAGE
        self.size = -(-end // _BLOCK) * _BLOCK
        self.bytes: Bytes = np.frombuffer(mmap.mmap(-1, self.size), np.uint8)
        self.bytes.fill(0)


def floor(where: str, training: Training) -> Built:
    """The lower bound ("floor"): saves to and restores from files in a directory."""
    os.makedirs(where, exist_ok=True)
    areas, paths, buffers = [Area(training.state())], list[str](), _ReadBuffer()
    pool, readers, writer = ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(_READERS), ThreadPoolExecutor(1)
    writers = ThreadPoolExecutor(_THREADS)

    def save(values: State) -> Wait:
        if set(values) - set(areas[0].places):
            areas[0] = Area(values)
        area = areas[0]
        _all(pool, lambda name: np.copyto(_at(area, name), _bytes(values[name])), values)
        paths.append(f"{where}/{len(paths)}")  # replacing a file takes longer than creating one
        written: Future[None] = writer.submit(_write, paths[-1], area, writers)
        return lambda: written.result(SECONDS)

    def restore(target: State) -> None:
        fd = _open(paths[-1], os.O_RDONLY)

        def read_tensor(name: str) -> None:
            place, length = areas[0].places[name]
            target_bytes = _bytes(target[name])
            for at in range(0, length, _READ):
                size = min(_READ, length - at)
                buffer = buffers.bytes[: -(-size // _PAGE) * _PAGE]
                os.preadv(fd, [buffer], place + at)
                blake3(buffer[:size]).digest()
                np.copyto(target_bytes[at : at + size], np.frombuffer(buffer[:size], np.uint8))

        try:
            _all(readers, read_tensor, target)
        finally:
            os.close(fd)

    return Built(save, restore)


class _ReadBuffer(threading.local):
    """One buffer per thread that O_DIRECT reads can fill."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, _READ))


def _all(pool: ThreadPoolExecutor, work: Callable[[str], object], names: State) -> None:
    for future in [pool.submit(work, name) for name in names]:
        future.result(SECONDS)


def _at(area: Area, name: str) -> Bytes:
    at, length = area.places[name]
    return area.bytes[at : at + length]


def _bytes(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


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
