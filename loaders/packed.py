"""Plans whose places are pieces of recordings, several of which share a row of a batch.

Purpose: the join between `headrace.loaders.order.packing`, which packs lengths, and datasets. What the order permutes
is sequences.
Invariants: those of `headrace.loaders.plan`; the pieces of a row come one after the other, in the order of the
recordings' numbers.
A position is (epoch, batch), so a packing that is made anew for every epoch needs to know no other epoch than its own.
Failure behaviour: nobody stands in for a damaged piece, since no other has its length: its stretch stays silent and is not
listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace.loaders.contract import Fit, Place
from headrace.loaders.order.packing import Packed, Packing, Piece, pack, stretched, with_room
from headrace.loaders.order.permutation import I64, U64
from headrace.loaders.order.schedule import Population
from headrace.loaders.plan import OrderPlan, Stream
from headrace.loaders.state import Fingerprint


class Pack(msgspec.Struct, frozen=True):
    """How recordings are packed, and how long each of a stream is in the packing's unit."""

    packing: Packing
    lengths: Callable[[Stream], I64]


class PackedStream(Stream, frozen=True, eq=False):
    """A stream whose recordings are packed: piece `sample` numbers are places in `ids`."""

    packed: Packed | None = None

    @classmethod
    def from_(cls, stream: Stream, how: Pack, key: U64 | None = None) -> PackedStream:
        """The recordings of a stream, packed; otherwise for every `key`."""
        packed = pack(how.lengths(stream), how.packing, key)
        return cls(stream.dataset, stream.ids, stream.parts, stream.source, packed)

    @property
    def sequences(self) -> Packed:
        assert self.packed is not None
        return self.packed

    def at(self, epoch: int) -> Packed:
        """The sequences of this epoch of the stream."""
        return self.sequences

    @property
    def population(self) -> Population:
        """Sequences in place of samples."""
        share = len(self.ids) / max(1, len(self.dataset))
        return Population(len(self.sequences), self.dataset.total_bytes * share / len(self.sequences))


class RepackedStream(PackedStream, frozen=True, eq=False):
    """A stream whose recordings are packed otherwise in each of its epochs, always into as many sequences; `epochs` packs
    them, and keeps some."""

    epochs: Callable[[int], Packed] | None = None

    @classmethod
    def anew(cls, stream: Stream, how: Pack, key_at: Callable[[int], U64]) -> RepackedStream:
        """`key_at` gives the key of each epoch."""
        lengths = how.lengths(stream)
        first = with_room(pack(lengths, how.packing, key_at(0)))

        @functools.lru_cache(maxsize=2)
        def of(epoch: int) -> Packed:
            other = first if epoch == 0 else stretched(pack(lengths, how.packing, key_at(epoch)), len(first))
            return first if other is None else other

        return cls(stream.dataset, stream.ids, stream.parts, stream.source, first, of)

    def at(self, epoch: int) -> Packed:
        assert self.epochs is not None
        return self.epochs(epoch)


class PackedPlan(OrderPlan, frozen=True, eq=False):
    """An `OrderPlan` over packed streams: `places` are the pieces of its rows, row after row."""

    def places(self, epoch: int, batches: range) -> list[list[Place]]:
        return [self._batch(epoch, batch) for batch in batches]

    def _batch(self, epoch: int, batch: int) -> list[Place]:
        share = self.schedule.share(epoch, batch, self.rank, self.world_size)
        rows = list(zip(share.stream.tolist(), share.epoch.tolist(), share.virtual.tolist(), strict=True))
        places = dict[int, list[Place]]()
        for number in np.unique(share.stream).tolist():
            mine = [(row, own_epoch, v) for row, (stream, own_epoch, v) in enumerate(rows) if stream == number]
            places.update(self._pieces(number, mine))
        return [place for row in range(len(rows)) for place in places[row]]

    def substitute(self, place: Place, attempt: int) -> Place | None:
        return None

    def _pieces(self, number: int, rows: list[tuple[int, int, int]]) -> dict[int, list[Place]]:
        """The pieces of these (row, epoch, sequence)s of a stream, whose samples are looked up together."""
        stream, seed = self.streams[number], self.schedule.orders[number].seed
        assert isinstance(stream, PackedStream)
        sequences = [stream.at(epoch).sequence(virtual) for _, epoch, virtual in rows]
        wanted = sorted({int(stream.ids[piece.sample]) for sequence in sequences for piece in sequence})
        samples = dict(zip(wanted, stream.dataset.samples(wanted), strict=True))
        found = dict[int, list[Place]]()
        for (row, epoch, virtual), sequence in zip(rows, sequences, strict=True):
            found[row] = [
                Place(
                    epoch,
                    virtual,
                    samples[int(stream.ids[piece.sample])],
                    piece.start // stream.sequences.packing.capacity,
                    source=stream.source,
                    seed=seed,
                    stream=number,
                    fit=fit,
                )
                for piece, fit in _fits(row, sequence)
            ]
        return found


class RepackedPlan(PackedPlan, frozen=True, eq=False):
    """A plan that is another one in every epoch; by itself it is that of the first. `epochs` makes them, and keeps some; each has
    a batch at least."""

    epochs: Callable[[int], PackedPlan] | None = None

    def of(self, epoch: int) -> OrderPlan:
        assert self.epochs is not None
        return self.epochs(epoch)

    def places(self, epoch: int, batches: range) -> list[list[Place]]:
        return self.of(epoch).places(epoch, batches)

    def about(self, epoch: int, batch: int) -> dict[str, Any]:
        return self.of(epoch).about(epoch, batch)

    def fingerprint(self, epoch: int, batch: int) -> Fingerprint:
        return self.of(epoch).fingerprint(epoch, batch)


def _fits(row: int, sequence: tuple[Piece, ...]) -> list[tuple[Piece, Fit]]:
    """Where each piece lies in its row."""
    ends = np.cumsum([piece.length for piece in sequence]).tolist()
    return [
        (piece, Fit(row, end - piece.length, piece.start, piece.length))
        for piece, end in zip(sequence, ends, strict=True)
    ]
