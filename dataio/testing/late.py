"""Writes that are applied late: after their client gave up, or once more after they were acknowledged.

Purpose: a server may hold a request for minutes while its client tries again, or dies and is replaced. `Late` remembers the
writes to a store, so that a test applies an earlier one last.
Failure behaviour: a write that is held raises `TransientError`, as a request that timed out does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.dataio.core.errors import TransientError
from headrace.dataio.store.base import Buffer, Store, UploadLog
from headrace.dataio.store.wrappers import Wrapper


@dataclass(frozen=True, slots=True)
class Write:
    """One request. `data` is None for a delete; `if_absent`: with the precondition that there is no such object."""

    key: str
    data: bytes | None
    if_absent: bool = False


class Late(Wrapper):
    """`inner`. `writes` are all requests so far that change an object; `land` applies one of them, again or at last."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes: list[Write] = []
        self._hold, self._left = "", 0

    def hold(self, key: str, times: int = 1) -> None:
        """The next writes to keys that contain `key` are not applied, and time out."""
        self._hold, self._left = key, times

    @property
    def holding(self) -> int:
        """How many writes are still to be held; 0 once the fault has fired."""
        return self._left

    def land(self, write: Write) -> None:
        """The request reaches the store now."""
        if write.data is None:
            self.inner.delete_many([write.key])
        elif write.if_absent:
            self.inner.put_if_absent(write.key, write.data)
        else:
            self.inner.put(write.key, write.data)

    def put(self, key: str, data: Buffer) -> None:
        self._sent(Write(key, bytes(data)))
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self._sent(Write(key, bytes(data), if_absent=True))
        return super().put_if_absent(key, data)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        data = b"".join(bytes(part) for part in parts)
        self._sent(Write(key, data))
        return super().put_multipart(key, [data])

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self.put_multipart(key, parts)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._sent(Write(key, None))
            super().delete_many([key])

    def _sent(self, write: Write) -> None:
        self.writes.append(write)
        if self._left and self._hold in write.key:
            self._left -= 1
            raise TransientError(f"{write.key}: the request timed out, and is applied later")
