"""Whether a step's packs lie on this very node, and how many threads should read them.

Purpose: bytes in the node's page cache are nearer than those in another rank's memory, and ranks of one node have its cores
between them.
Invariant: a directory counts as the node's own only if the kernel says that its file system is of a kind for disks or memory;
what cannot be seen is elsewhere. All ranks of one node, and no others, have the same `node`.
Failure behaviour: `bring_near` is advice: a pack that is not there is missed by whoever reads it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.restoring.restore import Needed
from headrace.dataio.core.files import file_system
from headrace.dataio.store.base import Store

_OWN = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs", "ramfs"}
_FILE = "file://"
NODE_BYTES = 8
_LEAST, _MOST = 2, 8
_WAITING = 4
"""Threads at least that read from another machine, or of all ranks together from a disk: they mostly wait."""


def on_this_node(store: Store) -> bool:
    """Whether the store is a directory on a disk, or in memory, of this node."""
    folder = _directory(store)
    return folder is not None and file_system(folder) in _OWN


def threads(store: Store, ranks_here: int) -> int:
    """How many of this rank should read and hash at once, with so many ranks on the node."""
    cores, ranks = len(os.sched_getaffinity(0)), max(ranks_here, 1)
    if on_this_node(store):
        return min(max(max(cores, _WAITING) // ranks, _LEAST), _MOST)
    return min(max(cores // ranks, _WAITING), _MOST)


@cache
def node() -> bytes:
    """The machine, since its last start, in `NODE_BYTES`."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return digest(f"{boot}{socket.gethostname()}".encode())[:NODE_BYTES]
    return digest(socket.gethostname().encode())[:NODE_BYTES]


def bring_near(store: Store, chunks: Iterable[tuple[str, Needed]]) -> None:
    """Ask the kernel to read these into the page cache, for all ranks of this node, and do not wait for it."""
    folder = _directory(store)
    by_pack: dict[str, list[Needed]] = defaultdict(list)
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
