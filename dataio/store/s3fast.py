"""Objects in and out by native obstore instead of s3fs: the same requests at a fraction of the CPU.

Purpose: `FastSession` sends GET, HEAD and single PUTs through obstore, and asks for pages of listings by itself (`s3pages`).
Deletes and multipart uploads stay with s3fs's client, since obstore gives no hold on a single part; that client is imported and
made only when one of them is asked for.
Invariants: what the caller sees is that of `S3Session`: one request a call (obstore's retries are off), the same errors, bodies
that stream in chunks of about `_CHUNK` bytes. Credentials are given to obstore as values, never looked up by it. Payloads are not
hashed for the signature; digests of Millrace's own formats guard the content.
Failure behaviour: see `s3fasterrors`. A body above `_PUT_BYTES` goes through s3fs, because obstore counts its read time-out from
the first byte sent. obstore's threads do not survive a fork: `unavailable` says so in a child, where s3fs serves instead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore.store import S3Store as _Native

from dataio.core import limits
from dataio.core.errors import AccessDeniedError, RangeError
from dataio.store.s3config import S3Config
from dataio.store.s3credentials import Keys
from dataio.store.s3errors import CHECK_KEYS
from dataio.store.s3fasterrors import translated_native
from dataio.store.s3inside import KEYS_SECONDS, Inside
from dataio.store.s3pages import Pages, behind_a_proxy
from dataio.store.s3session import S3Session, flat

_CHUNK = 1 * limits.MIB
_ONE_PIECE = 1 * limits.MIB
"""Up to here a body that is read in the caller's thread comes in one piece."""
_PIECE = 256 * limits.KIB
"""Of a longer one: of about this size, which takes a fifth less CPU than one of `_CHUNK`, where each costs a hop."""
_LEAVE_SECONDS = 5.0
_PUT_BYTES = 64 * limits.MIB
_WHOLE_REQUEST = timedelta(hours=1)
"""obstore's limit on a request with its body, which is 30 s by default; a stalled one is ended by the read time-out."""


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


def unavailable(config: S3Config) -> str | None:
    """Why obstore cannot serve this configuration here, or None."""
    if _Runtime.is_lost():
        return "this process was forked from one that used obstore, whose threads do not survive that"
    return config.beyond_obstore()


class FastSession(S3Session):
    """As `S3Session`; `get_object`, `head_object` and `put_object` take the short way."""

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._native: tuple[Keys | None, Any] | None = None
        self._rotates, self._looked_at = config.uses_chain, 0.0  # the credentials
        self._pages = Pages(config)
        self._inside = Inside()
        weakref.finalize(self, self._inside.wait, _LEAVE_SECONDS)  # nobody is inside one that is collected: at the end

    def close(self) -> None:
        self._inside.close()
        super().close()

    def read_here(self, doing: str, key: str, start: int, stop: int, take: Callable[[memoryview], None]) -> bool:
        return self._here(doing, lambda native: _pieces(native, key, start, stop, take)) is True

    def head_here(self, doing: str, key: str) -> dict[str, Any] | None:
        found = self._here(doing, lambda native: obstore.head(native, key))
        return None if found is None else {"ContentLength": found["size"], "LastModified": found["last_modified"]}

    def _here(self, doing: str, request: Callable[[Any], Any]) -> Any:
        """What `request` gives in this thread; None where it has to go the ordinary way."""
        native = self._native
        recent = not self._rotates or time.monotonic() - self._looked_at < KEYS_SECONDS
        if native is None or not recent or _Runtime.is_lost() or not self._inside.enter():
            return None
        try:
            with translated_native(self.config, doing):
                return request(native[1])
        except (AccessDeniedError, RangeError):
            return None
        finally:
            self._inside.leave()

    async def _request(self, operation: str, doing: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        if operation == "list_objects_v2" and not behind_a_proxy(os.environ):
            keys = await self._keys(doing)
            page = await self._pages.page(doing, keys, parameters, lambda: self._prepare(keys))
            return page if page is not None else await super()._request(operation, doing, parameters)
        handler = _HANDLERS.get(operation)
        if handler is None or flat(parameters.get("Body")).nbytes > _PUT_BYTES:
            return await super()._request(operation, doing, parameters)
        native = await self._connected(doing)
        with translated_native(self.config, doing):
            answer: dict[str, Any] = await handler(self.config, doing, native, parameters)
            return answer

    async def short(self, doing: str, key: str, start: int, stop: int) -> memoryview | None:
        """One step between the loop and obstore's threads instead of two, each of which costs more than the request."""

        async def request() -> memoryview:
            native = await self._connected(doing)
            with translated_native(self.config, doing):
                data: Any = await obstore.get_range_async(native, key, start=start, end=stop)
                return memoryview(data)

        return await self._allowed(request, doing)

    async def _connected(self, doing: str) -> Any:
        """obstore's client for the credentials of now: botocore refreshes those that expire."""
        keys = await self._keys(doing)
        self._looked_at = time.monotonic()
        return self._client_of(keys)

    def _client_of(self, keys: Keys | None) -> Any:
        if self._native is None or self._native[0] != keys:
            _Runtime.mark()
            self._native = (keys, _native(self.config, keys))
        return self._native[1]

    def _prepare(self, keys: Keys | None) -> None:
        """Make the client while the server is busy: who lists reads next, as a rule, and nothing else runs while it is made (it
        reads all certificates of the machine)."""
        with contextlib.suppress(Exception):  # whoever needs the client is told
            self._client_of(keys)

    async def _keys(self, doing: str) -> Keys | None:
        if not self.config.uses_chain:
            return Keys(*self.config.keys) if self.config.keys else None
        found = await self._frozen(doing)
        if found is None:
            raise AccessDeniedError(f"{doing}: no credentials were found for {self.config.endpoint}", hint=CHECK_KEYS)
        return found


def _native(config: S3Config, keys: Keys | None) -> Any:
    """A client without retries. Every setting is given, since obstore would take it from variables of its own otherwise."""
    client: Any = _Native  # its types are those of one release; what is given below is checked by the tests
    return client(
        config.bucket,
        config={
            "endpoint": config.bucket_url,
            "aws_endpoint_url_s3": config.bucket_url,  # it goes before the other one, and has a variable
            "region": config.region or "us-east-1",
            "virtual_hosted_style_request": True,  # that is, the endpoint says where the bucket is
            "unsigned_payload": True,
            "skip_signature": keys is None,
            "request_payer": bool(config.options.get("requester_pays")),
        },
        client_options={
            "allow_http": True,  # an endpoint of plain http is the caller's own choice
            "connect_timeout": timedelta(seconds=config.connect_seconds),
            "read_timeout": timedelta(seconds=config.read_seconds),
            "timeout": _WHOLE_REQUEST,
            **_trust(config),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        credential_provider=None if keys is None else keys.for_obstore,
    )


def _trust(config: S3Config) -> dict[str, Any]:
    verify = config.verify
    if verify is False:
        return {"allow_invalid_certificates": True}
    if isinstance(verify, str):
        with open(verify, "rb") as bundle:
            return {"root_certificate": bundle.read(limits.JSON_DOCUMENT_BYTES)}
    return {}


def _pieces(native: Any, key: str, start: int, stop: int, take: Callable[[memoryview], None]) -> bool:
    if stop - start <= _ONE_PIECE:
        whole: Any = obstore.get_range(native, key, start=start, end=stop)
        take(memoryview(whole))
        return True
    found = obstore.get(native, key, options={"range": (start, stop)})
    if tuple(found.range) != (start, stop):
        return False
    for piece in found.stream(min_chunk_size=_PIECE):
        take(memoryview(piece))
    return True


async def _get(config: S3Config, doing: str, native: Any, parameters: Mapping[str, object]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "Range" in parameters:
        first, _, last = str(parameters["Range"]).removeprefix("bytes=").partition("-")
        options["range"] = (int(first), int(last) + 1)
    get: Any = obstore.get_async
    found = await get(native, str(parameters["Key"]), options=options or None)
    start, stop = found.range
    answer = _described(found) | {"ContentLength": stop - start, "Body": _Body(found, config, doing)}
    if options:
        answer["ContentRange"] = f"bytes {start}-{stop - 1}/{found.meta['size']}"
    return answer | {"ResponseMetadata": {"HTTPStatusCode": 206 if options else 200}}


async def _head(config: S3Config, doing: str, native: Any, parameters: Mapping[str, object]) -> dict[str, Any]:
    return _described(await obstore.get_async(native, str(parameters["Key"]), options={"head": True}))


async def _put(config: S3Config, doing: str, native: Any, parameters: Mapping[str, object]) -> dict[str, Any]:
    body = flat(parameters["Body"])  # the caller's own bytes, not copied
    mode: Any = "create" if parameters.get("IfNoneMatch") == "*" else "overwrite"
    done = await obstore.put_async(native, str(parameters["Key"]), body, mode=mode, use_multipart=False)
    return {"ETag": done["e_tag"]}


_HANDLERS = {"get_object": _get, "head_object": _head, "put_object": _put}


def _described(found: Any) -> dict[str, Any]:
    meta = found.meta
    return {
        "ContentLength": meta["size"],
        "LastModified": meta["last_modified"],
        "ETag": meta["e_tag"],
        "Metadata": found.attributes,
    }


class _Body:
    """A body that is being received: the part of botocore's stream that `s3read` uses."""

    def __init__(self, found: Any, config: S3Config, doing: str) -> None:
        self._chunks: AsyncIterator[Any] | None = found.stream(min_chunk_size=_CHUNK)
        self._config, self._doing = config, doing

    async def read(self, _: int) -> Any:
        """The next chunk, of any size; empty at the end."""
        if self._chunks is None:
            return b""
        with translated_native(self._config, self._doing):
            return await anext(self._chunks, b"")

    def close(self) -> None:
        """Drop the connection unless the body was read to its end."""
        self._chunks = None
