"""Files and folders on this machine: kinds of storage, locks, private and temporary folders, output files.

Invariants:

* Only the file systems listed in `LOCAL` count as local. An unknown one is treated as remote, which costs at most one
  copy.
* The innermost mount point that contains a path decides its file system. If two mounts have the same mount point, the
  later one decides.
* `write_output` and `write_atomically` give a file its name only when it is complete.
* `write_output` writes directly to a device or pipe (`/dev/stdout`), and never replaces or removes it. If the path is a
  symbolic link, it replaces the link's target.
* `file_lock` is released when the block ends or the process dies, even if a child that was forked in the meantime still
  has the file open.
* A scratch folder is locked before it gets its name and until it is removed. So the owner of an unlocked folder is
  dead. The next scratch folder with the same prefix, user and parent removes it.

Failure behaviour: if the mount table is unknown or unreadable, a path counts as remote and on disk. `file_lock` raises
`TimeoutError`. `private_directory` raises `AccessDeniedError`. The others raise `OSError`, and leave no partial file.
On a file system without locks, scratch folders of dead processes are not removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.dataio.core.errors import AccessDeniedError

_NAMES = """
bcachefs btrfs erofs exfat ext2 ext3 ext4 f2fs iso9660 jfs nilfs2 ntfs3 overlay ramfs reiserfs squashfs tmpfs udf vfat xfs zfs
"""
LOCAL = frozenset(_NAMES.split())
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_MOUNTINFO = Path("/proc/self/mountinfo")
_MAX_SWEPT = 256
"""How many folders one sweep examines at most."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_at(path: str, mounts: str) -> str:
    """Return the type of the file system that has the absolute `path`; "" if unknown.

    `mounts` is the text of a mountinfo file.
    """
    longest, kind = -1, ""
    for line in mounts.splitlines():
        mount_part, _, source_part = line.partition(" - ")
        mount_fields, source_fields = mount_part.split(" "), source_part.split(" ")
        if len(mount_fields) < 5 or not source_fields[0]:
            continue
        mount_point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), mount_fields[4]).rstrip("/")
        if (path == mount_point or path.startswith(mount_point + "/")) and len(mount_point) >= longest:
            longest, kind = len(mount_point), source_fields[0]
    return kind


def is_local(path: str | os.PathLike[str], mounts: Path = _MOUNTINFO) -> bool:
    """Whether `path` is on a local file system. The kernel's page cache then has the bytes that were read from it."""
    try:
        return file_system_at(os.path.realpath(path), mounts.read_text("utf-8", "surrogateescape")) in LOCAL
    except OSError:
        return False


def storage_kind(folder: Path, mounts: Path = _MOUNTINFO) -> str:
    """Return where the folder's bytes are stored: `memory` or `disk`."""
    return "memory" if file_system(folder, mounts) in _IN_MEMORY else "disk"


def file_system(folder: Path, mounts: Path = _MOUNTINFO) -> str:
    """Return the kernel's name of the folder's file system, found by its device number; "" if unknown."""
    try:
        device = os.stat(folder).st_dev
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount_part, _, source_part = line.partition(" - ")
        if mount_part.split()[2:3] == [device_number] and source_part.split()[:1]:
            return source_part.split()[0]
    return ""


def is_special(path: Path) -> bool:
    """Whether `path` exists and is neither a regular file nor a folder, but a device, a pipe or a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def write_output(path: Path) -> Iterator[IO[bytes]]:
    """Open the output file that a user named for writing."""
    if is_special(path):
        with open(path, "wb") as file:
            yield file
    else:
        with write_atomically(Path(os.path.realpath(path))) as file:
            yield file


@contextlib.contextmanager
def write_atomically(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Write a temporary file in the same folder, then rename it to `path`.

    With `replace=False` an existing file raises `FileExistsError`.
    """
    temporary = path.with_name(f".headrace-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    except OSError as error:
        if error.filename in (temporary, str(temporary)):  # the temporary name means nothing to the user
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def scratch_folder(prefix: str, place: str | None = None) -> Iterator[str]:
    """Make an empty folder in `place` (default: the system's temporary folder), and remove it with its content."""
    folder = Scratch(prefix, place)
    try:
        yield str(folder.path)
    finally:
        folder.remove()


class Scratch:
    """A temporary folder at `path`, which exists until `remove` is called."""

    def __init__(self, prefix: str, place: str | None = None) -> None:
        place = place or tempfile.gettempdir()
        _sweep(prefix, place)
        temporary = tempfile.mkdtemp(prefix=f".new-{prefix}", dir=place)
        self._lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = Path(place, os.path.basename(temporary).removeprefix(".new-"))
        os.rename(temporary, self.path)

    def remove(self) -> None:
        """Remove the folder as far as possible. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _sweep(prefix: str, place: str) -> None:
    """Remove the folders of dead owners."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        candidates = [entry.path for entry in entries if entry.name.startswith(prefix)]
        for path in candidates[:_MAX_SWEPT]:
            with contextlib.suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def private_directory(path: Path) -> Path:
    """Create `path` if needed, and check that it is a real directory that only this user may enter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise AccessDeniedError(
            f"{path} is not a private directory: owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
            hint="name a directory of your own with mode 0700",
        )
    return path


@contextlib.contextmanager
def file_lock(path: Path, seconds: float, poll: float) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path` for the block. Not reentrant.

    Args:
        path: The lock file; created if absent.
        seconds: How long to wait for another process or thread before `TimeoutError`.
        poll: How often to try again, in seconds.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + seconds
        while not _try_lock(fd):
            if time.monotonic() >= until:
                reason = f"another process held this lock for {seconds:g} s (lsof names it)"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(path))
            time.sleep(poll)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough, because a forked child may have the file open
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
