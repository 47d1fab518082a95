"""The s3fs client for S3, which supports every operation, and the choice between it and the obstore client.

Purpose: `S3Client` sends its requests through s3fs. `obstore.ObstoreS3Client` extends it with faster requests.
`connect` chooses obstore if it is installed and supports the configuration, unless the user asks for one of the two.

Invariants:

* One call makes one request: the library's retries are off. (aiohttp repeats an idempotent request if the server has
  closed an idle connection.)
* A request ends within `S3Config.request_seconds` plus the time for its body, even if the server sends a byte now
  and then.
* If the server refuses the credentials and the chain has new ones, the request is sent once more. If the chain has
  none, a listing of one key checks whether the bucket exists.
* s3fs is imported, and its client made, on first use.

Failure behaviour: the errors of `bucket_errors`. A server that ignores ranges is an `UnsupportedError`. If the user
asks for obstore and it cannot be used, `connect` raises an `UnsupportedError` with the reason.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    HeadraceError,
    UnsupportedError,
)
from headrace.dataio.core.log import get_logger, redact_loggers
from headrace.dataio.store.base import Buffer, too_large
from headrace.dataio.store.bucket_client import BucketClient, Consumer, Head
from headrace.dataio.store.bucket_errors import translated_s3
from headrace.dataio.store.credential_chain import CredentialChain, botocore_session
from headrace.dataio.store.s3_config import S3Config

T = TypeVar("T")
_CHUNK = limits.MIB // 4
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_logger = get_logger(__name__)


def connect(config: S3Config) -> S3Client:
    """Make the client for `config`, without sending a request."""
    if config.client == "s3fs":
        return S3Client(config)
    if importlib.util.find_spec("obstore") is None:
        reason, hint = "obstore is not installed", "pip install 'headrace[s3]'"
    else:
        from headrace.dataio.store.obstore import ObstoreS3Client, lost_in_fork

        obstacle = lost_in_fork() or config.unsupported_by_obstore()
        if obstacle is None:
            return ObstoreS3Client(config)
        reason, hint = obstacle, "set HEADRACE_S3=s3fs, or leave it unset"
    if config.client is not None:
        raise UnsupportedError(f"{config.url} cannot be served by obstore: {reason}", hint=hint)
    _logger.debug("%s is served by s3fs: %s", config.url, reason)
    return S3Client(config)


class S3Client(BucketClient):
    """Requests through s3fs.

    Args:
        config: The bucket and how to reach it.
    """

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._chain = CredentialChain(config.profile) if config.uses_chain else None
        self._s3fs = _S3fs(config, self._chain)
        super().__init__(config.url, config.request_seconds, self._s3fs.disconnect)

    async def get(self, doing: str, key: str, max_bytes: int) -> bytes:
        data = bytearray()

        def check(response: Mapping[str, Any], size: int) -> None:
            if size > max_bytes:
                raise too_large(doing.removeprefix("reading "), size, max_bytes)

        await self._with_renewed_credentials(doing, lambda: self._get_object(doing, {"Key": key}, check, data.extend))
        return bytes(data)

    async def read(self, doing: str, key: str, start: int, stop: int) -> Buffer:
        data = bytearray()
        await self.stream(doing, key, start, stop, data.extend)
        return data

    async def stream(self, doing: str, key: str, start: int, stop: int, consume: Consumer) -> str | None:
        def check(response: Mapping[str, Any], size: int) -> None:
            _check_range_response(doing, response, size, start, stop)

        request = {"Key": key, "Range": f"bytes={start}-{stop - 1}"}
        return await self._with_renewed_credentials(doing, lambda: self._get_object(doing, request, check, consume))

    async def head(self, doing: str, key: str) -> Head:
        response = await self.call("head_object", doing, Key=key)
        return Head(_content_length(response, f"{doing}: {self.config.endpoint}"), response["LastModified"])

    async def put(self, doing: str, key: str, body: memoryview, create: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if create else {}
        await self.call("put_object", doing, Key=key, Body=io.BytesIO(body), **condition)

    async def list_page(self, doing: str, folder: str) -> list[tuple[str, Head]] | None:
        """Return all keys below `folder`, in any order, if one cheap request can list them; else None."""
        return None

    async def call(self, operation: str, doing: str, **parameters: object) -> dict[str, Any]:
        """Send one request through s3fs; `operation` is its name in botocore, for example `put_object`."""
        return await self._with_renewed_credentials(doing, lambda: self._call(operation, doing, parameters))

    async def _call(self, operation: str, doing: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        size = 0
        if isinstance(body := parameters.get("Body"), io.BytesIO):
            body.seek(0)
            size = body.getbuffer().nbytes
        with translated_s3(self.config, doing):
            client = await self._s3fs.client()
            async with asyncio.timeout(self._seconds(size)):
                response: dict[str, Any] = await getattr(client, operation)(Bucket=self.config.bucket, **parameters)
            return response

    async def _get_object(
        self, doing: str, request: Mapping[str, str], check: Callable[[Mapping[str, Any], int], None], consume: Consumer
    ) -> str | None:
        # no variable for a time limit: it refers to its task, so a cancelled task would keep the caller's buffers alive
        with translated_s3(self.config, doing):
            client = await self._s3fs.client()
            async with asyncio.timeout(self._seconds()):
                response = await client.get_object(Bucket=self.config.bucket, **request)
            body = response["Body"]
            try:  # closing a body before its end drops the connection
                size = _content_length(response, f"{doing}: {self.config.endpoint}")
                check(response, size)
                async with asyncio.timeout(self._seconds(size)):
                    while chunk := await body.read(_CHUNK):
                        consume(chunk)
            finally:
                body.close()
            version: str | None = response.get("ETag")
            return version

    async def _with_renewed_credentials(self, doing: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send `request`. If the server refuses the credentials and the chain has new ones, send it once more."""
        used = self._chain.generation if self._chain else 0
        try:
            return await request()
        except AccessDeniedError:
            with translated_s3(self.config, doing):
                async with asyncio.timeout(self._seconds()):
                    renewed = self._chain is not None and await self._chain.renew(used)
            if not renewed:
                # some servers deny a write to a missing bucket; a listing then raises the error for that
                await self._call("list_objects_v2", doing, {"MaxKeys": 1})
                raise
        return await request()


class _S3fs:
    """Creates the s3fs client. It does not refer to the `S3Client`, so that the latter can be garbage-collected."""

    def __init__(self, config: S3Config, chain: CredentialChain | None) -> None:
        self._config, self._chain = config, chain
        self._client: Any = None
        self._lock = asyncio.Lock()

    async def client(self) -> Any:
        if self._client is None:
            async with self._lock:
                if self._client is None:
                    import s3fs  # with botocore and aiohttp: half a second

                    redact_loggers("botocore.auth", "botocore.endpoint", "botocore.httpsession")
                    arguments = self._config.s3fs_arguments()
                    if self._chain is not None:
                        arguments["session"] = botocore_session(self._chain)
                    fs = s3fs.S3FileSystem(loop=asyncio.get_running_loop(), **arguments)
                    self._client = await fs.set_session()
        return self._client

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            await asyncio.sleep(0)  # let the transports close


def _content_length(response: Mapping[str, Any], source: str) -> int:
    size = response.get("ContentLength")
    if not isinstance(size, int):
        raise HeadraceError(f"{source} sent no Content-Length", hint="check whether this is an S3 server")
    return size


def _check_range_response(doing: str, response: Mapping[str, Any], size: int, start: int, stop: int) -> None:
    status = response["ResponseMetadata"]["HTTPStatusCode"]
    content_range = _CONTENT_RANGE.fullmatch(response.get("ContentRange", ""))
    if status == 206 and content_range and int(content_range[1]) == start and int(content_range[2]) < stop:
        return
    if status == 200 and start == 0 and size == stop:
        return
    raise UnsupportedError(
        f"{doing}: the server answered a request for bytes {start} to {stop} with status {status} and {size} bytes",
        hint="Headrace needs a server that supports ranged reads; see `headrace doctor URL`",
    )
