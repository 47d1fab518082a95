"""Send chunks from the ranks that read them to the other ranks that need them.

Every rank handles its chunks in the same order, that of packs and offsets, and in rounds of at most `ROUND_BYTES`. In a
round it starts to receive, reads the chunks whose reader it is, and then passes each chunk on as soon as it has it. The
ranks need no common rounds: the first chunk in the order that is not finished never waits for a later one.

Invariant: at most one round of chunks is in memory. The digest of a received chunk is checked before it is used.
Every rank sends and receives all chunks of its routes, even after an error, so no rank waits in vain.
Failure behaviour: a rank that cannot read a chunk sends a message that is marked as invalid in its place. A rank that
receives one reads nothing more. So all ranks end soon, and the error of the rank that could not read is raised at the
next exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.ranks import PendingError, Request
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.restoring.chunk_homes import Place, Route, Routes
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, NeededChunk
from headrace.checkpoint.state.tensors import memory_of
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

ROUND_BYTES = 32 * MIB
_VALID, _INVALID = 1, 0
"""The last byte of a message, after the chunk."""


class Messages(Protocol):
    """Messages between two ranks."""

    def isend(self, data: torch.Tensor, rank: int, tag: int) -> Request:
        """Start to send main memory to a rank."""
        ...

    def irecv(self, data: torch.Tensor, rank: int, tag: int) -> Request:
        """Start to receive into main memory from a rank."""
        ...


def rounds(routes: Routes) -> Iterator[list[Place]]:
    """The places of these chunks, in order, in rounds of at most `ROUND_BYTES`."""
    places: list[Place] = []
    size_of_round = 0
    for place in sorted(routes):
        size = routes[place].chunk.raw
        if places and size_of_round + size > ROUND_BYTES:
            yield places
            places, size_of_round = [], 0
        places.append(place)
        size_of_round += size
    if places:
        yield places


class ChunkRelay:
    """One rank's part in the sending of the chunks of one reader.

    Args:
        store: The store to read from.
        reading: The reader whose requests are filled.
        routes: The chunks that are sent, with this rank's part in their ways.
        ranks: The ranks of the job.
        workers: The number of threads that this rank reads with.
    """

    def __init__(self, store: Store, reading: ChunkReader, routes: Routes, ranks: Messages, workers: int) -> None:
        self._store, self._reading, self._routes, self._ranks, self._workers = store, reading, routes, ranks, workers
        needed = {(key, chunk.offset): chunk for key, chunk in reading.needed()}
        self._chunks = {place: needed.get(place) or NeededChunk(route.chunk) for place, route in routes.items()}
        self._tags: Counter[tuple[str, int]] = Counter()
        self._stopped = False

    def run(self, pending: PendingError) -> None:
        """Read, send and receive all chunks. `pending` keeps the first error of this rank."""
        for places in rounds(self._routes):
            self._round(places, pending)

    def _round(self, places: Sequence[Place], pending: PendingError) -> None:
        incoming = {place: self._receive(self._routes[place]) for place in places}
        payloads: dict[Place, torch.Tensor] = {}
        if pending.error is None and not self._stopped:
            with pending:
                self._read([place for place in places if self._routes[place].parent is None], payloads)
        sending: list[Request] = []
        for place in places:
            route, received = self._routes[place], incoming[place]
            if received is not None:
                payloads[place], request = received
                request.wait()
            elif place not in payloads:
                payloads[place] = _message(route.chunk.raw, _INVALID)
            sending += [self._send(payloads[place], rank) for rank in route.children]
            if received is not None and pending.error is None:
                with pending:
                    self._use(place, payloads[place])
        for request in sending:
            request.wait()

    def _read(self, places: Sequence[Place], payloads: dict[Place, torch.Tensor]) -> None:
        def keep(key: str, chunk: NeededChunk, payload: memoryview | None) -> None:
            self._reading.use(key, chunk, payload)
            message = _message(chunk.raw, _VALID)
            memory_of(message)[: chunk.raw] = payload or b""
            payloads[key, chunk.offset] = message

        chunks = [(place[0], self._chunks[place]) for place in places]
        fetch.fetch(self._store, self._reading.batches(chunks), keep, workers=self._workers)

    def _use(self, place: Place, message: torch.Tensor) -> None:
        chunk, payload = self._chunks[place], memory_of(message)
        if payload[-1] == _INVALID:
            self._stopped = True
        elif not self._stopped:
            if digest(payload[:-1]) != chunk.digest:
                sender = self._routes[place].parent
                raise CorruptionError(
                    f"rank {sender} sent {chunk.raw} bytes of {place[0]} that differ from those saved"
                )
            self._reading.use(place[0], chunk, payload[:-1])

    def _receive(self, route: Route) -> tuple[torch.Tensor, Request] | None:
        if route.parent is None:
            return None
        message = torch.empty(route.chunk.raw + 1, dtype=torch.uint8)
        return message, self._ranks.irecv(message, route.parent, self._tag("from", route.parent))

    def _send(self, message: torch.Tensor, rank: int) -> Request:
        return self._ranks.isend(message, rank, self._tag("to", rank))

    def _tag(self, direction: str, rank: int) -> int:
        """The number of the message among those from one rank to another. Both ranks count in the same order."""
        self._tags[direction, rank] += 1
        return self._tags[direction, rank]


def _message(size: int, mark: int) -> torch.Tensor:
    message = torch.empty(size + 1, dtype=torch.uint8)
    message[-1] = mark
    return message
