"""Hidden files of a directory store: creates them for writers, and removes those that killed writers left.

Purpose: a reader must see a whole object or none. So a writer fills a hidden file in `<root>/.headrace-tmp`. The store
then gives the file the object's name by `rename` or `link`. `make_folders` and `sync_folder` make the names durable.

Invariants:

* A hidden file is fsynced before the store gives it a name. Its hidden name is removed at the end, also after an error.
  Only a killed writer leaves a hidden file.
* The writer holds a lock (flock) on its file until the end. A later writer removes hidden files that are more than a
  day old by the file system's clock and that no process has locked. The lock protects files in use even if clocks are
  wrong.
* One sweep, once per `HiddenFiles`, examines at most `_STALE_SCAN` files.

Failure behaviour: `OSError`, which the store translates. A failed fsync is not repeated (`_sync`): the kernel reports
a lost write only once, so a second fsync would succeed although the data is lost. If the folder of hidden files is
removed `_TRIES` times while a file is created, `TransientError` is raised. On a file system without locks, no file is
removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator

import msgspec

from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import HeadraceError, TransientError, from_os_error

TEMPORARY = ".headrace-tmp"
"""The folder of hidden files, directly below the root of the store."""
_STALE_SECONDS = 24 * 3600.0
_STALE_SCAN = 1024
_TRIES = 16
_written = declare("store.posix.written", "the bytes are durable under a hidden name; the object is as it was before")


class HiddenFile(msgspec.Struct, frozen=True):
    """A written file that does not have the object's name yet, and its size in bytes."""

    path: str
    size: int


class HiddenFiles:
    """The hidden files of the store in the directory `root`. Threads may share it."""

    def __init__(self, root: str) -> None:
        self._root, self._swept = root, False

    @contextlib.contextmanager
    def written(self, write: Callable[[str, int], int]) -> Iterator[HiddenFile]:
        """Create and lock a hidden file, let `write` fill it, and fsync it. Its hidden name is removed at the end.

        Args:
            write: Called with the file's path and descriptor. Returns the number of bytes that it has written.
        """
        path, fd = self._new_file()
        try:
            size = write(path, fd)
            _sync(fd, path)
            _written()
            yield HiddenFile(path, size)
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _new_file(self) -> tuple[str, int]:
        """Create, open and lock a hidden file. `headrace doctor` may remove its empty folder, so try a few times."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                folder = self._folder()
                path = os.path.join(folder, f"{int(time.time())}-{os.getpid()}-{secrets.token_hex(8)}")
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                if self._claim(folder, path, fd):
                    return path, fd
        raise TransientError(
            f"{self._root!r}: there was no folder for unfinished files in {_TRIES} tries, although each try created it",
            hint="check whether another program deletes below it, and whether files can be created on that file system",
        )

    def _claim(self, folder: str, path: str, fd: int) -> bool:
        """Lock the new file, and remove leftovers. Returns False, with `fd` closed, if another writer removed the file."""
        try:
            if _lock_new_file(fd, path):
                self._sweep(folder, path, fd)
                return True
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(fd)
        return False

    def _folder(self) -> str:
        folder = os.path.join(self._root, TEMPORARY)
        if not os.path.isdir(folder):
            make_folders(folder)
        return folder

    def _sweep(self, folder: str, path: str, fd: int) -> None:
        """Remove files of killed writers from `folder`, once.

        `path`, open as `fd`, is the file that this writer has just created there.
        """
        if not self._swept:
            self._swept = True
            _remove_stale(folder, path, os.fstat(fd).st_mtime - _STALE_SECONDS)


def _lock_new_file(fd: int, path: str) -> bool:
    """Lock the new file at `path` while `fd` is open.

    Returns False if another writer removed the file first, because it was not locked yet.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: no writer removes files there
        return True
    return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))


def _remove_stale(folder: str, own_path: str, cutoff: float) -> None:
    """Remove hidden files of killed writers that were last changed before the time `before`, but never the file `own`.

    One call examines at most `_STALE_SCAN` files. The age selects files, because earlier releases wrote without a lock.
    The lock tells whether the writer is dead.
    """
    with os.scandir(folder) as entries:
        for entry in itertools.islice((entry for entry in entries if entry.path != own_path), _STALE_SCAN):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < cutoff:
                    _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    """Remove the hidden file unless its writer is alive.

    Raises `OSError` if the writer is alive, or if the file system cannot tell.
    """
    # opened for writing, because NFS requires that for an exclusive lock
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)


def sync_folder(folder: str) -> None:
    """Make the names in `folder` durable. A missing folder is not an error."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # another process deleted its last object after this write took effect
        return
    try:
        _sync(fd, folder)
    finally:
        os.close(fd)


def _sync(fd: int, path: str) -> None:
    """Call fsync once. The kernel reports a lost write to one fsync only, so a retry proves nothing."""
    try:
        os.fsync(fd)
    except OSError as error:
        translated = from_os_error(error, f"writing: fsync of {path!r}")
        if not isinstance(translated, TransientError):
            raise
        raise HeadraceError(
            f"{translated.message}: the last writes may be lost",
            hint="check the disk or mount, then write it again; older objects are unchanged",
        ) from error


def make_folders(folder: str) -> None:
    """Create `folder` and its parents. The parent of every created folder is fsynced."""
    missing_folders = list(itertools.takewhile(lambda f: not os.path.isdir(f), _ancestors(folder)))
    for new_folder in reversed(missing_folders):
        with contextlib.suppress(FileExistsError):
            os.mkdir(new_folder)
            sync_folder(os.path.dirname(new_folder))


def _ancestors(folder: str) -> Iterator[str]:
    while True:
        yield folder
        folder = os.path.dirname(folder)
