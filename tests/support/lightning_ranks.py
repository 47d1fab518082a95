"""A rank of a training under Lightning's DDP with `headrace_callbacks`: `lightning_ranks DATASET FOLDER STEPS`.

Each rank has its own folder of names, as on a machine of its own.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn

from headrace.checkpoint.frameworks.lightning_callbacks import headrace_callbacks
from tests.support.latents import latent_loader

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.layer, self.url, self.seen = nn.Linear(4, 1), url, list[list[str]]()

    def train_dataloader(self) -> Any:
        return latent_loader(self.url, 2)

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        self.seen.append(batch["key"])
        loss: torch.Tensor = self.layer(batch["latent"]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main(url: str, folder: str, steps: str) -> None:
    warnings.simplefilter("ignore")  # Lightning's own
    torch.set_num_threads(1)
    torch.manual_seed(int(steps))
    names = Path(folder) / f"names-{os.environ['RANK']}"
    trainer = lightning.Trainer(
        max_steps=int(steps),
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=headrace_callbacks(f"{folder}/repo", run="ranks", every=3, folder=names, sidecar=None),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(url)
    trainer.fit(module, ckpt_path="last")
    found = {
        "seen": module.seen,
        "weights": module.layer.weight.tolist(),
        "names": [path.name for path in names.glob("*")],
    }
    print(json.dumps(found), flush=True)
