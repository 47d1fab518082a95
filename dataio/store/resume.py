"""Uploads that go on where a killed process stopped.

Purpose: `Resuming(store, log)` is the store; multipart uploads write down in `log` what the server has acknowledged, and the next
process that writes the same object with the same log sends only what is missing.
Invariant: a part is left out only when the server lists it with its size, and either its ETag is the MD5 of the bytes that
would be sent, or ETag and digest are those that were written down. So a log that is wrong, old or of another object costs
requests, never bytes.
Failure behaviour: an upload that the server does not know any more is begun anew. A back-end without parts ignores the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dataio.store.contract import Buffer, Store
from dataio.store.uploads import UploadLog
from dataio.store.wrapper import Wrapper


class Resuming(Wrapper):
    """`inner`, whose multipart uploads are written down in `log`."""

    def __init__(self, inner: Store, log: UploadLog) -> None:
        super().__init__(inner)
        self._log = log

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        size = self.inner.put_resumable(key, self._noted(key, parts), self._log)
        self._log.ended(key, size)
        return size

    def _noted(self, key: str, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        """`parts`; that the last one is known is written down before it is sent."""
        last: Buffer | None = None
        for part in parts:
            if last is not None:
                yield last
            last = part
        self._log.filled(key)
        if last is not None:
            yield last

    def abandon(self, key: str) -> None:
        """Abort what was begun of this object."""
        found = self._log.unfinished(key)
        if found is not None:
            self.inner.abort_upload(key, found.id)
            self._log.ended(key, None)
