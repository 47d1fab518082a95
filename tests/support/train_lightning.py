"""See `training`: under Lightning."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from tests.support.framework_training import (  # first: it sets variables
    BATCH,
    EVERY,
    loss_of,
    net,
    rows,
    run,
    settle,
)

import lightning  # isort: skip
import torch  # isort: skip
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # isort: skip
from torch import nn  # isort: skip

from headrace.checkpoint.frameworks.lightning import RepositoryIO  # isort: skip

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Heard(Callback):
    def __init__(self, plugin: RepositoryIO) -> None:
        self.plugin, self.step = plugin, 0

    def on_train_batch_start(self, *_: Any) -> None:
        settle(self.plugin._checkpointer)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.step = int(checkpoint["global_step"])


def train(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    plugin = RepositoryIO(str(folder / "repo"), run="exp", sidecar=None)
    keeps = ModelCheckpoint(
        folder / "names", filename="{step}", every_n_train_steps=EVERY, save_top_k=1, monitor=None, save_last=True
    )
    heard = Heard(plugin)
    trainer = lightning.Trainer(
        max_steps=stop, callbacks=[keeps, heard], plugins=[plugin], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    module = Module()
    path = "last" if resume == "auto" else folder / "names" / resume
    whole: Any = rows()[
        : EVERY * BATCH
    ]  # Lightning goes on at the beginning of an epoch with a loader that has no state
    trainer.fit(module, torch.utils.data.DataLoader(whole, batch_size=BATCH), ckpt_path=path)
    plugin.close()
    return heard.step, module.net


def main(*arguments: str) -> None:
    run(train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
