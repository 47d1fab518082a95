"""A store that can be told to hold back: before each piece of an upload it asks `wait`, which returns when it may go on.

Invariant: nothing but uploads in parts is held back; what is on its way already goes on.
Failure behaviour: none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from headrace.dataio.store.contract import Buffer, Store
from headrace.dataio.store.uploads import UploadLog
from headrace.dataio.store.wrapper import Wrapper


class Gated(Wrapper):
    """`inner`, with `wait` before each piece."""

    def __init__(self, inner: Store, wait: Callable[[], None]) -> None:
        super().__init__(inner)
        self._wait = wait

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self.inner.put_multipart(key, self._passing(parts))

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self.inner.put_logged(key, self._passing(parts), log)

    def _passing(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            self._wait()
            yield part
