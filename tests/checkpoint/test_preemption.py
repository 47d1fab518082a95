"""Real trainers that get real signals: the state of the step they stop at is committed, and they say so."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.preemption import NOT_SAVED, REPORT_VARIABLE, SAVED
from headrace.dataio.core.errors import CapacityError, UsageError
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_states import Wrapped
from tests.support.nursery import Child
from tests.support.ranks import launch
from tests.support.waiting import wait_for


def start(url: Path, report: Path, mode: str = "", rank: int = 0, world: int = 1, port: int = 0) -> Child:
    env = {REPORT_VARIABLE: str(report)}
    if world > 1:
        env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return nursery.start("tests.support.preempted_trainer", str(url), mode, **env)


def lines(process: Any) -> Iterator[dict[str, Any]]:
    for line in process.stdout:
        yield json.loads(line)


def wait_for_step(process: Any, step: int) -> None:
    for line in lines(process):
        if line.get("step") == step:
            return
    raise AssertionError(process.stderr.read())


def end_of(process: Any) -> dict[str, Any]:
    out, err = process.communicate(timeout=150)
    found = [json.loads(line) for line in out.splitlines()]
    assert found, err
    assert "end" in found[-1], (out, err)
    return found[-1]


def committed_digest(url: Path) -> tuple[int | None, float]:
    model = torch.nn.Linear(512, 512)
    with Checkpointer(str(url), run="exp", sidecar=None) as checkpointer:
        step = checkpointer.restore({"model": model}, strict=False)
    return step, sum(p.double().sum().item() for p in model.parameters())


@pytest.mark.parametrize("mode", ["", "in-flight"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_trainer_that_is_told_to_stop_commits_the_step_it_stops_at(
    mode: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = start(tmp_path / "store", tmp_path / "report", mode)
    wait_for_step(process, 3)
    process.send_signal(number)
    end = end_of(process)
    assert process.returncode == SAVED
    assert end["committed"]
    assert end["signal"] == number.name
    assert committed_digest(tmp_path / "store") == (end["end"], end["digest"])
    report = json.loads((tmp_path / "report.0").read_text())
    assert report["committed"]
    assert report["step"] == end["end"]
    assert report["seconds"] < 60


def test_all_ranks_stop_at_the_same_step_though_one_alone_was_told(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [start(tmp_path / "store", tmp_path / "report", rank=rank, world=2, port=port) for rank in (0, 1)]
    wait_for_step(both[1], 2)
    both[1].send_signal(signal.SIGTERM)
    ends = [end_of(process) for process in both]
    assert [process.returncode for process in both] == [SAVED, SAVED]
    assert ends[0]["end"] == ends[1]["end"]
    assert [end["signal"] for end in ends] == ["another rank's signal", "SIGTERM"]
    assert committed_digest(tmp_path / "store") == (ends[0]["end"], ends[0]["digest"])
    assert [json.loads((tmp_path / f"report.{r}").read_text())["committed"] for r in (0, 1)] == [True, True]


def test_a_save_that_fails_on_one_rank_while_all_are_told_to_stop_is_made_again_by_all(tmp_path: Path) -> None:
    zero, one = (lines[0] for lines in launch(2, "tests.support.preempted_ranks", str(tmp_path)))
    assert one["failed"]
    assert zero["under_way"]
    assert [zero["committed"], one["committed"]] == [True, True], (zero["why"], one["why"])
    assert [zero["packs"], one["packs"]] == [2, 2]


class Full(Wrapped):
    """A store without space."""

    def put_multipart(self, key: str, parts: Any) -> int:
        raise CapacityError("no space left")


class Slow(Wrapped):
    """A store whose packs take two seconds."""

    def put_multipart(self, key: str, parts: Any) -> int:
        time.sleep(2)
        return super().put_multipart(key, parts)

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)


@pytest.mark.parametrize(("store", "deadline", "why"), [(Full, 60.0, "no space left"), (Slow, 0.3, "not committed")])
def test_a_last_save_that_fails_or_is_late_is_reported_and_never_raised(
    store: type[Wrapped], deadline: float, why: str, tmp_path: Path
) -> None:
    with open_store(tmp_path / "s") as inner:
        opened: Store = store(inner)
        checkpointer = Checkpointer(opened, run="exp", sidecar=None)
        report = tmp_path / "report"
        with checkpointer.on_preemption(lambda: {"a": torch.ones(3)}, deadline=deadline, report=report) as guard:
            assert not guard.reached(1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert guard.requested
            assert guard.reached(2)
            assert guard.reached(3)  # and stays so
            assert guard.outcome is not None
            assert not guard.outcome.committed
            assert guard.exit_code == NOT_SAVED
            assert why in guard.outcome.why
            assert why in json.loads((tmp_path / "report.0").read_text())["why"]
        checkpointer.close()  # its failure was heard


def test_a_last_save_that_commits_late_is_pending_and_then_reported_as_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path / "s") as inner, Checkpointer(Slow(inner), run="exp", sidecar=None) as checkpointer:
        report = tmp_path / "report"
        with checkpointer.on_preemption(lambda: {"a": torch.ones(3)}, deadline=0.3, report=report) as guard:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert guard.reached(2)
            early = json.loads((tmp_path / "report.0").read_text())
            assert (early["committed"], early["pending"], guard.exit_code) == (False, True, NOT_SAVED)
            assert "step 2 is NOT committed yet, but may be later" in caplog.text
            assert "NOT saved" not in caplog.text
        checkpointer.close()
        late = wait_for(lambda: no_longer_pending(tmp_path / "report.0"))
        assert (late["step"], late["committed"], late["pending"]) == (2, True, False)
        assert late["seconds"] > early["seconds"]
        assert guard.exit_code == SAVED
        assert "step 2 is committed after" in caplog.text


def no_longer_pending(report: Path) -> Any:
    """The report, once the save's thread has renewed it."""
    found = json.loads(report.read_text())
    return None if found["pending"] else found


def test_a_late_last_save_that_fails_is_reported_as_not_saved(tmp_path: Path) -> None:
    ended = threading.Event()

    class Failing(Wrapped):
        def put_multipart(self, key: str, parts: Any) -> int:
            assert ended.wait(60)
            raise CapacityError("no space left")

    with open_store(tmp_path / "s") as inner:
        checkpointer, report = Checkpointer(Failing(inner), run="exp", sidecar=None), tmp_path / "report"
        with checkpointer.on_preemption(lambda: {"a": torch.ones(3)}, deadline=0.3, report=report) as guard:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert guard.reached(2)
            assert json.loads((tmp_path / "report.0").read_text())["pending"]
            ended.set()
            with pytest.raises(CapacityError):
                checkpointer.close()
            late = wait_for(lambda: no_longer_pending(tmp_path / "report.0"))
            assert (late["committed"], late["pending"], late["why"]) == (False, False, "no space left")


def test_a_step_that_outlasts_the_deadline_is_reported_while_it_runs(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "s"), run="exp", sidecar=None) as checkpointer:
        report = tmp_path / "report"
        with checkpointer.on_preemption(lambda: {"a": torch.ones(3)}, deadline=0.1, report=report) as guard:
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + 30
            while not (tmp_path / "report.0").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "no step ended" in json.loads((tmp_path / "report.0").read_text())["why"]
            assert guard.reached(5)


def test_signals_go_back_to_whoever_had_them_who_is_also_told(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
            own = signal.getsignal(signal.SIGUSR1)
            with checkpointer.on_preemption(dict, deadline=60):
                os.kill(os.getpid(), signal.SIGUSR1)
                assert received == [signal.SIGUSR1]
            assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_the_main_thread_can_wait_for_signals(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            checkpointer.on_preemption(dict)
        except UsageError as error:
            errors.append(error)

    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(150)
    assert "main thread" in str(errors[0])
