from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core import limits
from headrace.dataio.shards.pieces import MAX_PIECES, MIN_PIECE_BYTES, Hasher, find_fault, matches, piece_size, runs
from headrace.dataio.shards.sample import Pieces


def test_short_files_have_no_pieces() -> None:
    assert piece_size(0) is None
    assert piece_size(limits.MIB - 1) is None


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (1 * limits.MIB, 64 * limits.KIB),
        (512 * limits.MIB, 64 * limits.KIB),
        (512 * limits.MIB + 1, 128 * limits.KIB),
        (100 * limits.GIB, 16 * limits.MIB),
    ],
)
def test_pieces_are_as_small_as_8192_of_them_can_be(length: int, size: int) -> None:
    assert piece_size(length) == size


@given(st.integers(limits.MIB, 1 << 50))
def test_a_size_is_the_least_power_of_two_with_few_enough_pieces(length: int) -> None:
    size = piece_size(length)
    assert size is not None
    assert size & (size - 1) == 0
    assert -(-length // size) <= MAX_PIECES
    assert size == MIN_PIECE_BYTES or -(-length // (size // 2)) > MAX_PIECES


@given(st.lists(st.binary(max_size=40), max_size=12), st.sampled_from([1, 2, 8, 16]))
def test_one_pass_over_chunks_of_any_size_gives_the_digests_of_the_whole_and_of_its_slices(
    chunks: list[bytes], size: int
) -> None:
    hasher, plain, whole = Hasher(size), Hasher(None), b"".join(chunks)
    for chunk in chunks:
        hasher.update(memoryview(chunk))
        plain.update(chunk)
    found = hasher.pieces()
    slices = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert found == Pieces(size, b"".join(xxhash.xxh3_64_intdigest(one).to_bytes(8, "little") for one in slices))
    assert hasher.whole() == plain.whole() == xxhash.xxh3_64_intdigest(whole)
    assert plain.pieces() is None
    assert not find_fault(found, len(whole))
    assert all(matches(found, number, one) for number, one in enumerate(slices))


def test_a_piece_is_right_only_where_it_belongs_and_as_long_as_it_was() -> None:
    hasher = Hasher(4)
    hasher.update(b"abcdefghij")
    found = hasher.pieces()
    assert found is not None
    assert matches(found, 2, b"ij")
    wrong = [(0, b"efgh"), (0, b"abc"), (2, b"ij\0"), (3, b""), (3, b"abcd")]
    assert not any(matches(found, number, data) for number, data in wrong)


@given(st.lists(st.integers(0, 30)))
def test_runs_are_the_same_pieces_in_order(numbers: list[int]) -> None:
    found = runs(numbers)
    assert [n for first, many in found for n in range(first, first + many)] == sorted(set(numbers))
    assert all(first + many < after for (first, many), (after, _) in pairwise(found))


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (Pieces(6, b"8bytes__" * 2), "not a power of two"),
        (Pieces(0, b""), "not a power of two"),
        (Pieces(-8, b"8bytes__"), "not a power of two"),
        (Pieces(8, b"8bytes__"), "8 bytes of digests for 2 pieces"),
        (Pieces(8, b"8bytes__" * 2 + b"7bytes_"), "23 bytes of digests for 2 pieces"),
        (Pieces(8, b"8bytes__" * 2, ((0, 3),)), "outside the file or are not in order"),
        (Pieces(8, b"8bytes__" * 2, ((-1, 1),)), "outside the file or are not in order"),
        (Pieces(8, b"8bytes__" * 2, ((1, 1), (0, 1))), "outside the file or are not in order"),
        (Pieces(8, b"8bytes__" * 2, ((0, 0),)), "outside the file or are not in order"),
        (Pieces(8, b"8bytes__" * 2, (), ((0, 0), (12, 9))), "outside the file, or more"),
        (Pieces(8, b"8bytes__" * 2, (), ((0, 0), (1, 1), (2, 2))), "outside the file, or more"),
        (Pieces(8, b"8bytes__" * 2, (), ((0, 1), (8, 1))), "marks that are not in order"),
        (Pieces(8, b"8bytes__" * 2, (), ((8, 0), (8, 1))), "marks that are not in order"),
    ],
)
def test_pieces_that_cannot_be_meant_are_told(pieces: Pieces, says: str) -> None:
    assert says in find_fault(pieces, 12)


def test_pieces_with_a_head_are_sound() -> None:
    assert not find_fault(Pieces(8, b"8bytes__" * 2, ((0, 1), (1, 1))), 12)
    assert not find_fault(Pieces(8, b"8bytes__" * 2, (), ((3, 0), (11, 1152))), 12)
