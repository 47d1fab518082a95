"""A store on Azure Blob Storage, through obstore.

Invariants: an object is written in one atomic request. A body is collected up to `WRITE_BYTES` and sent at once.
`put_if_absent` is one PUT with `If-None-Match: *`. Options and environment variables are those of obstore's
`AzureStore`. Nothing is cached.

Failure behaviour: the errors of `bucket_errors`. A listing is collected and sorted; above `LISTED` keys it raises
`CapacityError`. A process that was forked after its parent had used obstore gets an `UnsupportedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import UnknownConfigurationKeyError

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    HeadraceError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.redact import has_secrets, redact, without_secrets
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    check_folder,
    check_key,
    check_prefix,
    is_after,
    is_key,
)
from headrace.dataio.store.bucket import BucketStore, listed_object
from headrace.dataio.store.bucket_client import Head
from headrace.dataio.store.bucket_errors import UnreachableError, translated_obstore
from headrace.dataio.store.obstore import WHOLE_REQUEST, ObstoreRequests, lost_in_fork, mark_started, possible_markers
from headrace.dataio.store.retry import Policy, call_async
from headrace.dataio.store.s3_config import CONNECT_SECONDS, READ_SECONDS
from headrace.dataio.store.url_policy import sendable

T = TypeVar("T")
WRITE_BYTES = 256 * limits.MIB
LISTED = 1_000_000
_PAGE_BYTES = 1 * limits.MIB
_FOLDERS_BYTES = 64 * limits.MIB
"""Size of the responses to one listing of folders, for the time limit: obstore sends all its requests in one call."""
_CONCURRENT_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class AzureConfig:
    """A container and how to reach it.

    Args:
        bucket: The container.
        prefix: A key prefix without slashes at its ends; `""` for the container's root.
        options: Configuration keys of obstore's `AzureStore`, such as `account_name`. Environment
            variables set the rest.
    """

    bucket: str
    prefix: str
    options: Mapping[str, object] = field(repr=False)

    @property
    def url(self) -> str:
        return f"az://{self.bucket}/{self.prefix}" if self.prefix else f"az://{self.bucket}"

    @property
    def endpoint(self) -> str:
        """The service, for messages."""
        return "Azure Blob Storage"

    def full_key(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)


class AzureClient(ObstoreRequests):
    """The client of an Azure container. obstore finds the credentials."""

    def __init__(self, config: AzureConfig) -> None:
        super().__init__(config.url, CONNECT_SECONDS + READ_SECONDS)
        self._config = config
        self._container: Any = None

    def reconnect(self) -> None:
        self._container = None

    async def list_all(self, doing: str, folder: str) -> list[tuple[str, Head]]:
        """All keys below `folder`, at most `LISTED`. Names that end in a slash, such as `folder/`, are left out."""
        listed = list[tuple[str, Head]]()

        async def request(container: Any) -> None:
            pages = aiter(obstore.list(container, prefix=folder or None))
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    async with asyncio.timeout(self._seconds(_PAGE_BYTES)):
                        page = await anext(pages)
                    listed.extend((entry["path"], Head(entry["size"], entry["last_modified"])) for entry in page)
                    if len(listed) > LISTED:
                        raise _too_many(doing)

        await self._send(doing, request, None)
        markers, candidates = set[str](), possible_markers(listed)
        for at in range(0, len(candidates), _CONCURRENT_REQUESTS):
            batch = candidates[at : at + _CONCURRENT_REQUESTS]
            existence = await asyncio.gather(*(self._exists(doing, name) for name in batch))
            markers |= {name for name, exists in zip(batch, existence, strict=True) if not exists}
        return [(name, head) for name, head in listed if name not in markers]

    async def list_folders(self, doing: str, folder: str) -> list[str]:
        """The paths of the folders directly below `folder`, without a final slash, in any order; at most `LISTED`."""

        async def request(container: Any) -> list[str]:
            listing = await obstore.list_with_delimiter_async(container, folder or None)
            return list(listing["common_prefixes"])

        paths = await self._send(doing, request, self._seconds(_FOLDERS_BYTES))
        if len(paths) > LISTED:
            raise _too_many(doing)
        return paths

    async def _exists(self, doing: str, key: str) -> bool:
        async def request(container: Any) -> bool:
            try:
                await obstore.head_async(container, key)
            except FileNotFoundError:
                return False
            return True

        return await self._send(doing, request, self._seconds())

    async def delete(self, doing: str, key: str) -> None:
        """Delete the object, if it exists."""

        async def request(container: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(container, key)

        await self._send(doing, request, self._seconds())

    async def _send(self, doing: str, request: Callable[[Any], Awaitable[T]], seconds: float | None) -> T:
        try:
            with translated_obstore(self._config, doing):
                if self._container is None:
                    self._container = _azure_container(self._config)
                async with asyncio.timeout(seconds):
                    return await request(self._container)
        except HeadraceError as error:
            hint = _AZURE_HINTS.get(type(error))
            raise type(error)(error.message, hint=hint) if hint else error from None


def _too_many(doing: str) -> CapacityError:
    return CapacityError(
        f"{doing}: more than {LISTED:,} keys cannot be sorted in memory", hint="list by a longer prefix"
    )


_AZURE_HINTS: dict[type[HeadraceError], str] = {
    AccessDeniedError: "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, and their permissions",
    UnreachableError: "check the account's name, AZURE_STORAGE_ENDPOINT, and the network",
    TransientError: "check the network",
}


def _azure_container(config: AzureConfig) -> Any:
    from obstore.store import AzureStore as Container

    mark_started()
    make: Any = Container
    try:
        return make(
            config.bucket,
            config=dict(config.options),
            client_options={
                "allow_http": True,  # a plain http endpoint is the caller's choice
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": WHOLE_REQUEST,  # and no read time-out: obstore counts it from the first byte sent
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )
    except UnknownConfigurationKeyError:
        hint = "the options of az:// are the configuration keys of obstore's AzureStore, such as account_name"
        raise UsageError(f"{config.url}: an unknown storage option", hint=hint) from None


class AzureStore(BucketStore):
    """Objects under a prefix of an Azure container.

    Args:
        config: The container and how to reach it.
    """

    _config: AzureConfig
    _client: AzureClient

    def __init__(self, config: AzureConfig) -> None:
        super().__init__(config, AzureClient(config))

    @property
    def location(self) -> Location:
        options = self._config.options
        shareable = sendable(self._config.url, options) and not has_secrets(options)
        return Location(self._config.url, without_secrets(options), shareable)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        body = bytearray()
        for part in parts:
            body += part
            if len(body) > WRITE_BYTES:
                raise CapacityError(
                    f"{self._name(key)}: this store writes an object in one request, of at most "
                    f"{limits.format_bytes(WRITE_BYTES)}",
                    hint="write several, or use S3 or a directory",
                )
        self._client.run(call_async(lambda: self._put(key, body), Policy()))
        return len(body)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not check_prefix(prefix):
            return
        base = self._base
        folder = (base + prefix).rpartition("/")[0]
        listed = self._client.run(self._client.list_all(f"listing {self._config.url}", folder))
        for key, head in sorted(listed, key=lambda entry: entry[0]):
            info = listed_object(key[len(base) :], head)
            if info is not None and info.key.startswith(prefix):
                yield info

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        if not check_folder(prefix):
            return
        full = self._base + prefix
        paths = self._client.run(self._client.list_folders(f"listing {self._config.url}", full.rstrip("/")))
        names = (path[len(full) :] for path in paths)
        folders = (name for name in names if is_key(prefix + name) and is_after(name, after))
        yield from sorted(folders, key=lambda name: name + "/")

    def delete_many(self, keys: Iterable[str]) -> None:
        remaining = iter([self._config.full_key(key) for key in keys])
        while batch := list(itertools.islice(remaining, _CONCURRENT_REQUESTS)):
            self._client.run(self._delete(batch))

    @property
    def _base(self) -> str:
        return self._config.prefix + "/" if self._config.prefix else ""

    async def _delete(self, keys: Iterable[str]) -> None:
        await asyncio.gather(*(self._client.delete(f"deleting in {self._config.url}", key) for key in keys))


def open_url(url: str, options: Mapping[str, object]) -> Store:
    """Open `az://container/prefix`. The options are the configuration keys of obstore's `AzureStore`."""
    if reason := lost_in_fork():
        raise UnsupportedError(f"{url} cannot be opened: {reason}", hint="start the process with the spawn method")
    container, _, prefix = url.partition("://")[2].partition("/")
    if not container or "@" in container or "?" in url:
        raise UsageError(f"{redact(url)!r} is not the URL of a container", hint="write az://container/prefix")
    prefix = prefix.strip("/")
    return AzureStore(AzureConfig(container, check_key(prefix) if prefix else "", dict(options)))
