"""Restoring by a name, and what a trainer holds from its restore to its first commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Lease, StepOfRun, read
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import tags, timeline
from headrace.checkpoint.repository.collect import collect
from headrace.dataio.core.errors import ConflictError, NotFoundError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN

torch = pytest.importorskip("torch")


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def trainer(url: str, run: str = RUN) -> Any:
    from headrace.checkpoint import Checkpointer

    return Checkpointer(url, run=run, sidecar=None)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Steps 1 to 3; then back to 1 and step 2 again. Tags: best is the step 3 that was left behind, last the new step 2."""
    place = str(tmp_path)
    with trainer(place) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step)).result(60)
        with open_store(place) as store:
            tags.tag(store, "best", RUN, 3)
        assert checkpointer.restore(state(0), 1) == 1
        checkpointer.save(2, state(20)).result(60)
        with open_store(place) as store:
            tags.tag(store, "last", RUN)
    return place


@pytest.mark.parametrize(("name", "step", "value"), [("best", 3, 3.0), ("last", 2, 20.0)])
def test_a_tag_is_restored_in_whichever_timeline_it_lies(url: str, name: str, step: int, value: float) -> None:
    """And hides nothing, since a newer step is saved then."""
    from headrace.checkpoint import read as look_into

    with trainer(url) as checkpointer:
        given = state(0)
        assert checkpointer.restore(given, tag=name) == step
        assert given["w"].eq(value).all()
        checkpointer.save(step + 1, state(7)).result(60)
        assert checkpointer.steps() == [1, 2, step + 1]
    with look_into(url, run=RUN, tag=name) as saved:
        assert saved["w"][0] == value


def test_a_tag_of_another_run_needs_its_run(url: str) -> None:
    with trainer(url, run="fork") as checkpointer:
        with pytest.raises(UsageError, match=r"tag best is step 3 of run exp, not of fork \(give run='exp'\)"):
            checkpointer.restore(state(0), tag="best")
        given = state(0)
        assert checkpointer.restore(given, tag="best", run=RUN) == 3
        assert given["w"].eq(3).all()
        with pytest.raises(NotFoundError, match="no tag worst"):
            checkpointer.restore(state(0), tag="worst", run=RUN)
        with pytest.raises(UsageError):
            checkpointer.restore(state(0), tag="../best", run=RUN)


def test_a_tag_whose_step_was_removed_says_so(url: str) -> None:
    with open_store(url) as store:
        collect(store, [StepOfRun(RUN, 1, 3)])
    with (
        trainer(url) as checkpointer,
        pytest.raises(NotFoundError, match="step 3 of run exp, which tag best names, was"),
    ):
        checkpointer.restore(state(0), tag="best")


def test_the_command_takes_a_tag_for_a_step(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(["show", url, "--run", RUN, "--step", "tag:best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert ckpt(["tag", url, "release", "--run", RUN, "--step", "tag:best"]) == 0
    assert capsys.readouterr().out == "release  exp  timeline 1  step 3\n"


def test_what_is_shown_of_a_step_tells_its_own_packs_from_those_of_earlier_steps(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer(url) as checkpointer:
        checkpointer.restore(state(0))
        checkpointer.save(3, state(5)).result(60)
        checkpointer.save(4, state(5)).result(60)
    for step, packs, earlier in ((3, "1 pack\n", 0), (4, "1 pack, 1 of them from earlier steps\n", 1)):
        assert ckpt(["show", url, "--run", RUN, "--step", str(step)]) == 0
        text = capsys.readouterr().out
        assert packs in text
        assert f"compared with step {step - 1}\n" in text
        assert ckpt(["show", url, "--run", RUN, "--step", str(step), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["earlier_packs"] == earlier


def test_a_name_that_is_taken_moves_as_the_error_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConflictError, match="tag best is step 3") as caught:
        ckpt(["tag", url, "best", "--run", RUN, "--step", "2"])
    assert "--move" in caught.value.hint
    assert ckpt(["tag", url, "best", "--run", RUN, "--step", "2", "--move"]) == 0
    assert capsys.readouterr().out == "best  exp  timeline 2  step 2\n"


def held(store: Store) -> list[int]:
    return [base.step for info in store.list(names.LEASES) for base in read(store, info.key, Lease).bases]


def test_what_was_restored_is_held_until_the_first_commit(url: str) -> None:
    with open_store(url) as store:
        with trainer(url) as checkpointer:
            checkpointer.restore(state(0), 1)
            assert held(store) == [1]
            assert [step.step for step in collect(store, [StepOfRun(RUN, 1, 1)]).spared] == [1]
            checkpointer.save(2, state(8)).result(60)
            assert held(store) == []
        with trainer(url) as checkpointer:
            checkpointer.restore(state(0))
            checkpointer.restore(state(0), 1)
            assert held(store) == [1]
        assert held(store) == []


def test_a_restore_whose_latest_step_is_removed_just_now_takes_the_next(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking for it and holding it."""
    find, fired = repository.find, list[int]()

    def late(store: Store, run: str, step: int | str) -> Any:
        found = find(store, run, step)
        if not fired and found is not None:
            fired.append(found.step)
            collect(store, [StepOfRun(run, found.timeline, found.step)])
        return found

    monkeypatch.setattr(repository, "find", late)
    with trainer(url) as checkpointer:
        assert checkpointer.restore(state(0)) == 1
        assert fired == [2]


def test_a_trainer_whose_restored_step_is_gone_learns_it_before_it_saves(url: str) -> None:
    with trainer(url) as checkpointer, open_store(url) as store:
        checkpointer.restore(state(0), 1)
        store.delete_many([info.key for info in store.list(names.LEASES)])  # as if it had run out
        assert [step.step for step in collect(store, [StepOfRun(RUN, 1, 1)]).tombstones] == [1]
        with pytest.raises(ConflictError, match="step 1 cannot be saved, because retention removed its parent"):
            checkpointer.save(1, state(9))
        assert max(timeline.numbers(store, RUN)) == 2  # it opened none
