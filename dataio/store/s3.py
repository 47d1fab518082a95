"""A store on S3 or a compatible server: `bucket.BucketStore` with multipart uploads, listings and deletes.

Invariants:

* `put_if_absent` is one single PUT with `If-None-Match: *`.
* This module retries only the requests of an upload. `retry.Retry` retries all other operations.
* Content that fits one part is a single PUT. Otherwise at most `IN_FLIGHT` parts are being sent while one more is being
  filled, so memory stays below (IN_FLIGHT + 2) parts.
* Readers see nothing of an upload before it is completed.

Failure behaviour: see `bucket` and `bucket_errors`. Any exception during an upload, also one from the stream of parts
or an interrupt, cancels its requests and aborts it. If the response to the completion is lost, the nonce in the
object's metadata shows whether the upload was completed. More than `MAX_BYTES` is a `CapacityError`. A killed process
leaves an unfinished upload, which is invisible but billed. With an `UploadLog` the next process aborts it. Give the
bucket a lifecycle rule that aborts all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import (
    AccessDeniedError,
    AmbiguousWriteError,
    CapacityError,
    HeadraceError,
    NotFoundError,
    TransientError,
)
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    UploadLog,
    check_folder,
    check_prefix,
    is_after,
    is_key,
)
from headrace.dataio.store.bucket import BucketStore, listed_object
from headrace.dataio.store.bucket_client import Head
from headrace.dataio.store.bucket_errors import NoSuchUploadError
from headrace.dataio.store.retry import Policy, call_async
from headrace.dataio.store.s3_client import S3Client, connect
from headrace.dataio.store.s3_config import S3Config, parse

T = TypeVar("T")
PART_BYTES = 8 * limits.MIB
_PARTS_PER_SIZE, _SIZES = 2500, 4
"""2,500 parts each of 8, 16, 32 and 64 MiB. S3 allows 10,000 parts.

Some servers require parts of equal size, which the first 20 GB have.
"""
MAX_BYTES = sum(PART_BYTES << i for i in range(_SIZES)) * _PARTS_PER_SIZE
IN_FLIGHT = 4
_NONCE = "headrace-upload"
_logger = get_logger(__name__)
_part_sent = declare(
    "store.s3.part-sent", "some parts are uploaded, the upload is not completed; the object is as it was"
)
_uploaded = declare("store.s3.uploaded", "all parts are uploaded, the upload is not completed; the object is as it was")
_DELETE_BATCH = 1000
_SORTED_LISTING = 1_000_000
"""How many keys are sorted in memory for a server that does not list in key order."""


class S3Store(BucketStore):
    """Objects under a prefix of a bucket.

    Args:
        config: The bucket and how to reach it.
        policy: How the requests of an upload are retried. Default: `Policy()`.
    """

    _config: S3Config
    _client: S3Client

    def __init__(self, config: S3Config, policy: Policy | None = None) -> None:
        super().__init__(config, connect(config))
        self._policy = policy or Policy()

    @property
    def location(self) -> Location:
        return Location(self._config.url, self._config.public, self._config.shareable)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self._upload(key, parts, None)

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self._upload(key, parts, _LogEntry(log, key))

    def abort_upload(self, key: str, upload: str) -> None:
        with contextlib.suppress(NoSuchUploadError):
            full, doing = self._config.full_key(key), f"aborting the upload of {self._name(key)}"
            self._client.run(self._client.call("abort_multipart_upload", doing, Key=full, UploadId=upload))

    def _upload(self, key: str, parts: Iterable[Buffer], entry: _LogEntry | None) -> int:
        full, name = self._config.full_key(key), self._name(key)
        stream = blocks(parts, name)
        first, second = next(stream), next(stream, None)
        if second is None:
            # `getvalue` does not copy. A view from `getbuffer` could outlive the stream in the traceback of an error
            body = first.getvalue()
            self._client.run(call_async(lambda: self._put(key, body), self._policy))
            return len(body)
        upload = Upload(client=self._client, key=full, name=name, policy=self._policy, entry=entry)
        return upload.send(itertools.chain([first, second], stream))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not check_prefix(prefix):
            return
        base = self._base
        doing = f"listing {self._config.url}"
        page = self._client.run(self._client.list_page(doing, (base + prefix).rpartition("/")[0]))
        if page is not None:
            infos = (listed_object(key[len(base) :], head) for key, head in sorted(page, key=lambda entry: entry[0]))
            yield from (info for info in infos if info is not None and info.key.startswith(prefix))
            return
        pages = self._pages(base + prefix)
        first_page = next(pages)
        listed = itertools.chain.from_iterable(map(self._infos, itertools.chain([first_page], pages)))
        yield from (
            _sort_listing(listed, lambda info: info.key, self._config.url) if _lists_by_folder(first_page) else listed
        )

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        """List folders through s3fs, 1,000 in each request.

        obstore is not used: it collects all pages in one call, cannot begin after a folder, and hides errors.
        """
        if not check_folder(prefix):
            return
        full = self._base + prefix
        first_page, pages = self._folder_pages(full, after)
        prefixes = (entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ()))
        names = (name for name, _ in itertools.groupby(path[len(full) :].rstrip("/") for path in prefixes))
        folders = (name for name in names if is_key(prefix + name) and is_after(name, after))
        yield from (
            _sort_listing(folders, lambda name: name + "/", self._config.url)
            if _lists_by_folder(first_page)
            else folders
        )

    def _folder_pages(self, full: str, after: str) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """Return the first page and all pages of the folders of `full`. The pages have every folder after `after`.

        They may also have the folder `after` itself. A listing from the first key after the keys of `after`, which is
        `after` + "0", would not have it. But with that start, SeaweedFS skips a folder of the name `after` + "0".
        SeaweedFS sorts by name, so with `after` "a-b" it also skips "a". In such cases everything is listed.
        """
        pages = self._pages(full, Delimiter="/", **({"StartAfter": f"{full}{after}/"} if after else {}))
        first_page = next(pages)
        if _lists_by_folder(first_page) and any(character < "/" for character in after):
            pages = self._pages(full, Delimiter="/")
            first_page = next(pages)
        return first_page, itertools.chain([first_page], pages)

    def delete_many(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := [{"Key": self._config.full_key(key)} for key in itertools.islice(remaining, _DELETE_BATCH)]:
            self._client.run(self._delete(batch))

    # listing

    @property
    def _base(self) -> str:
        return self._config.prefix + "/" if self._config.prefix else ""

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        """Yield s3fs's responses, one for each page. `options` are further parameters of `list_objects_v2`."""
        continuation: dict[str, object] = {}
        while True:
            doing, parameters = f"listing {self._config.url}", {"Prefix": prefix, **options, **continuation}
            page = self._client.run(self._client.call("list_objects_v2", doing, **parameters))
            yield page
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            continuation = {"ContinuationToken": page["NextContinuationToken"]}

    def _infos(self, page: dict[str, Any]) -> Iterator[ObjectInfo]:
        """Yield the objects of a page. Names that are not valid keys, such as `folder/`, are skipped."""
        cut = len(self._base)
        for entry in page.get("Contents", ()):
            info = listed_object(entry["Key"][cut:], Head(entry["Size"], entry["LastModified"]))
            if info is not None:
                yield info

    async def _delete(self, batch: Sequence[dict[str, str]]) -> None:
        doing = f"deleting in {self._config.url}"
        response = await self._client.call("delete_objects", doing, Delete={"Objects": batch, "Quiet": True})
        for failed in response.get("Errors", ()):
            if failed.get("Code") not in ("NoSuchKey", "404"):
                kind = AccessDeniedError if failed.get("Code") == "AccessDenied" else TransientError
                raise kind(f"{doing}: {failed.get('Key')}: {failed.get('Code')}: {failed.get('Message')}")


def _lists_by_folder(page: dict[str, Any]) -> bool:
    """Whether the server sorts the names in each folder. SeaweedFS lists `a/b` before `a-b`. S3 compares whole keys."""
    headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("server", "")).startswith("SeaweedFS")


def _sort_listing(items: Iterator[T], key: Callable[[T], str], url: str) -> list[T]:
    listed = list(itertools.islice(items, _SORTED_LISTING + 1))
    if len(listed) > _SORTED_LISTING:
        raise CapacityError(
            f"{url}: this server does not list by key, and more than {_SORTED_LISTING:,} keys cannot be sorted in memory",
            hint="list by a longer prefix",
        )
    return sorted(listed, key=key)


def open_url(url: str, options: Mapping[str, object]) -> S3Store:
    """Open `s3://bucket/prefix`; the options are those of `s3_config.parse`."""
    return S3Store(parse(url, options))


def blocks(parts: Iterable[Buffer], name: str) -> Iterator[io.BytesIO]:
    """Copy `parts` into blocks of the sizes of an upload's parts. The owner of a part may reuse it afterwards."""
    sizes = itertools.chain.from_iterable(itertools.repeat(PART_BYTES << i, _PARTS_PER_SIZE) for i in range(_SIZES))
    block, room = io.BytesIO(), next(sizes)
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        while len(view):
            if not room:
                yield block
                block, room = io.BytesIO(), next(sizes, 0)
                if not room:
                    raise CapacityError(
                        f"{name}: an object may have at most {limits.format_bytes(MAX_BYTES)}", hint="write several"
                    )
            n = min(room, len(view))
            block.write(view[:n])
            view, room = view[n:], room - n
    yield block


@dataclass(frozen=True, slots=True)
class _LogEntry:
    """An upload log, and the object's key in it."""

    log: UploadLog
    key: str


class Upload:
    """One multipart upload. Not thread-safe.

    Args:
        client: Sends the requests.
        key: The object's key in the bucket.
        name: The object's URL, for errors.
        policy: How each request is retried.
        entry: Where to record the upload. Default: nowhere.
    """

    def __init__(
        self, *, client: S3Client, key: str, name: str, policy: Policy, entry: _LogEntry | None = None
    ) -> None:
        self._client, self._key, self._name, self._policy = client, key, name, policy
        self._entry = entry
        self._nonce = secrets.token_hex(16)
        self._id = ""
        self._waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
        self._done: list[dict[str, Any]] = []

    def send(self, stream: Iterable[io.BytesIO]) -> int:
        """Upload `stream`, complete the upload, and return the object's size."""
        size = 0
        self._client.run(self._begin())
        try:
            for number, block in enumerate(stream, 1):
                size += block.getbuffer().nbytes
                self._client.run(self._start_part(number, block))
            self._client.run(self._drain(0))
            _uploaded()
            self._client.run(self._complete())
            return size
        except BaseException:
            self._abort()
            raise

    async def _begin(self) -> None:
        self._id = (await self._call_with_retries("create_multipart_upload", Metadata={_NONCE: self._nonce}))[
            "UploadId"
        ]
        if self._entry is not None:
            self._entry.log.begun(self._entry.key, self._id)

    async def _start_part(self, number: int, block: io.BytesIO) -> None:
        await self._drain(IN_FLIGHT - 1)
        self._waiting.append(asyncio.create_task(self._send_part(number, block)))

    async def _drain(self, limit: int) -> None:
        while len(self._waiting) > limit:
            self._done.append(await self._waiting[0])
            self._waiting.popleft()

    async def _send_part(self, number: int, block: io.BytesIO) -> dict[str, Any]:
        response = await self._call_with_retries("upload_part", UploadId=self._id, PartNumber=number, Body=block)
        _part_sent()
        return {"PartNumber": number, "ETag": response["ETag"]}

    async def _complete(self) -> None:
        try:
            await self._call_with_retries(
                "complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": self._done}
            )
        except NoSuchUploadError as error:  # an earlier attempt may have completed it, but its response was lost
            with contextlib.suppress(NotFoundError):
                head = await self._call_with_retries("head_object")
                if head.get("Metadata", {}).get(_NONCE) == self._nonce:
                    return
            raise AmbiguousWriteError(
                f"could not tell whether the upload of {self._name} was completed: {error}"
            ) from error

    def _call_with_retries(self, operation: str, **parameters: object) -> Coroutine[Any, Any, dict[str, Any]]:
        async def once() -> dict[str, Any]:
            if isinstance(body := parameters.get("Body"), io.BytesIO):
                body.seek(0)
            return await self._client.call(operation, f"writing {self._name}", Key=self._key, **parameters)

        return call_async(once, self._policy)

    def _abort(self) -> None:
        try:
            self._client.run(self._cancel())
            self._client.run(self._call_with_retries("abort_multipart_upload", UploadId=self._id))
            if self._entry is not None:
                self._entry.log.ended(self._entry.key, None)
        except NoSuchUploadError:
            pass
        except HeadraceError as error:
            _logger.warning("the unfinished upload %s of %s is left on the server: %s", self._id, self._name, error)

    async def _cancel(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
