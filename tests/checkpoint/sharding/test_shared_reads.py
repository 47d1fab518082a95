"""A chunk that several ranks need leaves the store once."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.limits import MIB
from tests.support.checkpoint_states import flip
from tests.support.ranks import launch


def test_four_ranks_read_a_step_from_a_store_elsewhere_once_and_fail_together(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    with Checkpointer(str(damaged), run="exp", sidecar=None) as checkpointer:  # the same shapes as in the job
        layers = [torch.nn.Linear(1500, 1501), torch.nn.Linear(1501, 700), torch.nn.Linear(700, 3)]
        checkpointer.save(1, {"model": torch.nn.Sequential(*layers)}).result(60)
    flip(next((damaged / "packs").rglob("*.pack")), 5 * MIB)

    ranks = launch(4, "tests.support.shared_read_ranks", str(tmp_path / "repo"), str(damaged))
    total = ranks[0][0]["bytes"]
    for case in (
        1,
        2,
    ):  # from the node's own disk each rank takes what it needs, through the page cache where several do
        read = [lines[case]["read"] for lines in ranks]
        assert all(total <= own <= 1.02 * total for own in read) if case == 1 else sum(read) < 1.7 * total
        assert all(lines[case]["digests"] == ranks[0][0]["digests"] for lines in ranks)
    for case in (4, 5, 7, 8):  # from elsewhere, as all or only some ranks see it; replicated, sharded
        read = [lines[case]["read"] for lines in ranks]
        assert total <= sum(read) <= 1.02 * total
        assert max(read) < 0.6 * total
        assert all(lines[case]["digests"] == ranks[0][0]["digests"] for lines in ranks)
    assert [lines[3]["error"] for lines in ranks] == ["CorruptionError"] * 4  # each has seen it
    for case in (6, 9):
        errors = [lines[case] for lines in ranks]
        assert sorted(line["error"] for line in errors) == ["CorruptionError", *["TransientError"] * 3]
        assert any("damaged: tensor 'model/" in line["message"] for line in errors)
