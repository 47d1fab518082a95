"""examples/migrate/from_checkpoints.py imports what torch.save, DCP and safetensors wrote, and compares all tensors."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from headrace import Checkpointer, read
from headrace.dataio.core.errors import UnsupportedError
from tests.support.migrations import SCRIPTS, run_script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20_000, 16), torch.nn.Linear(16, 4))
    model[0].weight.requires_grad_(False)  # the same in all steps
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    for _ in range(steps % 7):
        optimizer.zero_grad()
        model(torch.arange(8)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(steps: int) -> dict[str, Any]:
    model, optimizer = trained(steps)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}


def imported(folder: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    code = run_script("from_checkpoints.py", folder, repository, "--run", "exp42")
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def test_files_of_torch_become_steps_that_a_checkpointer_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    (folder / "log_7.txt").write_text("no checkpoint")
    for steps in (100, 20):  # by number, and not by name
        torch.save(state_of(steps), folder / f"step_{steps}.pt")
    output = imported(folder, tmp_path / "runs", capsys)
    assert [line.split(",")[0] for line in output.splitlines()[::2]] == ["step 20: step_20.pt", "step 100: step_100.pt"]
    assert output.count("9 tensors with") == 2
    new, whole = (int(output.splitlines()[2].split()[place]) for place in (4, 6))
    assert new < whole / 3  # the embedding is stored once
    torch.save(state_of(103), folder / "step_103.pt")
    again = imported(folder, tmp_path / "runs", capsys)
    assert [line.split(":")[0] for line in again.splitlines()] == ["step 103"] * 2
    model, optimizer = trained(0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with Checkpointer(tmp_path / "runs", run="exp42", sidecar=None) as checkpointer:
        assert checkpointer.restore(state) == state["step"] == 103
    expected, found = state_of(103), {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for one, two in (("model", "1.weight"), ("optimizer", "state")):
        assert str(found[one][two]) == str(expected[one][two])


def test_safetensors_folders_of_models_and_folders_of_dcp_become_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    weights = {f"layers.{n}.weight": torch.randn(8, 4, dtype=torch.bfloat16) for n in range(3)}
    save_file(weights, folder / "model-5.safetensors")
    (parts := folder / "checkpoint-10").mkdir()
    files = {name: f"model-0000{n}-of-00003.safetensors" for n, name in enumerate(weights, 1)}
    for name, file in files.items():
        save_file({name: weights[name]}, parts / file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    dcp.save(state_of(2), checkpoint_id=folder / "step-20", no_dist=True)
    output = imported(folder, tmp_path / "runs", capsys)
    heads = [line.split(", ")[:2] for line in output.splitlines()[::2]]
    assert heads == [
        ["step 5: model-5.safetensors", "safetensors"],
        ["step 10: checkpoint-10", "hf"],
        ["step 20: step-20", "dcp"],
    ]
    for step in (5, 10):
        with read(tmp_path / "runs", run="exp42", step=step) as saved:
            assert all(torch.equal(saved[f"model/{name}"].read(), weights[name]) for name in weights)


def test_a_file_that_can_run_code_is_refused_and_earlier_steps_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    torch.save(state_of(1), folder / "step_1.pt")
    torch.save({"model": trained(0)[0]}, folder / "step_2.pt")
    with pytest.raises(UnsupportedError, match="Sequential"):
        imported(folder, tmp_path / "runs", capsys)
    with read(tmp_path / "runs", run="exp42") as saved:
        assert saved.step == 1


def test_tensors_that_differ_or_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "out").mkdir()
    torch.save({"w": torch.tensor([0.0]), "v": torch.ones(3)}, folder / "step_1.pt")
    imported(folder, tmp_path / "runs", capsys)
    compare = runpy.run_path(str(SCRIPTS / "from_checkpoints.py"), run_name="script")["compare"]
    torch.save({"w": torch.tensor([-0.0]), "v": torch.ones(3)}, folder / "step_1.pt")  # equal, but not in its bits
    assert not compare(folder / "step_1.pt", str(tmp_path / "runs"), "exp42", 1)
    torch.save({"u": torch.ones(1)}, folder / "step_1.pt")
    assert not compare(folder / "step_1.pt", str(tmp_path / "runs"), "exp42", 1)
    assert capsys.readouterr().err == "step_1.pt: w differs\nstep_1.pt: u is missing\n"


def test_two_checkpoints_of_one_step_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model_3.pt", "ema_3.pt"):
        torch.save({"w": torch.ones(1)}, tmp_path / name)
    assert run_script("from_checkpoints.py", tmp_path, tmp_path / "runs", "--run", "exp42") == 1
    assert "are the same step" in capsys.readouterr().err
