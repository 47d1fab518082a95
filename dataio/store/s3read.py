"""Ranged reads from S3 into the caller's buffers: plan spans, fetch them side by side, fill.

Invariants: neighbouring ranges up to `GAP_BYTES` apart travel in one request of at most `SPAN_BYTES`; larger ranges are cut
into spans; at most `PARALLEL` spans are in flight for a call, each holding a few hundred KiB of its own. All spans of one call
come from the same version of the object.
Failure behaviour: a range past the end is a `UsageError` that names the object's size; a server that ignores ranges is an
`UnsupportedError`; a body that ends early, or an object replaced during the call, is a `TransientError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.dataio.core.errors import RangeError, TransientError, UnsupportedError
from headrace.dataio.store.base import check_range, writable_bytes
from headrace.dataio.store.s3session import S3Session, each, length_of

GAP_BYTES = 64 << 10
SPAN_BYTES = 8 << 20
PARALLEL = 8
SHORT_BYTES = 1 << 20
"""Up to here a body may come in one piece, in memory of its own."""
_CHUNK = 256 << 10
_PIECE = 256 << 10
"""What passes through the processor's caches at a time."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Range = tuple[int, memoryview]


class Span(msgspec.Struct, frozen=True):
    """One request: bytes [start, stop) of the object, and where they go; None stands for a gap that is dropped."""

    start: int
    stop: int
    segments: tuple[tuple[int, memoryview | None], ...]


def plan(ranges: Sequence[Range]) -> list[Span]:
    """The spans that fetch `ranges` (offset, non-empty buffer), which may come in any order and overlap."""
    spans: list[Span] = []
    for offset, buffer in sorted(_cut(ranges), key=lambda r: r[0]):
        last = spans[-1] if spans else None
        if last and last.stop <= offset <= last.stop + GAP_BYTES and offset + len(buffer) - last.start <= SPAN_BYTES:
            gap = ((offset - last.stop, None),) if offset > last.stop else ()
            spans[-1] = Span(last.start, offset + len(buffer), (*last.segments, *gap, (len(buffer), buffer)))
        else:
            spans.append(Span(offset, offset + len(buffer), ((len(buffer), buffer),)))
    return spans


def _cut(ranges: Sequence[Range]) -> Iterator[Range]:
    for offset, buffer in ranges:
        for at in range(0, len(buffer), SPAN_BYTES):
            yield offset + at, buffer[at : at + SPAN_BYTES]


def fill_here(session: S3Session, key: str, name: str, ranges: Sequence[Range]) -> bool:
    """As `fill`, in the caller's thread and for one span; False where it has to be done by `fill`."""
    targets = [(offset, writable_bytes(buffer)) for offset, buffer in ranges]
    for offset, buffer in targets:
        check_range(name, offset, len(buffer))
    spans = plan(targets)
    if len(spans) != 1 or any(not len(buffer) for _, buffer in targets):
        return False
    start, stop, segments = spans[0].start, spans[0].stop, spans[0].segments
    buffers = (memoryview(bytearray(length)) if target is None else target for length, target in segments)
    return session.read_here(f"reading {name}", key, start, stop, buffers)


def pass_here(
    session: S3Session, key: str, name: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]
) -> bool:
    """Give `take` the bytes of one span as they come, through the beginning of `buffer`, which is as long as they are; in the
    caller's thread. False where it has to be done by `fill`."""
    size, room = len(buffer), buffer[:_PIECE]
    if not 0 < size <= SPAN_BYTES:
        return False
    check_range(name, offset, size)

    def pieces() -> Iterator[memoryview]:
        for at in range(0, size, _PIECE):
            piece = room[: size - at]
            yield piece
            take(offset + at, piece)

    return session.read_here(f"reading {name}", key, offset, offset + size, pieces())


async def fill(session: S3Session, key: str, name: str, ranges: Sequence[Range]) -> None:
    """Fill every buffer of `ranges` from the object `key`, called `name` in errors."""
    targets = [(offset, writable_bytes(buffer)) for offset, buffer in ranges]
    for offset, buffer in targets:
        check_range(name, offset, len(buffer))
    if any(not len(buffer) for _, buffer in targets):
        await _check_inside(session, key, name, targets)
    versions: set[str | None] = set()

    async def fetch(span: Span) -> None:
        try:
            versions.add(await _fetch(session, key, name, span))
        except RangeError:
            await _check_inside(session, key, name, targets)
            raise

    spans = plan(targets)
    if len(spans) == 1:  # as most reads are: no tasks, and no version to compare
        if not await _fetch_short(session, key, name, spans[0]):
            await fetch(spans[0])
        return
    await each(spans, fetch, min(PARALLEL, len(spans)))
    if len(versions) > 1:
        raise TransientError(f"{name} was replaced while it was read", hint="read it again")


async def _check_inside(session: S3Session, key: str, name: str, ranges: Sequence[Range]) -> None:
    size = length_of(await session.call("head_object", f"reading {name}", Key=key), f"reading {name}")
    for offset, buffer in ranges:
        check_range(name, offset, len(buffer), size)


async def _fetch(session: S3Session, key: str, name: str, span: Span) -> str | None:
    wanted = f"bytes={span.start}-{span.stop - 1}"
    async with session.body(f"reading {name}", Key=key, Range=wanted) as (answer, body):
        _check_answer(answer, name, span)
        await pour(body, name, span.start, span.segments)
        version: str | None = answer.get("ETag")
        return version


async def _fetch_short(session: S3Session, key: str, name: str, span: Span) -> bool:
    """Fill a small span by the session's short way; False where it has none, or where the answer has to be looked at closely."""
    if span.stop - span.start > SHORT_BYTES:
        return False
    try:
        data = await session.short(f"reading {name}", key, span.start, span.stop)
    except RangeError:
        return False
    if data is None or len(data) != span.stop - span.start:
        return False
    at = 0
    for length, target in span.segments:
        if target is not None:
            target[:] = data[at : at + length]
        at += length
    return True


def _check_answer(answer: dict[str, Any], name: str, span: Span) -> None:
    status, length = answer["ResponseMetadata"]["HTTPStatusCode"], answer["ContentLength"]
    found = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    if status == 206 and found and int(found[1]) == span.start:
        if int(found[2]) + 1 == span.stop:
            return
        raise RangeError(f"{name} has only {found[3]} bytes")
    if status == 200 and span.start == 0 and length == span.stop:
        return
    raise UnsupportedError(
        f"{name}: the server answered a request for bytes {span.start} to {span.stop} with status {status} and {length} bytes",
        hint="Headrace needs a server that supports ranged reads; see `headrace doctor URL`",
    )


async def pour(body: Any, name: str, start: int, segments: Iterable[tuple[int, memoryview | None]]) -> None:
    """Fill `segments` one after the other from a body that begins at byte `start` of the object."""
    pending = memoryview(b"")
    for length, target in segments:
        done = 0
        while done < length:
            if not pending and not (pending := memoryview(await body.read(_CHUNK))):
                raise TransientError(f"{name}: the body ended at byte {start + done}", hint="check the network")
            n = min(len(pending), length - done)
            if target is not None:
                target[done : done + n] = pending[:n]
            pending, done = pending[n:], done + n
        start += length
