"""Loaders in Lightning, Accelerate and transformers: checkpoints go on at the very next batch, in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Clip, VideoLoader

pytestmark = pytest.mark.slow

Make = Callable[[], VideoLoader]


@pytest.fixture
def make(made_dataset: Dataset) -> Iterator[Make]:
    made = list[VideoLoader]()

    def loader() -> VideoLoader:
        clip = Clip(2, per_video=2)
        made.append(VideoLoader(made_dataset, 2, clip=clip, size=(16, 16), seed=4, sidecar=None, num_threads=1))
        return made[-1]

    yield loader
    for one in made:
        one.close()


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_in_the_middle_of_an_epoch(make: Make, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(2 * 3 * 16 * 16, 1), list[Any]()

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.seen.append(batch["id"].tolist())
            loss: torch.Tensor = self.layer(batch["video"].float().flatten(1)).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    def fit(steps: int, begin: Path | None = None) -> tuple[Net, Any]:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        net = Net()
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(net, make(), ckpt_path=begin)
        return net, trainer

    whole, _ = fit(12)
    assert len(whole.seen) == 12
    first, trainer = fit(5)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    second, _ = fit(12, tmp_path / "kept.ckpt")
    assert first.seen + second.seen == whole.seen


def test_accelerate_goes_on_in_the_middle_of_an_epoch(make: Make, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(steps: int, begin: Path | None = None, keep: Path | None = None) -> list[list[int]]:
        accelerator = accelerate.Accelerator(cpu=True)
        loader = accelerator.prepare(make())
        accelerator.register_for_checkpointing(loader)
        if begin is not None:
            accelerator.load_state(str(begin))
        seen = [batch["id"].tolist() for _, batch in zip(range(steps), loader, strict=False)]
        if keep is not None:
            accelerator.save_state(str(keep))
        return seen

    assert train(3, keep=tmp_path / "kept") + train(5, tmp_path / "kept") == train(8)


class Net(torch.nn.Module):
    """Under transformers; it notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(2 * 3 * 16 * 16, 1), list[Any]()

    def forward(self, video: torch.Tensor, id: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.seen.append(id.tolist())
        return {"loss": self.layer(video.float().flatten(1)).mean()}


class Run:
    """Trainings of transformers in one folder, each with a separate Trainer."""

    def __init__(self, make: Make, folder: Path) -> None:
        self.make, self.folder = make, folder

    def arguments(self, steps: int) -> Any:
        transformers = pytest.importorskip("transformers")
        return transformers.TrainingArguments(
            str(self.folder),
            max_steps=steps,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )

    def fit(self, steps: int, resume: bool = False, around: Callable[[Any], Any] = lambda loader: loader) -> list[Any]:
        """What the model saw; the last step is saved."""
        from headrace.checkpoint.frameworks.transformers import RepositoryTrainer

        arguments, net = self.arguments(steps), Net()
        arguments.save_strategy, arguments.save_steps = "steps", steps
        with Checkpointer(str(self.folder / "repo"), run="exp", sidecar=None) as checkpointer:
            trainer = RepositoryTrainer(net, arguments, train_dataset=around(self.make()), checkpointer=checkpointer)
            trainer.train(resume_from_checkpoint=resume)
        return net.seen

    def fit_with_callback(self, steps: int) -> list[Any]:
        from transformers import Trainer

        from headrace.checkpoint.frameworks.transformers import RepositoryCallback

        loader, net = self.make(), Net()

        class TrainerWithLoader(Trainer):  # type: ignore[misc, unused-ignore]
            def get_train_dataloader(self) -> Any:
                return loader

        arguments = self.arguments(steps)
        arguments.save_strategy, arguments.save_steps = "steps", steps
        with Checkpointer(str(self.folder / "other"), run="exp", sidecar=None) as checkpointer:
            TrainerWithLoader(net, arguments, callbacks=[RepositoryCallback(checkpointer)]).train()
        return net.seen


@pytest.mark.filterwarnings("ignore")
def test_transformers_goes_on_in_the_middle_of_an_epoch_and_at_its_end(make: Make, tmp_path: Path) -> None:
    epoch = len(make())
    assert epoch > 2
    whole = Run(make, tmp_path / "whole").fit(epoch + 3)
    for stop in (2, epoch, epoch + 1):
        run = Run(make, tmp_path / str(stop))
        assert run.fit(stop) + run.fit(epoch + 3, resume=True) == whole
    for stop in (2, epoch):
        run = Run(make, tmp_path / f"callback-{stop}")
        assert run.fit_with_callback(stop) + run.fit_with_callback(epoch + 3) == whole


@pytest.mark.filterwarnings("ignore")
def test_transformers_is_refused_a_loader_whose_position_it_could_not_keep(make: Make, tmp_path: Path) -> None:
    class TrainerWithLoader(Run):
        """`get_train_dataloader` returns a DataLoader around the loader."""

        def fit_around(self, **how: Any) -> list[Any]:
            from headrace.checkpoint.frameworks.transformers import RepositoryTrainer

            loader, net = torch.utils.data.DataLoader(self.make(), **how), Net()

            class Trainer(RepositoryTrainer):
                def get_train_dataloader(self) -> Any:
                    return loader

            with Checkpointer(str(self.folder / "repo"), run="exp", sidecar=None) as checkpointer:
                Trainer(net, self.arguments(2), checkpointer=checkpointer).train()
            return net.seen

    pytest.importorskip("transformers")
    assert len(TrainerWithLoader(make, tmp_path).fit_around(batch_size=None)) == 2
    with pytest.raises(UnsupportedError, match="prefetches or splits batches"):
        TrainerWithLoader(make, tmp_path).fit_around(batch_size=None, num_workers=1)
