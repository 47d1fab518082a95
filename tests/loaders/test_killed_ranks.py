"""Four gloo ranks, killed in the middle of steps and started again, also as two and three, train on what one process would."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.shards.dataset import Dataset
from tests.support import killed_ranks, nursery


def check(made_dataset: Dataset, folder: Path, worlds: list[int], seed: int, kind: str = "plain") -> None:
    """One run for each of `worlds`, all but the last one killed a few steps after it began."""
    draw = random.Random(seed)
    runs: list[tuple[int, int | None]] = []
    at = 0
    for world_size in worlds[:-1]:
        at += killed_ranks.FURTHER + draw.randint(1, 3)  # so that each run has a step to make
        runs.append((world_size, at))
    steps = at + killed_ranks.FURTHER + 1
    job = killed_ranks.Job(made_dataset.url, str(folder), steps, [*runs, (worlds[-1], None)], seed, kind)
    child = nursery.start("tests.support.killed_ranks", job.text())
    stdout, stderr = child.communicate(600)
    assert child.returncode == 0, stderr
    ends: list[dict[str, Any]] = json.loads(stdout)
    for end, (world_size, kill_at) in zip(ends, runs, strict=False):
        assert end["ends"] == [-9] * world_size, stderr  # every rank was killed, none ended by itself
        assert kill_at is not None
        assert kill_at <= end["lines"] <= kill_at + killed_ranks.FURTHER < steps
    assert ends[-1] == {"world_size": worlds[-1], "ends": [0] * worlds[-1], "lines": steps}
    found = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert found == uninterrupted(made_dataset.url, steps, kind)


def uninterrupted(url: str, steps: int, kind: str) -> list[Any]:
    """What one process delivers if it is not killed."""
    rows: list[Any] = []
    with killed_ranks.make_loader(url, 0, 1, kind) as loader:
        while len(rows) < steps:
            for batch in loader:
                rows.append(killed_ranks.row(batch))
                if len(rows) == steps:
                    break
    return rows


def test_ranks_killed_three_times_go_on_exactly_as_two_and_as_three(made_dataset: Dataset, tmp_path: Path) -> None:
    check(made_dataset, tmp_path, [4, 2, 3, 4], seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_ranks_killed_twenty_times_go_on_exactly(kind: str, made_dataset: Dataset, tmp_path: Path) -> None:
    check(made_dataset, tmp_path, [4] * 10 + [2, 2, 3, 3, 4, 2, 3, 4, 2, 3, 1], seed=2, kind=kind)
