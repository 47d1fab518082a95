"""Which file systems are of this machine, and which lie behind a network.

Purpose: a local file is in the kernel's page cache once it was read, so nobody needs to keep a copy of it; a remote one may be
slow, or gone, at every read.
Invariants: pure, but for `is_local`, which asks the kernel. The mount that a path is on is the innermost one around it; of two at
one place the later one. Only the kinds listed here count as local, so an unknown one is treated as remote, which costs a
copy and no more.
Failure behaviour: what cannot be seen is remote.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAMES = """
bcachefs btrfs erofs exfat ext2 ext3 ext4 f2fs iso9660 jfs nilfs2 ntfs3 overlay ramfs reiserfs squashfs tmpfs udf vfat xfs zfs
"""
LOCAL = frozenset(_NAMES.split())
_ESCAPED = re.compile(r"\\([0-7]{3})")
_MOUNTS = Path("/proc/self/mountinfo")


def kind_at(path: str, mounts: str) -> str:
    """The type of the file system that the absolute `path` is on, by the lines of a mountinfo; empty when none says."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        where, what = before.split(" "), after.split(" ")
        if len(where) < 5 or not what[0]:
            continue
        at = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), where[4]).rstrip("/")
        if (path == at or path.startswith(at + "/")) and len(at) >= best:
            best, kind = len(at), what[0]
    return kind


def is_local(path: str | os.PathLike[str], mounts: Path = _MOUNTS) -> bool:
    """Whether what is at `path` lies on a file system of this machine."""
    try:
        return kind_at(os.path.realpath(path), mounts.read_text("utf-8", "surrogateescape")) in LOCAL
    except OSError:
        return False
