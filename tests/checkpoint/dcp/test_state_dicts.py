"""`get_state_dict` and `set_state_dict`, with FSDP2, tensor parallelism and both: what comes back trains on the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import launch


@pytest.mark.parametrize(("kinds", "ranks"), [(("fsdp", "tp"), 2), pytest.param(("2d",), 4, marks=pytest.mark.soak)])
def test_model_and_optimizer_there_and_back(tmp_path: Path, kinds: tuple[str, ...], ranks: int) -> None:
    good: dict[str, str | bool] = {"loaded": True, "trained on": True, "changed": True}
    expected = [good | {"way": way, "flat": flat} for flat in (False, True) for way in ("dcp", "checkpointer")]
    found = launch(ranks, "tests.support.dcp_state_dict_ranks", str(tmp_path), *kinds)
    assert found == [expected * len(kinds)] * ranks
