"""`headrace samples`: the samples of each step, from the state of a loader alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import Checkpointer
from headrace.dataio import pack
from headrace.dataio.cli import main
from headrace.dataio.core.errors import MismatchError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import (
    Audio,
    AudioLoader,
    Bucket,
    Buckets,
    Clip,
    FileLoader,
    Loader,
    Mixture,
    Video,
    VideoLoader,
    Window,
)
from headrace.loaders.cli_samples import loader_of_state
from tests.support.batches import take
from tests.support.latents import latent_loader, latents_url
from tests.support.ranks import launch

pytestmark = pytest.mark.slow

LOADERS: dict[str, Callable[..., Any]] = {
    "video": lambda source, **how: VideoLoader(source, 3, clip=Clip(2, start="every"), size=(32, 32), **how),
    "clips by time": lambda source, **how: VideoLoader(
        source, 3, clip=Clip(2, fps=7.5, per_video=2), size=(8, 8), **how
    ),
    "audio": lambda source, **how: AudioLoader(
        source, 2, window=Window(0.5, "center", per_sample=2, jitter=0.1), **how
    ),
    "files": lambda source, **how: FileLoader(source, 3, files=["mp4"], **how),
    "fields": lambda source, **how: Loader(source, 2, fields={"v": Video(Clip(2), (8, 8)), "sound": Audio(0.5)}, **how),
    "evaluation": lambda source, **how: VideoLoader(source, 3, clip=Clip(2), size=(8, 8), evaluate=True, **how),
    "in order": lambda source, **how: VideoLoader(
        source, 3, clip=Clip(2), size=(8, 8), shuffle=False, drop_last=False, **how
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_is_enough_to_list_the_samples_of_each_step(made_dataset: Dataset, kind: str) -> None:
    with LOADERS[kind](made_dataset, seed=11) as loader:
        seen = [batch["key"] for batch in take(loader, 7)]
        state = json.loads(json.dumps(loader.state_dict()))
        with loader_of_state(made_dataset, state) as other:
            assert other.state_dict() == state
            steps = list(other.samples_of_steps(range(7)))
            in_ranks = list(other.samples_of_steps(range(2, 7), world_size=3))
    assert [[sample.key for sample in step.ranks[0]] for step in steps] == seen
    assert [[sample.key for share in step.ranks for sample in share] for step in in_ranks] == seen[2:]
    assert [step.step for step in in_ranks] == list(range(2, 7))
    assert len(in_ranks[0].ranks) == 3


def test_buckets_and_mixtures_list_their_steps_in_python(made_dataset: Dataset) -> None:
    buckets = Buckets((Bucket((32, 32)), Bucket((32, 48))), budget=2 * 2 * 32 * 48)
    mixture = Mixture({"one": made_dataset, "other": made_dataset.where("frames > 1")})
    for source, options in ((made_dataset, {"buckets": buckets}), (mixture, {"batch_size": 2, "size": (8, 8)})):
        settings: dict[str, Any] = {"clip": Clip(2), "drop_last": False, **options}
        if isinstance(source, Mixture):
            del settings["drop_last"]
        with VideoLoader(source, **settings) as loader:
            seen = [batch["key"] for batch in take(loader, 4)]
            steps = list(loader.samples_of_steps(range(4)))
            state = loader.state_dict()
        assert [[sample.key for sample in step.ranks[0]] for step in steps] == seen
        with pytest.raises(UsageError, match="does not describe the whole order"):
            loader_of_state(made_dataset, state)


@pytest.fixture
def state_file(made_dataset: Dataset, tmp_path: Path) -> Path:
    with LOADERS["video"](made_dataset, seed=4) as loader:
        take(loader, 3)
        (path := tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    return path


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def test_the_command_lists_steps_and_keys(
    made_dataset: Dataset, state_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", made_dataset.url, "--state", str(state_file)]) == 0
    rows = lines(capsys)
    with LOADERS["video"](made_dataset, seed=4) as loader:
        expected = [(str(n), key) for n, batch in enumerate(take(loader, 3)) for key in batch["key"]]
    assert [(row[0], row[-1]) for row in rows] == expected
    assert (
        main(["samples", made_dataset.url, "--state", str(state_file), "--from-step", "1", "--ranks", "2", "--json"])
        == 0
    )
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(str(one["step"]), one["key"]) for one in objects] == expected[3:]
    assert {one["rank"] for one in objects} == {0, 1}


def test_suspects_are_found_or_the_exit_code_says_not(
    made_dataset: Dataset, state_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", made_dataset.url, "--state", str(state_file)]) == 0
    first = lines(capsys)[0]
    (suspects := tmp_path / "suspects").write_text(f"{first[-1]}\nno such key\n")
    command = ["samples", made_dataset.url, "--state", str(state_file), "--find-in", str(suspects)]
    assert main([*command, "--to-step", "1"]) == 0
    assert {row[-1] for row in lines(capsys)} == {first[-1]}
    suspects.write_text("no such key\n")
    assert main(command) == 1


def test_a_state_of_other_data_is_refused(made_dataset: Dataset, state_file: Path, tmp_path: Path, media: Path) -> None:
    with (
        pack([media / "h265.mp4"], tmp_path / "other", workers=1) as other,
        pytest.raises(MismatchError, match="digest"),
    ):
        loader_of_state(other, json.loads(state_file.read_text()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seed": 1, "epoch": 0, "batch": 0}'])
def test_what_is_no_state_is_refused(
    made_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (path := tmp_path / "state.json").write_text(text)
    assert main(["samples", made_dataset.url, "--state", str(path)]) == 2
    assert "not the state of a loader" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [range(4, 0, -1), range(-1, 3)])
def test_steps_are_an_ascending_range(made_dataset: Dataset, steps: range) -> None:
    with LOADERS["files"](made_dataset) as loader, pytest.raises(UsageError, match="not a range of steps"):
        list(loader.samples_of_steps(steps))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> str:
    return latents_url(tmp_path_factory)


def samples(latents: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[int, list[str]]:
    """The keys of each step that `headrace samples` lists."""
    assert main(["samples", latents, "--trust-mounts", *arguments]) == 0
    steps: dict[int, list[str]] = {}
    for row in lines(capsys):
        steps.setdefault(int(row[0]), []).append(row[-1])
    return steps


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_state_of_a_checkpoint_lists_the_samples_of_its_run(
    latents: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        latent_loader(latents) as loader,
        latent_loader(latents, 2, seed=9) as other,
        Checkpointer(tmp_path, run="exp42", sidecar=None) as checkpointer,
    ):
        seen = [batch["key"] for batch in take(loader, 5)]
        checkpointer.save(5, {"loader": loader, "progress": {"step": 5}}).result(timeout=60)
        seen += [batch["key"] for batch in take(loader, 4)]
        saved = {"train": {"loader": loader}, "evaluation": {"loader": other}}
        checkpointer.save(9, saved).result(timeout=60)
    checkpoint = ["--checkpoint", str(tmp_path), "--run", "exp42"]
    assert samples(latents, capsys, *checkpoint, "--step", "5") == dict(enumerate(seen[:5]))
    named = [*checkpoint, "--name", "train/loader"]
    assert samples(latents, capsys, *named) == dict(enumerate(seen))
    assert samples(latents, capsys, *named, "--from-step", "6", "--to-step", "8") == dict(enumerate(seen[6:8], 6))
    for arguments, expected in (
        (checkpoint, "more than one state of a loader: train/loader, evaluation/loader"),
        ([*checkpoint, "--name", "loader"], "no state of a loader called 'loader'; there are: train/loader"),
        ([*checkpoint, "--step", "6"], "has no step 6; its newest steps are 9, 5"),
        ([*checkpoint[:3], "exp24"], "there are: exp42"),
        (checkpoint[:2], "--checkpoint needs --run"),
        (["--state", "x", *checkpoint], "either --state or --checkpoint"),
        ([], "either --state or --checkpoint"),
        (["--state", "x", "--step", "5"], "--step is for --checkpoint"),
    ):
        assert main(["samples", latents, *arguments]) == 2
        assert expected in capsys.readouterr().err


def test_a_checkpoint_of_two_ranks_lists_the_samples_of_both(
    latents: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [lines[-1]["keys"] for lines in launch(2, "tests.support.saved_loader_ranks", latents, str(tmp_path), "7")]
    seen = [one + other for one, other in zip(*ranks, strict=True)]
    checkpoint = ["--checkpoint", str(tmp_path), "--run", "ranks"]
    assert samples(latents, capsys, *checkpoint) == dict(enumerate(seen))
    assert main(["samples", latents, "--trust-mounts", *checkpoint, "--ranks", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[row["key"] for row in rows if (row["step"], row["rank"]) == (6, rank)] for rank in (0, 1)] == [
        ranks[0][6],
        ranks[1][6],
    ]


def test_a_state_from_a_pipe_is_read(
    latents: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with latent_loader(latents) as loader:
        seen = [batch["key"] for batch in take(loader, 2)]
        piped = io.TextIOWrapper(io.BytesIO(json.dumps(loader.state_dict()).encode()))
    monkeypatch.setattr("sys.stdin", piped)
    assert samples(latents, capsys, "--state", "-") == dict(enumerate(seen))
