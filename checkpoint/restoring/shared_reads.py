"""Several ranks read one step together. A chunk that more than one rank needs is read from the store once.

- From a store outside the node, one rank reads each such chunk and sends it to the others.
- From a directory on the node's own disk or in its memory, the ranks use the page cache instead. It is faster than any
  process group. One rank asks the kernel to load each such chunk (`prefetch`). Every rank then reads it from the page
  cache.

A directory counts as the node's own only if the kernel reports a file system for disks or memory.

Invariants:

- Those of `chunk_reader.read` hold. The digest of a chunk that another rank sent is checked again.
- Every rank takes part in every exchange, even a rank that has failed. So no rank waits for a rank that raised.
- One exchange for the whole restore tells which rank needs which chunks. One more follows for each round of chunks that
  are sent.
- All ranks of a node, and no others, have the same `node_id`.

Failure behaviour: a rank that cannot read raises its own error. The others raise `TransientError`, which names that
rank. `read` returns its error, and the caller raises it at the next exchange. `prefetch` is only a hint, and it ignores
errors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, NeededChunk, ReadsDirectly
from headrace.checkpoint.sharding import SharedChunk, assign_readers, needs_bitmap, rounds
from headrace.checkpoint.state.tensors import memory_of
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.files import file_system
from headrace.dataio.store.base import Store

_Needed = dict[int, tuple[str, NeededChunk]]


@dataclass(frozen=True, slots=True)
class SharedReads:
    """The ranks' common knowledge of their reads in a restore.

    `marked`: at least one rank called `compare` with `mark=True`.
    `on_node`: the store is on each rank's own node.
    `places`: every chunk of the step, by pack and offset, with its size, in the same order on every rank.
    `shared`: for each reader, the chunks that several ranks need.
    `threads`: the number of threads that this rank should read with.
    """

    marked: bool
    on_node: bool
    places: dict[tuple[str, int], int]
    shared: tuple[list[SharedChunk], ...]
    threads: int

    def needed(self, reading: ChunkReader) -> _Needed:
        """The chunks that the reader needs, by their number in `places`."""
        number = {place: i for i, place in enumerate(self.places)}
        return {number[key, chunk.offset]: (key, chunk) for key, chunk in reading.needed()}


class PendingError(contextlib.AbstractContextManager["PendingError"]):
    """Keeps an error of its body until the next exchange."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)

    def raise_kept(self) -> None:
        """Raise the error, if any. Call it inside an exchange."""
        if self.error is not None:
            raise self.error


def compare(store: Store, step: Step, readings: Sequence[ChunkReader], mark: bool, ranks: Ranks) -> SharedReads:
    """Exchange which rank needs which chunks. All ranks call it, with the same number of readers."""
    if ranks.world_size == 1:
        return SharedReads(mark, True, {}, tuple([] for _ in readings), threads(store, 1))
    own = SharedReads(mark, on_this_node(store), _places(step), (), 0)
    count = len(own.places)
    needs = [needs_bitmap(list(own.needed(reading)), count) for reading in readings]
    answers = ranks.all(bytes([mark, own.on_node]) + node_id() + b"".join(needs))
    sizes, maps = list(own.places.values()), [one[2 + NODE_BYTES :] for one in answers]
    width = len(needs[0])
    common = tuple(assign_readers([each[i * width :][:width] for each in maps], sizes) for i in range(len(readings)))
    ranks_on_node = sum(one[2 : 2 + NODE_BYTES] == node_id() for one in answers)
    # a directory that one node exports is local to that node's ranks only, and all ranks must read in the same way
    on_node = all(one[1] for one in answers)
    return SharedReads(any(one[0] for one in answers), on_node, own.places, common, threads(store, ranks_on_node))


def read(
    store: Store, reading: ChunkReader, given: Sequence[SharedChunk], common: SharedReads, ranks: Ranks
) -> PendingError:
    """Fill the reader's requests. All ranks call it. `given` are the reader's shared chunks.

    The result holds the error of this rank, if any.
    """
    pending = PendingError()
    on_node = not given or common.on_node
    sizes = list(common.places.values())
    with pending:
        needed = common.needed(reading) if given else {}
        if on_node:
            if given and not isinstance(store, ReadsDirectly):  # such a store does not use the page cache
                prefetch(store, [needed[each.chunk] for each in given if each.reader == ranks.rank])
            reading.fetch(store, reading.needed(), common.threads)
        else:
            sent = {each.chunk for each in given}
            reading.fetch(store, [place for n, place in needed.items() if n not in sent], common.threads)
    for batch in rounds(given, sizes) if not on_node else ():
        received: dict[int, torch.Tensor] = {}
        if pending.error is None:
            with pending:
                received = _read_round(store, reading, needed, batch, ranks.rank, common.threads)
        ranks.agree(0, b"", pending.error)
        _send(batch, received, sizes, ranks)
        with pending:
            _use_all(reading, needed, received, [each for each in batch if ranks.rank in each.others])
    return pending


def _places(step: Step) -> dict[tuple[str, int], int]:
    found = {(m.packs[c.pack].key, c.offset): c.raw for m in step.manifests for c in m.chunks}
    return dict(sorted(found.items()))


def _read_round(
    store: Store, reading: ChunkReader, needed: _Needed, batch: Sequence[SharedChunk], rank: int, workers: int
) -> dict[int, torch.Tensor]:
    """The chunks that this rank reads for itself and for other ranks, by number."""
    received: dict[int, torch.Tensor] = {}
    own = {needed[each.chunk]: each.chunk for each in batch if each.reader == rank}

    def keep(key: str, chunk: NeededChunk, payload: memoryview | None) -> None:
        reading.use(key, chunk, payload)
        received[own[key, chunk]] = torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8)

    fetch.fetch(store, reading.batches(own), keep, workers=workers)
    return received


def _send(batch: Sequence[SharedChunk], received: dict[int, torch.Tensor], sizes: Sequence[int], ranks: Ranks) -> None:
    """Send every chunk of the round to the ranks that need it. Received chunks are added to `received`."""
    sending: list[Any] = []
    for tag, each in enumerate(batch):
        if each.reader == ranks.rank:
            sending += [dist.isend(received[each.chunk], other, ranks.group(), tag) for other in each.others]
        elif ranks.rank in each.others:
            received[each.chunk] = torch.empty(sizes[each.chunk], dtype=torch.uint8)
            sending.append(dist.irecv(received[each.chunk], each.reader, ranks.group(), tag))
    for request in sending:
        request.wait()


def _use_all(
    reading: ChunkReader, needed: _Needed, payloads: dict[int, torch.Tensor], received: Sequence[SharedChunk]
) -> None:
    for each in received:
        key, chunk = needed[each.chunk]
        payload = memory_of(payloads[each.chunk])
        if digest(payload) != chunk.digest:
            raise CorruptionError(f"rank {each.reader} sent {len(payload)} bytes of {key} that differ from those saved")
        reading.use(key, chunk, payload)


_LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs", "ramfs"}
_FILE = "file://"
NODE_BYTES = 8
_MIN_THREADS, _MAX_THREADS = 2, 8
_WAITING_THREADS = 4
"""The minimum number of threads of one rank for reads from another machine. Such threads mostly wait.

For reads from a disk, it is the minimum for all ranks of a node together.
"""


def on_this_node(store: Store) -> bool:
    """Whether the store is a directory on a disk or in the memory of this node."""
    folder = _directory(store)
    return folder is not None and file_system(folder) in _LOCAL_FILE_SYSTEMS


def threads(store: Store, ranks_on_node: int) -> int:
    """The number of threads that this rank reads and hashes with, given the number of ranks on the node."""
    cores, ranks = len(os.sched_getaffinity(0)), max(ranks_on_node, 1)
    if on_this_node(store):
        return min(max(max(cores, _WAITING_THREADS) // ranks, _MIN_THREADS), _MAX_THREADS)
    return min(max(cores // ranks, _WAITING_THREADS), _MAX_THREADS)


@cache
def node_id() -> bytes:
    """An identifier of the machine and its current boot, of `NODE_BYTES` bytes."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return digest(f"{boot}{socket.gethostname()}".encode())[:NODE_BYTES]
    return digest(socket.gethostname().encode())[:NODE_BYTES]


def prefetch(store: Store, chunks: Iterable[tuple[str, NeededChunk]]) -> None:
    """Ask the kernel to load these chunks into the page cache, for all ranks of this node. Does not wait for them."""
    folder = _directory(store)
    by_pack: dict[str, list[NeededChunk]] = defaultdict(list)
    for key, chunk in chunks:
        by_pack[key].append(chunk)
    for key, wanted in by_pack.items():
        with contextlib.suppress(OSError):
            fd = os.open(f"{folder}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                for chunk in sorted(wanted, key=lambda c: c.offset):
                    os.posix_fadvise(fd, chunk.offset, chunk.stored, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)


def _directory(store: Store) -> Path | None:
    url = store.location.url
    return (
        Path(urllib.parse.unquote(url.removeprefix(_FILE), errors="surrogateescape")) if url.startswith(_FILE) else None
    )
