"""Steps of several ranks: shards are joined, and entries of all ranks are exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.checkpoint import export
from tests.support.exchange_ranks import whole
from tests.support.ranks import launch

safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.filterwarnings("ignore")
def test_shards_of_rows_and_columns_are_joined(tmp_path: Path) -> None:
    launch(3, "tests.support.exchange_ranks", str(tmp_path / "r"))
    export(tmp_path / "r", tmp_path / "hf", run="exp")
    found = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    expected = whole()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    export(tmp_path / "r", tmp_path / "m.pt", run="exp", format="torch", rank=2)
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(loaded["model"][name], expected[name]) for name in expected)
    assert torch.equal(loaded["local"], torch.full((3,), 2.0))  # that of the rank
    assert [loaded[f"stage{rank}"]["rank"] for rank in range(3)] == [0, 1, 2]  # those that one rank has
