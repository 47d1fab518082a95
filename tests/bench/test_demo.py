"""The whole main job, as `make demo` runs it: real files, a real S3 server, a real SIGKILL, and the proof."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.core.data import make_clip
from headrace.bench.demo import Settings, runs
from headrace.dataio import pack
from headrace.dataio.core.errors import UnsupportedError
from headrace.loaders import Clip, VideoLoader
from tests.support.ranks import launch

STEPS, SAVE_EVERY, KILL_AT = 6, 2, 2


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.dataio.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(4):
        make_clip(folder, number, seconds=1)
    return folder


@pytest.fixture(scope="module")
def dataset(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data") / "set")
    pack([str(clips)], url).close()
    return url


@pytest.mark.s3
def test_a_killed_and_restarted_run_equals_an_uninterrupted_one_bit_for_bit(clips: Path, tmp_path: Path) -> None:
    options = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--out", str(tmp_path), "--media", str(clips)]
    done = demo("--json", *options)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["equal"], found["differences"]
    assert found["killed_after_staging_step"] == KILL_AT
    assert found["figures"]["resumed_from"] == KILL_AT, "the sidecar did not finish the save of the dead trainer"
    assert found["steps_done_twice"], "the killed trainer had done nothing since its last save"
    assert found["samples_compared"] == STEPS * 8
    assert found["figures"]["last_loss"] < found["figures"]["first_loss"]
    assert done.returncode == 0
    assert "polyline" in (tmp_path / "index.html").read_text()


def test_too_few_steps_for_a_kill_are_refused_with_the_next_step() -> None:
    done = demo("--steps", "5", "--save-every", "4")
    assert done.returncode == 2
    assert "--steps at least twice --save-every" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_server_is_an_error_before_anything_is_reported_as_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise UnsupportedError("the program 'weed' is not installed")

    monkeypatch.setattr(runs, "find_seaweedfs", absent)
    with pytest.raises(UnsupportedError):
        runs.run_demo(Settings(steps=6, save_every=2, kill_at=2), None, lambda part, share: pytest.fail(part))


def train(dataset: str, repository: Path, run: str, ranks: int, steps: int) -> list[list[dict[str, Any]]]:
    """Events of every rank of a training run of the demo's trainer."""
    arguments = ["--data", dataset, "--checkpoints", str(repository), "--name", run, "--steps", str(steps)]
    arguments += ["--save-every", "2", "--clips-per-video", "4"]
    return launch(ranks, "tests.bench.demo_trainer", *arguments, HEADRACE_SIDECAR="off")


def global_batches(events: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Sample ids of every step, ranks in their order."""
    by_rank = [[event["ids"] for event in rank if event["event"] == "step"] for rank in events]
    return [[id for part in parts for id in part] for parts in zip(*by_rank, strict=True)]


def test_two_ranks_train_on_the_same_global_batches_as_one_and_share_one_checkpoint(
    dataset: str, tmp_path: Path
) -> None:
    clip = Clip(frames=8, stride=2, per_video=4)
    with VideoLoader(dataset, batch_size=8, clip=clip, size=(64, 64), seed=0, sidecar=None) as loader:
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        alone = [[int(sample) for sample in batch["id"]] for batch in itertools.islice(epochs, 4)]
    first = global_batches(train(dataset, tmp_path / "two", "a", ranks=2, steps=2))
    assert first == alone[:2]
    on_one = train(dataset, tmp_path / "two", "a", ranks=1, steps=4)
    assert on_one[0][0]["resumed_from"] == 2
    assert global_batches(on_one) == alone[2:]
