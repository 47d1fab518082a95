"""Several recordings in one sequence of fixed length, with little padding.

Purpose: decide, from lengths alone, which recordings share a sequence. In the order, a sequence then takes the place of
a sample: it is shuffled, assigned to ranks and resumed like a sample. `PackedPlan` connects sequences with datasets.

How it works. Recordings longer than `capacity` are cut into pieces of that length and a rest, or left out. Groups of
`lookahead` consecutive pieces, called windows, are packed by best fit decreasing (Johnson 1973): the longest piece
first, each into the fullest sequence that still has room for it. Windows are packed independently. So the packing is a
pure function of the lengths, and the pieces of a sequence are close to each other in their shard.

With a key, pieces are first shuffled within groups of `GROUP` windows. The boundaries of these groups depend on the
key. So different recordings share a sequence in each epoch, and are still close to each other.

Invariants:
- Every piece is in exactly one sequence. No sequence is longer than `capacity`. The pieces of a sequence are in the
  order of their numbers. At most `lookahead` pieces are considered at a time.
- Without a key (`repack_each_epoch=False`) the same recordings share a sequence in every epoch. Only the sequences of a
  batch change.
- The number of sequences depends on the key. A mixture needs the same number in all epochs. So all of its packings are
  extended to one number (`with_spare_sequences`, `stretched`), by halving a few sequences. A packing that needs more
  sequences is replaced by the first one. Without a mixture, so is a packing that fills no batch.
- A position is (epoch, batch), so the packing of one epoch does not depend on other epochs.

Cost: recordings are packed once, when a loader is opened; with `repack_each_epoch`, they are packed in every epoch. Two
packings are kept.
Failure behaviour: `UsageError` for an impossible capacity or lookahead, and when there is nothing to pack. A damaged
piece has no substitute, since no other piece has its length: its part of the row stays silent and is not listed.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.loaders.interfaces import RowSpan, SampleRef
from headrace.loaders.sampling.permutation import I64, U64, key_of, permute
from headrace.loaders.sampling.plan import OrderPlan, Stream
from headrace.loaders.sampling.schedule import Population
from headrace.loaders.sampling.state import Fingerprint
from headrace.loaders.validation import check_fields

MAX_LOOKAHEAD = 65_536
GROUP = 4
"""Number of windows whose pieces are shuffled together."""
MAX_CAPACITY = 1 << 40
SPARE_EVERY, LEAST_SPARE = 200, 2
"""If all packings need the same number of sequences, one spare sequence is added for every `SPARE_EVERY` sequences, and
at least `LEAST_SPARE` in all."""


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class Packing:
    """Packing of whole recordings, several to a row of fixed length.

    Args:
        capacity (int): length of a row, in audio samples or spectrogram columns.
        lookahead (int): number of recordings that are packed together, 1 to 65536. Default: 256.
        long (str): "split" cuts recordings longer than `capacity` into several pieces; "drop" leaves them out. Default:
            "split".
        repack_each_epoch (bool): combine recordings differently in each epoch. The number of rows then differs slightly
            between epochs, except with a mixture. Default: False.

    Raises:
        UsageError: for an impossible packing.

    Example:
        >>> Packing(30 * 16_000).long
        'split'
    """

    capacity: int
    lookahead: int = 256
    long: Literal["split", "drop"] = "split"
    repack_each_epoch: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.capacity <= MAX_CAPACITY or not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise UsageError(
                f"{self} is not possible", hint=f"capacity is at least 1, lookahead from 1 to {MAX_LOOKAHEAD}"
            )
        if self.long not in ("split", "drop"):
            raise UsageError(f"long={self.long!r} is not known", hint="use 'split' or 'drop'")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of recording `sample`: `length` units from unit `start` on."""

    sample: int
    start: int
    length: int


@dataclass(frozen=True)
class Packed:
    """The sequences.

    Piece i of sequence s is row `ends[s-1] + i` of the columns `samples`, `starts` and `lengths` (int64).
    """

    packing: Packing
    samples: I64
    starts: I64
    lengths: I64
    ends: I64
    dropped: int
    """Recordings left out: longer than the capacity (with `long="drop"`) or empty."""

    def __len__(self) -> int:
        return len(self.ends)

    def sequence(self, number: int) -> tuple[Piece, ...]:
        """The pieces of one sequence."""
        if not 0 <= number < len(self):
            raise UsageError(f"there is no sequence {number}", hint=f"they are numbered 0 to {len(self) - 1}")
        start, end = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
        columns = (column[start:end].tolist() for column in (self.samples, self.starts, self.lengths))
        return tuple(Piece(*values) for values in zip(*columns, strict=True))

    @cached_property
    def waste(self) -> float:
        """The fraction of all sequences that is padding, 0 … 1."""
        return 1.0 - int(self.lengths.sum()) / (len(self) * self.packing.capacity)

    @property
    def waste_alone(self) -> float:
        """The value of `waste` if every piece had a sequence of its own."""
        return 1.0 - int(self.lengths.sum()) / (len(self.lengths) * self.packing.capacity)


def stretched(packed: Packed, count: int) -> Packed | None:
    """The same pieces in exactly `count` sequences, or None if that is impossible.

    Some sequences that hold several pieces are halved.
    """
    missing = count - len(packed)
    pieces = np.diff(packed.ends, prepend=0)
    able = np.flatnonzero(pieces > 1)
    if not 0 <= missing <= len(able):
        return None
    chosen = able[np.argsort(-pieces[able], kind="stable")[:missing]]
    cuts = packed.ends[chosen] - pieces[chosen] // 2
    return replace(packed, ends=np.sort(np.concatenate([packed.ends, cuts])))


def with_spare_sequences(packed: Packed) -> Packed:
    """The same pieces in a few more sequences, so that `stretched` can bring other packings to the same number."""
    able = int((np.diff(packed.ends, prepend=0) > 1).sum())
    spared = stretched(packed, len(packed) + min(able, max(LEAST_SPARE, -(-len(packed) // SPARE_EVERY))))
    assert spared is not None
    return spared


def pack(lengths: Sequence[int] | I64, packing: Packing, key: U64 | None = None) -> Packed:
    """The sequences of recordings 0 … N-1 of these lengths. A different `key` combines the recordings differently."""
    counts = np.asarray(lengths, np.int64)
    if counts.size and counts.min() < 0:
        raise UsageError("a recording has a negative length")
    usable = counts > 0 if packing.long == "split" else (counts > 0) & (counts <= packing.capacity)
    samples, starts, sizes = _pieces(np.flatnonzero(usable), counts[usable], packing.capacity)
    if not len(samples):
        raise UsageError("there is no recording to pack", hint="are all of them longer than the capacity?")
    chosen, ends = list[int](), list[int]()
    sequence = np.arange(len(samples)) if key is None else _shuffled(len(samples), packing.lookahead * GROUP, key)
    for start in range(0, len(samples), packing.lookahead):
        window = np.sort(sequence[start : start + packing.lookahead])
        for bin_ in _best_fit(sizes[window].tolist(), packing.capacity):
            chosen.extend(window[sorted(bin_)].tolist())
            ends.append(len(chosen))
    rows = np.array(chosen, np.int64)
    left_out = int(len(counts) - usable.sum())
    return Packed(
        packing,
        samples[rows],
        starts=starts[rows],
        lengths=sizes[rows],
        ends=np.array(ends, np.int64),
        dropped=left_out,
    )


def _shuffled(count: int, group: int, key: U64) -> I64:
    """0 … count-1, shuffled within groups of `group` consecutive numbers. The first group may be shorter."""
    refs = np.arange(count)
    short = int(key[0] % np.uint64(group)) + 1
    number = (refs + group - short) // group
    starts = np.maximum(0, number * group - (group - short))
    sizes = np.minimum(count, (number + 1) * group - (group - short)) - starts
    return starts + permute(refs - starts, sizes, key_of(key.astype(np.int64), number))


def _pieces(samples: I64, lengths: I64, capacity: int) -> tuple[I64, I64, I64]:
    """Cut recordings into pieces, and return the pieces' recordings, starts and lengths."""
    counts = -(-lengths // capacity)
    owners = np.repeat(np.arange(len(samples)), counts)
    nth = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = nth * capacity
    return samples[owners], starts, np.minimum(capacity, lengths[owners] - starts)


def _best_fit(sizes: list[int], capacity: int) -> Iterator[list[int]]:
    """Pack pieces of these sizes into bins; yields each bin's piece numbers, in the order of the bins' first pieces."""
    bins = list[list[int]]()
    room = list[tuple[int, int]]()  # (room left, bin), sorted: the fullest bins first
    for piece in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        at = bisect_left(room, (sizes[piece], -1))
        if at < len(room):
            remaining, number = room.pop(at)
        else:
            remaining, number = capacity, len(bins)
            bins.append([])
        bins[number].append(piece)
        if remaining > sizes[piece]:
            insort(room, (remaining - sizes[piece], number))
    return iter(sorted(bins, key=min))


class Pack(msgspec.Struct, frozen=True):
    """How recordings are packed.

    `lengths` returns the length of each recording of a stream, in the packing's unit.
    """

    packing: Packing
    lengths: Callable[[Stream], I64]


class PackedStream(Stream, frozen=True, eq=False):
    """A stream of packed recordings. `Piece.sample` is an index into `ids`."""

    packed: Packed | None = None

    @classmethod
    def from_(cls, stream: Stream, spec: Pack, key: U64 | None = None) -> PackedStream:
        """Pack the recordings of a stream. `key` seeds the shuffle of pieces; None packs them in order."""
        packed = pack(spec.lengths(stream), spec.packing, key)
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
        """The population of the stream, with sequences in place of samples."""
        share = len(self.ids) / max(1, len(self.dataset))
        return Population(len(self.sequences), self.dataset.total_bytes * share / len(self.sequences))


class RepackedStream(PackedStream, frozen=True, eq=False):
    """A stream that is packed again for each of its epochs, always into the same number of sequences.

    `epochs` returns the packing of an epoch, and caches the last ones.
    """

    epochs: Callable[[int], Packed] | None = None

    @classmethod
    def repacked(cls, stream: Stream, spec: Pack, key_at: Callable[[int], U64]) -> RepackedStream:
        """Pack a stream for each epoch. `key_at` returns the key of an epoch."""
        lengths = spec.lengths(stream)
        first_packing = with_spare_sequences(pack(lengths, spec.packing, key_at(0)))

        @functools.lru_cache(maxsize=2)
        def of(epoch: int) -> Packed:
            packing = (
                first_packing
                if epoch == 0
                else stretched(pack(lengths, spec.packing, key_at(epoch)), len(first_packing))
            )
            return first_packing if packing is None else packing

        return cls(stream.dataset, stream.ids, stream.parts, stream.source, first_packing, of)

    def at(self, epoch: int) -> Packed:
        assert self.epochs is not None
        return self.epochs(epoch)


class PackedPlan(OrderPlan, frozen=True, eq=False):
    """An `OrderPlan` over packed streams. `refs` are the pieces of its rows, row by row."""

    def refs(self, epoch: int, batches: range) -> list[list[SampleRef]]:
        return [self._batch(epoch, batch) for batch in batches]

    def _batch(self, epoch: int, batch: int) -> list[SampleRef]:
        share = self.schedule.share(epoch, batch, self.rank, self.world_size)
        rows = list(zip(share.stream.tolist(), share.epoch.tolist(), share.virtual.tolist(), strict=True))
        refs = dict[int, list[SampleRef]]()
        for number in np.unique(share.stream).tolist():
            own_rows = [(row, own_epoch, v) for row, (stream, own_epoch, v) in enumerate(rows) if stream == number]
            refs.update(self._pieces(number, own_rows))
        return [ref for row in range(len(rows)) for ref in refs[row]]

    def substitute(self, ref: SampleRef, attempt: int) -> SampleRef | None:
        return None

    def _pieces(self, number: int, rows: list[tuple[int, int, int]]) -> dict[int, list[SampleRef]]:
        """The pieces of some (row, epoch, sequence) of a stream. Their samples are looked up together."""
        stream, seed = self.streams[number], self.schedule.orders[number].seed
        assert isinstance(stream, PackedStream)
        sequences = [stream.at(epoch).sequence(virtual) for _, epoch, virtual in rows]
        ids = sorted({stream.ids[piece.sample] for sequence in sequences for piece in sequence})
        samples = dict(zip(ids, stream.dataset.samples(ids), strict=True))
        refs_by_row = dict[int, list[SampleRef]]()
        for (row, epoch, virtual), sequence in zip(rows, sequences, strict=True):
            refs_by_row[row] = [
                SampleRef(
                    epoch,
                    virtual,
                    samples[stream.ids[piece.sample]],
                    number=piece.start // stream.sequences.packing.capacity,
                    source=stream.source,
                    seed=seed,
                    stream=number,
                    span=span,
                )
                for piece, span in _spans(row, sequence)
            ]
        return refs_by_row


class RepackedPlan(PackedPlan, frozen=True, eq=False):
    """A plan with different sequences in every epoch. Its own fields are those of epoch 0.

    `epochs` returns the plan of an epoch, and caches the last ones. Each plan has at least one batch.
    """

    epochs: Callable[[int], PackedPlan] | None = None

    def of(self, epoch: int) -> OrderPlan:
        assert self.epochs is not None
        return self.epochs(epoch)

    def refs(self, epoch: int, batches: range) -> list[list[SampleRef]]:
        return self.of(epoch).refs(epoch, batches)

    def about(self, epoch: int, batch: int) -> dict[str, Any]:
        return self.of(epoch).about(epoch, batch)

    def fingerprint(self, epoch: int, batch: int) -> Fingerprint:
        return self.of(epoch).fingerprint(epoch, batch)


def _spans(row: int, sequence: tuple[Piece, ...]) -> list[tuple[Piece, RowSpan]]:
    """The span of each piece in its row."""
    ends = np.cumsum([piece.length for piece in sequence]).tolist()
    return [
        (piece, RowSpan(row, end - piece.length, piece.start, piece.length))
        for piece, end in zip(sequence, ends, strict=True)
    ]
