"""Tensors are written only after the last read of them, on whatever stream."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter, reader
from headrace.checkpoint.restoring import chunk_reader, shared_reads
from headrace.checkpoint.state import tensors


def test_what_the_trainers_stream_still_reads_is_waited_for_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    here = [torch.device(name) for name in ("cuda:1", "cpu", "cuda:0", "cuda:1")]
    tensors.synchronize(here)
    assert sorted(waited, key=str) == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_that_wait_comes_before_tensors_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    read = shared_reads.read

    def spied(*given: Any) -> Any:
        seen.append("read")
        return read(*given)

    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        monkeypatch.setattr(tensors, "synchronize", lambda devices: seen.append(list(devices)))
        monkeypatch.setattr(shared_reads, "read", spied)
        checkpointer.restore({"w": torch.zeros(3)})
    assert seen == [[torch.device("cpu")], "read"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_torch_distributed_checkpoint_waits_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=RepositoryWriter(str(tmp_path), run="a", step=1), no_dist=True)
    seen: list[Any] = []
    read = chunk_reader.read

    def spied(*given: Any) -> None:
        seen.append("read")
        read(*given)

    monkeypatch.setattr(reader, "synchronize", lambda devices: seen.append(list(devices)))
    monkeypatch.setattr(chunk_reader, "read", spied)
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=RepositoryReader(str(tmp_path), run="a"), no_dist=True)
    assert state["w"].tolist() == [1, 1, 1]
    assert seen == [[torch.device("cpu")], "read"]
