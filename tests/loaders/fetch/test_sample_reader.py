"""Where the bytes of samples come from: right, or an error, whatever lies between the store and the reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from headrace.dataio.cache.readers.base import Read, open_local_reader
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError
from headrace.dataio.shards import member_reader
from headrace.dataio.shards.pieces import Hasher
from headrace.dataio.shards.sample import Files, Member, Sample
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from headrace.loaders.fetch import sample_reader as source_module
from headrace.loaders.fetch.sample_reader import AT_ONCE, SampleReader, StoreReader, spans
from tests.support.denied import denied

FIRST, SECOND = b"first" * 1000, b"second" * 70
SHARD = bytes(512) + FIRST + bytes(700) + SECOND + bytes(512)


def files_of(first: bytes = FIRST, second: bytes = SECOND) -> Files:
    places = (512, 512 + len(FIRST) + 700)
    each = zip(places, (first, second), strict=True)
    return Files("shard", [Member("bin", at, len(data), xxhash.xxh3_64_intdigest(data)) for at, data in each])


class CorruptingReader(StoreReader):
    """A cache whose disk changed a byte of everything."""

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        super().read_into(key, pieces)
        for _, buffer in pieces:
            buffer[3] ^= 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        opened.put("shard", SHARD)
        yield opened


@pytest.fixture
def source(store: Store) -> Iterator[SampleReader]:
    made = SampleReader(open_local_reader(store), store)
    yield made
    made.close()


def test_all_files_of_a_sample_come_one_after_the_other(source: SampleReader) -> None:
    memory = memoryview(bytearray(len(FIRST) + len(SECOND) + 5))
    assert source.fetch_into(files_of(), memory) == len(FIRST) + len(SECOND)
    assert bytes(memory) == FIRST + SECOND + bytes(5)
    assert source.fetch_into(Files("shard", []), memory) == 0


def test_what_a_cache_got_wrong_is_read_from_the_store(store: Store) -> None:
    memory = memoryview(bytearray(len(FIRST) + len(SECOND)))
    SampleReader(CorruptingReader(store), store).fetch_into(files_of(), memory)
    assert bytes(memory) == FIRST + SECOND


class FlippingStore(Wrapper):
    """A store whose connections change a bit in the first `times` reads, and that counts new connections."""

    def __init__(self, inner: Store, times: int) -> None:
        super().__init__(inner)
        self.times, self.fired, self.connected = times, 0, 0

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().get_ranges_into(key, ranges)
        if self.fired < self.times:
            self.fired += 1
            ranges[0][1][3] ^= 1

    def open_file(self, key: str) -> int | None:
        return None

    def reconnect(self) -> None:
        self.connected += 1


def member(size: int | None = None) -> Member:
    """The first file, in pieces of `size`."""
    hasher = Hasher(size)
    hasher.update(FIRST)
    return Member("bin", 512, len(FIRST), hasher.whole(), hasher.pieces())


@pytest.mark.parametrize("size", [None, 4096])
def test_bytes_that_were_wrong_twice_are_looked_at_later_by_another_connection(
    store: Store, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "LATER", 0.01)
    sample = Sample(0, "a", "shard", (member(size),), 0.0)
    partial = {} if size is None else {"bin": ((0, 1),)}
    for times, right in ((1, True), (2, True), (3, False)):
        flipping = FlippingStore(store, times)
        made = SampleReader(StoreReader(flipping), flipping)

        def read(made: SampleReader = made) -> bytes:
            return bytes(made.fetch(sample, {"bin": partial.get("bin")})["bin"][0:4096])

        if right:
            assert read() == FIRST[:4096]
        else:
            with pytest.raises(CorruptionError, match="not those that were packed"):
                read()
        assert (flipping.fired, flipping.connected) == (times, int(times > 1))


@pytest.mark.parametrize("files", [files_of(first=b"other" * 1000), files_of(second=b"sec0nd" * 70)])
def test_bytes_that_are_not_those_that_were_packed_are_damage(source: SampleReader, files: Files) -> None:
    with pytest.raises(CorruptionError, match=r"shard: the \d+ bytes at \d+ are not those that were packed"):
        source.fetch_into(files, memoryview(bytearray(len(SHARD))))


@pytest.mark.parametrize(("shard", "offset"), [("gone", 0), ("shard", len(SHARD) - 4)])
def test_a_missing_or_short_shard_is_damage(source: SampleReader, shard: str, offset: int) -> None:
    with pytest.raises(CorruptionError, match=shard):
        source.fetch_into(Files(shard, [Member("bin", offset, 9, 0)]), memoryview(bytearray(9)))


def test_a_shard_that_may_not_be_read_is_trouble_and_not_damage(store: Store, tmp_path: Path) -> None:
    """Otherwise, credentials that expire would quarantine samples permanently."""
    sample = Sample(0, "a", "shard", (Member("bin", 512, len(FIRST), files_of().members[0].xxh3),), 0.0)
    source = SampleReader(StoreReader(store), store)
    with denied(tmp_path / "shard"):
        with pytest.raises(AccessDeniedError, match="shard: Permission denied"):
            source.fetch_into(files_of(), memoryview(bytearray(len(SHARD))))
        with pytest.raises(AccessDeniedError, match="shard: Permission denied"):
            source.fetch(sample, {"bin": None})
        with pytest.raises(AccessDeniedError, match="shard: Permission denied"):
            member_reader.read_member(store, sample, "bin")


@pytest.mark.parametrize("bad", [files_of(second=b"sec0nd" * 70), Files("gone", [Member("bin", 0, 9, 0)])])
def test_of_many_reads_the_first_are_made_up_to_one_with_which_something_is_wrong(
    source: SampleReader, bad: Files
) -> None:
    memories = [memoryview(bytearray(files_of().size)) for _ in range(4)]
    whole = source.fetch_first(list(zip([files_of(), files_of(), bad, files_of()], memories, strict=True)))
    assert whole == 2
    assert [bytes(memory) for memory in memories[:2]] == [FIRST + SECOND] * 2
    assert source.fetch_first([(files_of(), memories[3])]) == 1


def test_of_many_reads_no_more_are_prepared_than_some_tens_at_once(store: Store) -> None:
    asked = list[int]()

    class CountingReader(StoreReader):
        def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
            asked.append(len(reads))
            return super().read_each(reads)

    many = AT_ONCE + 3
    memories = [memoryview(bytearray(files_of().size)) for _ in range(many)]
    assert SampleReader(CountingReader(store), store).fetch_first([(files_of(), memory) for memory in memories]) == many
    assert asked == [AT_ONCE, 3]
    assert all(bytes(memory) == FIRST + SECOND for memory in memories)
    wanted = [(files_of(), memory) for memory in memories[:-1]]
    assert (
        SampleReader(CountingReader(store), store).fetch_first([*wanted, (files_of(second=b"x" * 420), memories[-1])])
        == many - 1
    )


def test_files_side_by_side_are_announced_as_one_range_and_others_each_by_itself() -> None:
    near, far = Member("a", 512, 1000, 0), Member("b", 2048, 0, 0)
    assert spans(Files("s", [far, near])) == [("s", 512, 1536)]
    assert spans(Files("s", [near, Member("c", 9000, 5, 0)])) == [("s", 512, 1000), ("s", 9000, 5)]
