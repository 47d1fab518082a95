"""Collections on real stores: what goes, what stays, and a collector killed at every named point."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, StepName, StepOfRun
from headrace.checkpoint.repository import check, commit, lease, tags
from headrace.checkpoint.repository import collect as collecting
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect, preview, to_delete
from headrace.checkpoint.repository.retention import Keep, steps_to_delete
from headrace.dataio.core.crashpoints import declared
from headrace.dataio.core.errors import ConflictError, NotFoundError, TransientError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_states import RUN, begin, latest, load, make, save, tiny_state

POINTS = sorted(name for name in declared() if name.startswith("gc."))


def names_of(steps: set[StepName]) -> list[int]:
    return sorted(name.step for name in steps)


def branch_of(*steps: int) -> list[StepName]:
    return [StepName(1, step) for step in sorted(steps, reverse=True)]


def test_a_policy_keeps_the_newest_the_round_and_the_tagged() -> None:
    branch = branch_of(10, 20, 30, 40, 50, 60)
    tagged = {StepName(1, 20): ["best"], StepName(1, 30): ["tmp-1"]}
    assert names_of(steps_to_delete(Keep(last=2), branch, (), tagged)) == [10, 40]
    assert names_of(steps_to_delete(Keep(last=1, every=20, tags=("b*",)), branch, (), tagged)) == [10, 30, 50]
    assert names_of(steps_to_delete(Keep(every=40, tags=()), branch, (), tagged)) == [10, 20, 30, 50]
    assert steps_to_delete(Keep(), branch, [StepName(0, 5)], {}) == set()
    assert steps_to_delete(Keep(last=9), branch, [StepName(0, 5)], {}) == {StepName(0, 5)}


def test_steps_that_a_trainer_went_back_from_stay_until_it_has_reached_their_numbers() -> None:
    before, other = branch_of(10, 20, 30), StepName(1, 40)
    for step, gone in ((15, [10]), (20, [10, 20]), (29, [10, 20]), (30, [10, 20, 30]), (40, [10, 20, 30, 40])):
        branch = [StepName(2, step), *before]
        assert names_of(steps_to_delete(Keep(last=1), branch, [other], {})) == gone
    assert names_of(steps_to_delete(Keep(every=7), [StepName(2, 15), *before], [other], {})) == [10]


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(1, 5), st.integers(1, 9) | st.none())
def test_the_newest_step_is_never_let_go(steps: set[int], last: int, every: int | None) -> None:
    gone = steps_to_delete(Keep(last, every), branch_of(*steps), (), {})
    assert StepName(1, max(steps)) not in gone
    assert len(steps) - len(gone) >= min(last, len(steps))


@pytest.mark.parametrize("bad", [{"last": 0}, {"every": -1}, {"last": True}, {"tags": "best"}])
def test_a_policy_that_makes_no_sense_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Keep(**bad)  # type: ignore[arg-type]


def three_steps(store: Store) -> list[Base]:
    """Each leans on the one before: `frozen` lies in the packs of step 1."""
    number, found = begin(store), list[Base]()
    for step in (1, 2, 3):
        found.append(save(store, make(store, tiny_state(step), step=step, number=number, bases=tuple(found[-1:]))))
    return found


def packs(store: Store) -> set[str]:
    return {info.key for info in store.list("packs/")}


def test_removed_steps_are_gone_and_what_others_need_of_them_stays(store_url: str) -> None:
    with open_store(store_url) as store:
        one, two, three = three_steps(store)
        before = packs(store)
        plan = preview(store, to_delete(store, RUN, Keep(last=1)))
        assert packs(store) == before
        assert [step.step for step in plan.tombstones] == [1, 2]
        done = collect(store, to_delete(store, RUN, Keep(last=1)))
        assert done.tombstones == plan.tombstones
        assert {key for key, _ in done.objects} == {key for key, _ in plan.objects}
        assert [step.step for step in repository.visible(store, RUN)] == [3]
        assert load(store, three) == tiny_state(3)
        assert len(packs(store)) == 2  # its own, and that of step 1, which has the frozen tensor
        assert check.check(store).clean
        for gone in (one, two):
            with pytest.raises(NotFoundError):
                repository.find(store, RUN, gone.step)
        assert preview(store, to_delete(store, RUN, Keep(last=1))).empty
        after = save(store, make(store, tiny_state(4), step=4, number=1, bases=(three,)))
        assert load(store, after) == tiny_state(4)


def test_a_step_that_somebody_reads_is_spared(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        one, *_ = three_steps(store)
        with lease.LeaseKeeper(store, "0" * 26, run=RUN, timeline=1, step=1, bases=[one]):
            done = collect(store, to_delete(store, RUN, Keep(last=1)))
            assert [step.step for step in done.spared] == [1]
            assert [step.step for step in done.tombstones] == [2]
            assert load(store, one) == tiny_state(1)
        old = os.stat(tmp_path / names.lease("0" * 26)).st_mtime - 400  # its holder is dead for longer than a life
        os.utime(tmp_path / names.lease("0" * 26), (old, old))
        done = collect(store, to_delete(store, RUN, Keep(last=1)))
        assert [step.step for step in done.tombstones] == [1]
        assert names.lease("0" * 26) in {key for key, _ in done.objects}
        assert not list(store.list("leases/"))


def test_a_collectors_own_clock_does_not_matter(tmp_path: Path) -> None:
    """A lease is over by the store's clock, so a machine whose clock is an hour ahead fences no attempt."""

    class Ahead:
        def monotonic(self) -> float:
            return 0.0

        def time(self) -> float:
            import time

            return time.time() + 3600

        def sleep(self, seconds: float) -> None:
            raise AssertionError

    with open_store(str(tmp_path)) as store:
        three_steps(store)
        attempt = "0" * 25 + "1"
        with lease.LeaseKeeper(store, attempt, run=RUN, timeline=1, step=4, bases=[]):
            assert collect(store, (), clock=Ahead()).aborted == ()
            assert commit.find_decision(store, names.decision(RUN, 1, 4, attempt)) is None


def test_what_a_dead_saver_left_is_fenced_and_deleted(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        *_, three = three_steps(store)
        made = make(store, tiny_state(9), step=4, number=1, bases=(three,))
        store.put_multipart(names.pack(made.plan.attempt, "0-00000000-0"), [b"x" * 1000])
        with lease.LeaseKeeper(store, made.plan.attempt, run=RUN, timeline=1, step=4, bases=[three]):
            assert collect(store, ()).empty  # it may live
        path = tmp_path / names.lease(made.plan.attempt)
        os.utime(path, (path.stat().st_mtime - 400,) * 2)
        done = collect(store, ())
        assert done.aborted == (made.plan.attempt,)
        assert done.bytes_freed == 1000
        with pytest.raises(Exception, match="aborted"):
            save(store, made)  # it wakes
        assert latest(store) == three


def killed(store_url: str, point: str, mark: Path) -> None:
    environment = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    done = nursery.run("tests.support.collector_process", store_url, "1", "2", **environment)
    assert done.returncode == -9, done.stderr
    assert mark.read_text() == point + "\n"


def cases() -> Iterator[object]:
    for point in POINTS:
        yield pytest.param(point, "posix", id=f"{point}-posix")
        yield pytest.param(point, "s3", id=f"{point}-s3", marks=[pytest.mark.s3])


@pytest.mark.parametrize(("point", "store_url"), list(cases()), indirect=["store_url"])
def test_a_collector_killed_at_any_point_harms_nothing_and_the_next_finishes(
    point: str, store_url: str, tmp_path: Path
) -> None:
    assert len(POINTS) == 6
    with open_store(store_url) as store:
        *_, three = three_steps(store)
        killed(store_url, point, tmp_path / "mark")
        assert latest(store) == three
        assert load(store, three) == tiny_state(3)
        assert check.check(store).clean
        four = save(store, make(store, tiny_state(4), step=4, number=1, bases=(three,)))
        collect(store, ())
        assert not list(store.list("gc/"))
        assert [base.step for base in repository.visible(store, RUN)] == [4, 3]
        assert load(store, four) == tiny_state(4)
        assert len(packs(store)) == 3


def test_tags_name_steps_and_keep_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path)
    with open_store(url) as store:
        three_steps(store)
    assert ckpt(["tag", url, "best", "--run", RUN, "--step", "1"]) == 0
    assert ckpt(["tag", url, "newest", "--run", RUN, "--json"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "best  exp  timeline 1  step 1"
    assert json.loads("".join(rest))["step"] == 3
    with open_store(url) as store:
        assert tags.find(store, "best").step == 1
        with pytest.raises(ConflictError, match="step 1 of run exp already"):
            tags.tag(store, "best", RUN, 2)
        assert tags.tag(store, "best", RUN, 2, move=True).step == 2
        with pytest.raises(NotFoundError, match="headrace ckpt tags"):
            tags.untag(store, "absent")
        with pytest.raises(UsageError):
            tags.tag(store, "../evil", RUN, 2)
    assert ckpt(["tags", url, "--json"]) == 0
    assert [tag["step"] for tag in json.loads(capsys.readouterr().out)] == [2, 3]
    assert ckpt(["retain", url, "--run", RUN, "--last", "1"]) == 0
    text = capsys.readouterr().out
    assert "step 1: would be removed" in text
    assert "step 2" not in text
    assert "nothing was changed" in text
    assert ckpt(["retain", url, "--run", RUN, "--last", "1", "--keep-tags", "none-*", "--apply", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in done["tombstones"]] == [1, 2]
    assert done["applied"]
    assert done["bytes_freed"] > 100_000
    assert ckpt(["gc", url]) == 0
    assert ckpt(["untag", url, "best"]) == 0
    with open_store(url) as store:
        assert [tag.name for tag in tags.all_tags(store)] == ["newest"]


def test_steps_of_abandoned_timelines_go_when_no_tag_names_them(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        one, two, three = three_steps(store)
        tags.tag(store, "old", RUN, 3)
        number = begin(store, one)  # back to step 1
        new = save(store, make(store, tiny_state(8), step=2, number=number, bases=(one,)))
        gone = to_delete(store, RUN, Keep(last=2))
        assert gone == {StepOfRun(RUN, 1, 2)}
        collect(store, gone)
        assert [base.step for base in repository.visible(store, RUN)] == [2, 1]
        assert load(store, new) == tiny_state(8)
        assert load(store, three) == tiny_state(3)
        assert two.step == 2


def test_a_checkpointer_keeps_what_its_policy_says(store_url: str) -> None:
    torch = pytest.importorskip("torch")
    from headrace.checkpoint import Checkpointer

    with Checkpointer(store_url, run=RUN, sidecar=None, keep=Keep(last=2, every=4)) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, {"w": torch.full((1000,), float(step)), "frozen": torch.zeros(100_000)}).result(60)
    with Checkpointer(store_url, run=RUN, sidecar=None) as checkpointer:
        assert checkpointer.steps() == [4, 6, 7]
        state = {"w": torch.zeros(1000), "frozen": torch.ones(100_000)}
        assert checkpointer.restore(state, 4) == 4
        assert state["w"][0] == 4
        assert not state["frozen"].any()


@pytest.mark.parametrize("pending_deletes", [(), (1,)])
def test_a_collector_whose_record_another_one_has_settled_goes_on(
    pending_deletes: tuple[int, ...], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_steps(store)
    others: list[object] = []

    def overtaken() -> None:
        if not others:
            others.append(None)
            others.append(collect(store, ()))

    monkeypatch.setattr(collecting, "_recorded", overtaken)
    collect(store, {StepOfRun(RUN, 1, step) for step in pending_deletes})
    assert len(others) == 2
    assert [base.step for base in repository.visible(store, RUN)] == [s for s in (3, 2, 1) if s not in pending_deletes]
    assert not list(store.list(names.GC))


def test_a_collector_that_is_always_overtaken_ends_and_changes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_steps(store)
    overtaken: list[bool] = []

    def by_another() -> None:
        if not overtaken or overtaken[-1]:
            overtaken.append(False)
            collect(store, ())
            overtaken[-1] = True

    monkeypatch.setattr(collecting, "_recorded", by_another)
    with pytest.raises(TransientError, match="collect again later"):
        collect(store, ())
    assert overtaken == [True] * 10
    assert [base.step for base in repository.visible(store, RUN)] == [3, 2, 1]
    assert not list(store.list(names.GC))
