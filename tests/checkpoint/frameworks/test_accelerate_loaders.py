"""Accelerate with a loader: it resumes at the next batch, and is stopped where it would change the batches."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headrace.dataio.cli import main
from headrace.dataio.core.errors import UsageError
from tests.support import nursery
from tests.support.latents import latent_loader, latents_url
from tests.support.lazy_modules import lazily
from tests.support.ranks import launch

accelerate = lazily("accelerate", needs="accelerate")
accelerate_run = lazily("tests.support.accelerate_run", needs="accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
KINDS = ["files", "repository"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return latents_url(tmp_path_factory)


def seen(folder: Path, rank: int = 0) -> list[list[str]]:
    return [json.loads(line) for line in (folder / f"seen-{rank}").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], Any]:
    """The keys of 15 steps, which are two and a half epochs, and the weights at the end."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = accelerate_run.train(url, folder, 15)
    return seen(folder), result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [4, 6, 8])
def test_a_resumed_training_gets_the_batches_of_an_unbroken_one(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path, stop: int, kind: str
) -> None:
    """Step 6 is the end of an epoch."""
    keys, result = unbroken
    assert len({key for batch in keys[:6] for key in batch}) == 24
    accelerate_run.train(url, tmp_path, stop, kind)
    assert seen(tmp_path) == keys[:stop]
    assert accelerate_run.train(url, tmp_path, 15, kind) == result
    assert seen(tmp_path) == keys


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_resumes_after_a_checkpoint(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path, kind: str
) -> None:
    keys, result = unbroken
    killed = nursery.start("tests.support.accelerate_run", url, str(tmp_path), "15", kind, "9")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert seen(tmp_path) == keys[:9]
    assert accelerate_run.train(url, tmp_path, 15, kind) == result
    (again,) = (at for at in (2, 4, 6, 8) if seen(tmp_path)[9:] == keys[at:])
    assert again == 8 or kind == "repository"  # its last save may not have been committed


def test_batches_that_were_trained_on_are_not_read_again(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    keys, _ = unbroken
    accelerate_run.train(url, tmp_path, 4)
    decoded: list[str] = []

    def note(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        decoded.append(f"{int(values['latent'][0]):03}")
        return values

    accelerate_run.train(url, tmp_path, 6, transform=note)
    assert decoded[:8] == keys[4] + keys[5]
    assert len(decoded) <= 5 * 4  # two batches are trained on, and at most three are in preparation


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_share_each_batch_and_resume_as_two_and_as_one(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path, kind: str
) -> None:
    keys, _ = unbroken
    for steps in ("4", "8"):
        launch(2, "tests.support.accelerate_run", url, str(tmp_path), steps, kind, LOCAL_WORLD_SIZE="2")
    both = [one + two for one, two in zip(seen(tmp_path), seen(tmp_path, 1), strict=True)]
    assert both == keys[:8]
    accelerate_run.train(url, tmp_path, 10, kind)
    assert seen(tmp_path)[8:] == keys[8:10]


def test_the_samples_of_a_step_are_listed(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerate_run.train(url, tmp_path, 8, "repository")
    checkpoint = ["--checkpoint", str(tmp_path / "repository"), "--run", "exp", "--step", "6"]
    assert main(["samples", url, "--trust-mounts", *checkpoint]) == 0
    keys = [line.split("\t")[-1] for line in capsys.readouterr().out.splitlines()]
    assert keys == [key for batch in unbroken[0][:6] for key in batch]


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dispatched by default": {},
    "dispatched": {"dispatch_batches": True},
    "not dispatched": {"dispatch_batches": False},
    "stateful": {"use_stateful_dataloader": True},
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_dataloader_around_a_loader_is_refused(url: str, configuration: str) -> None:
    settings = accelerate.utils.DataLoaderConfiguration(**CONFIGURATIONS[configuration])
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    with latent_loader(url) as loader:
        prepared = accelerator.prepare(DataLoader(loader, batch_size=None))
        with pytest.raises(UsageError, match="Accelerate would split the loader's batches") as caught:
            next(iter(prepared))
        assert "accelerator.prepare(loader)" in caught.value.hint
        shard = accelerate.data_loader.IterableDatasetShard(loader, num_processes=2)
        with pytest.raises(UsageError, match="Accelerate would split the loader's batches"):
            next(iter(shard))
        assert accelerator.prepare(loader) is loader


def test_a_dataset_of_the_user_may_regroup_the_batches(url: str) -> None:
    class Samples(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            for batch in loader:
                yield from batch["latent"]

    accelerator = accelerate.Accelerator(cpu=True)
    with latent_loader(url) as loader:
        batch = next(iter(accelerator.prepare(DataLoader(Samples(), batch_size=3))))
    assert batch.shape == (3, 4)


def test_batches_are_not_skipped_after_a_state_was_loaded(url: str) -> None:
    with latent_loader(url) as loader:
        with pytest.raises(
            UsageError, match="continues at its saved position, so no batches need to be skipped"
        ) as caught:
            accelerate.skip_first_batches(loader, 3)
        assert "leave out skip_first_batches" in caught.value.hint
        assert not hasattr(loader, "sampler")
