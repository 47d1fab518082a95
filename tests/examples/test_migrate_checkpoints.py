"""examples/migrate/from_checkpoints.py imports what torch.save, DCP and safetensors wrote, and compares all tensors."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from headrace import Checkpointer, read
from tests.support import pages
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


def imported(
    folder: Path, repository: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0, run: str = "exp42"
) -> str:
    """Run the script, compare its exit code with `code`, and return all that it prints."""
    capsys.readouterr()
    found = run_script("from_checkpoints.py", folder, repository, "--run", run, *options)
    output = capsys.readouterr()
    assert found == code, output.err
    return output.out + output.err


def after_the_plan(output: str) -> list[str]:
    """The lines that follow the steps which the script is going to import."""
    lines = output.splitlines()
    count = next(number for number, line in enumerate(lines) if line.endswith(":"))
    return lines[count + 1 + int(lines[count].split()[0]) :]


def steps_in(repository: Path, run: str = "exp42") -> list[int]:
    with Checkpointer(repository, run=run, sidecar=None) as checkpointer:
        return checkpointer.steps()


def test_files_of_torch_become_steps_that_a_checkpointer_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    (folder / "log_7.txt").write_text("no checkpoint")
    for steps in (100, 20):  # by number, and not by name
        torch.save(state_of(steps), folder / f"step_{steps}.pt")
    output = imported(folder, tmp_path / "runs", capsys)
    assert output.startswith(
        "2 steps for the run exp42:\n  step_20.pt -> step 20\n  step_100.pt -> step 100\nstep 20: "
    )
    lines = after_the_plan(output)
    assert [line.split(",")[0] for line in lines[::2]] == ["step 20: step_20.pt", "step 100: step_100.pt"]
    assert output.count("9 tensors with") == 2
    new, whole = (int(lines[2].split()[place]) for place in (4, 6))
    assert new < whole / 3  # the embedding is stored once
    torch.save(state_of(103), folder / "step_103.pt")
    again = after_the_plan(imported(folder, tmp_path / "runs", capsys))
    assert again[:2] == [f"step {step}: step_{step}.pt is already there" for step in (20, 100)]
    assert [line.split(":")[0] for line in again[2:]] == ["step 103"] * 2
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
    heads = [line.split(", ")[:2] for line in after_the_plan(output)[::2]]
    assert heads == [
        ["step 5: model-5.safetensors", "safetensors"],
        ["step 10: checkpoint-10", "hf"],
        ["step 20: step-20", "dcp"],
    ]
    for step in (5, 10):
        with read(tmp_path / "runs", run="exp42", step=step) as saved:
            assert all(torch.equal(saved[f"model/{name}"].read(), weights[name]) for name in weights)


def test_files_that_can_run_code_are_named_and_nothing_is_imported_before_they_are_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    torch.save({"w": torch.ones(2)}, folder / "step_1.pt")
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=0.1)}, folder / "step_2.pt")
    torch.save({"w": torch.ones(2), "loss": np.float64(0.5)}, folder / "step_3.pt")
    torch.save({"w": torch.ones(2)}, folder / "step_4.pt")
    lines = after_the_plan(imported(folder, tmp_path / "runs", capsys, code=1))
    assert lines[0] == "step_2.pt is refused: it can run code when it is loaded (argparse.Namespace)"
    assert lines[1].startswith("step_3.pt is refused: it can run code when it is loaded (numpy")
    assert lines[2].startswith("nothing was imported: convert these files, or copy damaged ones again, or leave them")
    assert lines[2].endswith("an older step cannot be added to a run that has newer ones")
    assert len(lines) == 3
    assert steps_in(tmp_path / "runs") == []
    for name, convert in (("step_2.pt", {"args": vars}), ("step_3.pt", {"loss": float})):
        saved = torch.load(folder / name, weights_only=False)
        torch.save(saved | {key: change(saved[key]) for key, change in convert.items()}, folder / name)
    imported(folder, tmp_path / "runs", capsys)
    assert steps_in(tmp_path / "runs") == [1, 2, 3, 4]


def test_the_page_shows_what_is_printed_about_a_refused_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"args": argparse.Namespace(lr=0.1), "loss": np.float64(0.5)}
    torch.save(saved, tmp_path / "step_900.pt")
    output = imported(tmp_path, tmp_path / "runs", capsys, code=1)
    page = pages.ROOT / "docs" / "howto" / "migrate" / "checkpoints.md"
    (told,) = (block.text for block in pages.blocks(page) if "is refused" in block.text)
    assert pages.missing(told, output) == []


def test_refused_files_can_be_left_out_and_are_not_added_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    for step in (1, 4):
        torch.save({"w": torch.ones(step)}, folder / f"step_{step}.pt")
    torch.save({"model": trained(0)[0]}, folder / "step_2.pt")
    (folder / "step_3.safetensors").write_bytes(b"damaged")
    output = imported(folder, tmp_path / "runs", capsys, "--skip-refused", code=1)
    assert "step_2.pt is refused: it can run code when it is loaded (torch.nn" in output
    assert "step_3.safetensors is refused: " in output
    assert steps_in(tmp_path / "runs") == [1, 4]
    torch.save({"w": torch.ones(2)}, folder / "step_2.pt")
    output = imported(folder, tmp_path / "runs", capsys, "--skip-refused", code=1)
    assert "step 2: step_2.pt is left out: the run has step 4, and an older step cannot be added" in output
    assert "Import all steps into a new run, with --base exp42" in output
    imported(folder, tmp_path / "runs", capsys, "--skip-refused", "--base", "exp42", code=1, run="again")
    assert steps_in(tmp_path / "runs", "again") == [1, 2, 4]


def test_a_damaged_file_is_found_before_the_first_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "out").mkdir()
    for step in (1, 2, 3):
        torch.save({"w": torch.ones(step)}, folder / f"step_{step}.pt")
    whole = (folder / "step_2.pt").read_bytes()
    (folder / "step_2.pt").write_bytes(whole[:100])
    output = imported(folder, tmp_path / "runs", capsys, code=1)
    assert "step_2.pt is refused: " in output
    assert "is cut off or damaged" in output
    assert steps_in(tmp_path / "runs") == []
    (folder / "step_2.pt").write_bytes(whole)
    imported(folder, tmp_path / "runs", capsys)
    assert steps_in(tmp_path / "runs") == [1, 2, 3]


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


def test_names_without_a_step_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "out").mkdir()
    (folder / "tensorboard").mkdir()
    for name in ("step_3.pt", "last.pt"):
        torch.save({"w": torch.ones(1)}, folder / name)
    output = imported(folder, tmp_path / "runs", capsys)
    for name in ("last.pt", "tensorboard"):
        assert f"{name} is left out: its name does not end in the number of a step\n" in output
    assert "whose name ends in the number of a step" in imported(
        folder, tmp_path / "runs", capsys, "--files", "x*", code=1
    )


def test_two_checkpoints_of_one_step_are_imported_into_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    for name in ("step_3.pt", "ema_3.pt", "model-2.pt"):
        torch.save({"w": torch.ones(1)}, folder / name)
    output = imported(folder, tmp_path / "runs", capsys, code=1)
    assert "step_3.pt and ema_3.pt are the same step" in output
    assert (
        "with --run exp42 --files 'model-*.pt' --files 'step_*.pt', and with --run exp42-2 --files 'ema_*.pt'" in output
    )
    output = imported(folder, tmp_path / "runs", capsys, "--files", "model-*.pt", "--files", "step_*.pt")
    assert "ema_3.pt is left out by --files\n" in output
    imported(folder, tmp_path / "runs", capsys, "--files", "ema_*.pt", run="exp42-2")
    assert (steps_in(tmp_path / "runs"), steps_in(tmp_path / "runs", "exp42-2")) == ([2, 3], [3])


def test_a_folder_that_is_a_url_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = imported(Path("unused"), tmp_path / "runs", capsys, code=1)
    assert "unused is not a folder" in output
    assert run_script("from_checkpoints.py", "s3://bucket/hf", tmp_path / "runs", "--run", "a") == 1
    assert "s3://bucket/hf is a URL: import reads local files; copy it to a disk first" in capsys.readouterr().err


def test_names_with_several_numbers_are_refused_unless_a_pattern_has_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "out").mkdir()
    for name in ("step_1100_loss0.25.pt", "step_1200_loss0.5.pt", "ckpt_v2.pt"):
        torch.save({"w": torch.ones(1)}, folder / name)
    output = imported(folder, tmp_path / "runs", capsys, code=1)
    assert output.count("it is not clear which number of its name is the step\n") == 3
    assert "write {step} where the number of the step is, such as --files 'ckpt_v{step}.pt'" in output
    options = ["--files", "step_{step}_loss*.pt"]
    output = imported(folder, tmp_path / "runs", capsys, *options, "--dry-run")
    assert "ckpt_v2.pt is left out by --files\n" in output
    assert output.endswith("  step_1100_loss0.25.pt -> step 1100\n  step_1200_loss0.5.pt -> step 1200\n")
    assert not (tmp_path / "runs").exists()
    imported(folder, tmp_path / "runs", capsys, *options)
    assert steps_in(tmp_path / "runs") == [1100, 1200]
