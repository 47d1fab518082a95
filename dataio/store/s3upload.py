"""Multipart upload to S3 from a stream of parts of any size.

Invariants: content below one part travels as a single PUT. Otherwise at most `IN_FLIGHT` parts are on their way while one
more is being filled, so memory stays below (IN_FLIGHT + 2) parts. Nothing is visible before the upload is completed.
Failure behaviour: each part is retried by itself (its bytes cannot be asked for twice). Any exception, also one of the stream
or an interrupt, cancels what is on its way and aborts the upload. A lost answer to the completion is settled by the
nonce in the object's metadata. More than `MAX_BYTES` is a `CapacityError`. A process that is killed leaves an unfinished
upload, invisible but billable, which the next one aborts where there is a log (`uploads`); give the bucket a lifecycle rule
that aborts the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.dataio.core import limits
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import AmbiguousWriteError, CapacityError, HeadraceError, NotFoundError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Buffer, UploadLog
from headrace.dataio.store.retry import Policy, call_async
from headrace.dataio.store.s3errors import NoSuchUploadError
from headrace.dataio.store.s3session import S3Session

PART_BYTES = 8 * limits.MIB
_PARTS_PER_SIZE, _SIZES = 2500, 4
"""2,500 parts each of 8, 16, 32 and 64 MiB: S3 allows 10,000, and some servers want equal parts, which the first 20 GB are."""
MAX_BYTES = sum(PART_BYTES << i for i in range(_SIZES)) * _PARTS_PER_SIZE
IN_FLIGHT = 4
_NONCE = "headrace-upload"
_logger = get_logger(__name__)
_part_sent = declare(
    "store.s3.part-sent", "some parts are uploaded, the upload is not completed; the object is as it was"
)
_uploaded = declare("store.s3.uploaded", "all parts are uploaded, the upload is not completed; the object is as it was")


def blocks(parts: Iterable[Buffer], name: str) -> Iterator[io.BytesIO]:
    """`parts` in blocks of the sizes that a multipart upload takes. Each part is copied at once: its owner may reuse it."""
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
class Notes:
    """The page of a log that is about one object."""

    log: UploadLog
    key: str


class Upload:
    """One multipart upload, to `complete` or `abort`. Used from one thread."""

    def __init__(self, session: S3Session, key: str, name: str, policy: Policy, notes: Notes | None = None) -> None:
        self._session, self._key, self._name, self._policy = session, key, name, policy
        self._notes = notes
        self._nonce = secrets.token_hex(16)
        self._id = ""
        self._waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
        self._done: list[dict[str, Any]] = []

    def send(self, stream: Iterable[io.BytesIO]) -> int:
        """Upload `stream` and complete; the object's size in bytes."""
        size = 0
        self._session.run(self._begin())
        try:
            for number, block in enumerate(stream, 1):
                size += block.getbuffer().nbytes
                self._session.run(self._admit(number, block))
            self._session.run(self._drain(0))
            _uploaded()
            self._session.run(self._complete())
            return size
        except BaseException:
            self._abort()
            raise

    async def _begin(self) -> None:
        self._id = (await self._retried("create_multipart_upload", Metadata={_NONCE: self._nonce}))["UploadId"]
        if self._notes is not None:
            self._notes.log.begun(self._notes.key, self._id)

    async def _admit(self, number: int, block: io.BytesIO) -> None:
        await self._drain(IN_FLIGHT - 1)
        self._waiting.append(asyncio.create_task(self._part(number, block)))

    async def _drain(self, left: int) -> None:
        while len(self._waiting) > left:
            self._done.append(await self._waiting[0])
            self._waiting.popleft()

    async def _part(self, number: int, block: io.BytesIO) -> dict[str, Any]:
        answer = await self._retried("upload_part", UploadId=self._id, PartNumber=number, Body=block)
        _part_sent()
        return {"PartNumber": number, "ETag": answer["ETag"]}

    async def _complete(self) -> None:
        try:
            await self._retried("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": self._done})
        except NoSuchUploadError as error:  # an earlier try may have completed it, and only its answer was lost
            with contextlib.suppress(NotFoundError):
                head = await self._retried("head_object")
                if head.get("Metadata", {}).get(_NONCE) == self._nonce:
                    return
            raise AmbiguousWriteError(
                f"could not tell whether the upload of {self._name} was completed: {error}"
            ) from error

    def _retried(self, operation: str, **parameters: object) -> Coroutine[Any, Any, dict[str, Any]]:
        async def once() -> dict[str, Any]:
            if isinstance(body := parameters.get("Body"), io.BytesIO):
                body.seek(0)
            return await self._session.call(operation, f"writing {self._name}", Key=self._key, **parameters)

        return call_async(once, self._policy)

    def _abort(self) -> None:
        try:
            self._session.run(self._cancel())
            self._session.run(self._retried("abort_multipart_upload", UploadId=self._id))
            if self._notes is not None:
                self._notes.log.ended(self._notes.key, None)
        except NoSuchUploadError:
            pass
        except HeadraceError as error:
            _logger.warning("the unfinished upload %s of %s is left on the server: %s", self._id, self._name, error)

    async def _cancel(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
