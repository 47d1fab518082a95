"""Loading through DCP changes nothing of the run; resuming is said."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headrace.checkpoint import Checkpointer, Keep
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter, session
from headrace.checkpoint.repository import collect, timeline, writers
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.errors import ConflictError
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def in_a_process_of_its_own() -> None:
    another_process()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


def another_process() -> None:
    """As after a restart."""
    writers.is_new_process()
    session.is_new_process()


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((3,), value)}


def save(store: Store, *steps: int) -> None:
    for step in steps:
        dcp.save(state(step), storage_writer=RepositoryWriter(store, run="a", step=step))


def load(store: Store, step: int, **more: Any) -> None:
    into = state(0)
    dcp.load(into, storage_reader=RepositoryReader(store, run="a", step=step, **more))
    assert torch.equal(into["t"], state(step)["t"])


def steps(store: Store) -> list[int]:
    return sorted(base.step for base in repository.visible(store, "a"))


def test_a_load_of_an_older_step_changes_nothing(store: Store) -> None:
    save(store, 1, 2, 3)
    load(store, 1)
    save(store, 4)
    load(store, 3)
    assert (steps(store), timeline.numbers(store, "a")) == ([1, 2, 3, 4], [1])
    assert collect.retain(store, "a", Keep(last=100)) is None


def test_a_load_does_not_fence_a_save_in_flight(store: Store, tmp_path: Path) -> None:
    held, seen = threading.Event(), threading.Event()

    class Held(Wrapped):
        def put_if_absent(self, key: str, data: Buffer) -> bool:
            if key.endswith(".manifest") and "/000000000002/" in key:
                seen.set()
                assert held.wait(60)
            return self.inner.put_if_absent(key, data)

    slow = Held(store)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        save(slow, 1)
        saving = dcp.async_save(state(2), storage_writer=RepositoryWriter(slow, run="a", step=2))
        assert seen.wait(60)
        load(slow, 1)
        save(slow, 3)
        held.set()
        saving.result(60)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
    assert steps(store) == [1, 2, 3]


def test_a_resumed_step_lets_a_step_be_saved_again_and_a_newer_one_go_on(store: Store) -> None:
    save(store, 1, 2, 3)
    load(store, 1, resume=True)
    assert steps(store) == [1, 2, 3], "the load alone changes nothing"
    save(store, 4)
    assert steps(store) == [1, 2, 3, 4]
    load(store, 2, resume=True)
    save(store, 3)
    assert (steps(store), timeline.numbers(store, "a")) == ([1, 2, 3], [1, 2])
    save(store, 4)
    assert (steps(store), timeline.numbers(store, "a")) == ([1, 2, 3, 4], [1, 2])


def test_a_process_that_resumed_the_latest_step_keeps_it_when_another_trainer_goes_back_meanwhile(store: Store) -> None:
    save(store, 1, 2, 3)
    another_process()
    dcp.load(state(0), storage_reader=RepositoryReader(store, run="a", resume=True))
    going_on = dict(session._resumed)
    another_process()
    load(store, 1, resume=True)
    save(store, 2)
    assert steps(store) == [1, 2], "its timeline hides steps 2 and 3"
    another_process()
    session._resumed.update(going_on)
    save(store, 4)
    assert (steps(store), timeline.numbers(store, "a")) == ([1, 2, 3, 4], [1, 2, 3])


def test_a_process_that_starts_with_an_older_step_needs_no_word(store: Store) -> None:
    save(store, 10, 20, 30)
    another_process()
    load(store, 20)
    save(store, 30)
    assert (steps(store), timeline.numbers(store, "a")) == ([10, 20, 30], [1, 2])


def test_without_a_word_a_step_is_not_saved_again_and_an_older_one_is_warned_about(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 10, 30)
    load(store, 10)
    with pytest.raises(CheckpointException) as caught:
        save(store, 30)
    error = caught.value.failures[0][0]
    assert isinstance(error, ConflictError)
    assert "restore it first (`resume=True` of RepositoryReader)" in str(error)
    with caplog.at_level(logging.WARNING):
        save(store, 20)
    assert "step 20 is saved before step 30, which stays the latest" in caplog.text
    assert steps(store) == [10, 20, 30]


def test_a_process_that_saves_for_another_one_goes_on_in_its_timeline_and_branches_for_it(store: Store) -> None:
    """What DCP's process for asynchronous saves does: it unpickles the writer. The processes take turns here."""
    save(store, 1, 2)
    load(store, 1, resume=True)
    sent = pickle.dumps(RepositoryWriter(store.location.url, run="a", step=2))
    trainer = session.export_session()
    another_process()
    dcp.save(state(2), storage_writer=pickle.loads(sent))  # noqa: S301 - our own
    assert timeline.numbers(store, "a") == [1, 2]
    another_process()
    session.adopt_session(trainer)
    with pytest.raises(CheckpointException):
        save(store, 2)  # the other process has saved it in this branch
    save(store, 3)
    assert timeline.numbers(store, "a") == [1, 2], "it was the same branch"
    assert steps(store) == [1, 2, 3]


def test_a_trainer_all_of_whose_saves_another_process_makes_does_not_take_the_run_back(store: Store) -> None:
    sent = pickle.dumps(RepositoryWriter(store.location.url, run="a", step=1))
    trainer = session.export_session()
    another_process()
    dcp.save(state(1), storage_writer=pickle.loads(sent))  # noqa: S301 - our own
    another_process()
    save(store, 2)  # the heir
    another_process()
    session.adopt_session(trainer)
    session.export_session()
    with pytest.raises(CheckpointException) as caught:
        save(store, 3)
    assert "timeline 1 was taken over by timeline 2" in str(caught.value.failures[0][0])


def test_a_checkpointer_and_dcp_in_one_process_share_their_timeline(store: Store) -> None:
    with Checkpointer(store, run="a", sidecar=None) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
        save(store, 2)
        checkpointer.save(3, state(3)).result(60)
        assert checkpointer.steps() == [1, 2, 3]
    save(store, 4)
    assert (steps(store), timeline.numbers(store, "a")) == ([1, 2, 3, 4], [1])


def test_a_missing_step_is_a_file_that_is_not_found(store: Store) -> None:
    save(store, 1)
    for run, step in (("a", 2), ("b", 1), ("b", "latest")):
        with pytest.raises(FileNotFoundError, match=f"run {run} has no step"):
            RepositoryReader(store, run=run, step=step).read_metadata()
