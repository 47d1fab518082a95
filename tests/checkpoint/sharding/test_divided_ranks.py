"""Real ranks that divide the manifests of a step: onto fewer and onto more ranks, and with a damaged manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoint_states import flip
from tests.support.ranks import launch

pytestmark = pytest.mark.process
OF_RANKS = {"own", "views", "value"}
"""Entries that differ between ranks: a rank that the saving job did not have gets those of rank 0."""


def test_four_ranks_save_and_three_four_and_five_restore(tmp_path: Path) -> None:
    launch(4, "tests.support.divided_ranks", "save", str(tmp_path))
    for world, what in ((3, "restore"), (4, "elsewhere"), (5, "elsewhere")):
        found = launch(world, "tests.support.divided_ranks", what, str(tmp_path))
        assert all(lines[0]["tied"] for lines in found)
        assert [set(lines[0]["wrong"]) for lines in found] == [set() if rank < 4 else OF_RANKS for rank in range(world)]
    flip(next(tmp_path.rglob("000000000002/*/rank-00003.manifest")), 100)
    found = launch(3, "tests.support.divided_ranks", "restore", str(tmp_path))
    assert [lines[0]["error"] for lines in found] == ["CorruptionError"] * 3
    assert all("rank-00003.manifest is damaged" in lines[0]["message"] for lines in found)
