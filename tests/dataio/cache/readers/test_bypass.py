"""What is wanted first comes straight from the store; what comes later, and whatever else is read, from the cache."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.cache.readers.base import ShardReader
from headrace.dataio.cache.readers.bypass import (
    MAX_BYTES,
    MIN_PART_BYTES,
    BypassReader,
    PartlyFetchedStore,
    is_worthwhile,
)
from headrace.dataio.core import limits
from headrace.dataio.core.errors import TransientError
from headrace.dataio.store.base import Store
from headrace.loaders.fetch.sample_reader import StoreReader
from tests.support.memory_store import MemoryStore

MIB = limits.MIB
FIRST = [("a", 5, 100), ("a", 3 * MIB, 50), ("b", 1000, 20)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(a=random.Random(1).randbytes(4 * MIB), b=random.Random(2).randbytes(MIB))


class Behind(StoreReader):
    """In the cache's place; what it was told, and what it was asked for."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.announced: list[Any] = []
        self.read_keys: list[str] = []
        self.closed = False

    def read(self, key: str, ranges: Any) -> list[memoryview]:
        self.read_keys.append(key)
        return super().read(key, ranges)

    def read_into(self, key: str, pieces: Any) -> None:
        self.read_keys.append(key)
        super().read_into(key, pieces)

    def announce(self, upcoming: Any) -> None:
        self.announced.append(list(upcoming))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made() -> list[Behind]:
    return []


@pytest.fixture
def reader(store: MemoryStore, made: list[Behind]) -> Iterator[BypassReader]:
    def make(behind: Store) -> ShardReader:
        made.append(Behind(behind))
        return made[-1]

    with contextlib.closing(BypassReader(store, make)) as opened:
        yield opened


def wanted(store: MemoryStore, key: str, offset: int, length: int) -> bytes:
    return store.objects[key][offset : offset + length]


def test_what_is_announced_first_is_fetched_by_itself_and_no_cache_is_made(
    reader: BypassReader, store: MemoryStore, made: list[Behind]
) -> None:
    reader.announce(FIRST)
    for key, offset, length in FIRST:
        (view,) = reader.read(key, [(offset, length)])
        assert bytes(view) == wanted(store, key, offset, length)
        assert view.readonly
    buffers = [(5, memoryview(bytearray(40))), (60, memoryview(bytearray(45))), (3 * MIB + 7, memoryview(bytearray(0)))]
    reader.read_into("a", buffers)
    assert [bytes(buffer) for _, buffer in buffers] == [wanted(store, "a", o, len(b)) for o, b in buffers]
    assert sorted(store.reads) == sorted(FIRST)
    assert made == []


def test_what_comes_later_and_what_was_not_announced_goes_through_the_cache(
    reader: BypassReader, store: MemoryStore, made: list[Behind]
) -> None:
    reader.announce(FIRST)
    assert bytes(reader.read("a", [(5, 100), (200, 10)])[1]) == wanted(store, "a", 200, 10)
    assert bytes(reader.read("b", [(990, 20)])[0]) == wanted(store, "b", 990, 20)
    later = [("b", 0, 10)]
    reader.announce(later)
    assert bytes(reader.read("a", [(5, 100)])[0]) == wanted(store, "a", 5, 100)
    (behind,) = made
    assert (behind.announced, behind.read_keys) == ([later], ["a", "b", "a"])
    reader.close()
    assert behind.closed


def test_pieces_of_many_objects_are_filled_in_turn_wherever_they_come_from(
    reader: BypassReader, store: MemoryStore, made: list[Behind]
) -> None:
    reads = [("b", [(1000, memoryview(bytearray(20)))]), ("a", [(100, memoryview(bytearray(9)))])]
    reader.announce(FIRST)
    assert sum(1 for _ in reader.read_each(reads)) == 2
    assert [bytes(pieces[0][1]) for _, pieces in reads] == [wanted(store, "b", 1000, 20), wanted(store, "a", 100, 9)]
    assert made[0].read_keys == ["a"]


def test_what_could_not_be_fetched_so_is_asked_of_the_cache(
    reader: BypassReader, store: MemoryStore, made: list[Behind], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = list[str]()

    def down(key: str, ranges: Any) -> None:
        failed.append(key)
        raise TransientError(f"{key}: the store is down")

    with monkeypatch.context() as patched:
        patched.setattr(store, "get_ranges_into", down)
        reader.announce(FIRST[:1])
        with pytest.raises(TransientError, match="down"):
            reader.read("a", [(5, 100)])
    assert failed == ["a", "a"]  # itself, and the one behind it
    assert bytes(reader.read("a", [(5, 100)])[0]) == wanted(store, "a", 5, 100)
    assert made[0].read_keys == ["a", "a"]


def test_closing_and_going_on_wait_for_nothing_that_is_still_fetched(
    reader: BypassReader, store: MemoryStore, made: list[Behind]
) -> None:
    store.stuck = len(FIRST)
    reader.announce(FIRST)
    done = threading.Event()

    def go_on() -> None:
        reader.announce([])
        reader.close()
        done.set()

    threading.Thread(target=go_on).start()
    assert done.wait(150)
    assert not store.let_go.is_set()
    store.let_go.set()
    assert made[0].announced == [[]]


def test_samples_as_large_as_blocks_and_very_many_are_left_to_the_cache() -> None:
    block = limits.CACHE_BLOCK_BYTES
    assert is_worthwhile([("a", n * MIB, 100_000) for n in range(8)])
    assert not is_worthwhile([])
    assert not is_worthwhile([("a", 0, 0)])
    assert not is_worthwhile([("a", n * block, block * 2 // 3) for n in range(8)])
    assert not is_worthwhile([("a", 100 * n, 100) for n in range(64)])
    assert not is_worthwhile([("a", 4 * n * block, MAX_BYTES // 16 + 1) for n in range(16)])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1 << 30), st.integers(0, 9 * MIB)), max_size=100))
def test_what_is_worth_it_is_bounded(upcoming: list[tuple[str, int, int]]) -> None:
    if is_worthwhile(upcoming):
        blocks = sum(
            (o + n - 1) // limits.CACHE_BLOCK_BYTES - o // limits.CACHE_BLOCK_BYTES + 1 for _, o, n in upcoming
        )
        assert sum(n for _, _, n in upcoming) <= min(MAX_BYTES, blocks * limits.CACHE_BLOCK_BYTES // 2)
        assert len(upcoming) <= 8 + 2 * blocks


def test_what_came_first_is_asked_for_no_more_when_its_block_is(store: MemoryStore) -> None:
    large, small = ("a", 70_000, MIN_PART_BYTES + 5), ("a", 3 * MIB, MIN_PART_BYTES - 1)
    behind = list[Store]()

    def make(given: Store) -> ShardReader:
        behind.append(given)
        return Behind(given)

    with contextlib.closing(BypassReader(store, make)) as reader:
        reader.announce([large, small])
        reader.read("a", [large[1:], small[1:]])
        reader.announce([("a", 0, 10)])
    store.reads.clear()
    assert in_pieces(behind[0], "a", 0, 4 * MIB) == store.objects["a"]
    assert store.bytes_read == 4 * MIB - large[2]
    assert in_pieces(behind[0], "a", 0, 4 * MIB) == store.objects["a"]
    assert store.bytes_read == 2 * 4 * MIB - large[2]  # it was forgotten


def test_a_read_that_a_store_begins_anew_is_given_whole(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, original = PartlyFetchedStore(store), store.get_pieces
    begun.add("a", MIN_PART_BYTES, memoryview(store.objects["a"])[MIN_PART_BYTES : 2 * MIN_PART_BYTES])
    times = list[int]()

    def twice(key: str, offset: int, buffer: memoryview, take: Any) -> None:
        times.append(offset)
        original(key, offset, buffer[:10], take)
        original(key, offset, buffer, take)

    monkeypatch.setattr(store, "get_pieces", twice)
    assert in_pieces(begun, "a", 0, MIB) == store.objects["a"][:MIB]
    assert times == [0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), max_size=4),
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 16)), min_size=1, max_size=5),
)
def test_blocks_are_put_together_of_whatever_is_there(
    there: list[tuple[int, int]], reads: list[tuple[int, int]]
) -> None:
    unit = MIN_PART_BYTES // 2
    whole = random.Random(3).randbytes(32 * unit)
    begun = PartlyFetchedStore(store := MemoryStore(a=whole))
    for first, length in there:
        begun.add("a", first * unit, memoryview(whole)[first * unit : (first + length) * unit])
    for first, length in reads:
        assert in_pieces(begun, "a", first * unit, length * unit) == whole[first * unit : (first + length) * unit]
    assert store.bytes_read <= sum(length for _, length in reads) * unit


def in_pieces(store: Store, key: str, offset: int, length: int) -> bytes:
    """What a cache would write; every piece goes on where the last one ended, or begins anew."""
    found = bytearray()

    def take(at: int, piece: memoryview) -> None:
        if at == offset:
            found.clear()
        assert at == offset + len(found)
        found.extend(piece)

    store.get_pieces(key, offset, memoryview(bytearray(length)), take)
    return bytes(found)
