"""Trainers as real processes: several ranks, a kill in the middle of staging."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.repository import check
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_trainer import state_for, summary
from tests.support.nursery import Child
from tests.support.ranks import meeting


def start(*arguments: str, **environment: str) -> Child:
    return nursery.start("tests.support.checkpoint_trainer", *arguments, **environment)


def ranks(url: str, world_size: int) -> list[list[dict[str, Any]]]:
    """The lines that each rank printed."""
    with meeting(world_size) as place:
        running = [start("ranks", url, RANK=str(rank), **place) for rank in range(world_size)]
        outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * world_size, outputs
    return [[json.loads(line) for line in out.splitlines()] for out, _ in outputs]


def test_two_ranks_save_one_step_and_one_or_two_restore_it(tmp_path: Path) -> None:
    lines = ranks(str(tmp_path), 2)
    first, second = (lines[rank][0] for rank in range(2))
    assert first["attempt"] == second["attempt"]
    differ = {name for name in first["weights"] if first["weights"][name] != second["weights"][name]}
    assert differ == {"1.running_mean", "1.running_var"}
    total = first["state"] + second["state"]
    assert abs(first["state"] - second["state"]) < 0.1 * total  # the work was spread, nothing written twice
    expected = state_for(0, seed=1)
    assert total < 1.05 * sum(t.numel() * 4 * 3 for t in expected["model"].parameters())

    for rank in range(2):  # restored on two ranks: each has its own loader again
        restored = lines[rank][-1]
        assert restored["weights"] == first["weights"]
        assert restored["moments"] == first["moments"]
        assert restored["tag"] == f"rank {rank}"
        assert restored["loader"] == [100 + rank, [100 + rank] * 3]

    alone = state_for(9, seed=3)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(alone) == 5
    now = summary(alone)
    assert now["weights"] == first["weights"]
    assert now["moments"] == first["moments"]
    assert now["tag"] == "rank 0"
    assert alone["loader"].position == 100

    errors = [[line for line in lines[rank] if "code" in line] for rank in range(2)]
    assert [e["code"] for e in errors[0]] == ["transient", "usage"]
    assert [e["code"] for e in errors[1]] == ["usage", "usage"]
    assert "rank 1 could not take part" in errors[0][0]["message"]
    assert "tag: a value of type builtins.object cannot be saved" in errors[1][0]["message"]
    assert all("the ranks request different steps" in e[1]["message"] for e in errors)


def test_a_trainer_killed_while_staging_leaves_nothing_behind(tmp_path: Path) -> None:
    url, mark = str(tmp_path / "repo"), tmp_path / "mark"
    state = {"a": torch.randn(100_000), "b": torch.randn(100_000)}
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)
    process = start("staging", url, HEADRACE_CRASH="ckpt.mid-stage", HEADRACE_CRASH_MARK=str(mark))
    _, errors = process.communicate(timeout=150)
    assert process.returncode == -9, errors
    assert mark.read_text() == "ckpt.mid-stage\n"
    with open_store(url) as store:
        report = check.check(store)
        assert report.clean
        assert [line.step for line in report.steps] == [1]
        assert report.unfinished == []
        assert [base.step for base in repository.visible(store, "exp")] == [1]
    into = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(into) == 1
        assert torch.equal(into["a"], state["a"])
        assert checkpointer.save(2, into).result(60).bytes_written == 0


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="these start no thread at their end; a warning says so"
)
def test_a_program_that_ends_without_close_still_commits_its_save(tmp_path: Path) -> None:
    process = start("ending", str(tmp_path))
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert "waiting for the save in flight" in errors
    with open_store(tmp_path) as store:
        assert [base.step for base in repository.visible(store, "exp")] == [1]
