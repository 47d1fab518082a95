"""Values other than tensors through DCP: each comes back as it was saved, of the rank in the process group of the call."""

from __future__ import annotations

import enum
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter, document
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.restoring import dcp_names
from headrace.checkpoint.state.tree import decode
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.open import open_store
from tests.support.ranks import launch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Mode(str, enum.Enum):  # noqa: UP042
    FAST = "fast"


def there_and_back(where: Path, state: dict[str, Any], into: dict[str, Any], *, flat: bool = True) -> dict[str, Any]:
    writer = RepositoryWriter(str(where), run="a", step=1)
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flat, flat))
    reader = RepositoryReader(str(where), run="a")
    dcp.load(into, storage_reader=reader, planner=DefaultLoadPlanner(flat, flat))
    return into


def test_values_that_dcp_would_pickle_come_back_with_their_types(tmp_path: Path) -> None:
    given = {
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "mode": Mode.FAST,
        "number": np.int64(3),
        "array": np.arange(3),
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "range": range(3),
        "pairs": frozenset({(np.float32(1.5), Mode.FAST)}),
    }
    found = there_and_back(tmp_path, {"v": given, "t": torch.ones(2)}, {"v": dict.fromkeys(given), "t": torch.zeros(2)})
    for key, value in found["v"].items():
        assert type(value) is type(given[key])
        assert repr(value) == repr(given[key])
    assert found["v"]["mode"] is Mode.FAST


def test_a_stream_comes_back_with_its_bytes(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save([1.0, 2.0], stream)
    found = there_and_back(tmp_path, {"s": stream, "t": torch.ones(1)}, {"s": None, "t": torch.zeros(1)})
    assert found["s"].getvalue() == stream.getvalue()


def test_tensors_inside_of_containers_that_a_planner_does_not_flatten_come_back(tmp_path: Path) -> None:
    tied = torch.arange(5.0)
    state = {"a": torch.ones(3), "b": {"x": tied, "n": 5, "deep": [{"y": torch.full((40_000,), 7.0)}, tied]}, "c/x": 1}
    into = {"a": torch.zeros(3), "b": {"x": torch.zeros(5), "n": 0, "deep": None}, "c/x": 0}
    found = there_and_back(tmp_path, state, into, flat=False)
    assert torch.equal(found["a"], torch.ones(3))
    assert found["b"]["n"] == 5
    assert torch.equal(found["b"]["x"], tied)
    assert torch.equal(found["b"]["deep"][0]["y"], torch.full((40_000,), 7.0))
    assert torch.equal(found["b"]["deep"][1], tied)


def test_what_a_container_cannot_keep_is_refused(tmp_path: Path) -> None:
    sparse = torch.zeros(3, 3).to_sparse()
    with pytest.raises(CheckpointException) as caught:
        there_and_back(tmp_path, {"b": {"x": sparse}}, {}, flat=False)
    error = caught.value.failures[0][0]
    assert isinstance(error, UsageError)
    assert "values/b/x: a tensor of kind coo inside of a value" in str(error)


@pytest.mark.parametrize(("many", "version"), [(document._MANY, 1), (2, manifests.WITH_VALUES)])
def test_of_many_tensors_each_name_is_written_once_with_its_path(
    many: int, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "_MANY", many)
    layers = [torch.full((3,), 1.0), {"7": torch.full((2,), 2.0), "é.": torch.full((20_000,), 3.0)}]
    state = {"model": {"layers.0": layers, "n": 5}, "": {"a": torch.ones(1)}}
    dcp.save(state, storage_writer=RepositoryWriter(str(tmp_path), run="a", step=1))
    with open_store(tmp_path) as store:
        key = next(info.key for info in store.list("runs/") if info.key.endswith(".manifest"))
        found = manifests.decode(store.get(key, max_bytes=manifests.MAX_BYTES), key)
    assert found.version == version
    assert found.tree.count("é".encode()) == (1 if many == 2 else 4)
    back = _load_state_dict_from_keys(storage_reader=RepositoryReader(str(tmp_path), run="a"))
    assert repr(back["model"]["layers.0"]) == repr(layers)
    assert (back["model"]["n"], back[""]["a"].item()) == (5, 1)


@pytest.mark.parametrize(
    ("name", "path"), [("a.b", ("x", "y")), ("a", ("a", "b")), ("a.01", ("a", 1)), ("a.-1", ("a", -1)), ("", ())]
)
def test_a_path_that_is_not_in_the_name_is_written_out(
    name: str, path: tuple[str | int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = document._cuts(name, path)
    assert cuts is None or dcp_names.path_from_cuts(name, cuts) == path
    for many in (document._MANY, 1):
        monkeypatch.setattr(document, "_MANY", many)
        tree = document.encode([name], {}, {name: path})[0]
        assert dcp_names.of_document(decode(tree)).paths == {name: path}
        assert dcp_names.of_document(decode(tree)).tensors == {name: name}


@pytest.mark.soak
def test_two_hundred_thousand_small_tensors_come_back(tmp_path: Path) -> None:
    def state(x: float) -> dict[str, Any]:
        names = (f"model.layers.{i // 100}.experts.{i % 100}.projection.weight" for i in range(200_000))
        return {"model": {name: torch.full((2,), x * i) for i, name in enumerate(names)}}

    given, into = state(1.0), state(0.0)
    there_and_back(tmp_path / "dcp", given, into)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in given["model"].items())
    into = state(0.0)
    with Checkpointer(str(tmp_path / "own"), run="a", sidecar=None) as checkpointer:
        checkpointer.save(1, given).result(300)
        checkpointer.restore(into)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in given["model"].items())


def test_ranks_of_a_process_group_get_their_own_values_and_the_coordinators_step(tmp_path: Path) -> None:
    lines = launch(3, "tests.support.dcp_group_ranks", str(tmp_path))
    for rank, output in enumerate(lines):
        found = {line.pop("what"): line for line in output}
        assert found.pop("alone") == {"position": 30 + rank, "own": [rank] * 2}
        if rank:
            second = {"position": 20 + rank, "own": [2.0] * rank}
            assert found.pop("step 1") == {"position": 10 + rank, "own": [1.0] * rank}
            assert found.pop("step latest") == second
            assert found.pop("race 2 ['latest']" if rank == 2 else "race 2 []") == second  # the race took place
        assert not found


def test_a_step_has_the_metadata_of_its_writer(tmp_path: Path) -> None:
    writer = RepositoryWriter(str(tmp_path), run="a", metadata={"loss": 2.5, "note": "ok"})
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="step-1")
    writer.metadata = {"loss": 1.5}
    saving: Any = dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="step-2", no_dist=True)
    saving.result()
    with read(tmp_path, run="a", step=1) as first, read(tmp_path, run="a", step=2) as second:
        assert (first.metadata, second.metadata) == ({"loss": 2.5, "note": "ok"}, {"loss": 1.5})
    with pytest.raises(UsageError, match=r"value\.item\(\)"):
        writer.metadata = {"loss": torch.ones(1)}  # type: ignore[dict-item]
