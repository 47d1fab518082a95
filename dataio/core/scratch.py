"""Temporary folders that do not outlive their maker for long, even when it is killed.

Invariant: a folder is locked (`flock` on the folder itself) from before it gets its name until it is removed, so one that
nobody has locked has lost its maker: the next folder of the same prefix, made by the same user in the same place, removes it.
Failure behaviour: where folders cannot be locked (some network file systems) nothing is swept; a folder that cannot be removed is
left to the next sweep. Making one raises `OSError` as `tempfile` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MOST = 256
"""Folders that are looked at, at most, each time."""


@contextlib.contextmanager
def scratch_folder(prefix: str, place: str | None = None) -> Iterator[str]:
    """A new empty folder below `place` (the system's temporary folder), removed at the end with all that is in it."""
    folder = Scratch(prefix, place)
    try:
        yield str(folder.path)
    finally:
        folder.remove()


class Scratch:
    """A folder that `remove` removes. `path`: where it is."""

    def __init__(self, prefix: str, place: str | None = None) -> None:
        place = place or tempfile.gettempdir()
        _sweep(prefix, place)
        made = tempfile.mkdtemp(prefix=f".new-{prefix}", dir=place)
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = Path(place, os.path.basename(made).removeprefix(".new-"))
        os.rename(made, self.path)

    def remove(self) -> None:
        """Remove it, as far as that is possible; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _sweep(prefix: str, place: str) -> None:
    """Remove what makers that are gone have left."""
    with contextlib.suppress(OSError), os.scandir(place) as found:
        left = [entry.path for entry in found if entry.name.startswith(prefix)]
        for path in left[:_MOST]:
            with contextlib.suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
