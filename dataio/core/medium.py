"""Where a directory's bytes are: in memory or on a disk.

Invariant: the kernel's word, by the device that the directory is on. Failure behaviour: what cannot be seen is a disk.
"""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_MOUNTS = Path("/proc/self/mountinfo")


def medium(folder: Path, mounts: Path = _MOUNTS) -> str:
    """`memory` or `disk`."""
    return "memory" if file_system(folder, mounts) in _IN_MEMORY else "disk"


def file_system(folder: Path, mounts: Path = _MOUNTS) -> str:
    """What the kernel calls the kind of file system that the directory is on; "" when that cannot be seen."""
    try:
        device = os.stat(folder).st_dev
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [wanted] and after.split()[:1]:
            return after.split()[0]
    return ""
