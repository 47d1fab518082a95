"""The program that measures what the ranks of a node pay: the figures of design note 0037, on a small index."""

from __future__ import annotations

import json

import pytest

from tests.support import node_scale

pytestmark = pytest.mark.slow


def test_two_ranks_read_a_column_once_and_a_restarted_node_reads_none(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("node")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    node_scale.main(["--samples", "2000000", "--ranks", "2", "--kinds", "column"])
    costs = json.loads(capsys.readouterr().out)
    assert 1.0 < costs["column"]["mean_ratio"] < 1.1
    assert costs["column_again"]["bytes"] == [0, 0]
