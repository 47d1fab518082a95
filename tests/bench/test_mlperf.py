"""Emulated accelerators and model checkpoints: the published numbers, and runs that deliver every byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.core.results import Part, decode
from headrace.bench.mlperf import data, raw, states, train
from headrace.bench.mlperf.workloads import MODELS, WORKLOADS, model, utilisation, workload
from headrace.dataio.core.errors import CorruptionError, UsageError

BENCH = [sys.executable, "-m", "headrace.dataio.cli", "bench"]


def bench(*arguments: str) -> Part:
    done = subprocess.run([*BENCH, *arguments, "--rounds", "1", "--json"], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = decode(done.stdout.encode(), "stdout").parts
    assert not part.failed
    assert any("Unofficial" in note for note in part.notes)
    return part


def test_an_accelerator_needs_what_the_published_numbers_say() -> None:
    assert workload("resnet50", "h100").rate == pytest.approx(204.8e6, rel=0.01)
    assert workload("unet3d", "h100").rate == pytest.approx(3.18e9, rel=0.01)
    assert workload("cosmoflow", "h100").rate == pytest.approx(808e6, rel=0.01)
    for one in WORKLOADS.values():
        assert one.scaled(0.01).rate == pytest.approx(one.rate)
    for fraction in (0, -1, 1.5):
        with pytest.raises(UsageError, match="--fraction"):
            one.scaled(fraction)
    with pytest.raises(UsageError, match="no workload 'bert' on 'h100'"):
        workload("bert", "h100")


def test_a_checkpoint_has_fourteen_bytes_a_parameter_as_published() -> None:
    for name, billions in (("8b", 8.03), ("70b", 70.6), ("405b", 405.9)):
        assert MODELS[name].checkpoint_bytes == pytest.approx(14e9 * billions, rel=0.02), name
    found = states.state(1_400_000, 0)
    assert sum(value.numel() * value.element_size() for value in found.values()) == pytest.approx(1_400_000, rel=0.001)
    assert not (found["model.0"].float() == states.state(1_400_000, 1)["model.0"].float()).all()
    with pytest.raises(UsageError, match="no model '7b'"):
        model("7b")


def test_utilisation_is_computing_over_running_time() -> None:
    assert utilisation(0.5, 10, 10) == 0.5
    assert utilisation(0.5, 10, 0) == 0


def test_the_ranks_of_an_epoch_get_every_record_once_whole_and_in_host_memory(tmp_path: Path) -> None:
    work = workload("cosmoflow", "h100").scaled(0.005)
    total = data.make(tmp_path, work, 13, lambda *_: None)
    wanted = sorted(path.read_bytes() for path in (tmp_path / "files").iterdir())
    assert sum(map(len, wanted)) == total
    got = [
        bytes(sample)
        for rank in range(2)
        for batch in raw.batches(str(tmp_path / "dataset"), 2, rank=rank, ranks=2, epoch=3)
        for sample in batch
    ]
    assert sorted(got) == wanted


def test_a_damaged_record_is_an_error_and_leaving_early_stops_the_thread(tmp_path: Path) -> None:
    import threading

    data.make(tmp_path, workload("cosmoflow", "h100").scaled(0.005), 12, lambda *_: None)
    loop = raw.batches(str(tmp_path / "dataset"), 2)
    next(loop)
    assert [thread for thread in threading.enumerate() if thread.name == "headrace-raw"]
    loop.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-raw"]
    shard = next((tmp_path / "shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptionError, match="are not those that were packed"):
        list(raw.batches(str(tmp_path / "dataset"), 2))


def test_accelerators_are_emulated_beside_the_default_way_of_reading() -> None:
    part = bench("train", "--workload", "cosmoflow", "--fraction", "0.02", "--batches", "40", "--accelerators", "2")
    assert len(part.candidates) == 2
    for name, samples in part.candidates.items():
        assert set(samples.metrics) == set(part.metrics), name
        (rate,), (au,) = samples.metrics["rate_2"], samples.metrics["au_2"]
        assert 0 < au <= 100
        assert rate == pytest.approx(2 * 808 * au / 100, rel=0.1), "AU and rate are two views of one run"


@pytest.mark.soak
def test_our_video_workload_decodes() -> None:
    part = bench("train", "--workload", "video", "--batches", "2", "--accelerators", "1", "--fraction", "0.1")
    assert list(part.candidates) == ["headrace"]
    assert part.candidates["headrace"].metrics["rate_1"][0] > 0


def test_model_checkpoints_are_written_and_read_back_by_all_processes() -> None:
    part = bench("llm-checkpoint", "--model", "1t", "--fraction", "0.0005", "--processes", "2")
    assert part.settings["bytes"] == int(18_000 * 2**30 / 1024 * 0.0005)
    for name, samples in part.candidates.items():
        found = {metric: values[0] for metric, values in samples.metrics.items()}
        assert set(found) == set(states.METRICS), name
        assert found["stall_s"] <= found["write_s"]
        assert found["write"] == pytest.approx(2 * part.settings["bytes"] / 1e9 / found["write_s"])


def test_wrong_numbers_of_accelerators_are_refused() -> None:
    with pytest.raises(UsageError, match="is no list of numbers"):
        train._counts("zero")
    assert json.dumps(train._counts("1,2")) == "[1, 2]"
