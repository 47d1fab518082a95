"""Sequential reads of one object in large windows, with the next window read in the background.

Invariants: at most four windows are in memory, for any size of the object. While reads go forward, each window is
requested once. A read may go back by less than one window without a new request.

Failure behaviour: if the object became shorter or was deleted, a writer is changing it, and reads raise
`TransientError`. Other errors of the store pass through.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, RangeError, TransientError
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import url_of

WINDOW = 16 * limits.MIB


class ReadAhead:
    """Reads one object in order. It is a context manager.

    Args:
        store: the store of the object.
        key: the object's key.
        size: the object's size in bytes.
        window: the bytes of one request. The default is 16 MiB.
    """

    def __init__(self, store: Store, key: str, size: int, window: int = WINDOW) -> None:
        self._store, self._key, self.size, self._window = store, key, size, window
        self._windows: dict[int, Future[bytearray]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def read_at(self, offset: int, length: int) -> bytes:
        """Read exactly these bytes, which must be inside the object."""
        return b"".join(self.parts(offset, length))

    def parts(self, offset: int, length: int) -> Iterator[memoryview]:
        """Like `read_at`, but yields the bytes in pieces. Each piece is valid until the next one is requested."""
        end = offset + length
        while offset < end:
            number, start = divmod(offset, self._window)
            piece = memoryview(self._get(number))[start : start + end - offset]
            yield piece
            offset += len(piece)

    def _get(self, number: int) -> bytearray:
        for old in [n for n in self._windows if not number - 1 <= n <= number + 2]:
            del self._windows[old]
        for window in (number, number + 1):
            if window not in self._windows and window * self._window < self.size:
                self._windows[window] = self._thread.submit(self._fetch, window)
        return self._windows[number].result()

    def _fetch(self, number: int) -> bytearray:
        start = number * self._window
        data = bytearray(min(self._window, self.size - start))
        try:
            self._store.get_into(self._key, start, memoryview(data))
        except (NotFoundError, RangeError) as error:
            raise TransientError(
                f"{url_of(self._store, self._key)} changed while it was read: {error.message}",
                hint="try again when nothing writes to it",
            ) from error
        return data

    def close(self) -> None:
        """Wait for a read in progress, and release all windows."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._windows.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
