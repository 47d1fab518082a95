"""Loaders in Lightning and Accelerate: the trainers' own checkpoints go on at the very next batch, in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataio.shards.dataset import Dataset
from loaders import Clip, VideoLoader

Make = Callable[[], VideoLoader]


@pytest.fixture
def make(made_dataset: Dataset) -> Iterator[Make]:
    made = list[VideoLoader]()

    def loader() -> VideoLoader:
        clip = Clip(2, per_video=2)
        made.append(VideoLoader(made_dataset, 2, clip=clip, size=(16, 16), seed=4, sidecar=None, threads=1))
        return made[-1]

    yield loader
    for one in made:
        one.close()


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_in_the_middle_of_an_epoch(make: Make, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):  # type: ignore[name-defined, misc]
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
