"""Which failures the worker's program says may be tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.format.documents import Decision, encode
from headrace.checkpoint.repository.commit import Attempt, FinalError, LateError
from headrace.checkpoint.repository.lease import lost
from headrace.checkpoint.saving.commit_worker import _may_succeed_later
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, SlowDownError, TransientError
from headrace.dataio.sidecar.jobs.memfd import sealed
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Made, begin, make, tiny_state

ROOT = Path(__file__).parents[3]


class Worker:
    """`python -m headrace.checkpoint.saving.commit_worker` with one plan, one arena and one progress file."""

    def __init__(self, made: Made, folder: Path) -> None:
        self.arena, self.plan = sealed("arena", bytes(made.arena)), sealed("plan", made.encoded)
        self.progress = os.open(folder / "progress", os.O_RDWR | os.O_CREAT, 0o600)

    def run(self, *, arena: bool = True) -> list[dict[str, Any]]:
        """What it says."""
        descriptors = [self.arena if arena else -1, self.plan, self.progress]
        names = ("--arena-fd", "--plan-fd", "--progress-fd")
        messages = [text for name, fd in zip(names, descriptors, strict=True) for text in (name, str(fd))]
        ended = subprocess.run(
            [sys.executable, "-m", "headrace.checkpoint.saving.commit_worker", *messages],
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd in descriptors if fd >= 0],
            cwd=ROOT,
            timeout=120,
            check=False,
        )
        return [json.loads(line) for line in ended.stdout.splitlines()]

    def close(self) -> None:
        for fd in (self.arena, self.plan, self.progress):
            os.close(fd)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (TransientError("the store is away"), True),
        (SlowDownError("the store is overloaded"), True),
        (lost("1"), True),
        (FinalError("it was aborted"), False),
        (LateError("rank 1 did not come"), False),
        (ConflictError("another won"), False),
        (CorruptionError("the plan is damaged"), False),
    ],
)
def test_only_what_may_pass_by_itself_is_worth_another_try(error: HeadraceError, again: bool) -> None:
    assert _may_succeed_later(error) == again


def test_an_attempt_that_was_aborted_is_not_to_be_tried_again(store: Store, tmp_path: Path) -> None:
    made = make(store, tiny_state(1), step=1, number=begin(store))
    p = made.plan
    attempt = Attempt(p.run, p.timeline, p.step, p.attempt, p.world_size)
    store.put(attempt.decision_key, encode(Decision(attempt=p.attempt, outcome="abort", reason="the test says so")))
    worker = Worker(made, tmp_path)
    output = worker.run()[-1]
    worker.close()
    assert (output["event"], output["code"], output["again"]) == ("failed", "transient", False)
    assert "was aborted" in output["message"]


def test_bytes_that_are_gone_are_not_to_be_tried_again(store: Store, tmp_path: Path) -> None:
    worker = Worker(make(store, tiny_state(1), step=1, number=begin(store)), tmp_path)
    output = worker.run(arena=False)[-1]
    worker.close()
    assert (output["event"], output["again"]) == ("failed", False)
    assert "is lost" in output["message"]
