"""`headrace ckpt rm` removes one step: not a tagged one, not one that a live process needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import check, collect, tags
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.removal import remove_step
from headrace.dataio.core.errors import ConflictError, NotFoundError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, load
from tests.support.copied_runs import filled


def steps(store: Store) -> list[int]:
    return [base.step for base in repository.visible(store, RUN)]


def test_one_step_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        bases = filled(store)
        plan = remove_step(store, RUN, 2)
        assert steps(store) == [3, 2, 1]
        assert [step.step for step in plan.plan.tombstones] == [2]
        assert not plan.was_latest
        done = remove_step(store, RUN, 2, apply=True)
        assert done.plan.tombstones == plan.plan.tombstones
        assert steps(store) == [3, 1]
        assert load(store, bases[0])
        assert load(store, bases[2])
        assert check.check(store).clean
        with pytest.raises(NotFoundError):
            remove_step(store, RUN, 2, apply=True)
        assert remove_step(store, RUN, "latest", apply=True).was_latest
        assert steps(store) == [1]


def test_a_tagged_step_is_refused_without_with_tags(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
        tags.tag(store, "best", RUN, 2)
        with pytest.raises(ConflictError, match="has the tag best"):
            remove_step(store, RUN, "tag:best", apply=True)
        assert remove_step(store, RUN, 2, with_tags=True).tags == ("best",)
        assert steps(store) == [3, 2, 1]
        assert remove_step(store, RUN, "tag:best", with_tags=True, apply=True).tags == ("best",)
        assert steps(store) == [3, 1]
        assert list(tags.all_tags(store)) == []


def test_a_step_that_is_tagged_during_the_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
        collected = collect.collect

        def late(*args: object, **options: object) -> object:
            tags.tag(store, "best", RUN, 2)
            return collected(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(collect, "collect", late)
        assert [step.step for step in remove_step(store, RUN, 2, apply=True).plan.spared] == [2]
        assert steps(store) == [3, 2, 1]
        assert list(store.list(names.GC)) == []


def test_a_step_that_a_live_process_needs_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(str(tmp_path)) as store:
        base = filled(store)[1]
        with LeaseKeeper(store, names.new_id(), run=RUN, timeline=1, step=2, bases=[base]):
            assert ckpt(["rm", str(tmp_path), "--run", RUN, "--step", "2", "--apply"]) == 0
        assert "stays, because a live process or a tag needs it" in capsys.readouterr().out
        assert steps(store) == [3, 2, 1]


def test_the_command_prints_a_plan_and_applies_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(str(tmp_path)) as store:
        filled(store)
        assert ckpt(["rm", str(tmp_path), "--run", RUN, "--step", "3"]) == 0
        text = capsys.readouterr().out
        assert "step 3, the latest step of the run: would be removed" in text
        assert "nothing was changed" in text
        assert ckpt(["rm", str(tmp_path), "--run", RUN, "--step", "3", "--apply", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["applied"]
        assert steps(store) == [2, 1]
        with pytest.raises(UsageError, match="needs --run and --step"):
            ckpt(["rm", str(tmp_path), "--run", RUN])
