"""Copies between repositories: what is sent, which steps there are, and what a conflict is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint import Checkpointer, read_artifact
from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.copies.copy import (
    COPIED,
    PRESENT,
    REMOVED_HERE,
    RunCopier,
    Selection,
    StepCopy,
    copy,
    run_copiers,
)
from headrace.checkpoint.copies.identity import attempt_of, is_copy
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import check, collect, commit, tags, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import open_step
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import ConflictError, NotFoundError, TransientError, UsageError
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, begin, latest, load, make, save, tiny_state
from tests.support.copied_runs import FROZEN, assert_copied, filled, sharded
from tests.support.stepping import MemoryStore


@pytest.fixture
def source() -> MemoryStore:
    return _Named("memory://source")


@pytest.fixture
def store() -> MemoryStore:
    return _Named("memory://destination")


class _Named(MemoryStore):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def location(self) -> Location:
        return Location(self._url, {}, shareable=False)


@pytest.fixture(autouse=True)
def _probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.dataio.store.probe.require_preconditions", lambda *_: None)


def packs(store: Store) -> dict[str, int]:
    return {info.key: info.size for info in store.list(names.PACKS)}


def test_a_copy_has_the_same_steps_and_sends_each_chunk_once(source: MemoryStore, store: MemoryStore) -> None:
    filled(source)
    report = copy(source, store, run=RUN)
    assert [(each.step, each.state) for each in report.steps] == [(1, COPIED), (2, COPIED), (3, COPIED)]
    assert report.steps[1].bytes_found == FROZEN
    assert sorted(packs(store).values()) == sorted(packs(source).values())
    assert_copied(source, store)
    assert {each.state for each in copy(source, store, run=RUN).steps} == {PRESENT}


def test_packs_of_which_everything_is_copied_are_stored_with_the_same_bytes(
    source: MemoryStore, store: MemoryStore
) -> None:
    filled(source)
    copy(source, store)
    bodies = [
        {data for key, (data, _) in each.objects.items() if key.startswith(names.PACKS)} for each in (source, store)
    ]
    assert bodies[0] == bodies[1]


def test_metadata_descriptions_and_artifacts_are_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path / "one", run=RUN, sidecar=None) as checkpointer:
        checkpointer.describe(config={"lr": 0.1})
        checkpointer.put_artifact(1, "log.txt", b"all is well")
        checkpointer.save(1, {"epoch": 1}, metadata={"loss": 2.5}).result(60)
    copy(str(tmp_path / "one"), str(tmp_path / "two"), run=RUN, as_run="copied")
    with open_store(str(tmp_path / "two")) as store:
        shown = check.describe(store, "copied", "latest")
        assert check.check(store).clean
    assert shown.metadata == {"loss": 2.5}
    assert read_artifact(tmp_path / "two", run="copied", name="log.txt") == b"all is well"
    (description,) = (tmp_path / "two").glob("runs/copied/descriptions/*.json")
    (ours,) = (tmp_path / "one").glob(f"runs/{RUN}/descriptions/*.json")
    assert description.read_bytes() == ours.read_bytes()
    ours.write_bytes(b"{}")
    copy(str(tmp_path / "one"), str(tmp_path / "three"), run=RUN)
    assert "without its description" in caplog.text


def test_steps_can_be_chosen_and_share_chunks_with_steps_that_were_not_copied(
    source: MemoryStore, store: MemoryStore
) -> None:
    bases = filled(source, 5)
    assert [each.step for each in copy(source, store, run=RUN, steps=[4]).steps] == [4]
    assert [each.step for each in copy(source, store, run=RUN, last=2).steps] == [4, 5]
    report = copy(source, store, run=RUN, steps=[1])
    assert report.steps[0].bytes_found == FROZEN
    assert load(store, next(b for b in repository.visible(store, RUN) if b.step == 1)) == load(source, bases[0])
    with pytest.raises(NotFoundError):
        copy(source, store, run=RUN, steps=[9])
    with pytest.raises(NotFoundError, match="no such run"):
        copy(source, store, run="none")


def test_a_run_can_be_copied_under_another_name_and_into_the_same_repository(source: MemoryStore) -> None:
    filled(source)
    before = packs(source)
    report = copy(source, source, run=RUN, as_run="fork")
    assert report.bytes_sent == 0
    assert packs(source) == before
    assert_copied(source, source, "fork")
    collect.collect(source, [base.of(RUN) for base in repository.visible(source, RUN)])
    assert packs(source) == before
    assert check.check(source).clean
    with pytest.raises(UsageError, match="onto itself"):
        copy(source, source, run="fork")


def test_a_copy_and_a_copy_of_the_copy_are_recognised(source: MemoryStore, store: MemoryStore) -> None:
    third = _Named("memory://third")
    filled(source)
    copy(source, store)
    copy(store, third)
    for one, other in ((source, third), (third, source), (store, source)):
        assert {each.state for each in copy(one, other, run=RUN).steps} == {PRESENT}
    attempt, stranger = names.new_id(), attempt_of(names.new_id(), RUN, 0)
    assert not is_copy(attempt, RUN, stranger, RUN)
    assert attempt_of(attempt, RUN, 0)[:9] == attempt[:9]
    assert len({attempt_of(attempt, run, generation) for run in ("a", "b") for generation in (0, 1)}) == 4


def test_a_run_with_other_content_is_a_conflict_and_is_not_changed(source: MemoryStore, store: MemoryStore) -> None:
    filled(source)
    filled(store)
    before = dict(store.objects)
    with pytest.raises(ConflictError, match="timeline 1 differs"):
        copy(source, store)
    assert store.objects == before
    copy(source, store, run=RUN, as_run="other")
    assert_copied(source, store, "other")


def test_a_run_that_was_continued_at_the_destination_is_a_conflict(source: MemoryStore, store: MemoryStore) -> None:
    bases = filled(source)
    copy(source, store)
    begin(store, bases[-1])
    with pytest.raises(ConflictError, match="the source does not have it"):
        copy(source, store)


def test_the_latest_step_is_that_of_the_source_at_every_moment(source: MemoryStore, store: MemoryStore) -> None:
    """Timeline 2 branches off before the end of timeline 1. Timeline 3 branches off 2, and its only step was removed."""
    bases = filled(source, 4)
    two = begin(source, bases[1])
    bases.append(save(source, make(source, tiny_state(30), step=3, number=two, bases=(bases[1],))))
    abandoned = save(source, make(source, tiny_state(50), step=5, number=two, bases=(bases[-1],)))
    three = begin(source, bases[-1])
    gone = save(source, make(source, tiny_state(40), step=4, number=three))
    collect.collect(source, [gone.of(RUN)])
    begin(source, bases[0])  # a trainer that has not saved yet
    tags.tag(source, "abandoned", RUN, abandoned)
    of_source = latest(source)
    assert of_source is not None
    assert (of_source.timeline, of_source.step) == (two, 3)
    allowed = {None, *((base.timeline, base.step) for base in repository.visible(source, RUN))}
    for copied in run_copiers(source, store, RUN)[0].copy(Selection(tags=True)):
        found = latest(store)
        assert (found and (found.timeline, found.step)) in allowed, copied
    assert_copied(source, store)
    assert timeline.numbers(store, RUN) == [1, 2, 3, 4]
    assert tags.find(store, "abandoned").base.timeline == two
    assert load(store, tags.find(store, "abandoned").base) == load(source, abandoned)


def test_a_copy_continues_while_the_run_grows_and_branches(source: MemoryStore, store: MemoryStore) -> None:
    bases = filled(source, 2)
    (copier,) = run_copiers(source, store, RUN, workers=1)
    assert [each.state for each in copier.copy(Selection())] == [COPIED, COPIED]
    assert [each.state for each in copier.copy(Selection())] == []
    number = begin(source, bases[0])
    save(source, make(source, tiny_state(9), step=2, number=number, bases=(bases[0],)))
    assert [(each.timeline, each.step) for each in copier.copy(Selection())] == [(2, 2)]
    assert_copied(source, store)


def test_a_step_that_was_removed_at_the_destination_stays_removed(source: MemoryStore, store: MemoryStore) -> None:
    filled(source, 4)
    copy(source, store)
    collect.retain(store, RUN, Keep(last=2))
    report = copy(source, store)
    assert [each.state for each in report.steps] == [REMOVED_HERE, REMOVED_HERE, PRESENT, PRESENT]
    assert check.check(store).clean


def test_steps_of_many_ranks_are_copied_with_their_groups(
    source: MemoryStore, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = begin(source)
    sharded(source, 4, bytes(range(256)) * 2048, 1, number)
    copy(source, store)
    (one,), (other,) = (list(repository.visible(each, RUN)) for each in (source, store))
    ours, theirs = open_step(source, RUN, one), open_step(store, RUN, other)
    assert [m.rank for m in theirs.manifests] == [0, 1, 2, 3]
    for rank in range(4):
        assert load(source, one, rank) == load(store, other, rank)
    assert [m.bytes_state for m in ours.manifests] == [m.bytes_state for m in theirs.manifests]


def test_an_aborted_attempt_is_followed_by_the_next_generation(source: MemoryStore, store: MemoryStore) -> None:
    (base,) = filled(source, 1)
    copier = run_copiers(source, store, RUN)[0]
    copier._timelines.copy()
    first = attempt_of(base.attempt, RUN, 0)
    commit.abort(store, commit.Attempt(RUN, 1, 1, first, 1), "a collection ran")
    (done,) = copier.copy(Selection())
    assert done.attempt == attempt_of(base.attempt, RUN, 1)
    assert_copied(source, store)


def test_tags_of_other_runs_are_not_moved(source: MemoryStore, store: MemoryStore) -> None:
    filled(source)
    tags.tag(source, "best", RUN, 3)
    begin(store, run="other")
    save(store, make(store, tiny_state(5), step=5, run="other"))
    tags.tag(store, "best", "other", 5)
    with pytest.raises(ConflictError, match="tag best is step 5 of run other"):
        copy(source, store, run=RUN, tags=True)
    tags.untag(store, "best")
    assert copy(source, store, run=RUN, tags=True).tags == ["best"]
    assert copy(source, store, run=RUN, tags=True).tags == []


def test_the_command_prints_a_line_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with open_store(one) as store:
        filled(store)
        tags.tag(store, "best", RUN, 1)
    assert ckpt(["copy", one, two, "--run", RUN, "--last", "2", "--tags"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"{RUN}  timeline 1  step {step}" for step in (1, 2, 3)]
    assert lines[3] == f"{RUN}  tag best: set"
    assert lines[4].startswith("3 copied; ")
    assert ckpt(["copy", one, two, "--steps", "all", "--json"]) == 0
    assert [each["state"] for each in json.loads(capsys.readouterr().out)["steps"]] == [PRESENT] * 3
    for wrong in (["--steps", "1"], ["--as", "x"], ["--run", RUN, "--steps", "a"], ["--follow", "9y"]):
        with pytest.raises(UsageError):
            ckpt(["copy", one, two, *wrong])


def test_following_copies_what_is_new_until_it_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with open_store(one) as store:
        bases, slept = filled(store, 2), list[float]()

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                raise KeyboardInterrupt
            if len(slept) == 2:
                raise_once.append(True)
            bases.append(save(store, make(store, tiny_state(9), step=len(bases) + 1, bases=(bases[-1],))))

        raise_once = list[bool]()
        rounds = RunCopier.copy

        def sometimes(self: RunCopier, selection: Selection) -> Iterator[StepCopy]:
            if raise_once and raise_once.pop():
                raise TransientError("the store cannot be reached")
            return rounds(self, selection)

        monkeypatch.setattr("headrace.checkpoint.cli_copy.time.sleep", sleep)
        monkeypatch.setattr(RunCopier, "copy", sometimes)
        with pytest.raises(KeyboardInterrupt):
            ckpt(["copy", one, two, "--run", RUN, "--follow", "2m"])
        assert slept == [120.0] * 3
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0].split()[-1] for line in lines] == ["1", "2", "3"]
        assert ckpt(["copy", one, two, "--run", RUN]) == 0
        with open_store(two) as copied:
            assert_copied(store, copied)


def test_arguments_that_do_not_fit_are_refused(source: MemoryStore, store: MemoryStore) -> None:
    with pytest.raises(UsageError, match="need run"):
        copy(source, store, steps=[1])
    with pytest.raises(NotFoundError, match="no checkpoint repository"):
        copy(source, store)
    filled(source)
    with pytest.raises(UsageError, match="give one of them"):
        copy(source, store, run=RUN, steps=[1], last=1)
    with pytest.raises(UsageError, match="out of range"):
        copy(source, store, workers=0)
    assert isinstance(run_copiers(source, store)[0], RunCopier)
