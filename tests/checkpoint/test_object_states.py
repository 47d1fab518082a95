"""States of objects in a step, read as JSON without a state to restore into: `headrace ckpt state`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import RNG, Checkpointer
from headrace.checkpoint.object_states import object_state, object_states
from headrace.checkpoint.state.tree import DCP_MARK
from headrace.dataio.cli import main
from headrace.dataio.core.errors import NotFoundError


class Counter:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def repository(tmp_path: Path) -> str:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path / "ckpt", run="exp42", sidecar=None) as checkpointer:
        for step in (10, 20):
            state = {
                "model": model,
                "loader": Counter(seed=1, batch=step, order=["a", (2, 0.5)]),
                "objects": [Counter(seen=step)],
                "rng": RNG(),
                "raw": {"bytes": b"x"},
                "not finite": {"loss": float("nan")},
            }
            checkpointer.save(step, state).result(timeout=60)
    return str(tmp_path / "ckpt")


def test_states_that_are_json_are_listed_by_their_paths(repository: str) -> None:
    expected = {"loader": {"seed": 1, "batch": 10, "order": ["a", [2, 0.5]]}, "objects/0": {"seen": 10}}
    assert object_states(repository, "exp42", "10") == expected
    assert object_states(repository, "exp42")["objects/0"] == {"seen": 20}


def test_the_command_prints_one_state(repository: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "state", repository, "--run", "exp42", "--step", "10", "--name", "loader"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == 10


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run", "exp24"], "there is no such run at .*; there are: exp42"),
        (["--run", "exp42", "--step", "15"], "has no step 15; its newest steps are 20, 10"),
        (["--run", "exp42", "--name", "loadr"], "no state that is JSON called 'loadr'; there are: loader, objects/0"),
        (["--run", "exp42"], "more than one state that is JSON: loader, objects/0"),
        (["--run", "exp42", "--rank", "1"], "saved by 1 rank, so there is no rank 1"),
        (["--run", "exp42", "--step", "tag:best"], "best"),
        ([], "state needs --run"),
    ],
)
def test_a_mistake_names_what_there_is(
    repository: str, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert main(["ckpt", "state", repository, *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert re.search(expected, captured.err), captured.err


def test_the_only_state_needs_no_name() -> None:
    states = {"a": {"b": {"x": 1}}, "a/b": {"x": 1}}
    assert object_state(states) == {"b": {"x": 1}}
    assert object_state(states, "a/b") == {"x": 1}
    with pytest.raises(NotFoundError, match="holds no counter"):
        object_state({}, what="counter")


def test_the_command_needs_no_torch(repository: str) -> None:
    code = "import sys; from headrace.dataio.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "ckpt", "state", repository, "--run", "exp42", "--name", "loader"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_a_step_that_dcp_saved_have_their_paths_too(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from headrace.checkpoint.dcp import RepositoryWriter

    state = {"loader": Counter(seed=1, batch=7, order=["a", 2]), "weight": torch.zeros(3)}
    dcp.save(state, storage_writer=RepositoryWriter(str(tmp_path / "ckpt"), run="exp42", step=7), no_dist=True)
    assert object_states(tmp_path / "ckpt", "exp42")["loader"] == {"seed": 1, "batch": 7, "order": ["a", 2]}


@pytest.mark.parametrize(
    "path", [(), "loader", ("a",) * 10_000, ("loader", ("a", "b")), ("b", "c"), 7], ids=lambda path: str(path)[:20]
)
def test_a_strange_path_in_a_step_of_dcp_is_read_without_harm(tmp_path: Path, path: Any) -> None:
    values = {"b": 1, "x": {"seed": 2}, "a": {"c": 3}}
    document = {"by": DCP_MARK, "values": values, "paths": {"b": ("b",), "x": path}, "tensors": {}}
    with Checkpointer(tmp_path, run="exp42", sidecar=None) as checkpointer:
        checkpointer.save(1, document).result(timeout=60)
    assert object_states(tmp_path, "exp42")["a"] == {"c": 3}
