"""The storage contract that every back end and every wrapper must keep. Read this module first.

Purpose: one small synchronous interface to a directory or a bucket. It has only the operations that datasets and
checkpoints need.

Invariants of every implementation:

* *Atomic objects.* A reader sees a whole object, old or new, or no object. A writer that is killed or raises leaves no
  partial object. This holds for `put`, `put_if_absent` and `put_multipart`.
* *Strong consistency.* After a write returns, every later `get`, `stat` and `list` of any process sees it.
* *One winner.* If several calls of `put_if_absent` on one key run concurrently, exactly one returns True. This holds
  for any number of processes and machines. If the outcome is unknown, the call raises `AmbiguousWriteError`. It never
  returns True in that case.
* *Durable.* After a write returns, its object survives a crash of the machine, as far as the storage guarantees it.
* *Idempotent.* Every operation may be retried with the same arguments. For `put_if_absent`, the body contains the
  writer's nonce. A writer that reads back its own body has won.

Failure behaviour: only errors of `headrace.dataio.core.errors` are raised:

* `NotFoundError`: the key or bucket does not exist.
* `AccessDeniedError`: the credentials are missing or insufficient.
* `TransientError`: the operation still fails after bounded retries.
* `CapacityError`: there is no space, or the object exceeds a limit of the call.
* `UsageError`: a key or range is malformed.

There are no partial results. If a buffer cannot be filled, the call raises, and the buffer's content is undefined.

Retries, hedging, limits and tracing are wrappers around this interface, not options of it. Threads may share a store.
Stores do not work across `fork`, so open them again in the child. All back ends share the argument checks at the end of
this file. They therefore refuse the same arguments with the same messages.
"""

from __future__ import annotations

import abc
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, NotFoundError, RangeError, UsageError

CONDITIONAL_BYTES = limits.JSON_DOCUMENT_BYTES
"""The largest body of `put_if_absent`. It is small enough for one request and for reading it back."""
Buffer = bytes | bytearray | memoryview
"""Readable bytes. A memoryview must be contiguous."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """One stored object. `size` is in bytes. `modified` is in seconds since the epoch, by the store's own clock."""

    key: str
    size: int
    modified: float


class Location(msgspec.Struct, frozen=True):
    """The location of a store, without secrets. Another process with its own credentials can open the store from it.

    `shareable` is False when the store was opened with secrets or other options that never leave the process.
    """

    url: str
    options: Mapping[str, object]
    shareable: bool


class UploadLog(Protocol):
    """A record of multipart uploads, so that another process can abort the unfinished ones.

    Several threads call it. No process may continue another process's upload: requests of the first process may still
    be in flight, and would change the object of the second one.
    """

    def begun(self, key: str, upload: str) -> None:
        """Record that an upload of this object began with this id."""

    def ended(self, key: str, size: int | None) -> None:
        """Record that the object was written with `size` bytes. None means that its upload was aborted."""


class Store(abc.ABC):
    """Objects under one root URL, named by keys such as `shards/000001.tar`."""

    @property
    @abc.abstractmethod
    def location(self) -> Location:
        """The root's URL (`file:///data/set`, `s3://bucket/prefix`) and options, without secrets."""

    @abc.abstractmethod
    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        """Read the whole object. If it is larger than `max_bytes`, raise `CapacityError` before reading it."""

    @abc.abstractmethod
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset`.

        A range past the end raises `RangeError`, a `UsageError`, with the range and the object's size.
        """

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) of `ranges`. Back-ends override it to coalesce or to fetch in parallel."""
        for offset, buffer in ranges:
            self.get_into(key, offset, buffer)

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        """Read as `get_into` does, and pass each piece on while it is in the processor's caches.

        Args:
            key: The object.
            offset: Where to begin.
            buffer: Working memory, as long as the range.
            take: Called with (offset, piece) in order. The piece is valid only during the call. A call with the first
                offset means that the read starts again. `take` must not raise `OSError`. Any other error ends the read
                and is raised.
        """
        self.get_into(key, offset, buffer)
        take(offset, buffer)

    def open_file(self, key: str) -> int | None:
        """Open the object as a local file.

        Returns a file descriptor, which the caller closes, or None if the object is not a local file.
        """
        return None

    def read_once(self, prefix: str) -> None:  # noqa: B027 - most stores ignore the advice
        """Advise the store that large ranges of objects below `prefix` are read only once.

        They need no space in the page cache.
        """

    @abc.abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write or replace the object, in one request."""

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write the object unless the key exists. Returns True if the object has this call's body, else False.

        `data` must carry a nonce of the writer, because equal bodies count as the same writer.
        """

    @abc.abstractmethod
    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write or replace the object from a stream of parts, with a bounded number in flight. Returns its size.

        Parts may have any size. A read-only part (bytes, or a read-only memoryview) must not change until the call
        returns. Another part may change as soon as the next one is requested. An exception from `parts` leaves the old
        object, or none, and no billable leftovers.
        """

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        """Write as `put_multipart` does, and record multipart uploads in `log`.

        Another process can then abort an upload that was not completed. A back end without such uploads ignores `log`.
        """
        return self.put_multipart(key, parts)

    def abort_upload(self, key: str, upload: str) -> None:  # noqa: B027 - most stores have no uploads
        """Abort the unfinished upload with this id. An unknown id is not an error."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all objects with keys that start with `prefix`, in key order.

        `prefix` may be any string, not only a folder. Names that are not valid keys (`is_key`) are skipped.
        """

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        """Stream the names of the folders directly below a folder: "a" for keys such as `{prefix}a/b/c`.

        The cost depends on the number of folders, not on the number of objects in them, where the back end supports it.

        Args:
            prefix: The folder: "" for the root, otherwise a string that ends with "/".
            after: The name of a folder. Only folders after it are listed. Default: "", all folders.

        Returns:
            Iterator[str]: Names without slashes, each once. Their order is that of the keys: by name + "/". A folder
            may be listed although it has no objects, for example after they were deleted.
        """
        previous = ""
        for info in self.list(prefix) if check_folder(prefix) else ():
            name, slash, _ = info.key[len(prefix) :].partition("/")
            if slash and name != previous and is_after(name, after):
                previous = name
                yield name

    @abc.abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return the object's size and the time of its last change. Raises `NotFoundError` if it does not exist."""

    def exists(self, key: str) -> bool:
        """Whether the object exists."""
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    @abc.abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete these objects. A missing object is not an error."""

    def invalidate(self, key: str) -> bool:
        """Report that a reader found wrong bytes in this object.

        Returns True if the next read uses another copy, else False.
        """
        return False

    def reconnect(self) -> None:  # noqa: B027 - most stores have no connections
        """Close all idle connections, because bytes that arrived over one of them were wrong."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release connections and threads. The store must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.url!r})"


_NO_CHARACTER_OF_A_KEY = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")


def is_key(key: str) -> bool:
    """Whether `key` is well formed: relative, valid UTF-8, no empty, `.` or `..` segment, no control character."""
    segments = key.split("/")
    bad = "" in segments or "." in segments or ".." in segments or _NO_CHARACTER_OF_A_KEY.search(key) is not None
    return not bad and len(key.encode(errors="surrogatepass")) <= limits.OBJECT_KEY_BYTES


def check_key(key: str) -> str:
    """Return `key` if it is well formed (`is_key`); else raise `UsageError`."""
    if not is_key(key):
        raise UsageError(f"{key!r} is not a valid object key", hint="keys are relative paths without '..' or '//'")
    return key


def path_of_url(url: str) -> str:
    """The path of a `file://` URL. Raises `UsageError` if the URL names another host or no path."""
    host_and_path = url.partition("://")[2]
    host, _, path = host_and_path.partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{url!r} names the host {host!r}", hint="a file URL has three slashes: file:///data/set")
    if not host_and_path:
        raise UsageError(f"{url!r} names no path", hint="give a path or file:///path")
    return "/" + urllib.parse.unquote(path, errors="surrogateescape")


def check_conditional_size(name: str, data: Buffer) -> None:
    """Raise `CapacityError` for a body of `put_if_absent` above `CONDITIONAL_BYTES`."""
    size = memoryview(data).nbytes
    if size > CONDITIONAL_BYTES:
        raise CapacityError(
            f"{name}: a conditional write takes at most {limits.format_bytes(CONDITIONAL_BYTES)}, "
            f"not {limits.format_bytes(size)}",
            hint="write the content with put or put_multipart and only its name and digest conditionally",
        )


def check_prefix(prefix: str) -> bool:
    """Whether a well-formed key can start with `prefix`."""
    folders = prefix.split("/")[:-1]
    return not any(s in ("", ".", "..") for s in folders) and not any(c < " " or c in "\x7f\\" for c in prefix)


def check_folder(prefix: str) -> bool:
    """Whether objects can exist in the folder `prefix`. Raises `UsageError` if it is not empty and has no "/" at its end."""
    if prefix and not prefix.endswith("/"):
        raise UsageError(f"{prefix!r:.200} does not name a folder", hint='end it with "/"')
    return check_prefix(prefix)


def is_after(folder: str, after: str) -> bool:
    """Whether the keys in `folder` come after those in the folder `after`. "" is before all folders."""
    return not after or folder + "/" > after + "/"


def check_range(name: str, offset: int, length: int, size: int | None = None) -> None:
    """Raise `RangeError` for a negative start, or, if `size` is known, for an end past the object's end."""
    if offset < 0 or (size is not None and offset + length > size):
        end = "" if size is None else f"; the object has {size} bytes"
        raise RangeError(
            f"{name}: bytes {offset} to {offset + length} do not exist{end}",
            hint="ask for a range inside the object",
        )


def writable_bytes(buffer: memoryview) -> memoryview:
    """Return `buffer` as a flat memoryview of bytes. Raises `UsageError` if it is read-only or not contiguous."""
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise UsageError(
            "the buffer to read into must be writable and contiguous", hint="pass memoryview(bytearray(n))"
        )
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def too_large(name: str, size: int, max_bytes: int) -> CapacityError:
    """Return the error for an object that is larger than the reader's limit."""
    return CapacityError(
        f"{name} has {limits.format_bytes(size)}, above the limit of {limits.format_bytes(max_bytes)} for one read",
        hint="read it in ranges, or raise max_bytes",
    )
