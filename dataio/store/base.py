"""The storage contract: what every back end and every wrapper promises. Read this first.

Purpose: one small synchronous interface over a directory or a bucket, enough for datasets and checkpoints and no
more.

Invariants, for every implementation:

* *Atomic objects.* A reader sees an object whole, old or new, or not at all. A killed writer, or one that raises,
  leaves no part of it. This holds for `put`, `put_if_absent` and `put_multipart` alike.
* *Strong consistency.* After a write returns, every later `get`, `stat` and `list` of any process sees it.
* *One winner.* Of any number of concurrent `put_if_absent` calls on one key exactly one returns True, in any number
  of processes and machines. An outcome that cannot be established raises `AmbiguousWriteError`; it is never True.
* *Durable.* Once a write returns, its object survives a crash of the machine, as far as the storage promises.
* *Idempotent.* Every operation may be retried with the same arguments. For `put_if_absent` the body carries the
  writer's nonce: the same body read back means that this writer won.

Failure behaviour: only errors of `headrace.dataio.core.errors` are raised. `NotFoundError`: the key or bucket does
not exist. `AccessDeniedError`: credentials. `TransientError`: still failing after bounded retries. `CapacityError`:
no space, or above a limit of the call. `UsageError`: a malformed key or range. Nothing is returned partly: a buffer
that could not be filled raises, and its content is then undefined.

Retries, hedging, limits and tracing are wrappers of this interface, not flags of it. Stores may be shared between
threads. They do not work across `fork`; open them again in the child. The argument checks at the end of this file are
shared by all back ends, so that they refuse the same arguments with the same words.
"""

from __future__ import annotations

import abc
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, NotFoundError, RangeError, UsageError

CONDITIONAL_BYTES = limits.JSON_DOCUMENT_BYTES
"""The largest body of `put_if_absent`: small enough for one request and for reading it back."""
Buffer = bytes | bytearray | memoryview
"""Readable bytes; a memoryview must be contiguous."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """One stored object. `size` in bytes; `modified` in seconds since the epoch by the store's own clock."""

    key: str
    size: int
    modified: float


class Location(msgspec.Struct, frozen=True):
    """Where a store is, without secrets. Another process with its own credentials can open the same store from it.

    `shareable` is False when the store was opened with secrets or other options that never leave the process.
    """

    url: str
    options: Mapping[str, object]
    shareable: bool


class UploadLog(Protocol):
    """A record of multipart uploads, so that another process can abort the unfinished ones. Called from several
    threads.

    No process continues another's upload: requests of the first one may still be in flight, and would change the second
    one's object.
    """

    def begun(self, key: str, upload: str) -> None:
        """Record that an upload of this object began with this id."""

    def ended(self, key: str, size: int | None) -> None:
        """Record that the object was written with `size` bytes; None: its upload was aborted."""


class Store(abc.ABC):
    """Objects under one root URL, named by keys such as `shards/000001.tar`."""

    @property
    @abc.abstractmethod
    def location(self) -> Location:
        """The root's URL (`file:///data/set`, `s3://bucket/prefix`) and options, without secrets."""

    @abc.abstractmethod
    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        """The whole object. `CapacityError` when it is larger than `max_bytes`, before it is read."""

    @abc.abstractmethod
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset`. A range past the end is a `UsageError` naming both."""

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
            take: Called with (offset, piece) in order. The piece is valid during the call only. A call with the first
                offset
                means that the read starts again. `take` must not raise `OSError`; another error ends the read and is
                raised.
        """
        self.get_into(key, offset, buffer)
        take(offset, buffer)

    def open_file(self, key: str) -> int | None:
        """Open the object as a local file. Returns a descriptor that the caller closes; None if it is no local file."""
        return None

    def read_once(self, prefix: str) -> None:  # noqa: B027 - most stores ignore the advice
        """Advise that large ranges of objects below `prefix` are read once, and need no space in the page cache."""

    @abc.abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write or replace the object, in one request."""

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write the object unless the key exists. True: this call's body is the object. False: another writer's is.

        `data` must carry a nonce of the writer, because equal bodies count as the same writer.
        """

    @abc.abstractmethod
    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write or replace the object from a stream of parts, with a bounded number in flight; return its size.

        Parts may have any size. A read-only part (bytes, or a read-only memoryview) must not change until the call
        returns. Another part may change as soon as the next one is requested. An exception from `parts` leaves the old
        object, or none, and no billable leftovers.
        """

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        """Write as `put_multipart` does. A back end with multipart uploads records them in `log`, so that another
        process can abort them.
        """
        return self.put_multipart(key, parts)

    def abort_upload(self, key: str, upload: str) -> None:  # noqa: B027 - most stores have no uploads
        """Abort the unfinished upload with this id; an unknown id is no error."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix` (any string, not only a folder), by key, streaming."""

    @abc.abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """The object's size and time, or `NotFoundError`."""

    def exists(self, key: str) -> bool:
        """Whether the object is there."""
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    @abc.abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete these objects; absent ones are no error."""

    def invalidate(self, key: str) -> bool:
        """Report that this object's bytes were wrong. True: the next read uses another copy. False: there is none."""
        return False

    def reconnect(self) -> None:  # noqa: B027 - most stores have no connections
        """Drop all idle connections, because bytes that arrived over one of them were wrong."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release connections and threads. The store must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.url!r})"


def check_key(key: str) -> str:
    """Return `key` if it is well formed: relative, valid UTF-8, no empty, `.` or `..` segment, no control character."""
    segments = key.split("/")
    bad = any(s in ("", ".", "..") for s in segments) or any(
        c < " " or c in "\x7f\\" or "\ud800" <= c <= "\udfff" for c in key
    )
    if bad or len(key.encode(errors="surrogatepass")) > limits.OBJECT_KEY_BYTES:
        raise UsageError(f"{key!r} is not a valid object key", hint="keys are relative paths without '..' or '//'")
    return key


def path_of_url(url: str) -> str:
    """The path that a `file://` URL names; `UsageError` for one with another host or without a path."""
    rest = url.partition("://")[2]
    host, _, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{url!r} names the host {host!r}", hint="a file URL has three slashes: file:///data/set")
    if not rest:
        raise UsageError(f"{url!r} names no path", hint="give a path or file:///path")
    return "/" + urllib.parse.unquote(path, errors="surrogateescape")


def check_conditional_size(name: str, data: Buffer) -> None:
    """Refuse a body of `put_if_absent` above `CONDITIONAL_BYTES`."""
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


def check_range(name: str, offset: int, length: int, size: int | None = None) -> None:
    """Refuse a range with a negative start, or, where `size` is known, one that ends past the object's end."""
    if offset < 0 or (size is not None and offset + length > size):
        end = "" if size is None else f"; the object has {size} bytes"
        raise RangeError(
            f"{name}: bytes {offset} to {offset + length} do not exist{end}",
            hint="ask for a range inside the object",
        )


def writable_bytes(buffer: memoryview) -> memoryview:
    """`buffer` as writable flat bytes."""
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise UsageError(
            "the buffer to read into must be writable and contiguous", hint="pass memoryview(bytearray(n))"
        )
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def too_large(name: str, size: int, max_bytes: int) -> CapacityError:
    """The error for an object that is larger than its reader admits."""
    return CapacityError(
        f"{name} has {limits.format_bytes(size)}, above the limit of {limits.format_bytes(max_bytes)} for one read",
        hint="read it in ranges, or raise max_bytes",
    )
