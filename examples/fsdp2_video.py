"""Train a video model on several ranks with FSDP2: bfloat16, clips of several shapes, and an average of the weights.

    headrace index 's3://bucket/raw/**/*.mp4' s3://bucket/dataset
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_video.py s3://bucket/dataset s3://bucket/runs

Stop it whenever you like, also with `kill -9`, and start it with another number of ranks. It continues after the last
saved step, with the same global batches. The model learns to predict the next frame.
"""

import argparse
import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from headrace import Checkpointer, Clip
from headrace.loaders import Bucket, Buckets, VideoLoader

SHAPES = Buckets((Bucket((48, 80), 8), Bucket((64, 64), 8)), budget=4 * 8 * 64 * 64, multiple=4)


def build_model() -> nn.Module:
    """Convolutions over time and space. Each is a unit of FSDP2."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(3, 16, 3, padding=1), nn.Conv3d(16, 16, 3, padding=1), nn.Conv3d(16, 3, 3, padding=1)]
    model = nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def update_average(average: nn.Module, model: nn.Module) -> None:
    """Move each rank's part of the average towards the weights."""
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.to_local().lerp_(value.to_local(), 0.05)


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def digest_of_keys(keys: list[str]) -> str:
    """A digest of the samples of all ranks, to compare runs."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, keys)
    return hashlib.sha256(" ".join(key for keys in gathered for key in keys).encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="the indexed clips")
    parser.add_argument("runs", help="where checkpoints are written")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")  # with GPUs: "nccl", and device="cuda" for the loader
    model, average = build_model(), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        VideoLoader(args.dataset, clip=Clip(8), buckets=SHAPES, seed=1, trust_mounts=True) as loader,
        Checkpointer(args.runs, run="video") as checkpointer,
    ):
        state = {"model": model, "average": average, "optimizer": optimizer, "loader": loader}
        first = checkpointer.restore(state) or 0
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        for step, batch in zip(range(first + 1, args.steps + 1), batches, strict=False):
            clips = batch["video"].movedim(1, 2).float() / 255  # (B, 3, T, H, W)
            loss = (model(clips[:, :, :-1]).float() - clips[:, :, 1:]).square().mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            update_average(average, model)
            loss, seen = mean_over_ranks(loss), digest_of_keys(batch["key"])
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.5f} clips {tuple(clips.shape)} keys {seen}", flush=True)
            if step % args.save_every == 0 or step == args.steps:
                checkpointer.save(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
