"""Forked children (a DataLoader's workers, multiprocessing) while their parent saves: they wait for nothing of it, and end
nothing of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headrace.checkpoint import Checkpointer, Handle
from headrace.checkpoint.dcp import session
from headrace.checkpoint.format import names
from headrace.checkpoint.repository import writers
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_states import Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
_QUICK = 30.0
"""Seconds: no child of these tests takes a tenth of it, and the saves that it must not wait for take longer."""
_STATE = {"m": torch.arange(4.0)}


@contextmanager
def saving(where: Path) -> Iterator[tuple[Checkpointer, Handle]]:
    """A checkpointer with a save that goes on until the block ends."""
    over, waits = threading.Event(), threading.Event()

    class Held(Wrapped):
        def put_if_absent(self, key: str, data: Buffer) -> bool:
            if key.endswith(".manifest"):
                waits.set()
                assert over.wait(300)
            return self.inner.put_if_absent(key, data)

    with open_store(where) as store, Checkpointer(Held(store), run="a", sidecar=None) as checkpointer:
        handle = checkpointer.save(1, _STATE)
        assert waits.wait(60)
        try:
            yield checkpointer, handle
            assert not handle.done
        finally:
            over.set()
        handle.result(60)


def child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child that ends as Python's own do."""
    context = multiprocessing.get_context("fork")
    ours, peer = context.Pipe()

    def run() -> None:
        peer.send(work())

    process = context.Process(target=run)
    began = time.monotonic()
    process.start()
    process.join(_QUICK)
    if process.is_alive():
        process.kill()
        raise AssertionError("the child does not end")
    assert process.exitcode == 0
    assert time.monotonic() - began < _QUICK
    return ours.recv()


def test_the_workers_of_a_loader_do_not_wait_at_their_end_for_a_save_of_their_parent(tmp_path: Path) -> None:
    with saving(tmp_path):
        began = time.monotonic()
        numbers: Any = list(range(8))
        assert len(list(DataLoader(numbers, batch_size=2, num_workers=2, multiprocessing_context="fork"))) == 4
        assert time.monotonic() - began < _QUICK


def test_a_child_is_told_that_checkpointer_and_handle_are_its_parents_and_closes_nothing(tmp_path: Path) -> None:
    with saving(tmp_path) as (checkpointer, handle):

        def work() -> list[str]:
            output = []
            for call in (
                lambda: checkpointer.save(2, _STATE),
                lambda: checkpointer.restore(_STATE),
                handle.result,
                handle.staged,
                handle.copied,
                handle.wait,
            ):
                try:
                    call()
                except UsageError as error:
                    output.append(str(error))
            with checkpointer:
                pass
            return output

        output = child(work)
        assert [str(os.getpid()) in each for each in output] == [True] * 6
        assert "create another Checkpointer in this process" in output[0]
        assert "wait for the save in the process that began it" in output[2]
    with Checkpointer(str(tmp_path), run="a", sidecar=None) as after:
        assert after.steps() == [1]


def test_a_child_shares_no_timeline_with_its_parent(tmp_path: Path) -> None:
    ours, known = writers.enter(), writers.of_this_job()
    assert ours in known
    session.export_session()

    def work() -> bool:
        return (
            not (writers.of_this_job() & known)
            and session.export_session()[0].partition("-")[0] != ours.partition("-")[0]
        )

    assert child(work)


def test_a_child_that_ends_in_full_deletes_no_lease_of_its_parent_and_ends_no_connection(store_url: str) -> None:
    done = nursery.run("tests.support.leaving_child", store_url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "status": 0,
        "leases": 2,
        "kept": True,
        "m": [0.0, 1.0, 2.0, 3.0],
        "steps": [1, 2, 3],
    }


def test_a_lease_that_a_child_lets_go_of_stays(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with LeaseKeeper(store, names.new_id(), run="a", timeline=1, step=1, bases=()) as lease:
            assert child(lambda: [lease.release(), len(list(store.list(names.LEASES)))][1]) == 1
            lease.release()
        assert not list(store.list(names.LEASES))


def test_a_child_of_a_trainer_that_watches_for_preemption_ends_by_sigterm_and_not_by_other_signals(
    tmp_path: Path,
) -> None:
    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer, checkpointer.on_preemption(dict) as guard:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
        process.start()
        assert process.pid is not None
        try:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(0.5)
            assert process.is_alive(), "it is the parent that saves"
            process.terminate()
            process.join(_QUICK)
            assert process.exitcode == -signal.SIGTERM
        finally:
            process.kill()
        assert not guard.requested


def test_an_optimizer_of_a_child_does_not_wait_for_a_copy_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.checkpoint.saving.copying import Copying

    over = threading.Event()
    monkeypatch.setattr(Copying, "gate", lambda self: over.wait(300))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(str(tmp_path), run="a", sidecar=None, staging="lazy") as checkpointer:
        handle = checkpointer.save(1, {"model": model, "optimizer": optimizer})
        assert child(lambda: optimizer.step() is None)
        over.set()
        handle.result(60)
