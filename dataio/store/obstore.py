"""Requests through obstore, and the fast S3 client that uses them.

Purpose: obstore needs a fraction of the CPU of a Python client for a GET, a HEAD or a PUT. It gives no access to the
single parts of an upload, so multipart uploads to S3 go through s3fs. So do deletes, PUTs above `_LARGEST_PUT`,
listings of more than one page (see `ObstoreS3Client.list_page`), and listings of folders.

Invariants: obstore's retries are off. Every request has one time limit, body included, and is cancelled at its end.
S3 gets every setting and the credentials as values, never from obstore's own variables. Payloads are not hashed for
the signature; Headrace's formats carry their own digests.

Failure behaviour: the errors of `bucket_errors`. obstore's threads do not survive a fork, so obstore cannot be used in
a forked child (`lost_in_fork`).
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import obstore

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    HeadraceError,
)
from headrace.dataio.store.base import Buffer, too_large
from headrace.dataio.store.bucket_client import BucketClient, Consumer, Head
from headrace.dataio.store.bucket_errors import CHECK_KEYS, translated_obstore, translated_s3
from headrace.dataio.store.credential_chain import CredentialChain, Keys
from headrace.dataio.store.s3_client import S3Client
from headrace.dataio.store.s3_config import S3Config

T = TypeVar("T")
_LARGEST_PUT = 64 * limits.MIB
"""obstore counts its read time-out from the first byte sent, so larger bodies go through s3fs."""
_CHUNK = 2 * limits.MIB
_PAGE_KEYS = 1000
WHOLE_REQUEST = timedelta(hours=1)
"""obstore's own time limit for a request, which is 30 s by default. Our limits end each request earlier."""
_started_in: int | None = None
"""The id of the process that started obstore's threads, which run until that process ends."""


def lost_in_fork() -> str | None:
    """Return why obstore cannot be used in this process; None if it can."""
    if _started_in in (None, os.getpid()):
        return None
    return "this process was forked from one that used obstore, whose threads do not survive that"


def mark_started() -> None:
    """Remember this process, before its first client of obstore is made."""
    global _started_in
    _started_in = _started_in or os.getpid()


class ObstoreRequests(BucketClient):
    """Implements the requests of a `BucketClient` through obstore."""

    async def get(self, doing: str, key: str, max_bytes: int) -> bytes:
        async def request(client: Any) -> bytes:
            async with asyncio.timeout(self._seconds()):
                response = await obstore.get_async(client, key)
            size = response.meta["size"]
            if size > max_bytes:
                raise too_large(doing.removeprefix("reading "), size, max_bytes)
            async with asyncio.timeout(self._seconds(size)):
                return (await response.bytes_async()).to_bytes()

        return await self._send(doing, request, None)

    async def read(self, doing: str, key: str, start: int, stop: int) -> Buffer:
        async def request(client: Any) -> Buffer:
            return memoryview(await obstore.get_range_async(client, key, start=start, end=stop))

        return await self._send(doing, request, self._seconds(stop - start))

    async def stream(self, doing: str, key: str, start: int, stop: int, consume: Consumer) -> str | None:
        async def request(client: Any) -> str | None:
            response = await obstore.get_async(client, key, options={"range": (start, stop)})
            async for chunk in response.stream(min_chunk_size=_CHUNK):
                consume(memoryview(chunk))
            return response.meta["e_tag"]

        return await self._send(doing, request, self._seconds(stop - start))

    async def head(self, doing: str, key: str) -> Head:
        async def request(client: Any) -> Head:
            meta = await obstore.head_async(client, key)
            return Head(meta["size"], meta["last_modified"])

        return await self._send(doing, request, self._seconds())

    async def put(self, doing: str, key: str, body: memoryview, create: bool = False) -> None:
        async def request(client: Any) -> None:
            mode: Any = "create" if create else "overwrite"
            await obstore.put_async(client, key, body, mode=mode, use_multipart=False)  # the caller's bytes, no copy

        await self._send(doing, request, self._seconds(len(body)))

    @abc.abstractmethod
    async def _send(self, doing: str, request: Callable[[Any], Awaitable[T]], seconds: float | None) -> T:
        """Await `request(client)` with obstore's client, for at most `seconds`; None if the request limits itself."""


def possible_markers(listed: Iterable[tuple[str, Head]]) -> list[str]:
    """The listed names that may have a final slash at the server, as the marker of a folder has. obstore drops it.

    These are empty objects, and objects whose name is also the folder of another one.
    """
    entries = list(listed)
    folders = set[str]()
    for name, _ in entries:
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return [name for name, head in entries if not head.size or name in folders]


class ObstoreS3Client(ObstoreRequests, S3Client):
    """The client of S3 that reads, writes and lists small folders through obstore."""

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._keys = Keys(*config.keys) if config.keys else None
        self._obstore: tuple[Keys | None, Any] | None = None

    def reconnect(self) -> None:
        self._obstore = None

    async def put(self, doing: str, key: str, body: memoryview, create: bool = False) -> None:
        if len(body) > _LARGEST_PUT:
            await S3Client.put(self, doing, key, body, create)
        else:
            await super().put(doing, key, body, create)

    async def list_page(self, doing: str, folder: str) -> list[tuple[str, Head]] | None:
        """As in `S3Client`.

        obstore does not show the server's order. It refuses names such as `a//b`. It treats an error that the server
        sends with status 200 as an empty listing. So its result is used only if it is complete, fits one page, and has
        objects, and none of them is one of `possible_markers`.
        """

        async def request(client: Any) -> list[Any]:
            async for page in obstore.list(client, prefix=folder or None, chunk_size=_PAGE_KEYS + 1):
                return list(page)
            return []

        try:
            page_entries = await self._send(doing, request, self._seconds())
        except HeadraceError as error:
            if type(error) is HeadraceError:  # an answer that obstore does not understand
                return None
            raise
        listed = [(entry["path"], Head(entry["size"], entry["last_modified"])) for entry in page_entries]
        return listed if 0 < len(listed) <= _PAGE_KEYS and not possible_markers(listed) else None

    async def _send(self, doing: str, request: Callable[[Any], Awaitable[T]], seconds: float | None) -> T:
        async def once() -> T:
            client = await self._current_client(doing)
            with translated_obstore(self.config, doing):
                async with asyncio.timeout(seconds):
                    return await request(client)

        return await self._with_renewed_credentials(doing, once)

    async def _current_client(self, doing: str) -> Any:
        """Return obstore's client for the current keys. botocore refreshes keys that expire."""
        keys = self._keys if self._chain is None else self._chain.fixed or await self._chain_keys(self._chain, doing)
        current = self._obstore  # `reconnect` may drop it
        if current is None or current[0] != keys:
            mark_started()
            current = self._obstore = (keys, _s3_client(self.config, keys))
        return current[1]

    async def _chain_keys(self, chain: CredentialChain, doing: str) -> Keys:
        with translated_s3(self.config, doing):
            async with asyncio.timeout(self._seconds()):
                chain_keys = await chain.current()
        if chain_keys is None:
            raise AccessDeniedError(f"{doing}: no credentials were found for {self.config.endpoint}", hint=CHECK_KEYS)
        return chain_keys


def _s3_client(config: S3Config, keys: Keys | None) -> Any:
    """Make a client without retries. It gets every setting, because obstore reads others from the environment."""
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
            "timeout": WHOLE_REQUEST,
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
