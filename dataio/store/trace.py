"""A span around every operation of a store, for whatever tracer the application has.

Invariant: `span(operation, attributes)` gives a context manager that encloses the operation; attributes are the store's
URL, the key and the bytes asked for, and never a secret. With OpenTelemetry: `Trace(store, lambda name, attributes:
tracer.start_as_current_span(name, attributes=attributes))`.
Failure behaviour: errors of the store pass through the span, so that it can record them; an error of the tracer is one of
the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from headrace.dataio.store.contract import Store
from headrace.dataio.store.wrapper import Wrapper

T = TypeVar("T")
Span = Callable[[str, Mapping[str, str | int]], AbstractContextManager[object]]


class Trace(Wrapper):
    """`inner` with a span around each operation, called `store.<operation>`."""

    def __init__(self, inner: Store, span: Span) -> None:
        super().__init__(inner)
        self._span, self._url = span, inner.location.url

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        with self._span(f"store.{operation}", {"store.url": self._url, "store.key": key, "store.bytes": size}):
            return work()
