"""A shared list of bad samples: in versions, agreed on without talking, and the same for a run that is restored later."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.dataio.cli import main
from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    MismatchError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from headrace.loaders import Clip, QuarantineList, VideoLoader
from headrace.loaders.quarantine import shared_list
from headrace.loaders.quarantine.shared_list import Entry, location_of
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

Make = Callable[..., VideoLoader]


def entry(number: int, **more: Any) -> Entry:
    return Entry(
        "s3://bucket/clips",
        shard="shards/0.tar",
        offset=number,
        key=f"key{number}",
        code="corruption",
        reason="it is bad",
        **more,
    )


# -- the list itself


def test_a_version_holds_all_that_was_added_up_to_it_and_never_changes(store: Store) -> None:
    one = QuarantineList(store)
    assert (one.newest(), one.entries(), one.digest(0)) == (0, [], "")
    assert one.append([entry(1), entry(2)]) == 1
    assert one.append([entry(2)]) == 1  # it is there
    before = one.digest(1)
    other = QuarantineList(store)
    assert other.append([entry(2), entry(3)]) == 2
    for each in (one, other):
        assert [e.offset for e in each.entries(1)] == [1, 2]
        assert [e.offset for e in each.entries()] == [1, 2, 3]
        assert each.digest(1) == before != each.digest(2)
    with pytest.raises(CorruptionError, match="has 2 versions, but version 7"):
        one.digest(7)


def test_writers_at_once_lose_nothing_and_agree_on_each_epochs_version(tmp_path: Path) -> None:
    lists = [QuarantineList(tmp_path / "list") for _ in range(4)]
    decided: list[list[int]] = [[] for _ in lists]
    begin = threading.Barrier(len(lists))

    def rank(number: int) -> None:
        begin.wait()
        for epoch in range(6):
            lists[number].append([entry(100 * number + epoch)])
            decided[number].append(lists[number].adopted("run", epoch))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(lists))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decided.count(decided[0]) == len(lists)
    assert len(lists[0].entries()) == 24
    assert QuarantineList(tmp_path / "list").adopted("run", 3) == decided[0][3]


def test_what_a_run_goes_by_is_its_version_and_what_it_found_itself_by_then(tmp_path: Path) -> None:
    bad = QuarantineList(tmp_path / "list")
    bad.append([entry(1)])
    bad.append([entry(2, run="mine", epoch=3)])
    bad.append([entry(3, run="another")])

    def refused(version: int, epoch: int) -> list[int]:
        return [n for n in (1, 2, 3, 4) if bad.refused(entry(n).location, version, "mine", epoch)]

    assert refused(0, 2) == []
    assert refused(1, 2) == [1]
    assert refused(1, 3) == refused(1, 4) == [1, 2]
    assert refused(3, 0) == [1, 2, 3]


def test_what_one_run_suspects_counts_for_others_once_another_run_found_it_too(tmp_path: Path) -> None:
    bad = QuarantineList(tmp_path / "list")
    assert bad.append([entry(1, run="mine", epoch=2, suspected=True)]) == 1
    assert bad.append([entry(1, run="mine", epoch=4, suspected=True)]) == 1  # the entry was there already

    def refusing(version: int, epoch: int = 2) -> list[str]:
        return [run for run in ("mine", "other", "third") if bad.refused(entry(1).location, version, run, epoch)]

    assert refusing(0, 1) == refusing(1, 1) == []
    assert refusing(1) == ["mine"]
    assert not bad.is_lasting(entry(1).location, 1)
    assert bad.append([entry(1, run="other", epoch=2, suspected=True)]) == 2
    assert refusing(1) == ["mine", "other"]  # an epoch goes by its version, and by what its run found
    assert refusing(2) == refusing(2, 0) == ["mine", "other", "third"]
    assert bad.append([entry(1)]) == 2  # that is known
    assert bad.append([entry(1, run="third", suspected=True)]) == 3  # which may go by an older version
    assert refusing(0) == ["mine", "other", "third"]
    assert QuarantineList(tmp_path / "list").numbered() == bad.numbered()
    assert bad.append([entry(2, run="mine", suspected=True)]) == 4
    assert bad.append([entry(2)]) == 5  # a person says so
    assert bad.is_lasting(entry(2).location, 5)


def test_two_runs_of_one_process_are_one_witness(tmp_path: Path) -> None:
    bad = QuarantineList(tmp_path / "list")
    for run, process in (("a", "p"), ("b", "p"), ("c", "q")):
        assert not bad.is_lasting(entry(1).location, bad.newest())
        bad.append([entry(1, run=run, process=process, suspected=True)])
        assert bad.refused(entry(1).location, 0, run, 0) is not None
    assert [bad.is_lasting(entry(1).location, version) for version in range(4)] == [False, False, False, True]


def test_entries_of_an_older_release_name_no_process_and_count_as_before(store: Store) -> None:
    made = [msgspec.to_builtins(entry(1, run=run, suspected=True)) for run in ("a", "b")]
    for number, one in enumerate(made, 1):
        del one["process"]
        store.put(f"entries/{number:08}.json", json.dumps({"format": 1, "entries": [one], "nonce": "n"}).encode())
    bad = QuarantineList(store)
    assert bad.newest() == 2
    assert [bad.is_lasting(entry(1).location, version) for version in range(3)] == [False, False, True]


def test_a_pinned_list_stays_as_it_is_and_writes_nothing(tmp_path: Path) -> None:
    QuarantineList(tmp_path / "list").append([entry(1)])
    files = sorted(tmp_path.rglob("*"))
    pinned = QuarantineList(tmp_path / "list", version=1)
    assert pinned.adopted("run", 5) == 1
    with pytest.raises(UsageError, match="opened at version 1"):
        pinned.append([entry(2)])
    assert sorted(tmp_path.rglob("*")) == files
    with pytest.raises(UsageError, match="no version -1"):
        QuarantineList(tmp_path / "list", version=-1)


@pytest.mark.parametrize("broken", [b"", b"[]", b'{"format": 1}'])
def test_objects_that_are_no_part_of_a_list_are_refused(store: Store, broken: bytes) -> None:
    store.put("entries/00000001.json", broken)
    with pytest.raises(CorruptionError, match=r"entries/00000001\.json"):
        QuarantineList(store).newest()


def test_a_newer_format_is_refused_by_name(store: Store) -> None:
    store.put("entries/00000001.json", b'{"format": 9, "entries": [], "nonce": ""}')
    with pytest.raises(UnsupportedError, match="of format 9; this version reads format 1"):
        QuarantineList(store).newest()


def test_a_list_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_list, "MAX_VERSIONS", 2)
    bad = QuarantineList(store)
    for number in range(2):
        bad.append([entry(number)])
    with pytest.raises(CapacityError, match="full"):
        bad.append([entry(2)])


def test_entries_that_come_one_by_one_are_all_added_although_another_writer_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "list") as store:
        bad, real = QuarantineList(store), store.put_if_absent

        def late(key: str, data: Any) -> bool:
            monkeypatch.setattr(store, "put_if_absent", real)
            QuarantineList(store).append([entry(9)])
            return real(key, data)

        monkeypatch.setattr(store, "put_if_absent", late)
        assert bad.append(entry(number) for number in range(2)) == 2
        assert [one.offset for one in bad.entries()] == [9, 0, 1]


def test_more_entries_than_a_version_holds_make_several(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_list, "MAX_ENTRIES", 3)
    bad = QuarantineList(store)
    assert bad.append([entry(number) for number in range(8)]) == 3
    assert [one.offset for one in bad.entries()] == list(range(8))
    assert len(bad.entries(1)) == 3


def test_an_entry_that_could_not_be_read_again_is_not_added(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SMALL_OBJECT_BYTES", 2000)
    bad = QuarantineList(store)
    bad.append([entry(0)])
    with pytest.raises(CapacityError, match="too many for a version"):
        bad.append([entry(number) for number in range(1, 50)])
    assert QuarantineList(store).newest() == 1


def test_the_command_lists_a_shared_list_by_versions_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "list")
    assert main(["quarantine", "--shared", url]) == 0
    bad = QuarantineList(url)
    bad.append([entry(1)])
    bad.append([entry(2, run="mine", epoch=3), entry(3)])
    capsys.readouterr()
    assert main(["quarantine", "--shared", url, "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["version"], line["offset"], line["epoch"]) for line in lines] == [(1, 1, 0), (2, 2, 3), (2, 3, 0)]
    assert main(["quarantine", "--shared", url]) == 1
    assert "3 samples, version 2" in capsys.readouterr().out
    assert main(["quarantine", "--shared", url, "--clear"]) == 2


# -- loaders that go by it


@pytest.fixture
def damaged(made_dataset: Dataset, tmp_path: Path) -> Path:
    """A copy of the dataset, and a function's worth of damage: see `hurt`."""
    copy = tmp_path / "damaged"
    shutil.copytree(made_dataset.url.removeprefix("file://"), copy)
    return copy


def hurt(folder: Path, number: int) -> None:
    """Change a byte of a sample; twice repairs it."""
    with Dataset(folder) as dataset:
        sample = dataset.sample(number)
    member = sample.member(sample.video.ext if sample.video else "")
    with (folder / sample.shard).open("r+b") as shard:
        shard.seek(member.offset + member.length // 2)
        byte = shard.read(1)
        shard.seek(-1, 1)
        shard.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def make(damaged: Path, tmp_path: Path) -> Iterator[Make]:
    made = []

    def loader(**options: Any) -> VideoLoader:
        settings: dict[str, Any] = {
            "batch_size": 4,
            "quarantine_list": tmp_path / "list",
            "max_bad_samples": 8,
            "seed": 5,
        }
        made.append(
            VideoLoader(
                damaged, clip=Clip(2, per_video=3), size=(16, 16), sidecar=None, num_threads=2, **(settings | options)
            )
        )
        return made[-1]

    yield loader
    for one in made:
        one.close()


def take(loader: VideoLoader, count: int) -> list[tuple[list[int], str]]:
    """Numbers and pixels of so many batches."""
    found: list[tuple[list[int], str]] = []
    while len(found) < count:
        for batch in loader:
            found.append((batch["id"].tolist(), batch["video"].numpy().tobytes().hex()))
            if len(found) == count:
                break
    return found


def by_hand(folder: Path, number: int) -> Entry:
    with Dataset(folder) as dataset:
        sample = dataset.sample(number)
        return Entry(*location_of(sample, dataset.url), sample.key, "corruption", "looked at by hand")


def ids(batches: list[tuple[list[int], str]]) -> set[int]:
    return {number for numbers, _ in batches for number in numbers}


def test_a_restored_run_repeats_its_substitutions_although_the_list_has_grown(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    bad = QuarantineList(tmp_path / "list")
    bad.append([by_hand(damaged, 1)])
    interrupted = make()
    before = take(interrupted, 2)
    state = json.loads(json.dumps(interrupted.state_dict()))
    assert state["quarantine"] == [f"1:{bad.digest(1)}"]  # the list remembers which
    whole = before + take(interrupted, 4)
    assert 1 not in ids(whole)
    bad.append([by_hand(damaged, 6)])
    assert 6 in ids(whole)
    resumed = make()
    resumed.load_state_dict(state)
    assert before + take(resumed, 4) == whole
    assert take(resumed, 6) == take(interrupted, 6)  # the next epoch, by the version that was agreed on
    fresh = make(seed=6)
    assert not {1, 6} & ids(take(fresh, 6))


def test_ranks_that_come_late_to_an_epoch_go_by_the_version_of_the_first(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    alone = make()
    first = take(alone, 6)
    QuarantineList(tmp_path / "list").append([by_hand(damaged, 2)])
    parts = [take(make(batch_size=2, rank=rank, world_size=2), 6) for rank in range(2)]
    assert [a + b for (a, _), (b, _) in zip(*parts, strict=True)] == [numbers for numbers, _ in first]
    assert 2 in ids(first)


def test_what_a_run_finds_itself_is_left_out_also_when_it_was_repaired_before_the_resume(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    hurt(damaged, 3)
    interrupted = make()
    state = json.loads(json.dumps(interrupted.state_dict()))
    whole = take(interrupted, 12)
    assert 3 not in ids(whole)
    (found,) = QuarantineList(tmp_path / "list").entries()
    assert (found.shard, found.epoch) == (interrupted.dataset.sample(3).shard, 0)
    assert len(interrupted.state_dict()["quarantine"]) == 1
    hurt(damaged, 3)
    resumed = make()
    resumed.load_state_dict(state)
    assert take(resumed, 12) == whole
    assert [one.id for one in resumed.quarantine] == [3]
    assert 3 in ids(take(make(quarantine_list=None), 6))


def test_what_one_run_finds_a_run_of_another_process_reads_again(
    make: Make, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt(damaged, 3)
    assert 3 not in ids(take(make(), 6))
    hurt(damaged, 3)  # as if the network had changed it
    assert 3 in ids(take(make(seed=6), 6))
    hurt(damaged, 3)
    assert 3 not in ids(take(make(seed=7), 6))
    hurt(damaged, 3)
    assert 3 in ids(take(make(seed=8), 6))  # two runs found it, of one process
    hurt(damaged, 3)
    monkeypatch.setattr(shared_list, "PROCESS", "another")
    assert 3 not in ids(take(make(seed=9), 6))
    hurt(damaged, 3)
    assert 3 not in ids(take(make(seed=10), 6))
    entries = QuarantineList(tmp_path / "list").entries()
    assert [one.suspected for one in entries] == [True] * 3
    assert len({one.process for one in entries}) == 2


def test_a_run_of_an_older_version_repeats_what_it_found_although_others_had_found_it_too(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    first = make()
    state = json.loads(json.dumps(first.state_dict()))  # by version 0
    hurt(damaged, 3)
    bad = QuarantineList(tmp_path / "list")
    bad.append([by_hand(damaged, 3)])
    whole = take(first, 6)
    assert 3 not in ids(whole)
    assert len(bad.entries()) == 2
    assert first.state_dict()["quarantine"] == ["0:"]
    hurt(damaged, 3)
    resumed = make()
    resumed.load_state_dict(state)
    assert take(resumed, 6) == whole


def test_what_the_run_found_in_a_later_epoch_alone_stays_in_the_state(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    hurt(damaged, 3)
    loader = make()
    assert loader._listed is not None
    later = replace(by_hand(damaged, 3), run=loader._listed._run, epoch=4, suspected=True)
    QuarantineList(tmp_path / "list").append([later])
    loader.update_quarantine(0)
    take(loader, 6)
    assert loader.state_dict()["quarantine"] == ["0:", 3]


def test_newer_entries_are_taken_over_when_asked_for_and_the_state_says_so(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    loader, other = make(), make()
    take(loader, 2)
    take(other, 2)
    QuarantineList(tmp_path / "list").append([by_hand(damaged, n) for n in (0, 4)])
    assert loader.update_quarantine() == 1
    assert other.update_quarantine(1) == 1
    rest = take(loader, 4)
    assert not {0, 4} & ids(rest)
    assert take(other, 2) == rest[:2]
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert take(resumed, 2) == rest[2:]
    with pytest.raises(UsageError, match="follows no list"):
        make(quarantine_list=None).update_quarantine()


@pytest.mark.parametrize(("wrong", "wanted_message"), [(-1, "no version -1"), ("1", "cannot be '1'")])
def test_a_version_that_cannot_be_leaves_a_state_that_can_be_loaded(
    make: Make, wrong: Any, wanted_message: str
) -> None:
    loader = make()
    state = loader.state_dict()
    with pytest.raises(UsageError, match=wanted_message):
        loader.update_quarantine(wrong)
    assert loader.state_dict() == state
    loader.load_state_dict(state)


def test_a_loader_pinned_to_a_version_follows_no_other(make: Make, tmp_path: Path) -> None:
    QuarantineList(tmp_path / "list").append([entry(1)])
    loader = make(quarantine_list=QuarantineList(tmp_path / "list", version=0))
    with pytest.raises(UsageError, match="version 0 of its list only"):
        loader.update_quarantine()


def test_batches_planned_ahead_do_not_change_which_version_an_epoch_follows(
    make: Make, damaged: Path, tmp_path: Path
) -> None:
    loader = make(batch_size=24)  # an epoch of one batch: many are looked up ahead, by the version of that moment
    bad = QuarantineList(tmp_path / "list")
    take(loader, 1)
    bad.append([by_hand(damaged, 1)])
    for version in (1, 0, 1):
        loader.update_quarantine(version)
        before = loader.state_dict()
        assert (1 in ids(take(loader, 1))) == (version == 0)
        assert before["quarantine"] == [f"{version}:{bad.digest(version)}"]
        wait_for(lambda: loader._listed is not None and len(loader._listed._versions) > 8)
        assert loader.state_dict()["quarantine"] == before["quarantine"]
        loader.load_state_dict(before)


def test_a_state_says_which_list_it_needs(make: Make, damaged: Path, tmp_path: Path) -> None:
    QuarantineList(tmp_path / "list").append([by_hand(damaged, 1)])
    QuarantineList(tmp_path / "other").append([by_hand(damaged, 2)])
    state = make().state_dict()
    for wrong in (None, tmp_path / "other", tmp_path / "empty"):
        loader = make(quarantine_list=wrong)
        now = loader.state_dict()
        for refused in (loader.check_state_dict, loader.load_state_dict):
            with pytest.raises(MismatchError, match="quarantine_list was"):
                refused(state)
        assert loader.state_dict() == now
        loss = loader.load_state_dict(state, force=True)
        assert loss is not None
        assert [one.field for one in loss.fields] == ["quarantine_list"]
    none = make(quarantine_list=None).state_dict()
    assert none["quarantine"] == []
    late = make()
    now = late.state_dict()
    late.check_state_dict(none)
    assert late.state_dict() == now
    late.load_state_dict(none)  # the interrupted run had no list: this epoch has none
    assert 1 in ids(take(late, 6))
    with pytest.raises(UsageError, match="impossible"):
        late.load_state_dict(state | {"quarantine": ["x", 1]})


class RefusingStore(Wrapper):
    """A store that takes no entries."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.refused = 0

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        if key.startswith("entries"):
            self.refused += 1
            raise TransientError("the store is read-only")
        return super().put_if_absent(key, data)


def test_what_the_list_cannot_take_stays_in_the_state(
    make: Make, damaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hurt(damaged, 3)
    hurt(damaged, 6)
    with open_store(tmp_path / "sealed") as store:
        sealed = RefusingStore(store)
        loader = make(quarantine_list=QuarantineList(sealed))
        take(loader, 6)
        assert sealed.refused == 1  # asked once, and not for every sample
        assert loader.state_dict()["quarantine"] == ["0:", 3, 6]
        assert "cannot take them" in caplog.text
        pinned = make(quarantine_list=QuarantineList(store, version=0))
        take(pinned, 6)
        assert pinned.state_dict()["quarantine"] == ["0:", 3, 6]


def test_a_list_that_cannot_be_opened_lets_go_of_the_dataset(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for wrong in ({"quarantine_list": "nosuch://x"}, {"max_bad_samples": -1}):
        with pytest.raises(UsageError):
            make(**wrong)
