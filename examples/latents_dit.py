"""Train a small diffusion transformer on images and videos in one order, in the space of latents.

    headrace index 's3://bucket/raw/**/*.*' s3://bucket/dataset
    python examples/latents_dit.py s3://bucket/dataset s3://bucket/runs

Half of the samples are images. The text next to a file, `clip.txt`, conditions the model. If there is a `clip.latent.npy`,
float32 (T, 4, H / 8, W / 8), the model learns from these latents, and the clip is not encoded. A restart continues with
the next batch.
"""

import argparse
import itertools
import math

import torch
from torch import Tensor, nn

from headrace import RNG, Checkpointer, Clip, Dataset
from headrace.loaders import Bucket, Buckets, Loader, Mixture, Npy, Text, Video

CHANNELS, WIDTH, HEADS, DEPTH = 4, 64, 4, 2
SHAPES = Buckets((Bucket((64, 64), 1), Bucket((64, 64), 8), Bucket((48, 80), 8)), budget=4 * 8 * 64 * 64)
FIELDS = {
    "video": Video(Clip(8, start="center")),  # the frames of which the latents were made
    "latent": Npy("latent.npy", required=False),
    "caption": Text(required=False),
}


class Transformer(nn.Module):
    """Predicts the velocity of rectified flow. A token is one position of the latents of one frame."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.letters = nn.EmbeddingBag(256, WIDTH, mode="mean")
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, latents: Tensor, times: Tensor, captions: list[str | None]) -> Tensor:
        """Return the velocity of noisy `latents`, (B, T, 4, H, W)."""
        texts = [torch.tensor(list((caption or " ").encode())) for caption in captions]
        letters = self.letters(torch.cat(texts), torch.tensor([0, *map(len, texts[:-1])]).cumsum(0))
        grid = latents.movedim(2, -1)  # (B, T, H, W, 4)
        places = torch.meshgrid(*map(torch.arange, grid.shape[1:4]), indexing="ij")
        tokens = self.enter(grid).flatten(1, 3) + sum(waves(axis.flatten() / (i + 1)) for i, axis in enumerate(places))
        scale, shift = self.time(waves(1000 * times) + letters).unsqueeze(1).chunk(2, dim=-1)
        return self.leave(self.blocks(tokens * (1 + scale) + shift)).view(grid.shape).movedim(-1, 2)


def waves(positions: Tensor) -> Tensor:
    """Return sines and cosines of the positions, (N, WIDTH)."""
    angles = positions[:, None] * torch.exp(-torch.arange(WIDTH // 2) * math.log(10_000) / (WIDTH // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def encode(clips: Tensor) -> Tensor:
    """Return the latents of uint8 `clips`, (B, T, 3, H, W). A real training has a frozen autoencoder here."""
    colours = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [0.0, 1.0, -1.0], [-1.0, 0.0, 1.0]])
    means = nn.AvgPool3d((1, 8, 8))(clips.float() / 127.5 - 1)
    return torch.einsum("ck,btkhw->btchw", colours, means)


def loss_of(model: nn.Module, batch: dict) -> Tensor:
    """Return the loss of rectified flow for one batch."""
    video, latents, missing = batch["video"], batch["latent"], ~batch["latent.present"]  # None if all are missing
    latents = encode(video) if latents is None else latents.index_put((missing,), encode(video[missing]))
    noise, at = torch.randn(latents.shape), torch.rand(len(latents), 1, 1, 1, 1)
    velocity = model((1 - at) * latents + at * noise, at.flatten(), batch["caption"])
    return (velocity - (noise - latents)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed images, videos and latents")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Dataset(args.dataset, trust_mounts=True) as dataset, Checkpointer(args.runs, run="dit") as checkpointer:
        views = {"images": dataset.where("frames = 1"), "videos": dataset.where("frames > 1")}
        with Loader(Mixture(views, weights=dict.fromkeys(views, 1)), fields=FIELDS, buckets=SHAPES, seed=1) as loader:
            state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNG()}
            first = checkpointer.restore(state) or 0
            batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
            for step, batch in zip(range(first + 1, args.steps + 1), batches, strict=False):
                loss = loss_of(model, batch)
                optimizer.zero_grad(), loss.backward(), optimizer.step()
                print(f"step {step} loss {loss:.6f} clips {tuple(batch['video'].shape)} {batch['key'][0]}", flush=True)
                if step % args.save_every == 0 or step == args.steps:
                    checkpointer.save(step, state)


if __name__ == "__main__":
    main()
