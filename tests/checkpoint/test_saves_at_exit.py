"""The saves of a checkpointer at the end of its program."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.handle import Handle, SaveResult
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.saves import Saves, warn_of_python
from headrace.dataio.core import log
from headrace.dataio.core.errors import AccessDeniedError, TransientError
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.faulty_stores import Fault, Faulty, Rule


@pytest.mark.parametrize("version", [(3, 12, 0), (3, 12, 2)])
def test_a_python_that_starts_no_thread_at_its_end_is_named_with_what_to_do(
    version: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    log._logged.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_python(version)
    assert f"Python {'.'.join(map(str, version))} loses a save" in caplog.text
    assert "3.12.3 or newer" in caplog.text


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 12, 3), (3, 13, 0)])
def test_the_others_are_not_spoken_of(version: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    log._logged.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_python(version)
    assert not caplog.text


def test_a_save_that_ends_late_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        lineage = Lineage(store, "exp")
        lineage.new_ticket(1)
        saves, handles = Saves("exp", lineage, raises=False, wait=1.0), [Handle(1, "A"), Handle(2, "B")]
        for handle in handles:
            saves.add(handle)
        for handle in reversed(handles):
            handle.set_result(
                SaveResult("exp", lineage.timeline, handle.step, handle.attempt, 0, 0, 0, 0.0, 0.0, "process")
            )
            saves.forget_ended()
        assert [msgspec.structs.astuple(base)[1:3] for base in lineage.new_ticket(3).bases] == [(2, "B")]


def test_asking_for_the_save_of_one_step_leaves_the_errors_of_other_steps_to_be_raised(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        lineage = Lineage(store, "exp")
        lineage.new_ticket(1)
        saves, handles = Saves("exp", lineage, raises=False, wait=1.0), [Handle(1, "A"), Handle(2, "B")]
        for handle in handles:
            saves.add(handle)
            handle.set_error(TransientError(f"step {handle.step} failed"))
        assert saves.of(1) is None
        assert saves.of(3) is None
        with pytest.raises(TransientError, match="step 2 failed"):
            saves.raise_unfetched()


@pytest.mark.parametrize("raises", [False, True])
def test_several_failed_saves_are_all_reported_by_the_error_of_the_first(tmp_path: Path, raises: bool) -> None:
    with open_store(tmp_path) as store:
        lineage = Lineage(store, "exp")
        lineage.new_ticket(1)
        saves = Saves("exp", lineage, raises=raises, wait=1.0)
        for step in (1, 2):
            saves.add(handle := Handle(step, "A"))
            handle.set_error(TransientError(f"no answer for {step}"))
        if not raises:
            saves.raise_failures()
            saves.add(handle := Handle(3, "C"))
            handle.set_error(TransientError("no answer for 3"))
        with pytest.raises(TransientError, match="no answer for 1") as raised:
            saves.raise_failures() if raises else saves.raise_unfetched()
        expected = [f"step {step} was not saved either: no answer for {step}" for step in ((2,) if raises else (2, 3))]
        assert raised.value.__notes__ == expected
        saves.raise_failures()  # each is reported once


def test_the_errors_of_many_failed_saves_are_counted_beyond_a_limit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        lineage = Lineage(store, "exp")
        lineage.new_ticket(1)
        saves = Saves("exp", lineage, raises=False, wait=1.0)
        for step in range(1, 41):
            saves.raise_failures()
            saves.add(handle := Handle(step, "A"))
            handle.set_error(TransientError(f"no answer for {step}"))
        with pytest.raises(TransientError) as raised:
            saves.raise_unfetched()
        assert str(raised.value) == "no answer for 1"
        notes = raised.value.__notes__
        assert len(notes) == 17
        assert "step 40" in notes[-2]
        assert notes[-1].startswith("23 later saves failed too")


def test_an_error_that_the_caller_fetched_after_the_next_save_is_not_raised_by_close(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        lineage = Lineage(store, "exp")
        lineage.new_ticket(1)
        saves = Saves("exp", lineage, raises=False, wait=1.0)
        saves.add(handle := Handle(1, "A"))
        handle.set_error(TransientError("no answer"))
        saves.raise_failures()
        with pytest.raises(TransientError):
            handle.result()
        saves.raise_unfetched()


@pytest.mark.parametrize("on_save_error", ["log", "raise"])
def test_the_first_save_while_the_store_is_away_fails_at_its_handle_and_the_next_one_tries_again(
    tmp_path: Path, on_save_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Faulty(open_store(tmp_path), [Rule(Fault.TRANSIENT)])
    state = {"w": torch.ones(4)}
    with Checkpointer(store, run="exp", sidecar=None, on_save_error=on_save_error) as checkpointer:
        handle = checkpointer.save(1, state)
        assert store.fired[Fault.TRANSIENT]
        assert handle.done
        assert "training continues" in caplog.text
        store.rules.clear()
        if on_save_error == "raise":
            with pytest.raises(TransientError, match="could not open the run's timeline"):
                checkpointer.save(2, state)
        with pytest.raises(TransientError, match="could not open the run's timeline"):
            handle.result(0)
        assert checkpointer.save(1, state).result(60).step == 1
        assert checkpointer.steps() == [1]


def test_what_no_waiting_mends_is_raised_by_the_first_save(tmp_path: Path) -> None:
    store = Faulty(open_store(tmp_path), [Rule(Fault.DENIED)])
    with Checkpointer(store, run="exp", sidecar=None) as checkpointer, pytest.raises(AccessDeniedError):
        checkpointer.save(1, {"w": torch.ones(4)})
    assert store.fired[Fault.DENIED]


class Nameless:
    """A name that cannot be published, once `may_fail` is set."""

    def __init__(self) -> None:
        self.may_fail, self.failed = threading.Event(), 0

    def prepare(self, attempt: Base) -> None: ...
    def withdraw(self, error: BaseException) -> None: ...
    def publish(self) -> None:
        assert self.may_fail.wait(60)
        self.failed += 1
        raise TransientError("the folder is away")


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_step_whose_name_was_not_published_is_saved_again(
    tmp_path: Path, in_flight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step itself was committed. `in_flight`: the save fails while the next one waits for it."""
    name, state = Nameless(), {"w": torch.ones(4)}
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        checkpointer.save_as(1, state, None).result(60)
        failing = checkpointer.save_as(2, state, name)

        def fail(timeout: float | None = None) -> bool:
            name.may_fail.set()
            return Handle.wait(failing, timeout)

        if in_flight:
            monkeypatch.setattr(failing, "wait", fail)
        else:
            fail(60)
        assert checkpointer.save_as(2, state, None).result(60).timeline == 2
        assert (name.failed, checkpointer.steps()) == (1, [1, 2])
        with pytest.raises(TransientError, match="the folder is away"):
            checkpointer.close()


def test_a_step_that_could_not_be_saved_again_while_the_store_was_away_is_saved_again_later(tmp_path: Path) -> None:
    store, state = Faulty(open_store(tmp_path), []), {"w": torch.ones(4)}
    with Checkpointer(store, run="exp", sidecar=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save_as(step, state, None).result(60)
        store.rules.append(Rule(Fault.TRANSIENT))
        with pytest.raises(TransientError, match="could not open the run's timeline"):
            checkpointer.save_as(1, state, None).result(0)
        assert store.fired[Fault.TRANSIENT]
        store.rules.clear()
        assert checkpointer.save_as(1, state, None).result(60).timeline == 2
        assert (checkpointer.steps(), checkpointer.last_save_of(2)) == ([1], None)
        assert checkpointer.save(2, state).result(60).timeline == 2
