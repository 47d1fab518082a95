"""Counts what a store is asked, how long it takes, and what it moves.

Invariant: labels come from small fixed sets: the back-end's name, the contract's operation, `ok` or an error's code.
Failure behaviour: none of its own; errors of the wrapped store pass through, counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.metrics import store_bytes, store_requests, store_seconds
from headrace.dataio.store.contract import Buffer, ObjectInfo, Store
from headrace.dataio.store.uploads import UploadLog
from headrace.dataio.store.wrapper import Wrapper

T = TypeVar("T")


class Metered(Wrapper):
    """`inner`, with every operation, its seconds, and the payload bytes of the successful ones counted under `backend`."""

    def __init__(self, inner: Store, backend: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self._backend, self._clock = backend, clock
        # a label's child is looked up once: two locks and a tuple of texts each time would cost more than a small read
        self._requests = functools.cache(functools.partial(store_requests.labels, backend))
        self._seconds = functools.cache(functools.partial(store_seconds.labels, backend))
        self._bytes = functools.cache(functools.partial(store_bytes.labels, backend))

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        with self._counted(operation):
            return work()

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        data = super().get(key, max_bytes=max_bytes)
        self._read(len(data))
        return data

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().get_into(key, offset, buffer)
        self._read(buffer.nbytes)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().get_ranges_into(key, ranges)
        self._read(sum(buffer.nbytes for _, buffer in ranges))

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        self._through("get_into", key, buffer.nbytes, lambda: self.inner.get_pieces(key, offset, buffer, take))
        self._read(buffer.nbytes)

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        self._wrote(memoryview(data).nbytes)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won = super().put_if_absent(key, data)
        self._wrote(memoryview(data).nbytes if won else 0)
        return won

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        size = super().put_multipart(key, parts)
        self._wrote(size)
        return size

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        size = super().put_logged(key, parts, log)
        self._wrote(size)
        return size

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._requests("list", "ok")  # looked up here: the collector may end this, under the lock of the look-up
        self._seconds("list")
        with self._counted("list"):
            yield from self.inner.list(prefix)

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        outcome, began = "ok", self._clock.monotonic()
        try:
            yield
        except GeneratorExit:  # the reader of a listing has seen enough
            raise
        except BaseException as error:
            outcome = error.code if isinstance(error, HeadraceError) else "raised"
            raise
        finally:
            self._requests(operation, outcome).inc()
            self._seconds(operation).observe(self._clock.monotonic() - began)

    def _read(self, size: int) -> None:
        self._bytes("read").inc(size)

    def _wrote(self, size: int) -> None:
        self._bytes("written").inc(size)
