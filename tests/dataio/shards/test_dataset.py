"""An open version: its lookups, and the damage that it refuses to open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.dataio.core.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.shards.ingest.index_tars import index
from headrace.dataio.shards.ingest.pack import append, pack
from headrace.dataio.shards.query import part_writer as parts_module
from headrace.dataio.shards.query.tables import Tables
from headrace.dataio.shards.sample import Files, Member, Sample
from headrace.dataio.shards.verify.dataset_check import verify
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.store.base import Store

SHARDS = {"shards/00000000-aa.tar": 10_000, "shards/00000001-bb.tar": 5_000}


def sample(number: int, shard: int = 0, **changes: object) -> Sample:
    key = list(SHARDS)[shard]
    given = {"key": f"k{number}", "shard": key, "members": (Member("txt", 512 * (number + 1), 4, 7),), "duration": 0.0}
    return Sample(id=number, **(given | changes))  # type: ignore[arg-type]


SAMPLES = [sample(0), sample(1, text="one"), sample(2, shard=1), sample(3, shard=1, fields={"a": 1})]


def write(
    store: Store, parts: list[list[Sample]] | None = None, version: int = 1, **changes: object
) -> versions.VersionDocument:
    stored = []
    for number, part in enumerate(parts if parts is not None else [SAMPLES[:2], SAMPLES[2:]]):
        stored += parts_module.store_parts(store, part, number)
    shards = [versions.Shard(key=key, size=size, samples=2) for key, size in SHARDS.items()]
    document = versions.new_document("set", tuple(shards), tuple(stored), version=version, parent=None, message="")
    document = msgspec.structs.replace(document, **changes)
    history.publish(store, document)
    return document


@pytest.fixture
def posix(tmp_path: Path) -> Store:
    from headrace.dataio.store.open import open_store

    return open_store(tmp_path / "store")


def test_samples_are_numbered_and_answered_by_number_key_and_iteration(posix: Store) -> None:
    write(posix)
    dataset = Dataset(posix)
    assert len(dataset) == 4
    assert list(dataset) == SAMPLES
    assert dataset.sample(3) == SAMPLES[3]
    assert dataset.samples([2, 0, 2]) == [SAMPLES[2], SAMPLES[0], SAMPLES[2]]
    assert dataset.samples([]) == []
    assert dataset.find("k1") == SAMPLES[1]
    assert list(dataset.keys) == dataset.keys[:] == ["k0", "k1", "k2", "k3"]
    assert (dataset.keys[3], len(dataset.keys), "k2" in dataset.keys) == ("k3", 4, True)
    assert (dataset.version, dataset.name, dataset.total_bytes) == (1, "set", 16)
    assert dataset.url == posix.location.url
    assert repr(dataset) == f"Dataset({dataset.url!r}, version=1, samples=4)"


def test_the_positions_of_files_are_read_without_their_properties(posix: Store) -> None:
    several = tuple(
        Member(ext, 4096 + offset, length, 2**64 - length) for ext, offset, length in (("a", 0, 9), ("b", 512, 3))
    )
    write(posix, [[SAMPLES[0], sample(1, members=several)], SAMPLES[2:]])
    dataset = Dataset(posix)
    assert dataset.files([3, 1, 0, 1]) == [
        Files(SAMPLES[3].shard, list(SAMPLES[3].members)),
        Files(SAMPLES[1].shard, list(several)),
        Files(SAMPLES[0].shard, list(SAMPLES[0].members)),
        Files(SAMPLES[1].shard, list(several)),
    ]
    assert dataset.files([]) == []
    assert [found.shard for found in dataset.where("key = 'k2'").files([0])] == [SAMPLES[2].shard]


def test_columns_in_which_no_sample_has_a_value_are_not_looked_up(posix: Store) -> None:
    tables = Tables(posix, write(posix), remaining_rows=lambda _: None, samples=4)
    assert [*tables.samples(0, np.array([1]), [1]), *tables.samples(1, np.array([1]), [3])] == [SAMPLES[1], SAMPLES[3]]
    required = ["key", "shard", "bytes", "duration"]
    assert tables.group(0, 0).column_names == [*required, "text", "members"]
    assert tables.group(1, 0).column_names == [*required, "fields", "members"]


def test_the_digest_is_that_of_the_version_document(posix: Store) -> None:
    write(posix)
    assert Dataset(posix).digest == digest(posix.get("versions/00000001.json"))


def test_numbers_and_keys_that_do_not_exist_are_errors(posix: Store) -> None:
    write(posix)
    dataset = Dataset(posix)
    for number in (4, -1):
        with pytest.raises(UsageError, match=f"no sample {number}"):
            dataset.sample(number)
        with pytest.raises(UsageError, match=f"no sample {number}"):
            dataset.files([0, number])
    with pytest.raises(NotFoundError, match="no sample 'k9'"):
        dataset.find("k9")


def test_the_newest_version_is_opened_unless_one_is_named(posix: Store) -> None:
    write(posix)
    write(posix, version=12, parent=1)
    posix.put("versions/notes.txt", b"not a version")
    assert Dataset(posix).version == 12
    assert Dataset(posix, 1).version == 1
    with pytest.raises(NotFoundError, match=r"no version 2 \(it has 1, 12\)"):
        Dataset(posix, 2)


@pytest.mark.parametrize("version", [None, 1])
def test_no_dataset_is_an_error_that_says_where(posix: Store, version: int | None) -> None:
    history.claim(posix, "set")  # a packer that was killed leaves only this
    with pytest.raises(NotFoundError, match="no dataset at file://"):
        Dataset(posix, version)


def test_one_of_two_writers_of_a_version_wins_and_the_other_gets_an_error(posix: Store) -> None:
    write(posix)
    with pytest.raises(ConflictError, match="another writer made version 1, 4 samples"):
        write(posix)


def test_a_damaged_index_part_is_named(posix: Store) -> None:
    part = write(posix).index[1]
    whole = posix.get(part.key)
    assert part.pages is not None
    for at in (100, part.pages.offset + 5, part.pages.end - 5):
        posix.put(part.key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptionError, match=rf"{part.key}: .*BLAKE3"):
            Dataset(posix)
    posix.put(part.key, whole)
    Dataset(posix)


def test_a_part_of_another_digest_is_damage(posix: Store) -> None:
    part = write(posix).index[1]
    posix.put(part.key, bytes(part.size))
    with pytest.raises(CorruptionError, match=rf"{part.key}: .*BLAKE3"):
        Dataset(posix)


def test_a_missing_index_part_is_damage(posix: Store) -> None:
    key = write(posix).index[0].key
    posix.delete_many([key])
    with pytest.raises(CorruptionError, match=rf"{key} is missing"):
        Dataset(posix)


def test_a_small_index_part_is_read_in_one_request(posix: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    document, asked, real = write(posix), list[str](), posix.get_ranges_into

    def counted(key: str, ranges: Any) -> None:
        asked.append(key)
        real(key, ranges)

    monkeypatch.setattr(posix, "get_ranges_into", counted)
    keys = [part.key for part in document.index]
    Dataset(posix).table  # noqa: B018
    assert asked == keys * 2  # as tables, and their pages
    asked.clear()
    with Dataset.open_lazy(posix.location.url) as dataset:
        monkeypatch.setattr(dataset.store, "get_ranges_into", counted)
        assert list(dataset) == dataset.samples(range(4)) == SAMPLES
    assert asked == keys


def test_opened_at_once_a_missing_part_shows_when_a_sample_of_it_is_asked_for(posix: Store) -> None:
    posix.delete_many([write(posix).index[1].key])
    with Dataset.open_lazy(posix.location.url) as dataset:
        assert (len(dataset), dataset.sample(0)) == (4, SAMPLES[0])
        for ask in (lambda: dataset.sample(2), dataset.check):
            with pytest.raises(CorruptionError, match="missing"):
                ask()
    with pytest.raises(CorruptionError, match="missing"):
        Dataset(posix)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[SAMPLES[1], SAMPLES[0]], SAMPLES[2:]], "not in the order"),
        ([SAMPLES[2:], SAMPLES[:2]], "not in the order"),
        ([[SAMPLES[0], sample(1, key="k0")], SAMPLES[2:]], "same key"),
    ],
)
def test_an_order_that_is_not_that_of_the_numbers_is_refused(
    posix: Store, parts: list[list[Sample]], words: str
) -> None:
    write(posix, parts)
    with pytest.raises(CorruptionError, match=words):
        Dataset(posix)


@pytest.mark.parametrize("changes", [{"samples": 5}, {"version": 2}, {"shards": ()}])
def test_a_document_that_contradicts_itself_is_refused(posix: Store, changes: dict[str, object]) -> None:
    document = msgspec.structs.replace(write(posix), **changes)
    posix.put("versions/00000001.json", versions.encode(document))
    with pytest.raises(CorruptionError, match="contradicts itself"):
        Dataset(posix)


@pytest.mark.parametrize("key", ["../a.tar", "/etc/passwd", "shards/a\x1b[2J.tar", "", "a" * 5000])
def test_a_document_with_an_impossible_key_is_refused_as_damaged(posix: Store, key: str) -> None:
    document = write(posix)
    shards = (msgspec.structs.replace(document.shards[0], key=key), *document.shards[1:])
    posix.put("versions/00000001.json", versions.encode(msgspec.structs.replace(document, shards=shards)))
    with pytest.raises(CorruptionError, match="is not an object's key") as refused:
        Dataset(posix)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b"[" * 200_000])
def test_a_document_that_is_none_is_refused(posix: Store, data: bytes) -> None:
    posix.put("versions/00000001.json", data)
    with pytest.raises(CorruptionError, match=r"not a version document|does not end in its digest"):
        Dataset(posix)


def test_a_newer_format_is_refused_with_the_next_step(posix: Store) -> None:
    write(posix)
    document = json.loads(posix.get("versions/00000001.json"))
    posix.put("versions/00000001.json", json.dumps(document | {"format": 3}).encode())
    with pytest.raises(UnsupportedError, match="upgrade"):
        Dataset(posix)


@pytest.mark.parametrize("number", [0, -1])
def test_a_format_that_never_existed_is_damage_and_no_upgrade_is_suggested(posix: Store, number: int) -> None:
    write(posix)
    document = json.loads(posix.get("versions/00000001.json"))
    posix.put("versions/00000001.json", json.dumps(document | {"format": number}).encode())
    with pytest.raises(CorruptionError, match=f"format {number}, which does not exist") as caught:
        Dataset(posix)
    assert "upgrade" not in caught.value.hint


def test_a_document_above_the_limit_is_not_written() -> None:
    shards = tuple(versions.Shard(key=f"shards/{i:08}-{'a' * 900}.tar", size=1, samples=0) for i in range(18_000))
    document = versions.new_document("set", shards, (), version=1, parent=None, message="")
    with pytest.raises(CapacityError, match="larger shards"):
        versions.encode(document)


@pytest.mark.parametrize(
    "call",
    [
        Dataset,
        verify,
        lambda store, **options: pack([], store, **options),
        lambda store, **options: append([], store, **options),
        lambda store, **options: index([], store, **options),
    ],
    ids=["Dataset", "verify", "pack", "append", "index"],
)
def test_storage_options_with_an_open_store_are_an_error(posix: Store, call: Callable[..., object]) -> None:
    write(posix)
    with pytest.raises(UsageError, match="storage_options go with a URL"):
        call(posix, storage_options={"endpoint_url": "http://127.0.0.1:1"})


def test_members_are_read_with_their_checksum(posix: Store, tmp_path: Path) -> None:
    write(posix)
    posix.put(SAMPLES[0].shard, bytes(10_000))
    dataset = Dataset(posix)
    with pytest.raises(CorruptionError, match=r"k0\.txt in .*checksum"):
        dataset.read(dataset.sample(0), "txt")
    with pytest.raises(CorruptionError, match="not what was packed"):
        dataset.read(dataset.sample(2), "txt")
    with pytest.raises(NotFoundError, match=r"no member 'mp4' \(it has txt\)"):
        dataset.read(dataset.sample(0), "mp4")
