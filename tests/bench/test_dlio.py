"""DLIO's own harness drives our loader and our checkpoints: the real `dlio_benchmark`, where it is installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.bench.workloads.dlio import main, place_of, prepare
from headrace.checkpoint import Checkpointer
from headrace.dataio import Dataset
from headrace.dataio.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("HEADRACE_DLIO_PYTHON", sys.executable)
"""A Python with dlio_benchmark; docs/benchmarks.md says how to make one, as its package wants TensorFlow."""


STUBS: dict[str, dict[str, object]] = {
    "dlio_benchmark": {},
    "dlio_benchmark.checkpointing.base_checkpointing": {"BaseCheckpointing": object},
    "dlio_benchmark.common.enumerations": {"CheckpointLocationType": object, "DataLoaderType": object},
    "dlio_benchmark.data_loader.base_data_loader": {"BaseDataLoader": object},
}
"""As much of DLIO as importing the plugins takes."""


def installed() -> bool:
    code = "import dlio_benchmark.main, mpi4py.MPI"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, timeout=120).returncode == 0


def dlio(folder: Path, *overrides: str, processes: int = 1) -> str:
    command = [
        PYTHON,
        "-m",
        "dlio_benchmark.main",
        "workload=unet3d_h100",
        f"++workload.dataset.data_folder={folder}/data",
    ]
    if processes > 1:
        command = [str(Path(PYTHON).parent / "mpiexec"), "-n", str(processes), *command]
    sizes = ("num_files_train=16", "record_length=20000", "record_length_stdev=0", "record_length_resize=20000")
    command += [f"++workload.dataset.{size}" for size in sizes]
    command += ["++workload.reader.batch_size=2", "++workload.reader.read_threads=0", "++workload.train.epochs=2"]
    command += [f"++workload.output.folder={folder}/out", f"hydra.run.dir={folder}/hydra", *overrides]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DFTRACER_ENABLE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=folder, env=environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_original_harness_drives_our_loader_and_our_checkpoints(tmp_path: Path, processes: int) -> None:
    if not installed():
        pytest.skip("dlio_benchmark is not installed (docs/benchmarks.md: how to, without TensorFlow)")
    (tmp_path / "out").mkdir()
    dlio(
        tmp_path,
        "++workload.workflow.generate_data=True",
        "++workload.workflow.train=False",
        "++workload.workflow.checkpoint=False",
    )
    prepare(tmp_path / "data")
    output = dlio(
        tmp_path,
        "++workload.train.computation_time=0.01",
        "++workload.reader.data_loader_classname=headrace.bench.peers.dlio.HeadraceDataLoader",
        "++workload.reader.data_loader_sampler=iterative",
        "++workload.checkpoint.checkpoint_mechanism_classname=headrace.bench.peers.dlio.HeadraceCheckpointing",
        f"++workload.checkpoint.checkpoint_folder={tmp_path}/checkpoints",
        "++workload.checkpoint.checkpoint_after_epoch=1",
        "++workload.checkpoint.epochs_between_checkpoints=1",
        "++workload.checkpoint.model_size=100000",
        "++workload.checkpoint.type=all_ranks",
        processes=processes,
    )
    assert "Running DLIO with custom data loader class HeadraceDataLoader" in output
    assert "Running DLIO with custom checkpointing mechanism class HeadraceCheckpointing" in output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["metric"]["train_au_mean_percentage"] > 0
    assert summary["num_accelerators"] == processes
    with Checkpointer(
        str(tmp_path / "checkpoints" / "repository"), run="dlio", sidecar=None, rank=0, world_size=1
    ) as saved:
        assert len(saved.steps()) == 2, "one an epoch"


def test_files_become_samples_with_the_same_bytes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    for number in range(5):
        (tmp_path / "train" / f"img_{number}_of_5.npz").write_bytes(os.urandom(1000 + number))
    assert main([str(tmp_path)]) == 0
    with Dataset(str(place_of(tmp_path, "train")), trust_mounts=True) as dataset:
        assert [dataset.sample(n).members[0].length for n in range(5)] == [1000, 1001, 1002, 1003, 1004]
    assert main([str(tmp_path)]) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`headrace.bench.peers.dlio`, imported without DLIO."""
    for name in ("checkpointing", "common", "data_loader"):
        monkeypatch.setitem(sys.modules, f"dlio_benchmark.{name}", ModuleType(name))
    for name, members in STUBS.items():
        stub = ModuleType(name)
        vars(stub).update(members)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.delitem(sys.modules, "headrace.bench.peers.dlio", raising=False)
    return importlib.import_module("headrace.bench.peers.dlio")


def test_the_state_of_each_save_is_new(plugin: ModuleType) -> None:
    state: dict[str, Any] = {
        "model": [torch.zeros(4096, dtype=torch.int8)],
        "optimizer": {"a": torch.zeros(1024)},
        "layers": None,
    }
    seen = set()
    for _ in range(3):
        plugin.change(state)
        seen.add(bytes(state["model"][0].numpy()) + state["optimizer"]["a"].numpy().tobytes())
    assert len(seen) == 3


def test_the_loader_gives_every_rank_its_share_of_each_epoch_whole(tmp_path: Path, plugin: ModuleType) -> None:
    (tmp_path / "train").mkdir()
    for number in range(6):
        (tmp_path / "train" / f"img_{number}_of_6.npz").write_bytes(os.urandom(1000 + number))
    prepare(tmp_path)
    wanted = sorted(path.read_bytes() for path in (tmp_path / "train").iterdir())
    loaders = [plugin.file_loader(place_of(tmp_path, "train"), 2, rank, 2, 1) for rank in range(2)]
    for _ in range(2):
        found = [bytes(sample.numpy()) for loader in loaders for batch in loader for sample in plugin.samples(batch)]
        assert sorted(found) == wanted
    for loader in loaders:
        loader.close()


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no train/ with files"):
        prepare(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert main([]) == 2
