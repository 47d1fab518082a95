"""Real ranks that commit in groups: through the Checkpointer and through DCP, restored onto other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Decision, read
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.check import check
from headrace.dataio.store.open import open_store
from tests.support.ranks import launch

pytestmark = pytest.mark.process


def test_steps_of_five_ranks_in_groups_of_two_are_restored_on_five_and_three(tmp_path: Path) -> None:
    saved = launch(5, "tests.support.grouped_ranks", "save", str(tmp_path))
    assert sum(lines[1]["deduplicated"] for lines in saved) > 0
    with open_store(tmp_path) as store:
        for run, step in (("own", 1), ("own", 2), ("dcp", 3)):
            base = repository.find(store, run, step)
            assert base is not None
            decision = read(store, names.decision(run, base.timeline, step, base.attempt), Decision)
            assert (decision.world_size, decision.group_ranks, len(decision.groups)) == (5, 2, 3)
        assert check(store).clean
    for world in (5, 3):
        found = launch(world, "tests.support.grouped_ranks", "restore", str(tmp_path))
        assert [lines[0]["equal"] for lines in found] == [[True, True]] * world
