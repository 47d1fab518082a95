"""Single requests through native obstore, which `s3fast` sends for what it does not do by itself.

Invariants: one request a call (obstore's retries are off); bodies stream in chunks of about `_CHUNK` bytes. Credentials are
given to obstore as values, never looked up by it. Payloads are not hashed for the signature; digests of Headrace's own formats
guard the content.
Failure behaviour: see `s3fasterrors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore.store import S3Store as _Native

from headrace.dataio.core import limits
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3credentials import Keys
from headrace.dataio.store.s3fasterrors import translated_native
from headrace.dataio.store.s3session import flat

_CHUNK = 1 * limits.MIB
_WHOLE_REQUEST = timedelta(hours=1)
"""obstore's limit on a request with its body, which is 30 s by default; `s3fast` ends each by a limit for its size."""


def client(config: S3Config, keys: Keys | None) -> Any:
    """A client without retries. Every setting is given, since obstore would take it from variables of its own otherwise."""
    made: Any = _Native  # its types are those of one release; what is given below is checked by the tests
    return made(
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


async def request(
    config: S3Config, operation: str, doing: str, native: Any, parameters: Mapping[str, object]
) -> dict[str, Any]:
    """botocore's answer to the operation, by its name there."""
    with translated_native(config, doing):
        answer: dict[str, Any] = await _HANDLERS[operation](config, doing, native, parameters)
        return answer


async def piece(config: S3Config, doing: str, native: Any, key: str, start: int, stop: int) -> memoryview:
    """Bytes [start, stop) in one piece, as many as there are."""
    with translated_native(config, doing):
        data: Any = await obstore.get_range_async(native, key, start=start, end=stop)
        return memoryview(data)
