"""Directories that only this user may enter.

Invariant: what `private_directory` returned for is a real directory, no link, owned by this user, closed to everybody else.
Failure behaviour: `AccessDeniedError` names the directory, its owner and its mode.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.dataio.core.errors import AccessDeniedError


def private_directory(path: Path) -> Path:
    """`path` as a directory that only this user may enter, made when absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise AccessDeniedError(
            f"{path} is not a private directory: owner {found.st_uid}, mode {stat.filemode(found.st_mode)}",
            hint="name a directory of your own with mode 0700",
        )
    return path
