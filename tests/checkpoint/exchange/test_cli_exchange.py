"""`headrace ckpt export` and `headrace ckpt import`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio.cli import main

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def repository(tmp_path: Path) -> str:
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(7, {"model": torch.nn.Linear(4, 3), "epoch": 2}).result(60)
    return str(tmp_path / "r")


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["ckpt", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_export_then_import(tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "export", repository, "--run", "exp", "--step", 7, tmp_path / "m", "--format", "hf")
    assert "step 7 of exp: 2 tensors in 1 file of format hf" in out
    assert "epoch" in out
    out = said(capsys, "import", tmp_path / "m", repository, "--run", "new", "--step", 0, "--base", "exp")
    assert "step 0 of new: 2 tensors in the entries model" in out
    assert "step        0" in said(capsys, "ls", repository)
    assert "clean" in said(capsys, "check", repository)
    out = said(capsys, "export", repository, tmp_path / "m", "--run", "exp", code=2)
    assert "exists already" in out
    assert "--overwrite" in out
    said(capsys, "export", repository, tmp_path / "m", "--run", "exp", "--overwrite")


def test_json_tags_and_options(tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tag", repository, "best", "--run", "exp", "--step", 7)
    rules = tmp_path / "rules.toml"
    rules.write_text('"weight" = "kernel"\n')
    options: list[Any] = ["--run", "exp", "--step", "tag:best", "--dtype", "bf16", "--rename", rules, "--json"]
    report = json.loads(
        said(
            capsys, "export", repository, tmp_path / "m", *options, "--exclude", "model/bias", "--max-shard-size", "1MB"
        )
    )
    assert (report["step"], report["tensors"], report["left_out"]) == (7, 1, ["model/bias", "epoch"])
    found = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    assert list(found) == ["kernel"]
    assert found["kernel"].dtype == torch.bfloat16
    rules = tmp_path / "rules.json"
    rules.write_text('{"kernel": "weight"}')
    report = json.loads(
        said(capsys, "import", tmp_path / "m", repository, "--run", "n", "--rename", rules, "--json", "--entry", "net")
    )
    assert (report["format"], report["entries"], report["tensors"]) == ("hf", ["net"], 1)


def test_a_folder_of_dcp_is_imported_without_what_is_excluded(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "export", repository, tmp_path / "d", "--run", "exp", "--format", "dcp")
    options = ["--run", "n", "--exclude", "epoch", "--exclude", "model/bias"]
    report = json.loads(said(capsys, "import", tmp_path / "d", repository, *options, "--json"))
    assert (report["format"], report["entries"], report["tensors"]) == ("dcp", ["model"], 1)
    out = said(capsys, "import", tmp_path / "d", repository, "--run", "m", "--exclude", "nothing", code=2)
    assert "exclude has patterns without a match: 'nothing'" in out


def test_mistakes_are_errors_with_the_next_step(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "export needs --run" in said(capsys, "export", repository, tmp_path / "m", code=2)
    assert "import needs --run" in said(capsys, "import", tmp_path / "m", repository, code=2)
    assert "does not exist" in said(capsys, "import", tmp_path / "m", repository, "--run", "n", code=2)
    for text in ("[1]", "{", '{"a": 1}'):
        (tmp_path / "rules.json").write_text(text)
        out = said(
            capsys, "export", repository, tmp_path / "m", "--run", "exp", "--rename", tmp_path / "rules.json", code=2
        )
        assert "rules.json" in out or "rename maps 'a' to 1" in out
    assert not (tmp_path / "m").exists()


def test_the_help_of_ckpt_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from headrace.dataio.cli import main; main(['ckpt', 'export', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--max-shard-size" in done.stdout, done.stderr


def test_an_export_without_a_format_takes_it_from_the_name(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "of format torch\n" in said(capsys, "export", repository, tmp_path / "m.pt", "--run", "exp")
    chosen = tmp_path / "chosen.pt"
    assert "of format dcp\n" in said(capsys, "export", repository, chosen, "--run", "exp", "--format", "dcp")
    assert chosen.is_dir()


def test_what_is_excluded_is_not_said_to_be_a_matter_of_the_format(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, "export", repository, tmp_path / "m", "--run", "exp", "--exclude", "model/bias")
    excluded, other = out[out.index("left out by --exclude") :].split("left out, because the format holds only tensors")
    assert "model/bias" in excluded
    assert "epoch" in other
    assert "model/bias" not in other


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_formats_that_hold_everything_list_what_is_excluded(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    options = ["--run", "exp", "--format", format, "--exclude", "*/bias", "--exclude", "epoch"]
    out = said(capsys, "export", repository, tmp_path / "m", *options)
    assert "left out by --exclude: 2\n  epoch\n  model/bias\n" in out
    assert "does not read them" not in out


@pytest.mark.parametrize("format", ["hf", "torch"])
def test_a_pattern_that_excludes_all_of_an_entry_is_named_as_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(7, {"model": torch.nn.Linear(4, 3), "ema": {"weight_ema": torch.ones(2)}}).result(60)
    options = ["--run", "exp", "--format", format, "--exclude", "*/weight_ema"]
    out = said(capsys, "export", tmp_path / "r", tmp_path / "m", *options)
    assert out.endswith("left out by --exclude: 1\n  ema/weight_ema\n")


def test_a_dry_run_of_an_import_lists_tensors_values_and_what_is_left_out(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "export", repository, tmp_path / "m.pt", "--run", "exp")
    (tmp_path / "rules.json").write_text('{"model/weight": "model/kernel"}')
    options = ["--run", "n", "--dry-run", "--exclude", "model/bias", "--rename", tmp_path / "rules.json"]
    assert said(capsys, "import", tmp_path / "m.pt", repository, *options) == (
        "step 0 of n: 1 tensor in the entries model, epoch\n"
        "tensors: 1\n  model/kernel float32 [3, 4], named model/weight in the source\n"
        "values: 1\n  epoch\n"
        "left out by --exclude: 1\n  model/bias\n"
        "nothing was stored; without --dry-run, 48 B are read\n"
    )
    report = json.loads(said(capsys, "import", tmp_path / "m.pt", repository, *options, "--json"))
    assert report["contents"] == [
        {"path": "model/kernel", "source": "model/weight", "dtype": "float32", "shape": [3, 4]}
    ]
    assert "has no step" in said(capsys, "show", repository, "--run", "n", code=2)


def test_a_divided_safetensors_file_is_imported_by_the_name_it_was_exported_to(
    tmp_path: Path, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "st.safetensors"
    said(capsys, "export", repository, target, "--run", "exp", "--max-shard-size", "50")
    assert "2 tensors" in said(capsys, "import", target, repository, "--run", "new")
    shard = tmp_path / "st-00001-of-00002.safetensors"
    out = said(capsys, "import", shard, repository, "--run", "part", code=2)
    assert "is one of 2 files" in out
    assert f"import {tmp_path}/st.safetensors.index.json" in out
    out = said(capsys, "export", repository, tmp_path / "x", "--run", "exp", "--max-shard-size", "5 apples", code=2)
    assert "'5 apples' is not a size" in out
