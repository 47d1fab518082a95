"""`headrace_callbacks` under the real Lightning: saves, resuming, metadata, trackers; skipped where it is not installed."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headrace.checkpoint import Checkpointer, Keep, read
from headrace.checkpoint.frameworks.name_files import read_name
from headrace.checkpoint.trackers.events import CommittedStep, Tracker
from headrace.dataio.core.errors import TransientError, UsageError
from tests.support.latents import latent_loader, latents_url
from tests.support.lazy_modules import lazily
from tests.support.ranks import launch

lightning = lazily("lightning", needs="lightning")
loggers = lazily("lightning.pytorch.loggers", needs="lightning")
adapter = lazily("headrace.checkpoint.frameworks.lightning_callbacks", needs="lightning")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Lightning's own


@functools.cache
def module_class() -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore, name-defined]
        """Learns from the latents of a loader, and keeps the keys of the samples that it saw."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 1), list[list[str]]()

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.seen.append(batch["key"])
            loss: torch.Tensor = self.layer(batch["latent"]).square().mean()
            self.log("loss", loss, batch_size=len(batch["key"]))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Module


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return latents_url(tmp_path_factory)


def callbacks(folder: Path, names: str = "names", **options: Any) -> list[Any]:
    made: list[Any] = adapter.headrace_callbacks(
        str(folder / "repo"), run="called", every=3, folder=folder / names, sidecar=None, **options
    )
    return made


def trainer_of(folder: Path, steps: int, made: list[Any], **options: Any) -> Any:
    return lightning.Trainer(
        max_steps=steps, callbacks=made, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, **({"logger": False} | options),
    )  # fmt: skip


def fit(folder: Path, url: str, steps: int, made: list[Any], seed: int = 0, **options: Any) -> Any:
    """Train to a step, from the run's newest one."""
    torch.manual_seed(seed)
    module = module_class()()
    with latent_loader(url) as loader:
        trainer_of(folder, steps, made, **options).fit(module, loader, ckpt_path="last")
    return module


def test_a_training_resumes_on_another_machine_as_if_it_had_never_stopped(url: str, tmp_path: Path) -> None:
    (whole_folder := tmp_path / "whole").mkdir()
    whole = fit(whole_folder, url, 10, callbacks(whole_folder))
    first = fit(tmp_path, url, 4, callbacks(tmp_path, "here"))
    assert first.seen == whole.seen[:4]
    resumed = fit(tmp_path, url, 10, callbacks(tmp_path, "there"), seed=7)
    assert resumed.seen == whole.seen[4:]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    with Checkpointer(tmp_path / "repo", run="called", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [3, 4, 6, 9, 10]  # every third, and the last one of each training
    with read(str(tmp_path / "repo"), run="called", step=6) as saved:
        assert saved.metadata.keys() == {"epoch", "loss"}


def test_a_training_at_its_last_step_saves_nothing_more(url: str, tmp_path: Path) -> None:
    fit(tmp_path, url, 4, callbacks(tmp_path))
    assert fit(tmp_path, url, 4, callbacks(tmp_path)).seen == []
    with Checkpointer(tmp_path / "repo", run="called", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [3, 4]


def test_all_steps_are_committed_and_kept_by_the_policy_when_fit_returns(url: str, tmp_path: Path) -> None:
    fit(tmp_path, url, 9, callbacks(tmp_path, keep=Keep(last=2)))
    with Checkpointer(tmp_path / "repo", run="called", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [6, 9]


def test_the_folder_of_an_earlier_training_is_no_reason_for_a_warning(url: str, tmp_path: Path) -> None:
    fit(tmp_path, url, 3, callbacks(tmp_path))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fit(tmp_path, url, 4, callbacks(tmp_path))
    assert not [each for each in heard if "is not empty" in str(each.message)]


def test_the_best_checkpoint_is_tested_by_the_same_callbacks(url: str, tmp_path: Path) -> None:
    made = callbacks(tmp_path)
    trainer, module = trainer_of(tmp_path, 3, made), module_class()()
    module.test_step = lambda batch, number: None
    with latent_loader(url) as loader:
        trainer.fit(module, loader)
        weight = module.layer.weight.detach().clone()
        module.layer.weight.data.zero_()
        trainer.test(module, [], ckpt_path=made[0].best_model_path)
    assert torch.equal(module.layer.weight, weight)


def test_a_second_callback_for_the_best_steps_saves_to_the_same_repository(url: str, tmp_path: Path) -> None:
    best = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "best", "{step}", monitor="loss", save_top_k=1, every_n_train_steps=3
    )
    fit(tmp_path, url, 6, [*callbacks(tmp_path), best])
    named = read_name(best.best_model_path)
    assert named.run == "called"
    with Checkpointer(tmp_path / "repo", run="called", sidecar=None) as checkpointer:
        assert named.step in checkpointer.steps()


def test_another_checkpoint_io_is_refused(url: str, tmp_path: Path) -> None:
    plugin = adapter.RepositoryIO(str(tmp_path / "repo"), run="called", sidecar=None)
    with pytest.raises(UsageError, match="the trainer already has a RepositoryIO"):
        fit(tmp_path, url, 3, callbacks(tmp_path), plugins=[plugin])
    plugin.close()
    with pytest.raises(UsageError, match="every=0 is no number"):
        adapter.headrace_callbacks(str(tmp_path), run="called", every=0)


@pytest.fixture
def mlflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module = pytest.importorskip("mlflow", reason="the extra trackers is not installed")
    before = module.get_tracking_uri()
    yield (tmp_path / "mlruns").as_uri()
    module.set_tracking_uri(before)


def test_committed_steps_reach_the_trainers_own_loggers(url: str, tmp_path: Path, mlflow_folder: str) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    import mlflow

    board = loggers.TensorBoardLogger(tmp_path / "board")
    tracked = loggers.MLFlowLogger("exp", tracking_uri=mlflow_folder)
    fit(tmp_path, url, 6, callbacks(tmp_path), logger=[board, tracked, loggers.CSVLogger(tmp_path / "csv")])
    events = accumulator.EventAccumulator(board.log_dir)
    events.Reload()
    assert sorted(each.step for each in events.Scalars("checkpoint/bytes_state")) == [3, 6]
    history = mlflow.MlflowClient(mlflow_folder).get_metric_history(tracked.run_id, "checkpoint/metadata/loss")
    assert sorted(each.step for each in history) == [3, 6]


class Listed(Tracker):
    def __init__(self) -> None:
        self.steps = list[int]()

    def committed(self, step: CommittedStep) -> None:
        self.steps.append(step.step)


def test_given_trackers_replace_those_of_the_loggers(url: str, tmp_path: Path) -> None:
    board, mine = loggers.TensorBoardLogger(tmp_path / "board"), Listed()
    made = callbacks(tmp_path, trackers=[mine])
    from headrace.checkpoint.frameworks.lightning_callbacks import _trackers_of

    assert _trackers_of(SimpleNamespace(is_global_zero=True, loggers=[board]))
    fit(tmp_path, url, 6, made, logger=board)
    assert sorted(mine.steps) == [3, 6]  # two saves in flight may end in another order


def test_a_rank_resumes_from_the_step_that_rank_0_found(url: str, tmp_path: Path) -> None:
    fit(tmp_path, url, 4, callbacks(tmp_path))
    (mine,) = callbacks(tmp_path)
    assert isinstance(mine, adapter.RepositoryCheckpoint)
    alone = SimpleNamespace(is_global_zero=False, loggers=[])
    (path,) = mine._find_last_checkpoints(alone)
    newest = read_name(path)
    assert newest.step == 4
    mine._agree(dataclasses.replace(newest, step=3))
    assert read_name(path).step == 3
    with pytest.raises(TransientError, match="while the ranks looked for it"):
        mine._agree(None)
    mine.close()


@pytest.mark.process
def test_two_ranks_with_folders_of_their_own_resume_from_one_step(url: str, tmp_path: Path) -> None:
    def train(folder: Path, steps: int) -> list[dict[str, Any]]:
        elastic = {"TORCHELASTIC_RUN_ID": "ranks", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        lines = launch(2, "tests.support.lightning_ranks", url, str(folder), str(steps), **elastic)
        return [line for (line,) in lines]

    first = train(tmp_path, 4)
    second = train(tmp_path, 8)
    assert [rank["names"] for rank in second][1] == ["resume.ckpt"]  # rank 0 saves, and has the names of saves, too
    assert second[0]["weights"] == second[1]["weights"]
    with latent_loader(url) as loader:
        whole = [batch["key"] for _ in range(2) for batch in loader][:8]
    seen = [rank["seen"] + more["seen"] for rank, more in zip(first, second, strict=True)]
    assert [sorted(mine + theirs) for mine, theirs in zip(*seen, strict=True)] == [sorted(keys) for keys in whole]
