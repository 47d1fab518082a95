"""Files of removed objects, which the tier's next large objects overwrite.

Purpose: memory that is already allocated is written several times faster than new memory, on a tmpfs and in the page
cache alike. A trainer that saves after every step removes a step for each one that it keeps.

Invariants:

* A file is overwritten only with an exclusive lock on it. Readers hold a shared lock, and check the label after they got
  it. So no reader sees bytes of another object.
* The caller holds the tier's lock. So the bytes of a file are counted once, here or as a reservation.
* At most `FILES` files are kept, for `SECONDS`.

Failure behaviour: a file that cannot be kept or used is removed. `OSError` of the disk is raised by `take`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

from headrace.dataio.core.limits import MIB

FILES = 4
LEAST_BYTES = MIB
"""Smaller files are not kept."""
SECONDS = 60.0


class SpareFiles:
    """The spare files of a tier, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __bool__(self) -> bool:
        """Whether there is a file. The caller need not hold the lock."""
        with os.scandir(self._folder) as entries:
            return any(True for _ in entries)

    def add(self, path: Path) -> None:
        """Keep the file of a removed object, or remove it. An absent file is not an error."""
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_size < LEAST_BYTES or len(self._sizes()) >= FILES:
                path.unlink()
            else:
                path.rename(self._folder / secrets.token_hex(8))

    def take(self, target: Path) -> tuple[int, int] | None:
        """Move a file to `target`; returns its descriptor and its size, or None if no file can be used.

        The descriptor has an exclusive lock. A file that is still being read is removed, and stays readable.
        """
        for path in self._sizes():
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rename(target)
                return fd, os.fstat(fd).st_size
            except BlockingIOError:
                path.unlink()
                os.close(fd)
            except BaseException:
                os.close(fd)
                raise
        return None

    def trim(self, size: int) -> None:
        """Remove files until they have at most `size` bytes together."""
        total = 0
        for path, its in self._sizes().items():
            total += its
            if total > size:
                path.unlink()

    def tidy(self) -> None:
        """Remove the files that were added more than `SECONDS` ago."""
        for path in self._sizes():
            if not 0 <= time.time() - path.lstat().st_ctime < SECONDS:
                path.unlink()

    def _sizes(self) -> dict[Path, int]:
        with os.scandir(self._folder) as entries:
            return {Path(entry.path): entry.stat(follow_symlinks=False).st_size for entry in entries}
