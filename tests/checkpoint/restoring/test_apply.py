"""Tensors are written only when nobody reads them any more, on whatever stream."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint import Checkpointer
from checkpoint.restoring import apply, together


def test_what_the_trainers_stream_still_reads_is_waited_for_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    here = [torch.device(name) for name in ("cuda:1", "cpu", "cuda:0", "cuda:1")]
    apply._settle(here)
    assert sorted(waited, key=str) == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_that_wait_comes_before_tensors_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    read = together.read

    def spied(*given: Any) -> Any:
        seen.append("read")
        return read(*given)

    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        monkeypatch.setattr(apply, "_settle", lambda devices: seen.append(list(devices)))
        monkeypatch.setattr(together, "read", spied)
        checkpointer.restore({"w": torch.zeros(3)})
    assert seen == [[torch.device("cpu")], "read"]
