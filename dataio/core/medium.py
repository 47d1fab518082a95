"""Where a directory's bytes are: in memory or on a disk.

Invariant: the kernel's word, by the device that the directory is on. Failure behaviour: what cannot be seen is a disk.
"""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


def medium(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """`memory` or `disk`."""
    try:
        device = os.stat(folder).st_dev
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "disk"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [wanted] and after.split()[:1]:
            return "memory" if after.split()[0] in _IN_MEMORY else "disk"
    return "disk"
