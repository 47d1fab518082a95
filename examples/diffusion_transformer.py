"""Train a small diffusion transformer on a bucket of MP4 and PNG files, where they lie.

    python examples/diffusion_transformer.py 's3://bucket/raw/**/*.*' s3://bucket/dataset s3://bucket/runs

The first start indexes the files. Every later start continues after the last saved step, with the next batch. Images
and videos are in one order: images are clips of one frame. The text next to a file, `clip.txt`, conditions the model.
Several ranks: `torchrun --standalone --nproc-per-node 2 examples/diffusion_transformer.py …`.
"""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace import RNG, Checkpointer, Clip, Dataset, index
from headrace.dataio.core.errors import NotFoundError
from headrace.loaders import Bucket, Buckets, Loader, Text, Video

PATCH, WIDTH, HEADS, DEPTH = 8, 64, 4, 2
SHAPES = Buckets((Bucket((64, 64), 1), Bucket((64, 64), 8), Bucket((48, 80), 8)), budget=4 * 8 * 64 * 64)


class DiffusionTransformer(nn.Module):
    """Predicts the velocity of rectified flow. A token is a patch of 8 x 8 pixels of one frame."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3 * PATCH * PATCH, WIDTH), nn.Linear(WIDTH, 3 * PATCH * PATCH)
        self.letters = nn.EmbeddingBag(256, WIDTH, mode="mean")
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, clips: Tensor, times: Tensor, captions: list[str]) -> Tensor:
        """Return the velocity of noisy `clips`, (B, T, 3, H, W)."""
        b, t, c, h, w = clips.shape
        rows, columns = h // PATCH, w // PATCH
        patches = clips.reshape(b, t, c, rows, PATCH, columns, PATCH).permute(0, 1, 3, 5, 2, 4, 6).flatten(4)
        grid = torch.meshgrid(torch.arange(t), torch.arange(rows), torch.arange(columns), indexing="ij")
        tokens = self.enter(patches).flatten(1, 3) + sum(waves(axis.flatten() / (i + 1)) for i, axis in enumerate(grid))
        scale, shift = self.time(waves(1000 * times) + self.describe(captions)).unsqueeze(1).chunk(2, dim=-1)
        pixels = self.leave(self.blocks(tokens * (1 + scale) + shift))
        return pixels.reshape(b, t, rows, columns, c, PATCH, PATCH).permute(0, 1, 4, 2, 5, 3, 6).reshape(clips.shape)

    def describe(self, captions: list[str]) -> Tensor:
        """Return an embedding of each caption, from its letters."""
        texts = [list(caption.encode()) or [0] for caption in captions]
        starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0)[:-1]
        return self.letters(torch.tensor([letter for text in texts for letter in text]), starts)


def waves(positions: Tensor) -> Tensor:
    """Return sines and cosines of the positions, (N, WIDTH)."""
    angles = positions[:, None] * torch.exp(-torch.arange(WIDTH // 2) * math.log(10_000) / (WIDTH // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def loss_of(model: nn.Module, batch: dict) -> Tensor:
    """Return the loss of rectified flow for one batch."""
    clips = batch["video"].float() / 127.5 - 1
    noise, times = torch.randn_like(clips), torch.rand(len(clips))
    at = times.view(-1, 1, 1, 1, 1)
    velocity = model((1 - at) * clips + at * noise, times, [caption or "" for caption in batch["caption"]])
    return (velocity - (noise - clips)).square().mean()


def open_or_index(media: str, url: str) -> Dataset:
    """Open version 1 of the dataset. If there is none, index the files first, on one rank."""
    try:
        return Dataset(url, 1, trust_mounts=True)
    except NotFoundError:
        if not dist.is_initialized() or dist.get_rank() == 0:
            index(media, url).close()
        if dist.is_initialized():
            dist.barrier()
        return Dataset(url, 1, trust_mounts=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("media", help="pattern or folder of the files")
    parser.add_argument("dataset", help="where the index is, or is written")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DiffusionTransformer()
    trained = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fields = {"video": Video(Clip(8)), "caption": Text(required=False)}
    with (
        open_or_index(args.media, args.dataset) as dataset,
        Loader(dataset, fields=fields, buckets=SHAPES, seed=1) as loader,
        Checkpointer(args.runs, run="dit") as checkpointer,
    ):
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNG()}
        step = checkpointer.restore(state) or 0
        while step < args.steps:
            for batch in loader:
                loss = loss_of(trained, batch)
                optimizer.zero_grad(), loss.backward(), optimizer.step()
                step += 1
                seen = hashlib.sha256(" ".join(batch["key"]).encode()).hexdigest()[:12]
                print(f"step {step} loss {loss.item():.6f} clips {tuple(batch['video'].shape)} keys {seen}", flush=True)
                if step % args.save_every == 0 or step == args.steps:
                    checkpointer.save(step, state)
                if step == args.steps:
                    break


if __name__ == "__main__":
    main()
