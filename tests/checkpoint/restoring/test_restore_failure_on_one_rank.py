"""One rank alone cannot read the step: all ranks raise, and say which and why, and none waits for the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from headrace.checkpoint import Checkpointer
from tests.support.ranks import launch


def test_what_one_rank_alone_cannot_read_is_an_error_on_all_that_names_it(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "whole"), run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1000)}).result(60)
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    manifests = list((tmp_path / "damaged").rglob("*.manifest"))
    assert manifests
    for path in manifests:
        path.write_bytes(path.read_bytes()[:-9])

    ranks = launch(3, "tests.support.agreeing_ranks", str(tmp_path / "whole"), str(tmp_path / "damaged"))
    output = [{line.pop("case"): line for line in lines} for lines in ranks]
    assert [one["restore"]["raised"] for one in output] == ["TransientError", "CorruptionError", "TransientError"]
    for one in (output[0], output[2]):
        assert one["restore"]["message"].startswith("rank 1 could not take part: CorruptionError: ")
        assert "rank-00000.manifest is damaged" in one["restore"]["message"]
    for one in output:
        for case in ("dcp, latest", "dcp, by number"):
            assert list(one[case]["failures"]) == ["1"]
            assert "rank-00000.manifest is damaged" in one[case]["failures"]["1"]
        assert list(one["dcp, no store"]["failures"]) == ["1"]  # DCP itself tells the other ranks
        assert "gopher" in one["dcp, no store"]["failures"]["1"]
        assert one["whole"]["raised"] is one["dcp, whole"]["raised"] is None
        assert one["exchange of too much"]["raised"] == "CapacityError"
        assert one["exchange of as much as is allowed"]["raised"] is None
    told = [one["exchange of too much"]["message"] for one in output]
    assert "rank 0 has 1001 bytes; the limit is 1000" in told[0]
    assert "rank 1 has 1001 bytes; the limit is 1000" in told[1]
    assert "another rank has more bytes; the limit is 1000" in told[2]
