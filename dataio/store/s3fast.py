"""Objects in and out without s3fs: the same requests at a fraction of the CPU.

Purpose: `FastSession` reads spans, small objects and sizes in the caller's own thread (`s3here`), asks for pages of listings by
itself (`s3pages`), and sends single PUTs, and what those leave to it, through native obstore (`s3native`). Deletes and
multipart uploads stay with s3fs's client, since obstore gives no hold on a single part. Either library is imported, and its
client made, only when it is needed: who only reads does without, and without the memory of it.
Invariants: what the caller sees is that of `S3Session`: one request a call, the same errors.
Failure behaviour: as there. A body above `_PUT_BYTES` goes through s3fs, because obstore counts its read time-out from
the first byte sent. obstore's threads do not survive a fork: `unavailable` says so in a child, where s3fs serves instead.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.errors import AccessDeniedError
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3credentials import Keys
from headrace.dataio.store.s3errors import CHECK_KEYS, translated_s3
from headrace.dataio.store.s3here import Here
from headrace.dataio.store.s3pages import Pages, behind_a_proxy
from headrace.dataio.store.s3session import S3Session, flat

_PUT_BYTES = 64 * limits.MIB
_KEYS_SECONDS = 10.0
"""For so long the chain's credentials are taken for those of now by a thread that reads by itself."""
_NATIVE = ("get_object", "head_object", "put_object")
T = TypeVar("T")


class _Runtime:
    """Which process started obstore's threads; they live as long as it does."""

    started_in: int | None = None
    lock = threading.Lock()

    @classmethod
    def mark(cls) -> None:
        with cls.lock:
            cls.started_in = cls.started_in or os.getpid()

    @classmethod
    def is_lost(cls) -> bool:
        return cls.started_in not in (None, os.getpid())


def installed() -> bool:
    """Whether obstore is."""
    return importlib.util.find_spec("obstore") is not None


def unavailable(config: S3Config) -> str | None:
    """Why obstore cannot serve this configuration here, or None."""
    if _Runtime.is_lost():
        return "this process was forked from one that used obstore, whose threads do not survive that"
    return config.beyond_obstore()


class FastSession(S3Session):
    """As `S3Session`, the short way."""

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._native: tuple[Keys | None, Any] | None = None
        self._pages = Pages(config)
        self._here, self._behind_a_proxy = Here(config, self._pages.trust), behind_a_proxy(os.environ)
        weakref.finalize(self, self._here.close)
        self._last: tuple[float, Keys | None] | None = (
            None  # the credentials of whoever reads by himself, and since when
        )

    def close(self) -> None:
        self._here.close()
        super().close()

    def reconnect(self) -> None:
        self._here.reconnect()
        self._native = None

    def get_here(self, doing: str, key: str, most: int) -> bytes | None:
        return self._by_itself(doing, lambda keys: self._here.get(doing, key, keys, most))

    def read_here(self, doing: str, key: str, start: int, stop: int, buffers: Iterable[memoryview]) -> bool:
        return bool(self._by_itself(doing, lambda keys: self._here.read(doing, key, keys, start, stop, buffers)))

    def head_here(self, doing: str, key: str) -> dict[str, Any] | None:
        return self._by_itself(doing, lambda keys: self._here.head(doing, key, keys))

    def _by_itself(self, doing: str, request: Callable[[Keys | None], T | None]) -> T | None:
        """What `request` gives in this thread; None where it has to go the ordinary way."""
        if not self.is_open or self._behind_a_proxy:
            return None
        try:
            found = request(self._keys_here(doing))
        except AccessDeniedError:
            found = None
        if found is None:
            self._last = None  # it may be the credentials
        return found

    def _keys_here(self, doing: str) -> Keys | None:
        if self._last is None or (self.config.uses_chain and time.monotonic() - self._last[0] >= _KEYS_SECONDS):
            found = time.monotonic(), self.run(self._keys(doing))
            self._last = found
            return found[1]
        return self._last[1]

    async def _request(self, operation: str, doing: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        if operation == "list_objects_v2" and not behind_a_proxy(os.environ):
            page = await self._pages.page(doing, await self._keys(doing), parameters)
            return page if page is not None else await super()._request(operation, doing, parameters)
        if operation not in _NATIVE or flat(parameters.get("Body")).nbytes > _PUT_BYTES:
            return await super()._request(operation, doing, parameters)
        from headrace.dataio.store import s3native

        native = await self._connected(doing)
        with translated_s3(self.config, doing):
            async with asyncio.timeout(self.config.patience(flat(parameters.get("Body")).nbytes)):
                return await s3native.request(self.config, operation, doing, native, parameters)

    async def short(self, doing: str, key: str, start: int, stop: int) -> memoryview | None:
        """One step between the loop and obstore's threads instead of two, each of which costs more than the request."""

        async def request() -> memoryview:
            from headrace.dataio.store import s3native

            native = await self._connected(doing)
            with translated_s3(self.config, doing):
                async with asyncio.timeout(self.config.patience(stop - start)):
                    return await s3native.piece(self.config, doing, native, key, start, stop)

        return await self._allowed(request, doing)

    async def _connected(self, doing: str) -> Any:
        """obstore's client for the credentials of now: botocore refreshes those that expire."""
        from headrace.dataio.store import s3native

        keys = await self._keys(doing)
        known = self._native  # which `reconnect` forgets
        if known is None or known[0] != keys:
            _Runtime.mark()
            known = self._native = (keys, s3native.client(self.config, keys))
        return known[1]

    async def _keys(self, doing: str) -> Keys | None:
        if not self.config.uses_chain:
            return Keys(*self.config.keys) if self.config.keys else None
        found = await self._frozen(doing)
        if found is None:
            raise AccessDeniedError(f"{doing}: no credentials were found for {self.config.endpoint}", hint=CHECK_KEYS)
        return found
