"""The fast S3 client: obstore for GET, PUT, sizes and create-if-absent; s3fs for the rest.

Purpose: obstore needs a fraction of s3fs's CPU. Deletes, listings and multipart uploads stay with s3fs's client:
obstore lists by folders, reports the marker `folder/` as an object, and gives no access to a single part. Each
library is imported, and its client made, on first use, so a process that only reads needs neither.

Invariants: as for `S3Session`: one request per call (obstore's retries are off), the same errors. Bodies stream in
chunks of about `_CHUNK` bytes. obstore gets credentials as values, and never looks them up. Payloads are not hashed for
the signature; Headrace's formats carry their own digests.

Failure behaviour: as for `S3Session`. A body above `_PUT_BYTES` goes through s3fs, because obstore counts its read
time-out from the first byte sent. obstore's threads do not survive a fork: `unavailable` reports that in a child, and
s3fs serves instead.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.errors import AccessDeniedError
from headrace.dataio.store.credential_chain import Keys
from headrace.dataio.store.s3_config import S3Config
from headrace.dataio.store.s3_errors import CHECK_KEYS, translated_obstore, translated_s3
from headrace.dataio.store.s3_session import S3Session, flat

_PUT_BYTES = 64 * limits.MIB
_CHUNK = 1 * limits.MIB
_WHOLE_REQUEST = timedelta(hours=1)
"""obstore's own limit for a whole request, 30 s by default. `S3Config.request_seconds` ends each one earlier."""
T = TypeVar("T")


class _Runtime:
    """Which process started obstore's threads; they live as long as that process."""

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
    """Whether obstore is installed."""
    return importlib.util.find_spec("obstore") is not None


def unavailable(config: S3Config) -> str | None:
    """Why obstore cannot serve this configuration in this process; None if it can."""
    if _Runtime.is_lost():
        return "this process was forked from one that used obstore, whose threads do not survive that"
    return config.unsupported_by_obstore()


class ObstoreClient(S3Session):
    """An `S3Session` that sends reads and PUTs through obstore."""

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._obstore: tuple[Keys | None, Any] | None = None

    def reconnect(self) -> None:
        self._obstore = None

    async def _keys(self, doing: str) -> Keys | None:
        if not self.config.uses_chain:
            return Keys(*self.config.keys) if self.config.keys else None
        found = await self._chain_keys(doing)
        if found is None:
            raise AccessDeniedError(f"{doing}: no credentials were found for {self.config.endpoint}", hint=CHECK_KEYS)
        return found

    async def _request(self, operation: str, doing: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        size = flat(parameters.get("Body")).nbytes
        if operation not in _OPERATIONS or size > _PUT_BYTES:
            return await super()._request(operation, doing, parameters)
        client = await self._connected(doing)
        with translated_s3(self.config, doing), translated_obstore(self.config, doing):
            async with asyncio.timeout(self.config.request_seconds(size)):
                answer: dict[str, Any] = await _OPERATIONS[operation](self.config, doing, client, parameters)
                return answer

    async def get_range(self, doing: str, key: str, start: int, stop: int) -> memoryview | None:
        """One step between the loop and obstore's threads instead of two; each costs more than a short request."""

        async def request() -> memoryview:
            import obstore

            client = await self._connected(doing)
            with translated_s3(self.config, doing), translated_obstore(self.config, doing):
                async with asyncio.timeout(self.config.request_seconds(stop - start)):
                    data: Any = await obstore.get_range_async(client, key, start=start, end=stop)
                    return memoryview(data)

        return await self._with_current_credentials(request, doing)

    async def _connected(self, doing: str) -> Any:
        """obstore's client for the current keys; botocore refreshes those that expire."""
        keys = await self._keys(doing)
        known = self._obstore  # `reconnect` may drop it
        if known is None or known[0] != keys:
            _Runtime.mark()
            known = self._obstore = (keys, _client(self.config, keys))
        return known[1]


def _client(config: S3Config, keys: Keys | None) -> Any:
    """A client without retries. Every setting is given, because obstore reads missing ones from its own variables."""
    from obstore.store import S3Store

    make: Any = S3Store  # its types are those of one release; the tests check what is given here
    return make(
        config.bucket,
        config={
            "endpoint": config.bucket_url,
            "aws_endpoint_url_s3": config.bucket_url,  # it takes precedence over the one above, and has a variable
            "region": config.region or "us-east-1",
            "virtual_hosted_style_request": True,  # the endpoint names the bucket already
            "unsigned_payload": True,
            "skip_signature": keys is None,
            "request_payer": bool(config.options.get("requester_pays")),
        },
        client_options={
            "allow_http": True,  # a plain http endpoint is the caller's choice
            "connect_timeout": timedelta(seconds=config.connect_seconds),
            "read_timeout": timedelta(seconds=config.read_seconds),
            "timeout": _WHOLE_REQUEST,
            **_certificates(config),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        credential_provider=None if keys is None else keys.for_obstore,
    )


def _certificates(config: S3Config) -> dict[str, Any]:
    verify = config.verify
    if verify is False:
        return {"allow_invalid_certificates": True}
    if isinstance(verify, str):
        with open(verify, "rb") as bundle:
            return {"root_certificate": bundle.read(limits.JSON_DOCUMENT_BYTES)}
    return {}


# operations, by botocore's names, with botocore's answers


async def _get(config: S3Config, doing: str, client: Any, parameters: Mapping[str, object]) -> dict[str, Any]:
    import obstore

    options: dict[str, Any] = {}
    if "Range" in parameters:
        first, _, last = str(parameters["Range"]).removeprefix("bytes=").partition("-")
        options["range"] = (int(first), int(last) + 1)
    get: Any = obstore.get_async
    found = await get(client, str(parameters["Key"]), options=options or None)
    start, stop = found.range
    answer = _described(found) | {"ContentLength": stop - start, "Body": _Body(found, config, doing)}
    if options:
        answer["ContentRange"] = f"bytes {start}-{stop - 1}/{found.meta['size']}"
    return answer | {"ResponseMetadata": {"HTTPStatusCode": 206 if options else 200}}


async def _head(config: S3Config, doing: str, client: Any, parameters: Mapping[str, object]) -> dict[str, Any]:
    import obstore

    return _described(await obstore.get_async(client, str(parameters["Key"]), options={"head": True}))


async def _put(config: S3Config, doing: str, client: Any, parameters: Mapping[str, object]) -> dict[str, Any]:
    import obstore

    body = flat(parameters["Body"])  # the caller's own bytes, not a copy
    mode: Any = "create" if parameters.get("IfNoneMatch") == "*" else "overwrite"
    done = await obstore.put_async(client, str(parameters["Key"]), body, mode=mode, use_multipart=False)
    return {"ETag": done["e_tag"]}


_OPERATIONS = {"get_object": _get, "head_object": _head, "put_object": _put}


def _described(found: Any) -> dict[str, Any]:
    meta = found.meta
    return {
        "ContentLength": meta["size"],
        "LastModified": meta["last_modified"],
        "ETag": meta["e_tag"],
        "Metadata": found.attributes,
    }


class _Body:
    """A body that is being received, with the part of botocore's stream that `s3_session` uses."""

    def __init__(self, found: Any, config: S3Config, doing: str) -> None:
        self._chunks: AsyncIterator[Any] | None = found.stream(min_chunk_size=_CHUNK)
        self._config, self._doing = config, doing

    async def read(self, _: int) -> Any:
        """The next chunk, of any size; empty at the end."""
        if self._chunks is None:
            return b""
        with translated_obstore(self._config, self._doing):
            return await anext(self._chunks, b"")

    def close(self) -> None:
        """Drop the connection unless the body was read to its end."""
        self._chunks = None
