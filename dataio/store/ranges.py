"""Ranged reads from a bucket into a caller's buffers.

Purpose: a request has a fixed cost, so ranges with small gaps share one. Several concurrent requests read long ranges.

Invariants:

* Ranges with gaps of at most `GAP_BYTES` between them share one request of at most `SPAN_BYTES`. Longer ranges are cut.
* At most `PARALLEL` requests are in flight for a call. All of them read the same version of the object.
* If a call needs one request only, the body is received in new memory and then copied, because that costs a third less
  CPU than a stream. The bodies of several requests are streamed into the buffers.

Failure behaviour: the errors of `bucket_errors`. A range past the end is a `RangeError` with the object's size. A
short body, or an object that was replaced during the call, is a `TransientError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import RangeError, TransientError
from headrace.dataio.store.base import Buffer, check_range, writable_bytes
from headrace.dataio.store.bucket_client import BucketClient

GAP_BYTES = 64 * limits.KIB
SPAN_BYTES = 8 * limits.MIB
PARALLEL = 8
_PIECE_BYTES = 256 * limits.KIB
"""The size of the pieces of `read_pieces`. A piece stays in the processor's caches."""

T = TypeVar("T")
Range = tuple[int, memoryview]


class Span(msgspec.Struct, frozen=True):
    """One request: the bytes [start, stop) of the object, and their targets. A gap has the target None."""

    start: int
    stop: int
    segments: tuple[tuple[int, memoryview | None], ...]


def plan(ranges: Sequence[Range]) -> list[Span]:
    """Return the spans that read `ranges` of (offset, buffer). Ranges may be in any order and overlap."""
    spans: list[Span] = []
    for offset, buffer in sorted(_cut_to_spans(ranges), key=lambda r: r[0]):
        last = spans[-1] if spans else None
        if last and last.stop <= offset <= last.stop + GAP_BYTES and offset + len(buffer) - last.start <= SPAN_BYTES:
            gap = ((offset - last.stop, None),) if offset > last.stop else ()
            spans[-1] = Span(last.start, offset + len(buffer), (*last.segments, *gap, (len(buffer), buffer)))
        else:
            spans.append(Span(offset, offset + len(buffer), ((len(buffer), buffer),)))
    return spans


def _cut_to_spans(ranges: Sequence[Range]) -> Iterator[Range]:
    for offset, buffer in ranges:
        for at in range(0, len(buffer), SPAN_BYTES):
            yield offset + at, buffer[at : at + SPAN_BYTES]


def read_ranges(client: BucketClient, key: str, name: str, ranges: Sequence[Range]) -> None:
    """Fill every buffer of `ranges` from the object `key`. Errors use `name` for the object."""
    reader = _Reader(
        client=client,
        key=key,
        name=name,
        ranges=[(offset, writable_bytes(buffer)) for offset, buffer in ranges],
    )
    if any(not len(buffer) for _, buffer in reader.ranges):
        client.run(reader.check_inside())
    spans = plan(reader.ranges)
    if len(spans) == 1:
        _Scatter(spans[0]).consume(client.run(reader.read(spans[0])))
    elif spans:
        client.run(reader.stream_all(spans))


def read_pieces(
    client: BucketClient, key: str, name: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]
) -> None:
    """Read a range of the length of `buffer`, at most `SPAN_BYTES`, and pass it to `take` in pieces.

    Each piece is copied to the start of `buffer` first.
    """
    reader = _Reader(client=client, key=key, name=name, ranges=[(offset, buffer)])
    data = memoryview(client.run(reader.read(plan(reader.ranges)[0])))
    for at in range(0, len(buffer), _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, len(buffer) - at)]
        piece[:] = data[at : at + len(piece)]
        take(offset + at, piece)


class _Reader:
    """Reads ranges of one object."""

    def __init__(self, *, client: BucketClient, key: str, name: str, ranges: Sequence[Range]) -> None:
        for offset, buffer in ranges:
            check_range(name, offset, len(buffer))
        self.ranges = ranges
        self._client, self._key, self._name, self._doing = client, key, name, f"reading {name}"

    async def read(self, span: Span) -> Buffer:
        """Read the bytes of a span into new memory."""
        try:
            data = await self._client.read(self._doing, self._key, span.start, span.stop)
        except RangeError:
            await self.check_inside()
            raise
        await self._check_length(span, len(data))
        return data

    async def stream_all(self, spans: Sequence[Span]) -> None:
        """Read all spans into their targets, several at a time."""
        versions: set[str | None] = set()

        async def stream(span: Span) -> None:
            scatter = _Scatter(span)
            try:
                versions.add(await self._client.stream(self._doing, self._key, span.start, span.stop, scatter.consume))
            except RangeError:
                await self.check_inside()
                raise
            await self._check_length(span, scatter.count)

        await _for_each(spans, stream, min(PARALLEL, len(spans)))
        if len(versions) > 1:
            raise TransientError(f"{self._name} was replaced while it was read", hint="read it again")

    async def check_inside(self) -> None:
        """Raise `RangeError` with the object's size if a range goes past its end."""
        head = await self._client.head(self._doing, self._key)
        for offset, buffer in self.ranges:
            check_range(self._name, offset, len(buffer), head.size)

    async def _check_length(self, span: Span, count: int) -> None:
        if count != span.stop - span.start:
            await self.check_inside()
            raise TransientError(f"{self._name}: the body ended at byte {span.start + count}", hint="check the network")


class _Scatter:
    """Copies a body, which arrives in chunks, to the targets of a span."""

    def __init__(self, span: Span) -> None:
        self._segments = iter(span.segments)
        self._target: memoryview | None = None
        self._segment_left = 0
        self.count = 0
        """The bytes that have arrived."""

    def consume(self, chunk: Buffer) -> None:
        data = memoryview(chunk)
        self.count += len(data)
        while data:
            while not self._segment_left:
                self._segment_left, self._target = next(
                    self._segments, (len(data), None)
                )  # surplus bytes have no target
            n = min(self._segment_left, len(data))
            if self._target is not None:
                self._target[:n] = data[:n]
                self._target = self._target[n:]
            self._segment_left, data = self._segment_left - n, data[n:]


async def _for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], width: int) -> None:
    """Await `work(item)` for all `items`, `width` at a time. The first error cancels the others and waits for them."""
    todo = iter(items)

    async def worker() -> None:
        for item in todo:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(width)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
