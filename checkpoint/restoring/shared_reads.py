"""Several ranks read one step together. A chunk that more than one rank needs is read from the store once.

- From a store outside the node, one rank reads each such chunk and sends it to the others
  (`headrace.checkpoint.restoring.chunk_relay`).
- From a directory on the node's own disk or in its memory, the ranks use the page cache instead. It is faster than any
  process group. One rank asks the kernel to load each such chunk (`prefetch`). Every rank then reads it from the page
  cache.

A directory counts as the node's own only if the kernel reports a file system for disks or memory.

Invariants:

- The invariants of `chunk_reader.read`. The digest of a chunk that another rank sent is checked again.
- Every rank takes part in every exchange, even a rank that has failed. So no rank waits for a rank that raised.
- Each rank learns only about the chunks that it needs itself (`headrace.checkpoint.restoring.chunk_homes`).
- All ranks of a node, and no others, have the same `node_id`.

Failure behaviour: `read` returns the error of its rank, and the caller raises it at the next exchange. The other ranks
then raise `TransientError`, which names that rank. `prefetch` is only a hint, and it ignores
errors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.manifest import Chunk
from headrace.checkpoint.ranks import PendingError, Ranks, explained
from headrace.checkpoint.restoring import chunk_homes
from headrace.checkpoint.restoring.chunk_homes import Routes
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, ReadsDirectly
from headrace.checkpoint.restoring.chunk_relay import ChunkRelay
from headrace.dataio.core.files import file_system
from headrace.dataio.store.base import Store

FEW_RANKS = 8
"""A job of at most so many ranks gathers the chunks of all ranks, which takes fewer exchanges."""


@dataclass(frozen=True, slots=True)
class SharedReads:
    """What the ranks know about each other's reads in a restore.

    `marked`: at least one rank called `compare` with `mark=True`.
    `on_node`: the store is on each rank's own node.
    `routes`: for each reader, this rank's part in the ways of the chunks that several ranks need.
    `sent`: for each reader, whether any rank has such chunks.
    `threads`: the number of threads that this rank should read with.
    """

    marked: bool
    on_node: bool
    routes: tuple[Routes, ...]
    sent: tuple[bool, ...]
    threads: int


def compare(store: Store, readings: Sequence[ChunkReader], mark: bool, ranks: Ranks) -> SharedReads:
    """Find which chunks several ranks need. All ranks call it, with the same number of readers."""
    if ranks.world_size == 1:
        return SharedReads(mark, True, tuple({} for _ in readings), tuple(False for _ in readings), threads(store, 1))
    chunks = [list(_needed_by_several(reading)) for reading in readings]
    # a directory that one node exports is local to that node's ranks only, and all ranks must read in the same way
    flags = mark, not on_this_node(store)
    if ranks.world_size <= FEW_RANKS:
        return _compare_few(store, chunks, flags, ranks)
    routes = chunk_homes.find_routes(chunks, ranks)
    combined = ranks.maximum(bytes([*flags, *map(bool, routes)]))
    ranks_on_node = sum(each == node_id() for each in ranks.all(node_id()))
    sent = tuple(map(bool, combined[2:]))
    return SharedReads(bool(combined[0]), not combined[1], tuple(routes), sent, threads(store, ranks_on_node))


def _compare_few(
    store: Store, chunks: Sequence[Sequence[tuple[str, Chunk]]], flags: tuple[bool, bool], ranks: Ranks
) -> SharedReads:
    """`compare` for a small job, by two exchanges: every rank receives the chunks of all ranks."""
    table = chunk_homes.encode_needs(chunks)
    heads = ranks.all(bytes(flags) + node_id() + len(table).to_bytes(8, "big"))
    sizes = [int.from_bytes(head[-8:], "big") for head in heads]
    received = ranks.all(table.ljust(max(sizes), b"\0"))
    tables = [each[:size] for each, size in zip(received, sizes, strict=True)]
    routes = tuple(chunk_homes.routes_among(tables, chunks, ranks.rank))
    ranks_on_node = sum(head[2 : 2 + NODE_BYTES] == node_id() for head in heads)
    marked, away = any(head[0] for head in heads), any(head[1] for head in heads)
    return SharedReads(marked, not away, routes, chunk_homes.are_shared(tables), threads(store, ranks_on_node))


def read(store: Store, reading: ChunkReader, number: int, common: SharedReads, ranks: Ranks) -> PendingError:
    """Fill the requests of the reader with this number. All ranks call it.

    The result holds the error of this rank, if any.
    """
    pending, routes = PendingError(), common.routes[number]
    sends = common.sent[number] and not common.on_node
    with pending:
        if routes and common.on_node and not isinstance(store, ReadsDirectly):  # it does not use the page cache
            prefetch(store, ((place[0], route.chunk) for place, route in routes.items() if route.parent is None))
        chunks = [place for place in reading.needed() if not (sends and (place[0], place[1].offset) in routes)]
        reading.fetch(store, chunks, common.threads)
    if sends:
        ranks.group()  # the first call is collective, and this rank may have nothing to send
        with explained():
            ChunkRelay(store, reading, routes, ranks, common.threads).run(pending)
    return pending


def _needed_by_several(reading: ChunkReader) -> Iterator[tuple[str, Chunk]]:
    """The chunks that another rank may need too.

    Another rank may need a chunk that holds more than one piece, or a shard of which it needs a part.
    """
    for key, needed in reading.needed():
        if not all(reading.wants[use.want].saved.alone and use.length == needed.raw for use in needed.uses):
            yield key, needed.chunk


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


def prefetch(store: Store, chunks: Iterable[tuple[str, Chunk]]) -> None:
    """Ask the kernel to load these chunks into the page cache, for all ranks of this node. Does not wait for them."""
    folder = _directory(store)
    by_pack: dict[str, list[Chunk]] = defaultdict(list)
    for key, chunk in chunks:
        by_pack[key].append(chunk)
    for key, chunks_of_pack in by_pack.items():
        with contextlib.suppress(OSError):
            fd = os.open(f"{folder}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                for chunk in sorted(chunks_of_pack, key=lambda c: c.offset):
                    os.posix_fadvise(fd, chunk.offset, chunk.stored, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)


def _directory(store: Store) -> Path | None:
    url = store.location.url
    return (
        Path(urllib.parse.unquote(url.removeprefix(_FILE), errors="surrogateescape")) if url.startswith(_FILE) else None
    )
