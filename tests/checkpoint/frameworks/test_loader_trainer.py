"""A Trainer of transformers on a loader: it resumes at the next batch, and reads none of those that it was trained on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio.core.errors import CorruptionError, MismatchError, NotFoundError, UnsupportedError, UsageError
from tests.support import nursery
from tests.support.latents import latent_loader, latents_url
from tests.support.lazy_modules import lazily
from tests.support.ranks import launch

transformers = lazily("transformers", needs="transformers")
trainer_run = lazily("tests.support.trainer_run", needs="transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return latents_url(tmp_path_factory)


def seen(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], Any]:
    """The keys of 15 steps, which are two and a half epochs, and the weights at the end."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = trainer_run.train(url, folder, 15, resume=False, save_strategy="no")
    return seen(folder), result


@pytest.mark.parametrize("stop", [4, 6, 8])
def test_a_resumed_training_gets_the_batches_of_an_unbroken_one(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path, stop: int
) -> None:
    """Step 6 is the end of an epoch."""
    keys, result = unbroken
    first_epoch = [key for batch in keys[:6] for key in batch]
    assert len(keys) == 15
    assert len(set(first_epoch)) == len(first_epoch) == 24
    trainer_run.train(url, tmp_path, stop, resume=False)
    assert seen(tmp_path) == keys[:stop]
    assert trainer_run.train(url, tmp_path, 15, resume=True) == result
    assert seen(tmp_path) == keys


def test_a_killed_training_resumes_after_its_last_checkpoint(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    keys, result = unbroken
    killed = nursery.start("tests.support.trainer_run", url, str(tmp_path), "15", "no", "9")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert seen(tmp_path) == keys[:9]
    assert trainer_run.train(url, tmp_path, 15, resume=True) == result
    assert seen(tmp_path) == keys[:9] + keys[8:]  # its last checkpoint was that of step 8


def test_batches_that_were_trained_on_are_not_read_again(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    keys, _ = unbroken
    trainer_run.train(url, tmp_path, 4, resume=False)
    decoded: list[str] = []

    def note(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        decoded.append(f"{int(values['latent'][0]):03}")
        return values

    trainer_run.train(url, tmp_path, 6, resume=True, transform=note)
    assert decoded[:8] == keys[4] + keys[5]
    assert len(decoded) <= 5 * 4  # two batches are trained on, and at most three are in preparation


def test_accumulated_gradients_and_incomplete_updates_resume_exactly(url: str, tmp_path: Path) -> None:
    """An update takes four batches, and the last one of an epoch two."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 4}
    (whole := tmp_path / "whole").mkdir()
    (parts := tmp_path / "parts").mkdir()
    result = trainer_run.train(url, whole, 7, resume=False, **options)
    for stop, resume in ((2, False), (4, True), (7, True)):
        last = trainer_run.train(url, parts, stop, resume=resume, save_steps=1, **options)
    assert last == result
    assert seen(parts) == seen(whole)
    assert len(seen(whole)) == 3 * 6 + 4


def test_two_ranks_resume_as_two_and_as_one(url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path) -> None:
    keys, _ = unbroken
    job = ("tests.support.trainer_run", url, str(tmp_path))
    launch(2, *job, "4", "no", LOCAL_WORLD_SIZE="2")
    launch(2, *job, "8", "yes", LOCAL_WORLD_SIZE="2")
    other = [json.loads(line) for line in (tmp_path / "seen-1").read_text().splitlines()]
    assert [one + two for one, two in zip(seen(tmp_path), other, strict=True)] == keys[:8]
    trainer_run.train(url, tmp_path, 10, resume=True)
    assert seen(tmp_path)[8:] == keys[8:10]


@pytest.mark.parametrize("option", ["ignore_data_skip", "auto_find_batch_size"])
def test_arguments_that_a_loader_cannot_follow_are_refused(url: str, tmp_path: Path, option: str) -> None:
    trainer_run.train(url, tmp_path, 2, resume=False)
    options: dict[str, Any] = {option: True}
    with pytest.raises(UsageError, match=option) as caught:
        trainer_run.train(url, tmp_path, 4, resume=True, **options)
    assert "leave it out" in caught.value.hint
    assert len(seen(tmp_path)) == 2


def test_a_checkpoint_without_a_usable_position_is_refused(url: str, tmp_path: Path) -> None:
    trainer_run.train(url, tmp_path, 2, resume=False)
    position = tmp_path / "out" / "checkpoint-2" / "headrace_loader_0.json"
    saved = json.loads(position.read_text())
    position.write_text(json.dumps(saved | {"seed": 6}))
    with pytest.raises(MismatchError, match="seed"):
        trainer_run.train(url, tmp_path, 4, resume=True)
    position.write_text("{")
    with pytest.raises(CorruptionError, match="not the position of a loader"):
        trainer_run.train(url, tmp_path, 4, resume=True)
    position.unlink()
    with pytest.raises(NotFoundError, match=r"headrace_loader_0\.json is missing"):
        trainer_run.train(url, tmp_path, 4, resume=True)


def test_entries_that_the_model_does_not_take_are_left_out(url: str, tmp_path: Path) -> None:
    class Strict(trainer_run.Net):  # type: ignore[misc, unused-ignore, name-defined]
        def forward(self, latent: Any) -> Any:
            return super().forward(latent, ["?"])

    class Renamed(trainer_run.Net):  # type: ignore[misc, unused-ignore, name-defined]
        def forward(self, pixels: Any) -> Any:
            raise AssertionError

    with latent_loader(url) as loader:
        how = trainer_run.arguments(tmp_path, 2)
        trainer_run.LoaderTrainer(Strict(tmp_path / "seen"), how, train_dataset=loader).train()
        assert len(seen(tmp_path)) == 2
        with pytest.raises(UsageError, match="takes none of the entries of a batch: latent, caption, ") as caught:
            trainer_run.LoaderTrainer(Renamed(tmp_path / "seen"), how, train_dataset=loader).train()
        assert "remove_unused_columns=False" in caught.value.hint


def test_a_plain_trainer_is_told_what_to_use(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Lenient(trainer_run.Net):  # type: ignore[misc, unused-ignore, name-defined]
        def forward(self, latent: Any, key: list[str], **_: Any) -> Any:
            return super().forward(latent, key)

    class ReturnsLoader(transformers.Trainer):  # type: ignore[misc, unused-ignore, name-defined]
        def get_train_dataloader(self) -> Any:
            return self.train_dataset

    def fit(kind: Any, steps: int, **options: Any) -> None:
        with latent_loader(url) as loader:
            how = trainer_run.arguments(tmp_path, steps, remove_unused_columns=False, **options)
            net = Lenient(tmp_path / "seen")
            kind(net, how, train_dataset=loader).train(resume_from_checkpoint=steps > 2 or None)

    with pytest.raises(UsageError, match="Accelerate would split the loader's batches") as caught:
        fit(transformers.Trainer, 2)
    assert "LoaderTrainer" in caught.value.hint
    fit(ReturnsLoader, 2)
    with pytest.raises(UsageError, match="no batches need to be skipped") as caught:
        fit(ReturnsLoader, 4)
    assert "LoaderTrainer" in caught.value.hint
    assert not caplog.records
    fit(ReturnsLoader, 4, ignore_data_skip=True)
    assert "continues at step 2, but its loader begins with the first batch" in caplog.text


def test_another_trainer_trains_on_a_loader_by_inheritance(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    class Mine(trainer_run.LoaderTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc, unused-ignore, name-defined]
        pass

    for steps in (2, 4):
        how = transformers.Seq2SeqTrainingArguments(str(tmp_path / "out"), **trainer_run.SETTINGS, max_steps=steps)
        with latent_loader(url) as loader:
            trainer = Mine(trainer_run.Net(tmp_path / "seen"), how, train_dataset=loader)
            trainer.train(resume_from_checkpoint=steps > 2 or None)
    assert seen(tmp_path) == unbroken[0][:4]


def test_epochs_end_where_those_of_the_loader_end(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    for resume in (False, True):
        options: dict[str, Any] = {"num_train_epochs": 1 + resume, "save_strategy": "epoch"}
        trainer_run.train(url, tmp_path, -1, resume=resume, **options)
    assert seen(tmp_path) == unbroken[0][:12]


def test_options_of_accelerate_do_not_split_batches(
    url: str, unbroken: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    trainer_run.train(url, tmp_path, 2, resume=False)
    options: dict[str, Any] = {
        "accelerator_config": {"dispatch_batches": True, "split_batches": True},
        "dataloader_num_workers": 2,
    }
    trainer_run.train(url, tmp_path, 5, resume=True, **options)
    assert seen(tmp_path) == unbroken[0][:5]


def test_a_loader_is_not_evaluated_by_the_trainer(url: str, tmp_path: Path) -> None:
    with latent_loader(url, evaluate=True) as loader:
        how = trainer_run.arguments(tmp_path, 2)
        trainer = trainer_run.LoaderTrainer(trainer_run.Net(tmp_path / "seen"), how, eval_dataset={"small": loader})
        for evaluate in (trainer.evaluate, lambda: trainer.predict(loader)):
            with pytest.raises(UnsupportedError, match="averages losses as if all batches") as caught:
                evaluate()
            assert "evaluate=True" in caught.value.hint
