"""Packing: every piece once, no sequence too long, little waste, and never more looked at than agreed."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.packing import (
    GROUP,
    MAX_LOOKAHEAD,
    Packing,
    Piece,
    pack,
    stretched,
    with_spare_sequences,
)
from headrace.loaders.sampling.permutation import U64, key_of

lengths = st.lists(st.integers(0, 300), min_size=1, max_size=120).filter(any)
packings = st.builds(Packing, st.integers(1, 200), st.integers(1, 40))


keys = st.none() | st.integers(0, 2**64 - 1).map(key_of)


@given(lengths, packings, keys)
def test_every_unit_of_sound_is_in_exactly_one_piece(sizes: list[int], packing: Packing, key: U64 | None) -> None:
    packed = pack(sizes, packing, key)
    pieces = sorted(
        (p for n in range(len(packed)) for p in packed.sequence(n)), key=lambda piece: (piece.sample, piece.start)
    )
    covered = dict.fromkeys(range(len(sizes)), 0)
    for piece in pieces:
        assert piece.start == covered[piece.sample]
        assert 0 < piece.length <= packing.capacity
        covered[piece.sample] += piece.length
    assert list(covered.values()) == sizes
    assert packed.dropped == sizes.count(0)


@given(lengths, packings, keys)
def test_no_sequence_is_longer_than_the_capacity(sizes: list[int], packing: Packing, key: U64 | None) -> None:
    packed = pack(sizes, packing, key)
    used = [sum(piece.length for piece in packed.sequence(n)) for n in range(len(packed))]
    assert max(used) <= packing.capacity
    assert min(used) > 0
    assert packed.waste == pytest.approx(1 - sum(used) / (len(packed) * packing.capacity))


@given(lengths, packings)
def test_pieces_of_a_sequence_are_ordered_and_within_the_lookahead(sizes: list[int], packing: Packing) -> None:
    packed = pack(sizes, packing)
    number: dict[tuple[int, int], int] = {}
    for sample, size in enumerate(sizes):
        for start in range(0, size, packing.capacity):
            number[sample, start] = len(number)
    for n in range(len(packed)):
        at = [number[piece.sample, piece.start] for piece in packed.sequence(n)]
        assert at == sorted(at)
        assert at[0] // packing.lookahead == at[-1] // packing.lookahead


@given(lengths, packings, keys)
def test_with_a_key_pieces_of_a_sequence_lie_within_a_group_of_windows(
    sizes: list[int], packing: Packing, key: U64 | None
) -> None:
    packed = pack(sizes, packing, key)
    number: dict[tuple[int, int], int] = {}
    for sample, size in enumerate(sizes):
        for start in range(0, size, packing.capacity):
            number[sample, start] = len(number)
    for n in range(len(packed)):
        at = [number[piece.sample, piece.start] for piece in packed.sequence(n)]
        assert at == sorted(at)
        assert at[-1] - at[0] < 2 * GROUP * packing.lookahead


def test_every_key_packs_otherwise_and_as_tightly() -> None:
    spoken = np.random.default_rng(3).integers(1, 100, 4000)
    found = [pack(spoken, Packing(250, 64), key) for key in (None, key_of(1), key_of(2))]
    rows = [{tuple(piece.sample for piece in one.sequence(n)) for n in range(len(one))} for one in found]
    assert len(rows[0] & rows[1]) + len(rows[1] & rows[2]) < 0.1 * len(rows[0])
    assert max(one.waste for one in found) < 0.06
    assert all((found[1].ends == pack(spoken, Packing(250, 64), key_of(1)).ends).tolist())


@given(lengths, st.integers(1, 200))
def test_no_two_sequences_of_a_window_would_fit_into_one(sizes: list[int], capacity: int) -> None:
    """What best fit guarantees whatever the lengths: at most one sequence of a window is at most half full."""
    packed = pack(sizes, Packing(capacity, 10_000))
    used = sorted(sum(piece.length for piece in packed.sequence(n)) for n in range(len(packed)))
    assert len(used) < 2 or used[0] + used[1] > capacity


@given(lengths, packings)
def test_long_recordings_can_be_left_out(sizes: list[int], packing: Packing) -> None:
    short = [size for size in sizes if 0 < size <= packing.capacity]
    dropping = Packing(packing.capacity, packing.lookahead, "drop")
    if not short:
        with pytest.raises(UsageError, match="no recording"):
            pack(sizes, dropping)
        return
    packed = pack(sizes, dropping)
    assert sorted(packed.lengths.tolist()) == sorted(short)
    assert packed.dropped == len(sizes) - len(short)


def test_waste_falls_with_the_lookahead_and_is_far_below_one_recording_a_sequence() -> None:
    spoken = np.clip(np.random.default_rng(7).lognormal(np.log(5), 0.7, 20_000) * 16_000, 1600, 60 * 16_000)
    found = [pack(spoken.astype(np.int64), Packing(30 * 16_000, n)) for n in (1, 16, 256)]
    assert found[0].waste == pytest.approx(found[0].waste_alone)
    assert found[0].waste > 0.7
    assert found[1].waste < 0.2
    assert found[2].waste < 0.02


def test_a_sequence_says_where_its_pieces_are() -> None:
    packed = pack([5, 0, 12, 3], Packing(10, 4))
    assert [packed.sequence(n) for n in range(len(packed))] == [
        (Piece(0, 0, 5), Piece(2, 10, 2), Piece(3, 0, 3)),
        (Piece(2, 0, 10),),
    ]


def test_impossible_packings_are_refused() -> None:
    for wrong in (
        lambda: Packing(0),
        lambda: Packing(10, 0),
        lambda: Packing(10, MAX_LOOKAHEAD + 1),
        lambda: Packing(10, long="cut"),  # type: ignore[arg-type]
        lambda: pack([-1], Packing(10)),
        lambda: pack([], Packing(10)),
        lambda: pack([4], Packing(10)).sequence(1),
    ):
        with pytest.raises(UsageError):
            wrong()


@given(lengths, packings, keys, keys)
def test_packings_of_one_length_hold_the_same_pieces(
    sizes: list[int], packing: Packing, one: U64 | None, other: U64 | None
) -> None:
    first, second = pack(sizes, packing, one), pack(sizes, packing, other)
    spared = with_spare_sequences(first)
    assert len(first) <= len(spared) <= len(first) + max(2, len(first) // 200 + 1)
    found = stretched(second, len(spared))
    assert (found is None) <= (len(second) > len(spared) or (np.diff(second.ends, prepend=0) > 1).sum() < len(spared))
    for packed in (spared, *([] if found is None else [found])):
        assert len(packed) == len(spared)
        pieces = [piece for number in range(len(packed)) for piece in packed.sequence(number)]
        assert all(packed.sequence(number) for number in range(len(packed)))
        assert sorted(map(astuple, pieces)) == sorted(
            astuple(piece) for number in range(len(first)) for piece in first.sequence(number)
        )


def test_renewed_packings_nearly_always_fit_where_the_first_had_spare_sequences() -> None:
    sizes = np.minimum(480_000, np.random.default_rng(0).lognormal(1.4, 0.7, 5000) * 16_000).astype(np.int64)
    packing = Packing(480_000)
    first = pack(sizes, packing, key_of(0))
    spared = with_spare_sequences(first)
    others = [pack(sizes, packing, key_of(number)) for number in range(1, 11)]
    assert all(stretched(other, len(spared)) is not None for other in others)
    assert spared.waste < first.waste + 0.01
