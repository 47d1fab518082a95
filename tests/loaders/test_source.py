"""Where the bytes of samples come from: right, or an error, whatever lies between the store and the reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from dataio.cache.own import own_reader
from dataio.core.errors import AccessDeniedError, CorruptionError
from dataio.shards import members
from dataio.shards.contract import Files, Member, Sample
from dataio.store.contract import Store
from dataio.store.open import open_store
from loaders.samples.source import Source, StoreReader
from tests.denied import denied

FIRST, SECOND = b"first" * 1000, b"second" * 70
SHARD = bytes(512) + FIRST + bytes(700) + SECOND + bytes(512)


def files_of(first: bytes = FIRST, second: bytes = SECOND) -> Files:
    places = (512, 512 + len(FIRST) + 700)
    each = zip(places, (first, second), strict=True)
    return Files("shard", [(offset, len(data), xxhash.xxh3_64_intdigest(data)) for offset, data in each])


class Rotten(StoreReader):
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
def source(store: Store) -> Iterator[Source]:
    made = Source(own_reader(store), store)
    yield made
    made.close()


def test_all_files_of_a_sample_come_one_after_the_other(source: Source) -> None:
    memory = memoryview(bytearray(len(FIRST) + len(SECOND) + 5))
    assert source.fetch_into(files_of(), memory) == len(FIRST) + len(SECOND)
    assert bytes(memory) == FIRST + SECOND + bytes(5)
    assert source.fetch_into(Files("shard", []), memory) == 0


def test_what_a_cache_got_wrong_is_read_from_the_store(store: Store) -> None:
    memory = memoryview(bytearray(len(FIRST) + len(SECOND)))
    Source(Rotten(store), store).fetch_into(files_of(), memory)
    assert bytes(memory) == FIRST + SECOND


@pytest.mark.parametrize("files", [files_of(first=b"other" * 1000), files_of(second=b"sec0nd" * 70)])
def test_bytes_that_are_not_those_that_were_packed_are_damage(source: Source, files: Files) -> None:
    with pytest.raises(CorruptionError, match=r"shard: the \d+ bytes at \d+ are not those that were packed"):
        source.fetch_into(files, memoryview(bytearray(len(SHARD))))


@pytest.mark.parametrize("files", [Files("gone", [(0, 9, 0)]), Files("shard", [(len(SHARD) - 4, 9, 0)])])
def test_a_shard_that_is_gone_or_short_is_damage(source: Source, files: Files) -> None:
    with pytest.raises(CorruptionError, match=files.shard):
        source.fetch_into(files, memoryview(bytearray(9)))


def test_a_shard_that_may_not_be_read_is_trouble_and_not_damage(store: Store, tmp_path: Path) -> None:
    """Else credentials that run out would have samples quarantined for good."""
    sample = Sample(0, "a", "shard", (Member("bin", 512, len(FIRST), files_of().each[0][2]),), 0.0)
    source = Source(StoreReader(store), store)
    with denied(tmp_path / "shard"):
        with pytest.raises(AccessDeniedError, match="shard: Permission denied"):
            source.fetch_into(files_of(), memoryview(bytearray(len(SHARD))))
        with pytest.raises(AccessDeniedError, match="shard: Permission denied"):
            source.fetch(sample, ["bin"])
        with pytest.raises(AccessDeniedError, match="shard: Permission denied"):
            members.read(store, sample, "bin")
