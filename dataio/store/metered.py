"""Counts what a store is asked and what it moves.

Invariant: labels come from small fixed sets: the back-end's name, the contract's operation, `ok` or an error's code.
Failure behaviour: none of its own; errors of the wrapped store pass through, counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from dataio.core import limits
from dataio.core.errors import MillraceError
from dataio.core.metrics import store_bytes, store_requests
from dataio.store.contract import Buffer, Location, ObjectInfo, Store


class Metered(Store):
    """`inner`, with every operation and the payload bytes of the successful ones counted under the label `backend`."""

    def __init__(self, inner: Store, backend: str) -> None:
        self.inner, self._backend = inner, backend

    @property
    def location(self) -> Location:
        return self.inner.location

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        with self._counted("get"):
            data = self.inner.get(key, max_bytes=max_bytes)
        self._read(len(data))
        return data

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._counted("get_into"):
            self.inner.get_into(key, offset, buffer)
        self._read(buffer.nbytes)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        with self._counted("get_into"):
            self.inner.get_ranges_into(key, ranges)
        self._read(sum(buffer.nbytes for _, buffer in ranges))

    def put(self, key: str, data: Buffer) -> None:
        with self._counted("put"):
            self.inner.put(key, data)
        self._wrote(memoryview(data).nbytes)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._counted("put_if_absent"):
            won = self.inner.put_if_absent(key, data)
        self._wrote(memoryview(data).nbytes if won else 0)
        return won

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        with self._counted("put_multipart"):
            size = self.inner.put_multipart(key, parts)
        self._wrote(size)
        return size

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._counted("list"):
            yield from self.inner.list(prefix)

    def stat(self, key: str) -> ObjectInfo:
        with self._counted("stat"):
            return self.inner.stat(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        with self._counted("delete_many"):
            self.inner.delete_many(keys)

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return repr(self.inner)

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        outcome = "ok"
        try:
            yield
        except GeneratorExit:  # the reader of a listing has seen enough
            raise
        except BaseException as error:
            outcome = error.code if isinstance(error, MillraceError) else "raised"
            raise
        finally:
            store_requests.labels(self._backend, operation, outcome).inc()

    def _read(self, size: int) -> None:
        store_bytes.labels(self._backend, "read").inc(size)

    def _wrote(self, size: int) -> None:
        store_bytes.labels(self._backend, "written").inc(size)
