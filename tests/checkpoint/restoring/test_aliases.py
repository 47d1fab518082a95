"""Tensors that share memory in the state: what a step would put there is the same for all of them, or nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.dataio.core.errors import MismatchError
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped


def save(where: Path, state: dict[str, Any]) -> None:
    with Checkpointer(str(where), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)


def restore(where: Any, state: dict[str, Any], **how: Any) -> None:
    with Checkpointer(where if not isinstance(where, Path) else str(where), run="r", sidecar=None) as checkpointer:
        checkpointer.restore(state, **how)


class Counting(Wrapped):
    bytes_read = 0

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.bytes_read += sum(len(view) for _, view in ranges)
        self.inner.get_ranges_into(key, ranges)


def model(rows: int, *, tied: bool) -> nn.ModuleDict:
    made = nn.ModuleDict({"embed": nn.Embedding(rows, 8), "head": nn.Linear(8, rows, bias=False)})
    if tied:
        made["head"].weight = made["embed"].weight
    return made


@pytest.mark.parametrize("rows", [5, 30_000])
def test_untied_weights_are_not_restored_into_tied_ones_unless_they_are_equal(rows: int, tmp_path: Path) -> None:
    first, second = model(rows, tied=False), model(rows, tied=True)
    before = second.get_parameter("embed.weight").clone()
    save(tmp_path / "differ", {"m": first})
    with pytest.raises(MismatchError, match=r"m/embed\.weight and m/head\.weight share memory in the state"):
        restore(tmp_path / "differ", {"m": second})
    assert torch.equal(second.get_parameter("embed.weight"), before)
    restore(tmp_path / "differ", {"m": second}, exclude="m/head.weight")
    assert torch.equal(second.get_parameter("embed.weight"), first.get_parameter("embed.weight"))
    with torch.no_grad():
        first.get_parameter("head.weight").copy_(first.get_parameter("embed.weight")).view(-1)[3] = math.nan
        first.get_parameter("embed.weight").view(-1)[3] = math.nan
    save(tmp_path / "equal", {"m": first})
    with open_store(tmp_path / "equal") as store:
        counting = Counting(store)
        restore(counting, {"m": second})
    saved, found = (model.get_parameter("embed.weight").view(torch.int32) for model in (first, second))
    assert torch.equal(found, saved)
    if rows > 2048:  # their digests say that they are equal
        assert counting.bytes_read == rows * 8 * 4


def test_separate_tensors_are_not_restored_into_views_unless_they_agree(tmp_path: Path) -> None:
    def views(memory: torch.Tensor) -> dict[str, Any]:
        return {"all": memory, "part": memory[10:50], "column": memory.view(10, 10)[:, 3]}

    wanted = torch.arange(100.0)
    save(tmp_path / "agree", {name: tensor.clone() for name, tensor in views(wanted).items()})
    memory = torch.zeros(100)
    restore(tmp_path / "agree", views(memory))
    assert torch.equal(memory, wanted)
    save(tmp_path / "not", {**{n: t.clone() for n, t in views(wanted).items()}, "column": torch.zeros(10)})
    memory.zero_()
    with pytest.raises(MismatchError, match="share memory in the state"):
        restore(tmp_path / "not", views(memory))
    assert not memory.any()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.bfloat16, torch.bool])
def test_elements_of_all_sizes_are_compared_by_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    given = torch.tensor([math.nan, -0.0, 1.0]).to(dtype)
    save(tmp_path, {"a": given, "b": given.clone()})
    shared = torch.zeros(3, dtype=dtype)
    restore(tmp_path, {"a": shared, "b": shared})
    assert shared[2] == 1
    other = torch.zeros(3, dtype=torch.float64 if not dtype.is_complex else dtype)
    restore(tmp_path, {"a": other, "b": other}, cast=True)
    assert other[2] == 1


def test_a_tensor_whose_own_elements_share_memory_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.arange(3.0).view(3, 1).expand(3, 4), "y": torch.ones(2)})
    into = {"x": torch.zeros(3, 1).expand(3, 4), "y": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"x: elements of this tensor share memory \(clone"):
        restore(tmp_path, into)
    assert not into["y"].any()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_through_dcp_too(tmp_path: Path) -> None:
    state = {"a": torch.ones(5), "b": torch.full((5,), 2.0)}
    dcp.save(state, storage_writer=RepositoryWriter(str(tmp_path), run="r", step=1), no_dist=True)
    state["b"].fill_(1)
    dcp.save(state, storage_writer=RepositoryWriter(str(tmp_path), run="r", step=2), no_dist=True)
    shared = torch.zeros(5)
    with pytest.raises(CheckpointException, match="a and b share memory in the state"):
        dcp.load(
            {"a": shared, "b": shared}, storage_reader=RepositoryReader(str(tmp_path), run="r", step=1), no_dist=True
        )
    assert not shared.any()
    dcp.load({"a": shared, "b": shared}, storage_reader=RepositoryReader(str(tmp_path), run="r", step=2), no_dist=True)
    assert shared.all()
