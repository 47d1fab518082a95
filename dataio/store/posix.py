"""A store in a directory of a local file system, of NFS, or of another file system that has `link` and `fsync`.

Invariants:

* Bytes are first written to a hidden file (`hidden_files`) and fsynced. Then `rename` (`put`, `put_multipart`) or
  `link` (`put_if_absent`) gives the file its name. Last, all directories from the file's own up to the root are
  fsynced. So a killed writer leaves at most a hidden file.
* Below the root, no symbolic link is followed for reading, writing or listing.
* A listing skips files and folders whose path is not a valid key, such as names with a backslash.

Failure behaviour: an errno becomes a Headrace error (`core.errors`). If `link` fails with EEXIST, or with an error that
leaves the outcome unknown (a lost NFS reply), the store reads the object back, as the contract requires. A failed fsync
is final. A delete is not fsynced: after a crash of the machine, a deleted object may reappear.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as st
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import (
    AMBIGUOUS,
    AmbiguousWriteError,
    CapacityError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
    translate_os_errors,
)
from headrace.dataio.core.files import is_local
from headrace.dataio.store import openat2
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    check_conditional_size,
    check_folder,
    check_key,
    check_prefix,
    check_range,
    is_after,
    is_key,
    path_of_url,
    too_large,
    writable_bytes,
)
from headrace.dataio.store.direct_io import FileWriter, fill_directly, fill_together
from headrace.dataio.store.hidden_files import TEMPORARY, HiddenFile, HiddenFiles, make_folders, sync_folder

_PUBLISH_TRIES = 16
_ADVICE = 16
"""How many prefixes `read_once` remembers; further ones are ignored."""
_KERNEL = ("/proc/", "/sys/")
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK}

_named = declare("store.posix.named", "the object has its new content; its directory entry may not be durable yet")


class PosixStore(Store):
    """Stores each object as a file under `root`, which is created on the first write.

    With `direct`, large ranges of all objects bypass the page cache where possible
    (`headrace.dataio.store.direct_io`).
    """

    def __init__(self, root: str | os.PathLike[str], *, direct: bool = False) -> None:
        self._root, self._direct = os.path.realpath(os.fspath(root)), direct
        self._once: frozenset[str] = frozenset()
        self._local: bool | None = None
        self._hidden = HiddenFiles(self._root)

    @property
    def location(self) -> Location:
        options = {"direct": True} if self._direct else {}
        return Location("file://" + urllib.parse.quote(self._root, errors="surrogateescape"), options, shareable=True)

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        with self._reading(key) as file:
            if file.size > max_bytes:
                raise too_large(self._name(key), file.size, max_bytes)
            data = bytearray(file.size)
            file.fill(0, memoryview(data))
            return bytes(data)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        direct = self._bypasses_page_cache(key)
        with self._reading(key) as file:
            targets = [(offset, writable_bytes(buffer)) for offset, buffer in ranges]
            for offset, target in targets:
                check_range(self._name(key), offset, len(target), file.size)
            if direct and len(targets) > 1:
                direct, targets = False, fill_together(file.fd, targets)
            for offset, target in targets:
                file.fill(offset, target, direct=direct)

    def open_file(self, key: str) -> int | None:
        if self._local is None:
            self._local = not self._direct and is_local(self._root)
        if not self._local:
            return None
        with self._reading(key) as file:
            return os.dup(file.fd)

    def _bypasses_page_cache(self, key: str) -> bool:
        return self._direct or any(key.startswith(prefix) for prefix in self._once)

    def read_once(self, prefix: str) -> None:
        if len(self._once) < _ADVICE:
            self._once |= {prefix}

    def put(self, key: str, data: Buffer) -> None:
        self.put_multipart(key, [data])

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        path = self._path(key)
        with translate_os_errors(f"writing {self._name(key)}"), self._hidden_file(parts) as hidden:
            self._publish(path, lambda: os.replace(hidden.path, path))
            return hidden.size

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        path = self._path(key)
        check_conditional_size(self._name(key), data)
        with translate_os_errors(f"writing {self._name(key)}"), self._hidden_file([data]) as hidden:
            try:
                self._publish(path, lambda: os.link(hidden.path, path, follow_symlinks=False))
                return True
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise _no_hard_links(self._root) from error
                if error.errno not in AMBIGUOUS:
                    raise
                return self._holds_own_body(key, path, data, error)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if check_prefix(prefix):
            with translate_os_errors(f"listing {self._root}"):
                folder = prefix.rpartition("/")[0]
                yield from self._walk(folder, prefix)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        if check_folder(prefix):
            with translate_os_errors(f"listing {self._root}"):
                path = os.path.join(self._root, prefix[:-1]) if prefix else self._root
                entries = _sorted_names(path) if self._is_plain(path) else ()
            for name, is_folder in entries:
                key = prefix + name
                if is_folder and key != TEMPORARY and is_key(key) and is_after(name, after):
                    yield name

    def stat(self, key: str) -> ObjectInfo:
        with self._reading(key) as file:
            return ObjectInfo(key, file.size, file.modified)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with translate_os_errors(f"deleting {self._name(key)}"):
                if self._is_plain(path) and not os.path.isdir(path):
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        os.unlink(path)
                        self._prune(os.path.dirname(path))

    # paths

    def _name(self, key: str) -> str:
        return os.path.join(self._root, key)

    def _path(self, key: str) -> str:
        first = check_key(key).partition("/")[0]
        if first == TEMPORARY:
            raise UnsupportedError(f"{key!r} lies in {TEMPORARY}, which is the store's own", hint="choose another key")
        return self._name(key)

    def _is_plain(self, path: str) -> bool:
        """Whether no component of `path` below the root is a symbolic link."""
        return os.path.realpath(path) == path

    def _refuse_links(self, path: str) -> None:
        if not self._is_plain(path):
            raise UnsupportedError(
                f"{path!r} leads through a symbolic link, and none is followed below {self._root}",
                hint="open the store at the link's target, or mount it there",
            )

    # reading

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[_OpenFile]:
        path = self._path(key)
        with translate_os_errors(f"reading {path}"):
            try:
                file = _OpenFile.of(path, openat2.open_plain(path)) or self._open_step_by_step(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise NotFoundError(f"{path!r} does not exist", hint="check the path and the key") from None
            try:
                yield file
            finally:
                os.close(file.fd)

    def _open_step_by_step(self, path: str) -> _OpenFile:
        """Open the file without openat2: to find the error, or because the kernel is older than Linux 5.6."""
        os.lstat(path)  # raises for a missing file, and for folders that this process may not enter
        self._refuse_links(path)
        file = _OpenFile.of(path, os.open(path, openat2.FLAGS))
        if file is None:
            raise FileNotFoundError(path)
        return file

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects under `folder` that match `prefix`, in key order.

        Memory holds the names of one directory per level.
        """
        path = os.path.join(self._root, folder) if folder else self._root
        base = folder + "/" if folder else ""
        for name, is_folder in _sorted_names(path) if self._is_plain(path) else ():
            key = base + name
            if key == TEMPORARY or not (key + "/" if is_folder else key).startswith(prefix[: len(key) + is_folder]):
                continue
            if not is_key(key):  # a folder of such a name has no objects either
                continue
            if is_folder:
                yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(self._name(key), follow_symlinks=False)
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    # writing

    def _hidden_file(self, parts: Iterable[Buffer]) -> AbstractContextManager[HiddenFile]:
        return self._hidden.written(lambda path, fd: self._write(path, fd, parts))

    def _write(self, path: str, fd: int, parts: Iterable[Buffer]) -> int:
        """Write `parts` to the hidden file, open as `fd`; return its size."""
        with FileWriter(fd) as file:
            for part in parts:
                file.write(part)
            return file.finish()

    def _publish(self, path: str, name_it: Callable[[], None]) -> None:
        """Give the new content its name. A concurrent delete may remove the empty folder, so try a few times."""
        folder = os.path.dirname(path)
        for _ in range(_PUBLISH_TRIES):
            self._refuse_links(path)
            try:
                make_folders(folder)
                name_it()
            except FileNotFoundError:
                continue
            _named()
            self._sync_to_root(folder)
            return
        raise TransientError(f"{folder!r} was removed {_PUBLISH_TRIES} times while it was being written to")

    def _sync_to_root(self, folder: str) -> None:
        """fsync `folder` and its parents up to the root, since another process may have just made them."""
        while True:
            sync_folder(folder)
            if folder == self._root:
                return
            folder = os.path.dirname(folder)

    def _holds_own_body(self, key: str, path: str, data: Buffer, cause: OSError) -> bool:
        try:
            present = self.get(key, max_bytes=limits.JSON_DOCUMENT_BYTES)
        except CapacityError:
            return False
        except NotFoundError:
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, "is a folder", path) from cause
            raise AmbiguousWriteError(
                f"could not tell whether {path!r} was written: {cause}", hint="try again; the write is idempotent"
            ) from cause
        self._sync_to_root(os.path.dirname(path))
        return present == bytes(data)

    def _prune(self, folder: str) -> None:
        """Remove folders that became empty, so that a prefix disappears with its last object, as in S3."""
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)


def open_url(url: str, options: Mapping[str, object]) -> PosixStore:
    """Open the directory at a path or a `file://` URL. The option `direct` is that of `PosixStore`."""
    if unknown := sorted(options.keys() - {"direct"}):
        raise UsageError(f"unknown storage option {', '.join(unknown)} of a directory", hint="known is direct")
    path = path_of_url(url) if "://" in url else url
    if not path.strip() or "\0" in path:
        raise UsageError("a store needs a path", hint="give a path, file:///path or s3://bucket/prefix")
    _check_root(os.path.realpath(path))
    return PosixStore(path, direct=bool(options.get("direct")))


def _check_root(root: str) -> None:
    """Raise `UsageError` if no directory can be at `root`. It need not exist yet."""
    if root.startswith(_KERNEL) or root + "/" in _KERNEL:
        raise UsageError(f"{root!r} belongs to the kernel and stores no files", hint="give a directory on a disk")
    while not os.path.lexists(root):
        root = os.path.dirname(root)
    if not os.path.isdir(root):
        raise UsageError(
            f"{root!r} is a file, not a directory", hint="give the directory that holds, or will hold, the objects"
        )


class _OpenFile(msgspec.Struct, frozen=True):
    path: str
    fd: int
    size: int
    modified: float

    @classmethod
    def of(cls, path: str, fd: int | None) -> _OpenFile | None:
        """Wrap `fd` if it is a regular file. Otherwise close it and return None."""
        if fd is None:
            return None
        status = os.fstat(fd)
        if not st.S_ISREG(status.st_mode):
            os.close(fd)
            return None
        return cls(path, fd, status.st_size, status.st_mtime)

    def fill(self, offset: int, buffer: memoryview, *, direct: bool = False) -> None:
        start, stop = fill_directly(self.fd, offset, buffer) if direct else (0, 0)
        self._fill(offset, buffer[:start])
        self._fill(offset + stop, buffer[stop:])

    def _fill(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            n = os.preadv(self.fd, [buffer[done:]], offset + done)
            if n == 0:
                raise TransientError(f"{self.path!r} ended at byte {offset + done} of {self.size} while it was read")
            done += n


def _sorted_names(path: str) -> list[tuple[str, bool]]:
    """List the files and folders in `path` as (name, is a folder), in the order of their keys, without links."""
    try:
        with os.scandir(path) as entries:
            kinds = [(e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    listed = [(name, is_folder) for name, is_folder, is_file in kinds if is_folder or is_file]
    return sorted(listed, key=lambda entry: entry[0] + "/" * entry[1])


def _no_hard_links(root: str) -> UnsupportedError:
    return UnsupportedError(
        f"the file system of {root} has no hard links, so no write can be made conditional there",
        hint="use a local file system, NFS or S3 for anything that has several writers",
    )
