"""Faults below saves and restores: savers that are stopped, clocks that jump, an fsync that fails once, flipped bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import check
from headrace.checkpoint.repository.collect import collect
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import CorruptionError, HeadraceError, TransientError
from headrace.dataio.sidecar.jobs.gate import PriorityGate
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from headrace.dataio.testing.system import ManualClock, clock_jump, failing_fsync, stopped
from tests.support.checkpoint_states import Made, begin, latest, load, make, save, tiny_state
from tests.support.waiting import wait_for


def start(made: Made, gate: int) -> subprocess.Popen[str]:
    """`python -m headrace.checkpoint.saving.commit_worker` at a gate, with the arena and the plan as memfds."""
    fds = {}
    for name, data in (("arena", made.arena), ("plan", made.encoded)):
        fds[name] = fd = os.memfd_create(name)
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
    command = [
        sys.executable,
        "-m",
        "headrace.checkpoint.saving.commit_worker",
        *(f"--{name}-fd={fd}" for name, fd in {**fds, "gate": gate}.items()),
    ]
    try:
        return subprocess.Popen(command, pass_fds=[*fds.values(), gate], stdout=subprocess.PIPE, text=True)
    finally:
        for fd in fds.values():
            os.close(fd)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[PriorityGate]:
    made = PriorityGate(tmp_path / "gate")
    made.close_for_others(True)
    yield made
    made.close()


@pytest.mark.parametrize("collected", [True, False], ids=["fenced meanwhile", "left alone"])
def test_a_saver_that_is_stopped_for_longer_than_its_lease_does_no_harm(
    tmp_path: Path, gate: PriorityGate, collected: bool
) -> None:
    with open_store(tmp_path / "repo") as store:
        number = begin(store)
        one = save(store, make(store, tiny_state(1), step=1, number=number))
        made = make(store, tiny_state(2), step=2, number=number, lease_seconds=1.0)
        lease = tmp_path / "repo" / names.lease(made.plan.attempt)
        with start(made, fd := gate.for_a_worker()) as process:
            os.close(fd)
            wait_for(lease.exists)
            with stopped(process.pid):
                time.sleep(1.2)
                if collected:
                    past = lease.stat().st_mtime - 400  # so long that no clock makes it young
                    os.utime(lease, (past, past))
                    assert collect(store, ()).aborted == (made.plan.attempt,)
                gate.close_for_others(False)
            out, _ = process.communicate(timeout=150)
        last = json.loads(out.splitlines()[-1])
        if collected:
            assert (process.returncode != 0, last["event"]) == (True, "failed")
            assert latest(store) == one
        else:  # its lease was over, or renewed in time: it says which, and the repository agrees
            found = latest(store)
            assert found is not None
            assert (found.step == 2) == (process.returncode == 0)
        assert check.check(store).clean
        assert load(store, one) == tiny_state(1)
        assert load(store, save(store, make(store, tiny_state(3), step=3, number=number))) == tiny_state(3)


@pytest.mark.parametrize("days", [3, -3, 4000])
def test_a_trainers_clock_that_jumps_changes_nothing(tmp_path: Path, days: int) -> None:
    def saved(checkpointer: Checkpointer, step: int) -> None:
        checkpointer.save(step, {"w": torch.full((50_000,), float(step))}).result(60)

    with Checkpointer(tmp_path, run="exp", sidecar=None, keep=Keep(last=2)) as checkpointer:
        saved(checkpointer, 1)
        with clock_jump(days * 86400) as messages:
            for step in (2, 3):
                saved(checkpointer, step)
            with Checkpointer(tmp_path, run="another", sidecar=None, keep=Keep(last=1)) as other:
                for step in (1, 2):
                    saved(other, step)
        assert messages
        saved(checkpointer, 4)
    with open_store(tmp_path) as store:
        collect(store, ())
        assert check.check(store).clean
    found = {"w": torch.zeros(50_000)}
    for run, step in (("exp", 4), ("another", 2)):
        with Checkpointer(tmp_path, run=run, sidecar=None) as checkpointer:
            assert checkpointer.restore(found) == step
            assert torch.equal(found["w"], torch.full((50_000,), float(step)))
            assert checkpointer.steps() == ([3, 4] if run == "exp" else [2])


def test_a_lease_lives_by_the_clock_that_does_not_jump(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        open_store(tmp_path) as store,
        LeaseKeeper(store, "0" * 26, run="exp", timeline=1, step=1, bases=(), life=90.0, clock=clock) as keeper,
    ):
        clock.ahead = 86400.0
        assert keeper.alive()
        clock.ahead, clock.now = -86400.0, clock.now + 91
        assert not keeper.alive()


@pytest.mark.parametrize("where", ["/packs/", "/000000000002", ".headrace-tmp"])
def test_an_fsync_error_that_is_reported_once_fails_the_save(tmp_path: Path, where: str) -> None:
    state = {"w": torch.arange(50_000.0)}
    with Checkpointer(tmp_path / "repo", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)
        with failing_fsync(where) as failed:
            handle = checkpointer.save(2, {"w": state["w"] * 2})
            with pytest.raises(HeadraceError, match="may be lost") as caught:
                handle.result(60)
        assert len(failed) == 1
        assert not isinstance(caught.value, TransientError)
        checkpointer.save(3, {"w": state["w"] * 3}).result(60)
        found = {"w": torch.zeros(50_000)}
        assert checkpointer.restore(found) == 3
        assert torch.equal(found["w"], state["w"] * 3)


@pytest.mark.s3
@pytest.mark.parametrize("flips", [1, 2, 3])
def test_bits_flipped_in_a_row_are_never_restored(s3_server: S3Server, s3_url: str, flips: int) -> None:
    state = {"w": torch.arange(50_000.0)}
    with Checkpointer(s3_url, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)
    with (
        FaultProxy(s3_server.endpoint) as proxy,
        Checkpointer(s3_url, run="exp", sidecar=None, storage_options={"endpoint_url": proxy.endpoint}) as checkpointer,
    ):
        proxy.inject(Fault.FLIP_BIT, method="GET", path="/packs/", times=flips)
        found = {"w": torch.zeros(50_000)}
        if flips == 1:
            assert checkpointer.restore(found) == 1
        else:
            with pytest.raises(CorruptionError, match="step 1"):
                checkpointer.restore(found)
            assert proxy.fired[Fault.FLIP_BIT] == 2  # it is read again once
            proxy.forget()
            assert checkpointer.restore(found) == 1, "what was flipped on the wire is no verdict"
        assert proxy.fired[Fault.FLIP_BIT] == min(flips, 2)
        assert torch.equal(found["w"], state["w"])
