"""Trackers of a checkpointer: what they are given, when, and that they never delay or fail a save."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import names
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.handle import Handle, SaveResult
from headrace.checkpoint.repository import survey
from headrace.checkpoint.trackers import events
from headrace.checkpoint.trackers.background import MAX_TRACKERS, MAX_WAITING, BackgroundTrackers
from headrace.checkpoint.trackers.events import CommittedStep, PublishedVersion, Tracker
from headrace.dataio.core import json
from headrace.dataio.core.errors import TransientError, UsageError
from headrace.dataio.store.base import Location
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped
from tests.support.ranks import launch
from tests.support.waiting import wait_for

SECONDS = 60


class Recording(Tracker):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.started = self.closed = 0
        self.steps: list[CommittedStep] = []
        self.versions: list[PublishedVersion] = []
        self.threads = set[int]()

    def start(self) -> None:
        self.started += 1

    def committed(self, step: CommittedStep) -> None:
        self.steps.append(step)
        self.threads.add(threading.get_ident())

    def published(self, version: PublishedVersion) -> None:
        self.versions.append(version)

    def close(self) -> None:
        self.closed += 1


class Failing(Recording):
    def committed(self, step: CommittedStep) -> None:
        super().committed(step)
        raise ValueError("the tracking server refuses it")


class Hanging(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.go = threading.Event(), threading.Event()

    def committed(self, step: CommittedStep) -> None:
        self.called.set()
        assert self.go.wait(SECONDS)
        super().committed(step)


def test_a_committed_step_is_logged_with_its_url_digest_bytes_times_and_metadata(tmp_path: Path) -> None:
    tracker = Recording()
    with Checkpointer(tmp_path, run="exp", sidecar=None, trackers=[tracker]) as checkpointer:
        result = checkpointer.save(7, {"w": torch.ones(50_000)}, metadata={"loss": 2.5, "note": "ok"}).result(SECONDS)
    assert (tracker.started, tracker.closed) == (1, 1)
    (step,) = tracker.steps
    with open_store(str(tmp_path)) as store:
        data = store.get(names.decision("exp", result.timeline, 7, result.attempt))
        (line,) = survey.survey(store).steps
    assert step.digest == json.digest_of(data)
    assert len(step.digest) == 64
    assert (step.bytes_state, step.bytes_written) == (line.bytes_state, line.bytes_written)
    assert (step.step, step.attempt, step.stall, step.seconds) == (7, result.attempt, result.stall, result.seconds)
    assert step.metadata == {"loss": 2.5, "note": "ok"}
    assert Path(step.reference.removeprefix("file://")).read_bytes() == data
    assert threading.get_ident() not in tracker.threads


def test_published_versions_are_logged(tmp_path: Path) -> None:
    tracker = Recording()
    with Checkpointer(tmp_path, run="exp", sidecar=None, trackers=[tracker]) as checkpointer:
        for number in (1, 2):
            handle = checkpointer.save(number, {"model": {"w": torch.full((300,), float(number))}})
            checkpointer.publish("policy", handle)
    assert [(version.name, version.version, version.step) for version in tracker.versions] == [
        ("policy", 1, 1),
        ("policy", 2, 2),
    ]
    assert tracker.versions[1].bytes == 1200
    assert tracker.versions[1].bytes_update > 0
    assert Path(tracker.versions[1].reference.removeprefix("file://")).exists()


def test_a_failed_save_and_a_failed_publication_are_not_logged(tmp_path: Path) -> None:
    class Refusing(Wrapped):
        def put_if_absent(self, key: str, data: Any) -> bool:
            if key.endswith("COMMIT"):
                raise TransientError("no COMMIT today")
            return bool(self.inner.put_if_absent(key, data))

    tracker = Recording()
    with open_store(str(tmp_path)) as inner:
        checkpointer = Checkpointer(Refusing(inner), run="exp", sidecar=None, trackers=[tracker])
        handle = checkpointer.save(1, {"model": {"w": torch.ones(3)}})
        future = checkpointer.publish("policy", handle)
        assert future is not None
        for wait in (handle.result, future.result):
            with pytest.raises(TransientError, match="no COMMIT today"):
                wait(SECONDS)
        checkpointer.close()
    assert (tracker.steps, tracker.versions) == ([], [])


def test_an_error_of_a_tracker_is_logged_once_and_other_trackers_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Failing(), Recording()
    with Checkpointer(tmp_path, run="exp", sidecar=None, trackers=[failing, other]) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"epoch": step}).result(SECONDS)
    assert len(failing.steps) == len(other.steps) == 3
    warnings = [record for record in caplog.records if "refuses it" in record.getMessage()]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert failing.threads.isdisjoint(other.threads)


def test_a_tracker_that_hangs_delays_no_save_and_close_waits_a_limited_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.checkpoint.open_run.CLOSE_SECONDS", 0.05)
    hanging, other = Hanging(), Recording()
    with Checkpointer(tmp_path, run="exp", sidecar=None, trackers=[hanging, other]) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"epoch": step}).result(SECONDS)
        assert hanging.called.wait(SECONDS)
        wait_for(lambda: len(other.steps) == 3, SECONDS)
    assert hanging.steps == []
    assert [record for record in caplog.records if "does not finish" in record.getMessage()]
    hanging.go.set()
    wait_for(lambda: hanging.closed == 1, SECONDS)


def test_the_queue_of_a_tracker_is_limited_and_further_events_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    with open_store(str(tmp_path)) as store:
        trackers = BackgroundTrackers(store, [hanging])
        for number in range(MAX_WAITING + 5):
            handle = Handle(number, "A")
            trackers.follow_save(handle, {})
            handle.set_result(SaveResult("exp", 1, number, "A", 1, 1, 0, 0.1, 0.1, "process"))
            if number == 0:
                assert hanging.called.wait(SECONDS)
        hanging.go.set()
        trackers.close()
    assert [step.step for step in hanging.steps] == list(range(MAX_WAITING + 1))
    assert len([record for record in caplog.records if "events wait already" in record.getMessage()]) == 1


def test_events_that_end_after_close_are_not_logged(tmp_path: Path) -> None:
    tracker, handle = Recording(), Handle(1, "A")
    with open_store(str(tmp_path)) as store:
        trackers = BackgroundTrackers(store, [tracker])
        trackers.follow_save(handle, {})
        trackers.close(0)
        handle.set_result(SaveResult("exp", 1, 1, "A", 1, 1, 0, 0.1, 0.1, "process"))
        trackers.follow_save(Handle(2, "B"), {})
    assert tracker.steps == []


def test_without_its_decision_a_step_is_logged_without_a_digest(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        saved = SaveResult("exp", 1, 1, "A", 5, 3, 2, 0.1, 0.2, "process")
        step = events.committed_step(store, saved, {})
    assert (step.digest, step.bytes_state, step.bytes_written) == ("", 5, 3)


def test_secrets_are_in_no_event(tmp_path: Path) -> None:
    class Elsewhere(Wrapped):
        location = Location("https://me:hunter2@host/b?token=hunter2", {}, False)

    with open_store(str(tmp_path)) as inner:
        saved = SaveResult("exp", 1, 1, "A", 5, 3, 2, 0.1, 0.2, "process")
        step = events.committed_step(Elsewhere(inner), saved, {"api_key": "hunter2", "max_tokens": 5})
    assert "hunter2" not in repr(step) + repr(step.document()) + step.reference + repr(step.texts())
    assert step.numbers()["metadata/max_tokens"] == 5
    assert step.url.startswith("https://***@host/b")


def test_names_are_valid_in_all_trackers_and_never_collide() -> None:
    odd: Metadata = {"a b": 1, "a_b": 2, "../x": 3, "/y//z": 4, "ü%": 5, "flag": True, "none": None}
    step = CommittedStep("s", "exp", 1, 1, "A", "", 0, 0, 0, 0.0, 0.0, 0.0, odd)
    given = {name: value for name, value in step.numbers().items() if name.startswith("metadata/")}
    assert given == {
        "metadata/a_b": 1,
        "metadata/a_b_": 2,
        "metadata/_/x": 3,
        "metadata/_/y/_/z": 4,
        "metadata/ü_": 5,
    }
    assert (step.texts()["metadata/flag"], step.texts()["metadata/none"]) == ("true", "null")


def test_long_texts_are_cut() -> None:
    long = CommittedStep("s", "exp", 1, 1, "A", "", 0, 0, 0, 0.0, 0.0, 0.0, {"note": "x" * 9000})
    assert len(long.texts()["metadata/note"]) == events.TEXT_CHARACTERS


@pytest.mark.process
def test_of_two_ranks_only_rank_0_calls_its_tracker_with_the_bytes_of_both(tmp_path: Path) -> None:
    (first,), (second,) = launch(2, "tests.support.tracker_ranks", str(tmp_path))
    assert first == {"calls": ["start", "committed 1 {'rank': 0}", "close"], "bytes_state": [800]}
    assert second == {"calls": [], "bytes_state": []}


@pytest.mark.parametrize("given", ["wandb", [print], [Recording] * 2])
def test_what_is_no_tracker_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a tracker"):
        Checkpointer(tmp_path, run="exp", trackers=given)


def test_too_many_trackers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 16"):
        Checkpointer(tmp_path, run="exp", trackers=[Recording()] * (MAX_TRACKERS + 1))


PROGRAM = """
import sys
from pathlib import Path
from headrace.checkpoint import Checkpointer
from headrace.checkpoint.trackers.events import Tracker
class Writing(Tracker):
    def committed(self, step):
        Path(sys.argv[2]).write_text(str(step.step))
checkpointer = Checkpointer(sys.argv[1], run="exp", sidecar=None, trackers=[Writing()])
checkpointer.save(5, {"epoch": 1})
"""


@pytest.mark.process
def test_a_program_that_ends_without_close_still_logs_its_last_step(tmp_path: Path) -> None:
    out = tmp_path / "logged"
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(out)], check=True, timeout=120)
    assert out.read_text() == "5"
