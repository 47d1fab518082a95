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
from headrace.checkpoint.restoring import dcp_names
from headrace.dataio.core.errors import CorruptionError, MismatchError
from tests.support.ranks import launch

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


def test_a_step_of_several_ranks_is_restored_by_one(tmp_path: Path) -> None:
    launch(2, "tests.support.dcp_state_dict_ranks", str(tmp_path), "fsdp")
    found = []
    for run in ("dcp", "checkpointer"):  # the same state, saved through DCP and by a Checkpointer
        model = torch.nn.Sequential(torch.nn.Linear(32, 66), torch.nn.ReLU(), torch.nn.Linear(66, 8))
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
        optimizer = torch.optim.AdamW(groups)
        with Checkpointer(tmp_path / "fsdp", run=run, sidecar=None) as checkpointer:
            checkpointer.restore({"model": model, "optim": optimizer}, 0)
        found.append((model.state_dict(), optimizer.state_dict()))
    assert equal(found[0][0], found[1][0])
    assert equal(found[0][1], found[1][1])
    assert [group["lr"] for group in found[0][1]["param_groups"]] == [0.1, 0.01]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"paths": [], "tensors": {}, "values": {}},
        {"paths": {"a": 3}, "tensors": {}, "values": {"a": 1}},
        {"paths": {"a": (None,)}, "tensors": {}, "values": {"a": 1}},
        {"paths": {}, "tensors": {"a": "b"}, "values": {}},
        {"paths": {}, "tensors": {}, "values": 3},
        {"paths": {"a": ("x",) * 5000}, "tensors": {}, "values": {"a": 1}},
        {"paths": {"a": ("x",), "b": ("x", "y")}, "tensors": {}, "values": {"a": 1, "b": 2}},
        {"paths": {"a": ("x",), "b": ("x",)}, "tensors": {}, "values": {"a": 1, "b": 2}},
        {"paths": {"a": ()}, "tensors": {}, "values": {"a": 1}},
        {"paths": {}, "many": [3], "values": {}},
        {"paths": {}, "many": [["a", ["b"]]], "values": {}},
    ],
    ids=str,
)
def test_malformed_documents_are_corruption(document: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError):
        dcp_names.nested(dcp_names.of_document(document))


def test_a_long_number_stays_a_text() -> None:
    names = dcp_names.Names({}, {"a": [], "b": 1}, {"a": ("o", "param_groups"), "b": ("o", "state", "9" * 5000, "s")})
    assert list(dcp_names.nested(names)["o"]["state"]) == ["9" * 5000]
