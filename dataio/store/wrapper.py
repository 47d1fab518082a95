"""What all wrappers of a store share: every operation goes to `inner` through one hook.

Invariant: a wrapper that overrides nothing is transparent. `_through` is called once for each operation, with the
contract's name of it, the key (the prefix of a listing, empty for `delete_many`) and the bytes it may hold in memory. A
listing goes through it for its first object only; what follows streams.
Failure behaviour: none of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.store.contract import Buffer, Location, ObjectInfo, Store
from headrace.dataio.store.uploads import UploadLog

T = TypeVar("T")
MULTIPART_BYTES = 64 * limits.MIB
"""What `put_multipart` is taken to hold: some parts on their way and one that is being filled."""


class Wrapper(Store):
    """`inner`, by way of `_through`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        return work()

    @property
    def location(self) -> Location:
        return self.inner.location

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        return self._through("get", key, max_bytes, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._through("get_into", key, buffer.nbytes, lambda: self.inner.get_into(key, offset, buffer))

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        size = sum(buffer.nbytes for _, buffer in ranges)
        self._through("get_into", key, size, lambda: self.inner.get_ranges_into(key, ranges))

    def open_file(self, key: str) -> int | None:
        return self._through("open_file", key, 0, lambda: self.inner.open_file(key))

    def read_once(self, prefix: str) -> None:
        self.inner.read_once(prefix)

    def put(self, key: str, data: Buffer) -> None:
        self._through("put", key, memoryview(data).nbytes, lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        size = memoryview(data).nbytes
        return self._through("put_if_absent", key, size, lambda: self.inner.put_if_absent(key, data))

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self._through("put_multipart", key, MULTIPART_BYTES, lambda: self.inner.put_multipart(key, parts))

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self._through("put_multipart", key, MULTIPART_BYTES, lambda: self.inner.put_logged(key, parts, log))

    def abort_upload(self, key: str, upload: str) -> None:
        self._through("delete_many", key, 0, lambda: self.inner.abort_upload(key, upload))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self.inner.list(prefix)
        yield from self._through("list", prefix, 0, lambda: [*itertools.islice(found, 1)])
        yield from found

    def stat(self, key: str) -> ObjectInfo:
        return self._through("stat", key, 0, lambda: self.inner.stat(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        doomed = [*keys]
        self._through("delete_many", "", 0, lambda: self.inner.delete_many(doomed))

    def distrust(self, key: str) -> bool:
        return self.inner.distrust(key)

    def reconnect(self) -> None:
        self.inner.reconnect()

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return repr(self.inner)
