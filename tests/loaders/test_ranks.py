"""Real gloo ranks: together they train on exactly the batches of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.dataio.shards.dataset import Dataset
from tests.support.ranks import launch


def run_ranks(world_size: int, url: str, steps: int, state: str = "-") -> dict[str, Any]:
    return launch(world_size, "tests.support.training_ranks", url, str(steps), state)[0][0]


def test_two_gloo_ranks_see_the_global_batches_of_one_and_go_on_from_its_state(dataset: Dataset) -> None:
    url = Path(dataset.url.removeprefix("file://")).as_posix()
    alone = run_ranks(1, url, 6)
    together = run_ranks(2, url, 6)
    assert together == alone
    rest = run_ranks(2, url, 3, json.dumps(alone["states"][2]))
    assert rest["seen"] == alone["seen"][3:]
