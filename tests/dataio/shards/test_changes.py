"""Versions made from versions, compared with plain sets; and nothing is ever rewritten."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from headrace.dataio.core.errors import ConflictError, CorruptionError, NotFoundError, UsageError
from headrace.dataio.shards import changes
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history, tags
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.indexed_datasets import SHARD_BYTES, make, sample

pytestmark = pytest.mark.slow


def opened(path: Path, numbers: range, **how: object) -> Dataset:
    store = open_store(path)
    make(store, numbers, **how)  # type: ignore[arg-type]
    return Dataset(store)


def keys(numbers: object) -> list[str]:
    return [f"k{n:05}" for n in numbers]  # type: ignore[attr-defined]


def append(store: Store, numbers: list[int], name: str) -> versions.VersionDocument:
    """What `append` does, without media."""
    shard = f"shards/appended-{name}.tar"
    rows = [sample(n, shard, place) for place, n in enumerate(numbers)]

    def build(base: versions.VersionDocument) -> versions.VersionDocument:
        return versions.new_document(
            base.name,
            (*base.shards, versions.Shard(key=shard, size=SHARD_BYTES, samples=len(rows))),
            (*base.index, *part_writer.store_parts(store, rows, len(base.index))),
            version=0,
            parent=base.version,
            message=f"appended {name}",
            mounts=base.mounts,
        )

    return history.commit(store, build)


# --- save


def test_a_saved_view_is_a_version_that_is_not_the_newest(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(60))
    view = dataset.where("duration >= 20")
    saved = view.save("long")
    assert (saved.version, saved.document.parent, saved.document.message) == (2, 1, "long")
    assert list(saved) == list(view) == [*Dataset(tmp_path, 2)]
    assert Dataset(tmp_path).version == 1
    assert saved.lineage == view.lineage
    assert saved.total_bytes == view.total_bytes
    assert (saved.lineage.sources[0].version, saved.lineage.where) == (1, ("duration >= 20",))
    assert list(saved.where("height > 700")) == list(view.where("height > 700"))
    assert Dataset(tmp_path).remove(["k00000"]).version == 3
    assert Dataset(tmp_path).version == 3


def test_only_views_with_samples_are_saved(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(10))
    with pytest.raises(UsageError, match="stored already"):
        dataset.save()
    with pytest.raises(UsageError, match="no sample meets duration < 0"):
        dataset.where("duration < 0").save()
    assert history.list_versions(dataset.store) == [1]


# --- remove


def test_removing_leaves_every_object_and_older_version_as_it_was(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(60))
    before = {info.key: dataset.store.get(info.key) for info in dataset.store.list()}
    made = dataset.remove(keys([0, 24, 25, 59]), message="bad ones")
    left = [n for n in range(60) if n not in (0, 24, 25, 59)]
    assert [s.key for s in made] == keys(left)
    assert [s.id for s in made] == list(range(56))
    assert (made.document.message, made.lineage.operation) == ("bad ones", "remove")
    after = {info.key for info in dataset.store.list()}
    assert {key: dataset.store.get(key) for key in before} == before
    assert {key.rpartition(".")[2] for key in after - set(before)} == {"kept", "json"}
    assert len(Dataset(tmp_path, 1)) == 60
    again = made.remove(where="key > 'k00049'")
    assert [s.key for s in again] == keys(n for n in left if n <= 49)
    assert len(again.document.index) == 2  # the third has no samples left


def test_keys_that_nothing_has_are_named_and_nothing_is_removed(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(10))
    with pytest.raises(NotFoundError, match=r"no sample 'absent', 'none'.*nothing was removed"):
        dataset.remove(["k00001", "absent", "none"])
    with pytest.raises(UsageError, match="no sample is to be removed"):
        dataset.remove(where="duration < 0")
    with pytest.raises(UsageError, match="all samples are to be removed"):
        dataset.remove(where="true")
    with pytest.raises(UsageError, match="either keys or where"):
        dataset.remove()
    with pytest.raises(UsageError, match="not one string"):
        dataset.remove("k00001")
    with pytest.raises(UsageError, match="a view cannot be changed"):
        dataset.where("duration > 3").remove(["k00004"])
    assert history.list_versions(dataset.store) == [1]


def test_racing_removals_all_happen(tmp_path: Path) -> None:
    opened(tmp_path, range(60))
    barrier = threading.Barrier(6)

    def take(n: int) -> None:
        with Dataset(tmp_path) as dataset:
            barrier.wait()
            dataset.remove(keys(range(n, 60, 10)))

    threads = [threading.Thread(target=take, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dataset = Dataset(tmp_path)
    assert dataset.version == 7
    assert [s.key for s in dataset] == keys(n for n in range(60) if n % 10 >= 6)


def test_a_sample_that_another_removed_first_is_a_conflict_naming_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(tmp_path, range(30))
    original, fired = versions.new_document, list[int]()

    def first_the_other(*args: object, **how: object) -> versions.VersionDocument:
        if not fired:
            fired.append(1)
            Dataset(tmp_path).remove(["k00003"], message="mine")
        return original(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(versions, "new_document", first_the_other)
    with pytest.raises(ConflictError, match=r"another writer made version 2 \(mine\).*no sample 'k00003'"):
        dataset.remove(["k00003", "k00004"])
    assert fired
    assert len(Dataset(tmp_path)) == 29


def test_damage_to_a_bitmap_is_found(tmp_path: Path) -> None:
    made = opened(tmp_path, range(30)).remove(["k00003"])
    bitmap = made.document.index[0].bitmap
    assert bitmap is not None
    data = bytearray(made.store.get(bitmap.key))
    data[bitmap.offset + 5] ^= 4
    made.store.put(bitmap.key, data)
    with pytest.raises(CorruptionError, match="bitmap of its rows"):
        Dataset(tmp_path)
    made.store.delete_many([bitmap.key])
    with pytest.raises(CorruptionError, match="missing or short"):
        Dataset(tmp_path)


# --- merge


def test_a_merge_reads_other_datasets_where_they_are(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "one", range(30)), opened(tmp_path / "two", range(30, 50), name="two")
    before = sum(1 for _ in two.store.list())
    written = sum(info.size for info in one.store.list())
    made = one.merge(two.where("duration < 15").save(), message="both")
    expected = [*range(30), *(n for n in range(30, 50) if n % 30 < 15)]
    assert [s.key for s in made] == keys(expected)
    assert made.sample(30).shard.startswith(f"mounts/{made.document.mounts[0].name}/shards/")
    assert [(s.name, s.version) for s in made.lineage.sources] == [("two", 2)]
    assert sum(1 for _ in two.store.list()) == before + 2  # the saved view: a document and what is left
    assert sum(
        info.size for info in Dataset(tmp_path / "one", trust_mounts=True).store.list("")
    ) < written + 8000 + sum(info.size for info in two.store.list())
    made.check()
    # what is merged may itself be merged, as may a view that was not saved
    three = opened(tmp_path / "three", range(100, 110), name="three").merge(made.where("key > 'k00020'"))
    assert [s.key for s in three] == keys([*range(100, 110), *(n for n in expected if n > 20)])
    assert len(three.document.mounts) == 2
    three.check()
    with Dataset(tmp_path / "three", trust_mounts=True) as again:
        assert [s.key for s in again] == [s.key for s in three]


def test_a_merged_dataset_cannot_give_another_location_the_name_of_a_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = opened(tmp_path / "one", range(30)), opened(tmp_path / "two", range(30, 50), name="two")
    made, three = one.merge(two), opened(tmp_path / "three", range(60, 70), name="three")
    original, forged = changes._merge_input, msgspec.structs.replace(made.document.mounts[0], url="s3://elsewhere")
    monkeypatch.setattr(
        changes, "_merge_input", lambda target, other: dataclasses.replace(original(target, other), mounts=(forged,))
    )
    with pytest.raises(ConflictError, match="two locations the name"):
        made.merge(three)


def test_equal_keys_of_two_datasets_are_named(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "one", range(30)), opened(tmp_path / "two", range(28, 40), name="two")
    with pytest.raises(ConflictError, match="two of the merged datasets hold 'k00028', 'k00029'"):
        one.merge(two)
    assert len(one.merge(two.where("key > 'k00029'"))) == 40


def test_versions_of_one_dataset_merge_to_the_union_of_their_samples(tmp_path: Path) -> None:
    first = opened(tmp_path, range(60))
    low, high = first.where("key < 'k00020'").save(), first.where("key > 'k00010' and key < 'k00030'").save()
    removed = first.remove(where="key < 'k00040'")
    both = removed.merge(low, high)
    assert [s.key for s in both] == keys([*range(30), *range(40, 60)])
    assert both.total_bytes == sum(m.length for s in both for m in s.members)
    both.check()
    assert [s.key for s in both.merge(first)] == keys(range(60))


def test_merging_nothing_or_into_a_view_is_an_error(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(10))
    with pytest.raises(UsageError, match="at least one"):
        dataset.merge()
    with pytest.raises(UsageError, match="a view cannot be changed"):
        dataset.where("true").merge(dataset)


@pytest.mark.s3
def test_a_dataset_in_a_bucket_merges_one_on_disk_and_removes(s3_url: str, tmp_path: Path) -> None:
    opened(tmp_path / "two", range(10, 20), name="two")
    with open_store(s3_url) as store:
        make(store, range(10))
    with Dataset(s3_url, trust_mounts=True) as dataset, Dataset(tmp_path / "two") as two:
        dataset.merge(two)
    with Dataset(s3_url, trust_mounts=True) as dataset:
        dataset.remove(["k00000", "k00015"]).tag("v")
    with Dataset(s3_url, "v", trust_mounts=True) as dataset:
        assert list(dataset.keys) == keys(n for n in range(20) if n not in (0, 15))


# --- tags, log


def test_a_tag_opens_its_version_for_ever(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(30))
    dataset.tag("release-1")
    dataset.tag("release-1")
    newer = dataset.remove(["k00003"])
    with pytest.raises(ConflictError, match="'release-1' names version 1 since"):
        newer.tag("release-1")
    assert len(Dataset(tmp_path, "release-1")) == 30
    assert len(Dataset(tmp_path, version="2")) == 29
    with pytest.raises(NotFoundError, match=r"no version tagged 'release-2' \(tags: release-1\)"):
        Dataset(tmp_path, "release-2")
    with pytest.raises(UsageError, match="a view has no version"):
        dataset.where("true").tag("x")
    for name in ("", "7", "1a", "a/b", "../x", "a b", "x" * 129):
        with pytest.raises(UsageError, match="is not a valid tag"):
            dataset.tag(name)
    for name in ("a/b", "../x"):
        with pytest.raises(NotFoundError):
            Dataset(tmp_path, name)


def test_a_view_is_not_saved_with_a_tag_that_is_taken(tmp_path: Path) -> None:
    with opened(tmp_path, range(20)) as dataset:
        saved = dataset.where("number < 5").save("few", tag="few")
        assert (len(saved), saved.version) == (5, 2)
        assert Dataset(tmp_path, "few").version == 2
        with pytest.raises(ConflictError, match="'few' names version 2"):
            dataset.where("number < 9").save("more", tag="few")
        with pytest.raises(UsageError, match="not a valid tag"):
            dataset.where("number < 9").save("more", tag="9x")
        assert sorted(history.list_versions(dataset.store)) == [1, 2], "the refused calls made no version"


def test_a_tag_of_a_version_that_was_replaced_is_refused(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(10))
    dataset.tag("release-1")
    document = versions.new_document(
        "set", dataset.document.shards, dataset.document.index, version=1, parent=None, message="forged"
    )
    dataset.store.put(versions.version_key(1), versions.encode(document))
    with pytest.raises(CorruptionError, match="not the one that was tagged"):
        Dataset(tmp_path, "release-1")
    dataset.store.put("tags/release-1.json", b"{}")
    with pytest.raises(CorruptionError, match=r"tags/release-1\.json"):
        Dataset(tmp_path, "release-1")


def test_the_log_names_every_version_and_its_operation(tmp_path: Path) -> None:
    dataset = opened(tmp_path, range(30))
    dataset.where("duration > 3").save("view")
    dataset.remove(["k00003"], message="bad").tag("good")
    entries = list(tags.list_described(dataset.store))
    assert [(e.version, e.parent, e.trunk, e.message, e.samples, e.tags) for e in entries] == [
        (3, 1, True, "bad", 29, ("good",)),
        (2, 1, False, "view", 26, ()),
        (1, None, True, "made", 30, ()),
    ]
    assert tags.names(dataset.store) == ["good"]


# --- diff


def test_a_diff_names_added_removed_and_changed_samples(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rows = make(store, range(30))
    first = Dataset(store)
    changed: list[Sample] = [
        sample(1, "shards/x.tar", 0, text="another"),
        sample(2, "shards/x.tar", 1, fields={}),
        sample(3, "shards/x.tar", 2),  # the same, elsewhere
        sample(4, "shards/x.tar", 3, members=rows[5].members),
        sample(40, "shards/x.tar", 4),
    ]
    changed = [
        Sample(**{f: getattr(s, f) for f in s.__struct_fields__} | {"members": _at(s, n)})
        for n, s in enumerate(changed)
    ]
    shards = (versions.Shard(key="shards/x.tar", size=SHARD_BYTES, samples=5),)
    stored = tuple(part_writer.store_parts(store, changed, 0))
    history.commit(
        store, lambda b: versions.new_document("set", shards, stored, version=0, parent=b.version, message="")
    )
    with first.diff(Dataset(store)) as found:
        assert [(c.kind, c.key) for c in found] == [
            ("added", "k00040"),
            *(("removed", key) for key in keys([0, *range(5, 30)])),
            *(("changed", key) for key in keys([1, 2, 4])),
        ]
        assert (found.added, found.removed, found.changed, found.unchanged) == (1, 26, 3, 1)
        assert found.keys("changed") == keys([1, 2, 4])
    with first.diff(first) as nothing:
        assert not nothing
        assert (nothing.unchanged, list(nothing)) == (30, [])


def _at(s: Sample, place: int) -> object:
    from msgspec.structs import replace

    return tuple(replace(m, offset=512 + 4096 * place) for m in s.members)


# --- everything, against sets


class Versions(RuleBasedStateMachine):
    """Appends, removals, merges, tags and views at random; every version must hold what plain sets say."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix="headrace-")
        self.root = Path(self.folder.name)
        self.next, self.others = 1000, 0
        self.model: dict[int, list[int]] = {}
        self.tags: dict[str, int] = {}
        self.newest = 1

    @initialize(count=st.integers(1, 40), per_shard=st.integers(1, 12), per_part=st.integers(1, 30))
    def begin(self, count: int, per_shard: int, per_part: int) -> None:
        self.store = open_store(self.root / "main")
        make(self.store, range(count), per_shard=per_shard, per_part=per_part)
        self.model[1] = list(range(count))

    def made(self, version: int, numbers: list[int]) -> None:
        assert version == max(self.model) + 1
        self.model[version], self.newest = numbers, version

    @rule(count=st.integers(1, 8))
    def append(self, count: int) -> None:
        numbers = list(range(self.next, self.next + count))
        self.next += count
        document = append(self.store, numbers, str(self.next))
        self.made(document.version, self.model[self.newest] + numbers)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        there = self.model[self.newest]
        gone = set(data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=5)))
        if len(gone) == len(there):
            return
        self.made(
            Dataset(self.store, trust_mounts=True).remove(keys(gone)).version, [n for n in there if n not in gone]
        )

    @rule(modulus=st.integers(2, 5), rest=st.integers(0, 4))
    def remove_where(self, modulus: int, rest: int) -> None:
        there = self.model[self.newest]
        left = [n for n in there if n % modulus != rest]
        if left and len(left) < len(there):
            made = Dataset(self.store, trust_mounts=True).remove(where=f"number % {modulus} = {rest}")
            self.made(made.version, left)

    @rule(modulus=st.integers(1, 4), data=st.data())
    def save(self, modulus: int, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.model)))
        chosen = [n for n in self.model[version] if n % modulus == 0]
        view = Dataset(self.store, version, trust_mounts=True).where(f"number % {modulus} = 0")
        assert [s.key for s in view] == keys(chosen)
        if chosen:
            assert view.save().version == max(self.model) + 1
            self.model[max(self.model) + 1] = chosen

    @rule(data=st.data())
    def merge_a_version(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.model)))
        made = Dataset(self.store, trust_mounts=True).merge(Dataset(self.store, version, trust_mounts=True))
        both = {*self.model[self.newest], *self.model[version]}
        assert {s.key for s in made} == set(keys(both))
        self.made(made.version, [int(s.key[1:]) for s in made])

    @rule(count=st.integers(1, 8), modulus=st.integers(1, 2))
    def merge_another(self, count: int, modulus: int) -> None:
        if self.others == 4:
            return
        self.others += 1
        numbers = range(self.next, self.next + count)
        self.next += count
        other = opened(self.root / str(self.others), numbers, name=f"o{self.others}", per_shard=3)
        made = Dataset(self.store, trust_mounts=True).merge(
            other.where(f"number % {modulus} = 0") if modulus > 1 else other
        )
        self.made(made.version, self.model[self.newest] + [n for n in numbers if n % modulus == 0])

    @rule(data=st.data(), name=st.sampled_from("abc"))
    def tag(self, data: st.DataObject, name: str) -> None:
        version = data.draw(st.sampled_from(sorted(self.model)))
        if self.tags.setdefault(name, version) == version:
            Dataset(self.store, version, trust_mounts=True).tag(name)
        else:
            with pytest.raises(ConflictError):
                Dataset(self.store, version, trust_mounts=True).tag(name)

    @rule(data=st.data())
    def diff(self, data: st.DataObject) -> None:
        a, b = (data.draw(st.sampled_from(sorted(self.model))) for _ in range(2))
        with Dataset(self.store, a, trust_mounts=True).diff(Dataset(self.store, b, trust_mounts=True)) as found:
            old, new = set(self.model[a]), set(self.model[b])
            assert found.keys("added") == keys(sorted(new - old))
            assert found.keys("removed") == keys(sorted(old - new))
            assert (found.changed, found.unchanged) == (0, len(old & new))

    @invariant()
    def every_version_is_unchanged(self) -> None:
        if not self.model:
            return
        for version, numbers in self.model.items():
            dataset = Dataset(self.store, version, trust_mounts=True)  # which checks it
            assert list(dataset.keys) == keys(numbers)
            assert dataset.total_bytes == sum(100 + n % 3000 for n in numbers)
        assert Dataset(self.store, trust_mounts=True).version == self.newest
        for name, version in self.tags.items():
            assert Dataset(self.store, name, trust_mounts=True).version == version

    def teardown(self) -> None:
        self.folder.cleanup()


def test_any_sequence_of_changes_gives_the_same_as_sets() -> None:
    run_state_machine_as_test(Versions, settings=settings(max_examples=5, stateful_step_count=8, deadline=None))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_many_sequences_of_changes_give_the_same_as_sets(part: int) -> None:
    run_state_machine_as_test(Versions, settings=settings(max_examples=30, stateful_step_count=15, deadline=None))
