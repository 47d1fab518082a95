"""Steps that were saved through DCP are restored by a `Checkpointer`, into objects and into their state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.dcp import RepositoryWriter
from headrace.dataio.core.errors import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.Linear(100, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(where: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=RepositoryWriter(str(where), run="a", step=1), no_dist=True)


def restored(where: Path, state: dict[str, Any], **options: Any) -> None:
    with Checkpointer(where, run="a", sidecar=None) as checkpointer:
        assert checkpointer.restore(state, **options) == 1


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


@pytest.mark.parametrize("of_torch", [False, True], ids=["state_dict", "get_state_dict"])
def test_objects_are_restored_from_their_state_dicts(tmp_path: Path, of_torch: bool) -> None:
    model, optimizer = made(0)
    states = get_state_dict(model, optimizer) if of_torch else (model.state_dict(), optimizer.state_dict())
    saved(tmp_path, {"model": states[0], "optim": states[1], "epoch": 3, "list": [torch.ones(2), {"a": torch.ones(3)}]})
    other, other_optimizer = made(1)
    state = {"model": other, "optim": other_optimizer, "epoch": 0, "list": [torch.zeros(2), {"a": torch.zeros(3)}]}
    restored(tmp_path, state)
    assert equal(model.state_dict(), other.state_dict())
    assert equal(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    assert state["epoch"] == 3
    assert equal(state["list"], [torch.ones(2), {"a": torch.ones(3)}])


def test_state_dicts_are_restored_in_place(tmp_path: Path) -> None:
    model, optimizer = made(0)
    saved(tmp_path, {"model": model.state_dict(), "optim": optimizer.state_dict()})
    other, other_optimizer = made(1)
    state = {"model": other.state_dict(), "optim": other_optimizer.state_dict()}
    restored(tmp_path, state)
    assert equal(model.state_dict(), other.state_dict())
    assert equal(state["optim"], optimizer.state_dict())


def test_the_state_dict_of_an_object_that_was_saved_is_restored(tmp_path: Path) -> None:
    model, optimizer = made(0)
    with Checkpointer(tmp_path, run="a", sidecar=None) as checkpointer:
        checkpointer.save(1, {"model": model, "optim": optimizer}).result(60)
    other, other_optimizer = made(1)
    state = {"model": other.state_dict(), "optim": other_optimizer.state_dict()}
    restored(tmp_path, state)
    assert equal(model.state_dict(), other.state_dict())
    assert equal(state["optim"], optimizer.state_dict())


def test_a_part_is_restored_and_a_misfit_is_named(tmp_path: Path) -> None:
    model, _ = made(0)
    saved(tmp_path, {"model": model.state_dict(), "epoch": 3})
    other, optimizer = made(1)
    with pytest.raises(MismatchError, match="optim: missing in the checkpoint"):
        restored(tmp_path, {"model": other, "optim": optimizer, "epoch": 0})
    restored(tmp_path, {"model": other, "optim": optimizer, "epoch": 0}, include="model")
    assert equal(model.state_dict(), other.state_dict())
    with pytest.raises(MismatchError, match=r"model/0.weight: shape \[100, 300\] in the checkpoint, \[5, 300\] in"):
        restored(tmp_path, {"model": torch.nn.Sequential(torch.nn.Linear(300, 5))}, include="model/0.weight")


def test_read_shows_the_paths_of_the_state(tmp_path: Path) -> None:
    saved(tmp_path, {"model": {"w": torch.ones(2), "n": [torch.ones(1), torch.zeros(1)]}, "epoch": 3})
    with read(tmp_path, run="a") as step:
        assert sorted(step) == ["epoch", "model/n/0", "model/n/1", "model/w"]
        assert step["epoch"] == 3
        assert torch.equal(step["model/w"].read(), torch.ones(2))
