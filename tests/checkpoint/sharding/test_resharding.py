"""A small transformer from 4 ranks to 2, to 1, to 3, and from each way of spreading it to others; gloo, real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import launch

JOB = "tests.support.resharding_ranks"
Lines = list[list[dict[str, Any]]]

SHORT = [
    {4: "fsdp", 2: "tp", 1: "single", 3: "fsdp"},
    {4: "tp:dicts", 2: "fsdp:dicts", 1: "single:dicts", 3: "tp:dicts"},
    {4: "2d", 2: "hsdp", 1: "single", 3: "ddp"},
]
LONG = [
    {4: "hsdp", 2: "ddp", 1: "single", 3: "tp"},
    {4: "ddp", 2: "tp", 1: "single", 3: "fsdp"},
    {4: "tp", 2: "fsdp", 1: "single", 3: "tp"},
    {4: "fsdp:dicts", 2: "tp:dicts", 1: "single:dicts", 3: "ddp:dicts"},
    {4: "2d:dicts", 2: "fsdp:dicts", 1: "single:dicts", 3: "fsdp:dicts"},
]


def journey(url: str, chains: list[dict[int, str]]) -> dict[int, Lines]:
    return {
        world: launch(world, JOB, url, *(f"run{i}:{chain[world]}" for i, chain in enumerate(chains)))
        for world in (4, 2, 1, 3)
    }


def check(found: dict[int, Lines], chains: list[dict[int, str]]) -> None:
    last: Lines | None = None
    for world, ranks in found.items():
        for run in range(len(chains)):
            was = [[line for line in lines if line["run"] == f"run{run}"] for lines in last or []]
            now = [[line for line in lines if line["run"] == f"run{run}"] for lines in ranks]
            check_run(was, now)
        assert len(ranks) == world
        last = ranks


def check_run(was: Lines, now: Lines) -> None:
    """`was`: what the ranks of the job before printed; each rank printed what it restored and what it saved."""
    for rank, (restored, saved) in enumerate(now):
        assert saved["state"] == now[0][1]["state"]  # one model, whichever rank looks
        if not was:
            assert restored["restored"] is None
            continue
        before = was[rank if rank < len(was) else 0][1]
        assert restored["restored"] == before["saved"]
        assert restored["state"] == before["state"] != saved["state"]
        assert [restored[k] for k in ("position", "lr", "random")] == [before[k] for k in ("position", "lr", "random")]
    sizes = [saved["bytes"] for _, saved in now]
    assert max(sizes) < 1.05 * sum(sizes) / len(sizes)  # the work is spread
    if was:
        assert sum(sizes) < 1.02 * sum(saved["bytes"] for _, saved in was)  # and nothing is written by two


@pytest.mark.timeout(500)
def test_fsdp_tp_2d_hsdp_and_ddp_become_one_another_bit_for_bit_on_4_2_1_and_3_ranks(tmp_path: Path) -> None:
    check(journey(str(tmp_path), SHORT), SHORT)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_more_ways_from_one_spreading_to_another(tmp_path: Path) -> None:
    check(journey(str(tmp_path), LONG), LONG)
