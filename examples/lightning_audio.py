"""Train on recordings with Lightning: whole recordings packed into rows, and log-mel spectrograms.

    headrace index 's3://bucket/speech/**/*.flac' s3://bucket/dataset
    python examples/lightning_audio.py s3://bucket/dataset s3://bucket/runs

A row holds several recordings, one after the other, so little of a batch is padding. `pieces` says where each of them
begins and ends. The model learns to predict the next column of a spectrogram. A restart continues with the next batch,
also on another machine: the newest step is found in the repository.
"""

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from headrace.checkpoint.frameworks.lightning_callbacks import headrace_callbacks
from headrace.loaders import AudioLoader, LogMel, Packing

BANDS, COLUMNS = 40, 300  # 100 columns are a second


class Predictor(lightning.LightningModule):
    """Predicts a column of the spectrogram from those before it in the same recording."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.leave = nn.GRU(BANDS, 64, batch_first=True), nn.Linear(64, BANDS)

    def training_step(self, batch: dict[str, Any], number: int) -> Tensor:
        losses = []
        for row, pieces in zip(batch["mel"], batch["pieces"], strict=True):
            for start, end in pieces.tolist():
                piece = row[0, :, start:end].T[None]  # (1, columns, bands)
                if end - start > 1:
                    predicted = self.leave(self.cell(piece[:, :-1])[0])
                    losses.append((predicted - piece[:, 1:]).square().mean())
        loss = torch.stack(losses).mean()
        self.log("loss", loss, batch_size=len(losses))  # also into the metadata of the saved steps
        print(f"step {self.global_step + 1} loss {loss.item():.5f} recordings {len(losses)}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed recordings")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--output", default="out", help="the folder with the names of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    args = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        callbacks=headrace_callbacks(args.runs, run="speech", every=args.save_every, folder=args.output),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    mel, packing = LogMel(n_mels=BANDS), Packing(COLUMNS)
    with AudioLoader(args.dataset, batch_size=2, features=mel, packing=packing, trust_mounts=True) as loader:
        trainer.fit(Predictor(), loader, ckpt_path="last")
    print(f"trained to step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
