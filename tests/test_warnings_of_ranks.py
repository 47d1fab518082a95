"""What all ranks of a node notice is said once, and not once a rank."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch

from headrace import Checkpointer, pack
from headrace.bench.core.data import make_clip
from tests.support.ranks import launch


@pytest.mark.process
def test_the_loader_and_the_checkpointer_warn_once_a_node(tmp_path: Path) -> None:
    for number in range(8):
        make_clip(tmp_path / "media", number, seconds=1)
    pack([tmp_path / "media"], tmp_path / "clips", workers=1).close()
    with Checkpointer(tmp_path / "checkpoints", run="other", sidecar=None) as saver:
        saver.save(1, {"model": torch.nn.Linear(2, 2)}).result(60)

    lines = launch(2, "tests.support.warned_ranks", str(tmp_path))

    counts = collections.Counter(message for rank in lines for line in rank for message in line["warnings"])
    assert {message: count for message, count in counts.items() if count > 1} == {}
    for part in (
        "no sidecar answers on",  # the loader
        "no sidecar answers: saving inside this process",
        "run exp starts without a step",
        "left as they are: in the state, not in the step: new",
        "patterns without a match",
        "a state that does not fit was forced",
        "only rank 1 notices this",
    ):
        assert sum(part in message for message in counts) == 1, (part, counts)
