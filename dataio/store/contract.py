"""The storage contract: what every back-end and every wrapper promises. Read this first.

Purpose: one small synchronous interface over a directory or a bucket, enough for datasets and checkpoints and no more.

Invariants, for every implementation:

* *Atomic objects.* A reader sees an object whole, old or new, or not at all: never a part of it, also when the writer is
  killed or raises. This holds for `put`, `put_if_absent` and `put_multipart` alike.
* *Strong consistency.* After a write returned, every later `get`, `stat` and `list` of anyone sees it.
* *One winner.* Of any number of concurrent `put_if_absent` calls on one key exactly one returns True, in any number of
  processes and machines. An outcome that cannot be established raises `AmbiguousWriteError`; it is never True.
* *Durable.* What a write returned for survives a crash of the machine, as far as the medium promises.
* *Idempotent.* Every operation may be retried with the same arguments: `put_if_absent` because the body carries the
  writer's nonce, so the same body read back means that this writer had won.

Failure behaviour: only errors of `headrace.dataio.core.errors` are raised. `NotFoundError`: key or bucket absent.
`AccessDeniedError`: credentials. `TransientError`: still failing after bounded retries. `CapacityError`: no space, or
above a limit of the call. `UsageError`: a malformed key or range. Nothing is ever partly returned: a buffer that could
not be filled raises, and its content is then undefined.

Retry, hedging, limits and tracing are wrappers of this same interface, not flags of it. Stores are safe to share between
threads. They are not safe to carry through `fork`; open them again in the child.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.store.uploads import UploadLog

Buffer = bytes | bytearray | memoryview
"""Readable bytes; a memoryview must be contiguous."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """One stored object. `size` in bytes; `modified` in seconds since the epoch by the store's own clock."""

    key: str
    size: int
    modified: float


class Location(msgspec.Struct, frozen=True):
    """Where a store is, without secrets: enough for another process with its own credentials to open the same one.

    `shareable` is False when the store was opened with secrets or other options that never leave the process.
    """

    url: str
    options: Mapping[str, object]
    shareable: bool


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
        """As `get_into`, for bytes that go on to somewhere else: `take(offset, piece)` is called for each piece in order, while
        it is in the processor's caches; the piece is there for the time of the call only. One at the first offset means that all
        of it comes again. `buffer` is memory to use. `take` raises no `OSError`; what it raises ends the read and passes."""
        self.get_into(key, offset, buffer)
        take(offset, buffer)

    def open_file(self, key: str) -> int | None:
        """The object as a file that is open for reading, where it is one on a disk of this machine: a descriptor, the caller's to
        close. None elsewhere."""
        return None

    def read_once(self, prefix: str) -> None:  # noqa: B027 - advice, which most stores have no use for
        """Advice: large ranges of objects below `prefix` are not read again soon, and need no place in the page cache."""

    @abc.abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write or replace the object, in one request."""

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write the object unless the key exists. True: this call's body is the object. False: another's is.

        `data` must carry a nonce of the writer, since equal bodies count as the same writer.
        """

    @abc.abstractmethod
    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write or replace the object from a stream of parts, with a bounded number in flight; return its size.

        Parts may have any size. A read-only one (bytes, a memoryview that is) keeps its bytes until the call has returned, any
        other may change once the next is asked for. An exception from `parts` leaves the old object, or none, and no billable
        leftovers.
        """

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        """As `put_multipart`; where the back-end has parts, `log` is told of the upload, so that another process can abort it."""
        return self.put_multipart(key, parts)

    def abort_upload(self, key: str, upload: str) -> None:  # noqa: B027 - most stores have no uploads
        """Forget the unfinished upload with this id, if it is known."""

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

    def distrust(self, key: str) -> bool:
        """What was read of this object was wrong. True: the next read is of another copy. False: there is no other."""
        return False

    def reconnect(self) -> None:  # noqa: B027 - most stores have no connections
        """Reads that begin from now on use no connection that is idle now: what came over one of them was wrong."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release what the store holds; it is not used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.url!r})"


def check_key(key: str) -> str:
    """`key` itself when well formed: relative, valid UTF-8, no empty, `.` or `..` segment, no control character."""
    segments = key.split("/")
    bad = any(s in ("", ".", "..") for s in segments) or any(
        c < " " or c in "\x7f\\" or "\ud800" <= c <= "\udfff" for c in key
    )
    if bad or len(key.encode(errors="surrogatepass")) > limits.OBJECT_KEY_BYTES:
        raise UsageError(f"{key!r} is not a valid object key", hint="keys are relative paths without '..' or '//'")
    return key
