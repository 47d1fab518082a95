"""`headrace bench resume` on a small set: the candidates resume exactly, and ours says when it first reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.workloads import resume
from headrace.dataio.sidecar.client import open_shard_reader
from headrace.loaders import loader as loader_module

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_resumed_loader_is_timed_and_compared_with_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_READS", [])
    monkeypatch.setattr(loader_module, "open_shard_reader", open_shard_reader)  # put back afterwards
    resume.prepare(tmp_path, 400)
    monkeypatch.setattr(resume, "AFTER", 1)
    ours = resume.measure(resume.OURS, str(tmp_path))
    assert ours["exact"] == 1
    assert ours["state_bytes"] < 220
    for percent in (50, 99):
        assert 0 < ours[f"before_read_{percent}_ms"] <= ours[f"resume_{percent}_ms"]
    assert resume.measure(resume.FLOOR, str(tmp_path))["exact"] == 1
    peer = resume.measure(resume.TORCHDATA, str(tmp_path))
    assert peer["exact"] == 1
    assert peer["resume_50_ms"] > 0
