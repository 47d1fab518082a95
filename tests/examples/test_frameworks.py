"""The programs of examples/ with a framework: a training that was stopped or killed continues exactly."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import read
from headrace.dataio import index
from headrace.dataio.cli import main as headrace
from tests.support.example_runs import ranks_of, run, run_ranks, steps_of
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]  # the frameworks' own


def test_the_trainer_of_transformers_continues_at_the_next_batch(raw: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def arguments(name: str, steps: int) -> list[object]:
        places = [raw / "images-set", tmp_path / f"{name}-runs", "--output", tmp_path / name]
        return [*places, "--steps", steps, "--save-every", 3]

    runs = [*arguments("whole", 10), "::", *arguments("parts", 6), "::", *arguments("parts", 10)]
    output = run(tmp_path / "log", "hf_trainer.py", *runs)
    whole, first, second, rest = re.split("trained to step.*\n", output)
    assert re.findall("trained to step (.*), from .*checkpoint-6", output) == ["10"]
    losses = [re.findall(r"'loss': '?([\d.]+)", part) for part in (whole, first, second)]
    assert losses[1] + losses[2] == losses[0]
    assert len(losses[0]) == 10
    assert not rest


def test_lightning_continues_on_another_machine_at_the_next_batch_of_recordings(raw: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def arguments(name: str, steps: int, output: str) -> list[object]:
        places = [raw / "speech-set", tmp_path / f"{name}-runs", "--output", tmp_path / output]
        return [*places, "--steps", steps, "--save-every", 3]

    parts = [*arguments("parts", 4, "here"), "::", *arguments("parts", 7, "there")]
    output = run(tmp_path / "log", "lightning_audio.py", *arguments("whole", 7, "whole"), "::", *parts)
    assert sorted(steps_of(output)) == list(range(1, 8))  # it compares the steps of both trainings, too
    assert re.findall(r"^step (\d+) ", output, re.MULTILINE) == [*"1234567", *"1234", *"567"]
    with read(str(tmp_path / "parts-runs"), run="speech", step=4) as saved:
        expected = float(steps_of(output)[4].split()[1])
        assert saved.metadata["loss"] == pytest.approx(expected, abs=1e-5)


def write_tokens(folder: Path) -> dict[str, torch.Tensor]:
    """Write an indexed dataset "set" of rows of token ids, and return the rows by key."""
    rows = {str(number): np.random.default_rng(number).integers(0, 2048, 33) for number in range(40)}
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars" / "0.tar", "w") as tar:
        for key, row in rows.items():
            np.save(file := io.BytesIO(), row)
            member = tarfile.TarInfo(f"{key}.npy")
            member.size = file.tell()
            tar.addfile(member, io.BytesIO(file.getvalue()))
    index(folder / "tars", folder / "set").close()
    return {key: torch.from_numpy(row) for key, row in rows.items()}


def write_llama(folder: Path) -> Any:
    """Write a Llama with random weights as transformers writes it, in the shapes of torchtitan's debug model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=16,
        rms_norm_eps=1e-5,
        rope_parameters=scaling,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def test_a_llama_of_torchtitan_is_tuned_from_a_folder_of_hugging_face_to_another(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: `make test` installs it")
    transformers = pytest.importorskip("transformers")
    rows, llama = write_tokens(tmp_path), write_llama(tmp_path / "llama")
    assert headrace(["ckpt", "import", str(tmp_path / "llama"), str(tmp_path / "runs"), "--run", "tuned"]) == 0
    shutil.copytree(tmp_path / "runs", tmp_path / "whole")

    def arguments(runs: str, steps: int) -> list[Any]:
        places = [tmp_path / "set", tmp_path / runs, "--output", tmp_path / f"{runs}-out"]
        return ["torchtitan_finetune.py", *places, "--layers", 2, "--steps", steps, "--save-every", 2]

    with ranks_of(tmp_path / "killed.log", 2, *arguments("runs", 5)) as ranks:
        wait_for(lambda: len(list((tmp_path / "runs").rglob("COMMIT"))) > 1, 200)
        assert ranks[0].poll() is None
    killed = steps_of((tmp_path / "killed.log").read_text())
    again = steps_of(run_ranks(tmp_path / "again.log", 2, *arguments("runs", 5)))
    whole = steps_of(run_ranks(tmp_path / "whole.log", 2, *arguments("whole", 5)))
    assert min(again) > 2
    assert killed | again == whole
    assert sorted(whole) == list(range(1, 6))
    _, loss, _, *keys = whole[1].split()
    tokens = torch.stack([rows[key] for key in keys])
    assert float(loss) == pytest.approx(llama(tokens, labels=tokens).loss.item(), abs=1e-4)
    folders = [tmp_path / f"{runs}-out" / "checkpoint" / "step-5" for runs in ("runs", "whole")]
    for folder in folders:
        shutil.copy(tmp_path / "llama" / "config.json", folder)
    tuned, same = [transformers.LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
    assert tuned.keys() == same.keys() == llama.state_dict().keys()
    assert all(torch.equal(tuned[name], same[name]) for name in tuned)
    assert not torch.equal(tuned["model.norm.weight"], llama.state_dict()["model.norm.weight"])
    assert json.loads((folders[0] / "config.json").read_text())["num_hidden_layers"] == 2
