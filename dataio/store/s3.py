"""The storage contract on S3 and what speaks its protocol, through obstore where it is installed and s3fs otherwise.

Invariants: `put_if_absent` is one single PUT with `If-None-Match: *`, never a multipart upload; whatever leaves its outcome open
(412, 409, a time-out, a lost answer, a 5xx) is settled by reading the object back. Nothing is cached: no listing, no size.
No request is retried here but the parts of an upload; `headrace.dataio.store.retry.Retry` does the rest.
Failure behaviour: see `s3errors`. A PUT takes at most 5 GiB, and a conditional one `checks.CONDITIONAL_BYTES`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    AmbiguousWriteError,
    CapacityError,
    HeadraceError,
    NotFoundError,
    TransientError,
    UsageError,
)
from headrace.dataio.store import s3read
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    UploadLog,
    check_conditional_size,
    check_key,
    check_prefix,
    too_large,
    writable_bytes,
)
from headrace.dataio.store.retry import Policy, call_async
from headrace.dataio.store.s3client import connect
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3errors import NoSuchUploadError, PreconditionError, UnreachableError
from headrace.dataio.store.s3session import flat, length_of
from headrace.dataio.store.s3upload import Notes, Upload, blocks

PUT_BYTES = 5 * limits.GIB
_DELETE_BATCH = 1000
_SORTED_LISTING = 1_000_000
"""The most keys that are sorted in memory for a server that does not list by key."""


class S3Store(Store):
    """Objects under a prefix of a bucket."""

    def __init__(self, config: S3Config, policy: Policy | None = None) -> None:
        self._config, self._policy = config, policy or Policy()
        self._session = connect(config)

    @property
    def location(self) -> Location:
        return Location(self._config.url, self._config.public, self._config.shareable)

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        found = self._session.get_here(f"reading {self._name(key)}", self._config.full_key(key), max_bytes)
        return self._session.run(self._get(key, max_bytes)) if found is None else found

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        full, name = self._config.full_key(key), self._name(key)
        if not s3read.fill_here(self._session, full, name, ranges):
            self._session.run(s3read.fill(self._session, full, name, ranges))

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        full, name = self._config.full_key(key), self._name(key)
        if not s3read.pass_here(self._session, full, name, offset, writable_bytes(buffer), take):
            super().get_pieces(key, offset, buffer, take)

    def put(self, key: str, data: Buffer) -> None:
        self._session.run(self._put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        check_conditional_size(self._name(key), data)
        try:
            self._session.run(self._put(key, data, IfNoneMatch="*"))
            return True
        except UnreachableError:
            raise
        except (PreconditionError, TransientError) as error:
            return self._won(key, data, error)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self._upload(key, parts, None)

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self._upload(key, parts, Notes(log, key))

    def abort_upload(self, key: str, upload: str) -> None:
        with contextlib.suppress(NoSuchUploadError):
            full, doing = self._config.full_key(key), f"aborting the upload of {self._name(key)}"
            self._session.run(self._session.call("abort_multipart_upload", doing, Key=full, UploadId=upload))

    def _upload(self, key: str, parts: Iterable[Buffer], notes: Notes | None) -> int:
        full, name = self._config.full_key(key), self._name(key)
        stream = blocks(parts, name)
        first, second = next(stream), next(stream, None)
        if second is None:
            self._session.run(call_async(lambda: self._put(key, first), self._policy))
            return first.getbuffer().nbytes
        upload = Upload(self._session, full, name, self._policy, notes)
        return upload.send(itertools.chain([first, second], stream))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not check_prefix(prefix):
            return
        pages = self._pages(prefix)
        first = next(pages)
        found = itertools.chain.from_iterable(map(self._infos, itertools.chain([first], pages)))
        yield from _by_key(found, self._config.url) if _lists_by_folder(first) else found

    def stat(self, key: str) -> ObjectInfo:
        full, doing = self._config.full_key(key), f"reading {self._name(key)}"
        head = self._session.head_here(doing, full)
        if head is None:
            head = self._session.run(self._session.call("head_object", doing, Key=full))
        return ObjectInfo(key, length_of(head, f"{doing}: {self._config.endpoint}"), head["LastModified"].timestamp())

    def delete_many(self, keys: Iterable[str]) -> None:
        rest = iter(keys)
        while batch := [{"Key": self._config.full_key(key)} for key in itertools.islice(rest, _DELETE_BATCH)]:
            self._session.run(self._delete(batch))

    def reconnect(self) -> None:
        self._session.reconnect()

    def close(self) -> None:
        self._session.close()

    def _name(self, key: str) -> str:
        return f"{self._config.url}/{key}"

    async def _get(self, key: str, max_bytes: int) -> bytes:
        doing = f"reading {self._name(key)}"
        async with self._session.body(doing, Key=self._config.full_key(key)) as (answer, body):
            size = answer["ContentLength"]
            if size > max_bytes:
                raise too_large(self._name(key), size, max_bytes)
            data = bytearray(size)
            await s3read.pour(body, self._name(key), 0, [(size, memoryview(data))])
        return bytes(data)

    async def _put(self, key: str, body: Buffer | io.BytesIO, **conditions: object) -> None:
        size = flat(body).nbytes
        if size > PUT_BYTES:
            raise CapacityError(f"{self._name(key)}: one PUT takes at most 5 GiB, not {size}", hint="use put_multipart")
        full = self._config.full_key(key)
        await self._session.call("put_object", f"writing {self._name(key)}", Key=full, Body=body, **conditions)

    def _won(self, key: str, data: Buffer, cause: HeadraceError) -> bool:
        """Whether the object holds this writer's body; the answer to its PUT did not tell."""
        try:
            return self.get(key, max_bytes=len(memoryview(data).cast("B")) if memoryview(data).nbytes else 0) == bytes(
                data
            )
        except CapacityError:  # longer than ours
            return False
        except (NotFoundError, TransientError) as error:
            raise AmbiguousWriteError(
                f"could not tell whether {self._name(key)} was written: {cause.message}; and reading it back: {error.message}",
                hint="try again; the write is idempotent",
            ) from cause

    # listing

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        base = self._config.prefix + "/" if self._config.prefix else ""
        more: dict[str, object] = {}
        while True:
            page = self._session.run(
                self._session.call("list_objects_v2", f"listing {self._config.url}", Prefix=base + prefix, **more)
            )
            yield page
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _infos(self, page: dict[str, Any]) -> Iterator[ObjectInfo]:
        """Objects of a page; what others left under names that are no keys here, such as `folder/`, is passed over."""
        cut = len(self._config.prefix) + 1 if self._config.prefix else 0
        for entry in page.get("Contents", ()):
            key = entry["Key"][cut:]
            if _is_key(key):
                yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp())

    async def _delete(self, batch: Sequence[dict[str, str]]) -> None:
        doing = f"deleting in {self._config.url}"
        answer = await self._session.call("delete_objects", doing, Delete={"Objects": batch, "Quiet": True})
        for failed in answer.get("Errors", ()):
            if failed.get("Code") not in ("NoSuchKey", "404"):
                kind = AccessDeniedError if failed.get("Code") == "AccessDenied" else TransientError
                raise kind(f"{doing}: {failed.get('Key')}: {failed.get('Code')}: {failed.get('Message')}")


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except UsageError:
        return False
    return True


def _lists_by_folder(page: dict[str, Any]) -> bool:
    """SeaweedFS walks folders, so `a/b` comes before `a-b`; S3 and the contract say that keys are compared as a whole."""
    headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("server", "")).startswith("SeaweedFS")


def _by_key(found: Iterator[ObjectInfo], url: str) -> list[ObjectInfo]:
    some = list(itertools.islice(found, _SORTED_LISTING + 1))
    if len(some) > _SORTED_LISTING:
        raise CapacityError(
            f"{url}: this server does not list by key, and more than {_SORTED_LISTING:,} keys are not sorted in memory",
            hint="list by a longer prefix",
        )
    return sorted(some, key=lambda info: info.key)
