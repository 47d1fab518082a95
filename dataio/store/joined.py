"""Joined shards: several objects that readers see as one object, their bytes one after the other.

Purpose: a sample lies in one shard, but media files that are used where they lie are separate objects. A list names
the objects of a joined shard. `Mounts` reads the keys below `mounts/joined/` through `JoinedObjects`, so loaders, the
cache and the sidecar need no special case (`docs/design/0043-media-in-place.md`).

Invariants:

* The shard `mounts/joined/<number>-<digest>` has the list `joined/<number>-<digest>.json` in the dataset's own store.
  The digest is that of the list, so a list never changes.
* A list is hostile input. It may name only objects of the dataset's store and of its mounts, and no joined shards. Its
  length, the number of its objects and their sizes are bounded.
* Only `LIST_CACHE_BYTES` of lists are in memory. Ranges of several remote objects are read in up to `PARALLEL` threads.
* A list records the size and the time of each object. They are compared only to explain an error. The digests of the
  index find every change.
* In a range over several objects, the bytes of a missing or shortened object are zeros. Only a cache reads such ranges,
  since a file is in one object. So a missing object damages its own sample, and not those beside it in a block of the
  cache. The reader finds the zeros by the file's digest, reads the file alone, and gets the error.

Failure behaviour: a missing list, or one with an invalid name, raises `NotFoundError`. An invalid list raises
`CorruptionError`. A missing or shortened object raises the error of its own store, which names it, from `get` and from
ranges within one object. Writes raise `UnsupportedError`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NoReturn

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    DeadlineError,
    HeadraceError,
    NotFoundError,
    RangeError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.json import parse_json, seal, unseal
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    check_folder,
    check_range,
    is_key,
    too_large,
    writable_bytes,
)
from headrace.dataio.store.url_policy import JOINED_URL, scheme_of

JOINED = "joined"
"""The name of the mount that `Mounts` reserves for joined shards."""
SHARD_PREFIX = f"mounts/{JOINED}/"
LIST_FOLDER, FILES_FOLDER = "joined/", "files/"
FORMAT = 1
LIST_OBJECTS = 1024
"""The most objects of a list. Writers use fewer."""
LIST_BYTES = 2 * limits.MIB
LIST_CACHE_BYTES = 64 * limits.MIB
PARALLEL = 32
WAIT_SECONDS = 300.0
"""Seconds that a thread waits for a list that another thread reads."""
_OBJECT_BYTES = 1 << 50
_SHARD = re.compile(r"[0-9]{8,12}-[0-9a-f]{32}")
_TOLERANCE, _REMOTE_TOLERANCE = 0.002, 1.0
"""The seconds by which two stated times of an object may differ. Of a remote one, a listing may give more digits than
a request."""
_DECODED_COST = 3  # a decoded list takes up to three times the memory of its JSON


class JoinedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a joined shard.

    `modified` is its time, in seconds since the epoch, when it was indexed. None for an object that Headrace wrote.
    """

    key: str
    size: int
    modified: float | None = None


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    objects: tuple[JoinedObject, ...]


class JoinedList:
    """The objects of a joined shard in order. `size` is the sum of their sizes."""

    def __init__(self, objects: Sequence[JoinedObject]) -> None:
        self.objects = tuple(objects)
        self.starts = [0, *itertools.accumulate(one.size for one in self.objects)]
        self.size = self.starts.pop()
        self.is_local: bool | None = None
        """Whether all objects are in local folders. None until `JoinedObjects.is_local` finds out."""

    def find(self, offset: int) -> tuple[JoinedObject, int]:
        """Return the object that holds the byte `offset` of the shard, and its offset in that object."""
        number = bisect.bisect_right(self.starts, offset) - 1
        return self.objects[number], offset - self.starts[number]

    def cut(self, offset: int, buffer: memoryview) -> Iterator[tuple[JoinedObject, int, memoryview]]:
        """Cut a range into the objects' ranges: (object, offset in it, part of the buffer)."""
        while buffer:
            found, at = self.find(offset)
            length = min(len(buffer), found.size - at)
            yield found, at, buffer[:length]
            offset, buffer = offset + length, buffer[length:]


Route = Callable[[str], tuple[Store, str]]
"""Returns the store that holds a key of the dataset's store, and its key there."""


@dataclass(slots=True)
class _ObjectRead:
    """A read of ranges of one object. Unless it is `strict`, a missing or shortened object is read as zeros."""

    store: Store
    key: str
    ranges: list[tuple[int, memoryview]] = field(default_factory=list)
    strict: bool = False

    @property
    def is_local(self) -> bool:
        return scheme_of(self.store.location.url) == "file"

    def __call__(self) -> None:
        try:
            self.store.get_ranges_into(self.key, self.ranges)
        except (NotFoundError, RangeError):
            if self.strict:
                raise
            for _, view in self.ranges:
                view[:] = bytes(len(view))


class JoinedObjects(Store):
    """The joined shards of a dataset, by the last part of their keys.

    Args:
        route: Finds the store of a list, and of an object that a list names.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._lists = OrderedDict[str, tuple[int, JoinedList]]()
        self._reading = dict[str, Future[JoinedList]]()
        self._cached_bytes, self._lock = 0, threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def location(self) -> Location:
        return Location(JOINED_URL, {}, True)

    def objects(self, shard: str) -> JoinedList:
        """Return the list of this shard.

        One thread reads a list, and the other threads that need it at the same time wait for that.
        """
        with self._lock:
            if shard in self._lists:
                self._lists.move_to_end(shard)
                return self._lists[shard][1]
            reading, is_first = self._reading.get(shard), shard not in self._reading
            if reading is None:
                reading = self._reading[shard] = Future()
        if is_first:
            self._read_list(shard, reading)
        try:
            return reading.result(WAIT_SECONDS)
        except TimeoutError:
            raise DeadlineError(
                f"{LIST_FOLDER}{shard}.json: another thread reads it, and had not finished after {WAIT_SECONDS:.0f} s",
                hint="check that the store is reachable",
            ) from None

    def _read_list(self, shard: str, reading: Future[JoinedList]) -> None:
        """Read a list, and pass it or the error to the threads that wait for `reading`."""
        try:
            decoded = self._find_list(shard)
        except BaseException as error:
            reading.set_exception(error)
        else:
            reading.set_result(decoded)
        finally:
            with self._lock:
                del self._reading[shard]

    def _find_list(self, shard: str) -> JoinedList:
        if not _SHARD.fullmatch(shard):
            raise NotFoundError(f"{SHARD_PREFIX}{shard}: this is not the name of a joined shard")
        store, key = self._route(f"{LIST_FOLDER}{shard}.json")
        data = store.get(key, max_bytes=LIST_BYTES)
        decoded = decode_list(data, shard, f"{store.location.url.rstrip('/')}/{key}")
        self._require_mounts(decoded, shard)
        self._keep(shard, len(data) * _DECODED_COST, decoded)
        return decoded

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        size = self.objects(key).size
        if size > max_bytes:
            raise too_large(SHARD_PREFIX + key, size, max_bytes)
        data = bytearray(size)
        self._read(key, [(0, memoryview(data))], strict=True)
        return bytes(data)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._read(key, ranges, strict=False)

    def _read(self, key: str, ranges: Sequence[tuple[int, memoryview]], *, strict: bool) -> None:
        joined, reads = self.objects(key), dict[str, _ObjectRead]()
        for offset, buffer in ranges:
            view = writable_bytes(buffer)
            check_range(SHARD_PREFIX + key, offset, len(view), joined.size)
            parts = list(joined.cut(offset, view))
            for found, at, part in parts:
                read = reads.get(found.key) or reads.setdefault(found.key, _ObjectRead(*self._route(found.key)))
                read.ranges.append((at, part))
                read.strict = read.strict or strict or len(parts) == 1
        remote = [read for read in reads.values() if not read.is_local]
        if len(remote) > 1:
            self._read_parallel(remote)
        else:
            for read in remote:
                read()
        for read in reads.values():
            if read.is_local:
                read()

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        joined, view = self.objects(key), writable_bytes(buffer)
        check_range(SHARD_PREFIX + key, offset, len(view), joined.size)
        parts = list(joined.cut(offset, view))
        if len(parts) != 1:
            self.get_into(key, offset, buffer)
            take(offset, buffer)
            return
        ((found, at, part),) = parts
        store, inner = self._route(found.key)
        store.get_pieces(inner, at, part, lambda place, piece: take(place - at + offset, piece))

    def open_file(self, key: str) -> int | None:
        """Open the shard as a local file if it is exactly one object."""
        objects = self.objects(key).objects
        if len(objects) != 1:
            return None
        store, inner = self._route(objects[0].key)
        return store.open_file(inner)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the shards. This reads their lists, because only these hold the sizes."""
        store, _ = self._route(f"{LIST_FOLDER}list.json")
        for info in store.list(LIST_FOLDER + prefix):
            shard = info.key[len(LIST_FOLDER) :].removesuffix(".json")
            if _SHARD.fullmatch(shard):
                yield ObjectInfo(shard, self.objects(shard).size, info.modified)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        check_folder(prefix)
        return iter(())

    def stat(self, key: str) -> ObjectInfo:
        joined = self.objects(key)
        return ObjectInfo(key, joined.size, max((one.modified or 0.0 for one in joined.objects), default=0.0))

    def put(self, key: str, data: Buffer) -> None:
        _refuse_writes(key)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        _refuse_writes(key)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        _refuse_writes(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            _refuse_writes(key)

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def is_local(self, shard: str) -> bool:
        """Return whether all objects of this shard are in local folders."""
        listed = self.objects(shard)
        if listed.is_local is None:
            stores = {id(store): store for store, _ in (self._route(one.key) for one in listed.objects)}
            listed.is_local = all(scheme_of(store.location.url) == "file" for store in stores.values())
        return listed.is_local

    def describe_change(self, shard: str, offset: int) -> str:
        """Return how the object at this offset of the shard differs from the list, or "" if it does not."""
        found, _ = self.objects(shard).find(offset)
        store, inner = self._route(found.key)
        try:
            info = store.stat(inner)
        except NotFoundError:
            return "it does not exist any more"
        except HeadraceError as error:
            return f"it cannot be compared: {error.message}"
        if info.size != found.size:
            return f"it has {info.size} bytes, and had {found.size} when it was indexed"
        tolerance = _TOLERANCE if scheme_of(store.location.url) == "file" else _REMOTE_TOLERANCE
        if found.modified is not None and abs(info.modified - found.modified) > tolerance:
            return (
                f"it was modified at {_as_time(info.modified)}, and at {_as_time(found.modified)} when it was indexed"
            )
        return ""

    def _require_mounts(self, decoded: JoinedList, shard: str) -> None:
        for one in decoded.objects:
            try:
                self._route(one.key)
            except HeadraceError as error:
                raise CorruptionError(f"{LIST_FOLDER}{shard}.json: {error.message}") from error

    def _keep(self, shard: str, cost: int, decoded: JoinedList) -> None:
        with self._lock:
            if shard in self._lists:
                return
            self._lists[shard] = cost, decoded
            self._cached_bytes += cost
            while self._cached_bytes > LIST_CACHE_BYTES and len(self._lists) > 1:
                _, (freed, _) = self._lists.popitem(last=False)
                self._cached_bytes -= freed

    def _read_parallel(self, reads: Sequence[_ObjectRead]) -> None:
        """Read ranges of several objects at the same time. All reads have ended when this returns or raises."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PARALLEL, thread_name_prefix="headrace-joined")
            futures: list[Future[None]] = [self._threads.submit(read) for read in reads]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


def write_list(store: Store, number: int, objects: Sequence[JoinedObject]) -> tuple[str, int]:
    """Store the list of a joined shard.

    Args:
        store: The dataset's own store.
        number: The shard's number, which orders the shards of a dataset.
        objects: The objects, at least one. Their keys are those of the dataset's store with its mounts.

    Returns:
        The shard's key and its size in bytes. Equal arguments give an equal key.

    Raises:
        UsageError: an object cannot be in a list, or there is none.
        CapacityError: there are more than `LIST_OBJECTS` objects, or the list is too long.

    Example:
        >>> from headrace.dataio.store.open import open_store
        >>> with open_store("memory://joined-demo") as store:
        ...     store.put("a.mp4", b"one")
        ...     write_list(store, 0, [JoinedObject(key="a.mp4", size=3)])
        ('mounts/joined/00000000-8c5feab717224c93b1ece7fb16a15b7b', 3)
    """
    if (problem := _problem(objects)) is not None:
        raise UsageError(f"a joined shard cannot be made: {problem}")
    document = _Document(format=FORMAT, objects=tuple(objects))
    data = seal(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if len(data) > LIST_BYTES:
        raise CapacityError(f"a list of {len(objects)} objects has {len(data)} bytes", hint="join fewer objects")
    name = _name(number, data)
    store.put(f"{LIST_FOLDER}{name}.json", data)
    return SHARD_PREFIX + name, sum(one.size for one in objects)


def write_files(store: Store, number: int, data: Buffer) -> JoinedObject:
    """Store the files that Headrace made for a joined shard, one after the other, as one object.

    Args:
        store: The dataset's own store.
        number: The shard's number.
        data: The bytes of all files.

    Returns:
        The object, for `write_list`. Equal arguments give an equal key.
    """
    key = FILES_FOLDER + _name(number, data)
    store.put_multipart(key, [data])
    return JoinedObject(key=key, size=memoryview(data).nbytes)


def is_made(key: str) -> bool:
    """Return whether `key` is that of an object that `write_files` stores."""
    return key.startswith(FILES_FOLDER) and _SHARD.fullmatch(key[len(FILES_FOLDER) :]) is not None


def copy_files(source: Store, target: Store, made: JoinedObject) -> None:
    """Copy an object that `write_files` stored. Its name holds its digest, so it replaces no other object."""
    data = source.get(made.key, max_bytes=made.size)
    if not is_made(made.key) or _digest(data) != made.key.rpartition("-")[2]:
        raise CorruptionError(f"{source.location.url}: {made.key} is not the object that its name says")
    target.put_multipart(made.key, [data])


def decode_list(data: bytes, shard: str, name: str) -> JoinedList:
    """Decode and check the stored list of `shard`. Errors call it `name`."""
    if len(data) > LIST_BYTES:
        raise CorruptionError(f"{name} has {len(data)} bytes, above the limit of {LIST_BYTES} for a list")
    body = unseal(data, name)
    if _digest(data) != shard.rpartition("-")[2]:
        raise CorruptionError(f"{name} is not the list that its name says", hint="restore it from a copy")
    try:
        parse_json(data, max_bytes=LIST_BYTES, unique_names=True)
        document = msgspec.json.decode(body, type=_Document)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a list of objects: {error}") from error
    if document.format != FORMAT:
        raise UnsupportedError(
            f"{name} has format {document.format}; this Headrace reads {FORMAT}", hint="upgrade Headrace"
        )
    if (problem := _problem(document.objects)) is not None:
        raise CorruptionError(f"{name}: {problem}")
    return JoinedList(document.objects)


def _problem(objects: Sequence[JoinedObject]) -> str | None:
    """Return the reason why these objects cannot be a list, or None."""
    if not 1 <= len(objects) <= LIST_OBJECTS:
        return f"{len(objects)} objects, not 1 to {LIST_OBJECTS}"
    for one in objects:
        if not is_key(one.key) or one.key.startswith(SHARD_PREFIX):
            return f"{one.key!r:.200} cannot be the key of an object in a list"
        if not 0 <= one.size <= _OBJECT_BYTES:
            return f"{one.key!r:.200} cannot have {one.size} bytes"
        if one.modified is not None and not math.isfinite(one.modified):
            return f"{one.key!r:.200} has no valid time"
    return None


def _name(number: int, data: Buffer) -> str:
    return f"{number:08}-{_digest(data)}"


def _digest(data: Buffer) -> str:
    return blake3.blake3(data).hexdigest(16)


def _as_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s"


def _refuse_writes(key: str) -> NoReturn:
    raise UnsupportedError(f"{SHARD_PREFIX}{key} is a joined shard, which is read-only", hint="change its objects")
