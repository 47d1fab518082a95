"""The demo's trainer: one process, or one rank, that saves and restores. It has no special code for being killed.

Purpose: to show that an ordinary loop needs five lines of Headrace. It reports events as JSON lines on standard output.

Invariants: the line of a step is written atomically, after the step and before the next one. So the lines of a killed
trainer are correct for every step that it finished. Losses are written as hexadecimal floats: equal text means equal
bits.

Failure behaviour: errors end the process with their message and exit code. The trainer retries no operation that the
library has given up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import blake3
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.checkpoint import RNG, Checkpointer, Keep
from headrace.dataio.core.errors import HeadraceError
from headrace.loaders import Clip, VideoLoader

Emit = Callable[..., None]
_WAIT_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    """Train with the options of the command line. Returns the exit code: 0, or that of the error."""
    args = _parser().parse_args(argv)
    try:
        train(args, _emitter())
    except HeadraceError as error:
        print(f"trainer: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.demo.trainer", description=__doc__)
    parser.add_argument("--data", required=True, help="URL of the dataset")
    parser.add_argument("--checkpoints", required=True, help="URL of the checkpoint repository")
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=8, help="clips in a global batch")
    parser.add_argument("--clips-per-video", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _emitter() -> Emit:
    lock = threading.Lock()

    def emit(event: str, **values: object) -> None:
        line = json.dumps({"event": event, "at": time.time(), **values}) + "\n"
        with lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    return emit


def train(args: argparse.Namespace, emit: Emit) -> None:
    """Run the training loop, and report every event with `emit`."""
    started = time.perf_counter()
    device = _set_up_torch(args.seed)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model: nn.Module = MaskedClipModel().to(device)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    clip = Clip(frames=8, stride=2, per_video=args.clips_per_video)
    per_rank = args.batch_size // world_size
    with (
        VideoLoader(args.data, batch_size=per_rank, clip=clip, size=(64, 64), device=device, seed=args.seed) as loader,
        Checkpointer(args.checkpoints, run=args.name, staging="lazy", keep=Keep(last=3)) as checkpointer,
    ):
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "rng": RNG()}
        restoring = time.perf_counter()
        resumed = checkpointer.restore(state)
        now = time.perf_counter()
        emit("ready", resumed_from=resumed, restore_seconds=now - restoring, start_seconds=now - started)
        batches = _endless(loader)
        for step in range((resumed or 0) + 1, args.steps + 1):
            _one_step(step, batches, model, optimizer, scheduler, emit)
            if step % args.save_every == 0 or step == args.steps:
                handle = checkpointer.save(step, state)
                emit("saved", step=step, stall=handle.stall)
                threading.Thread(target=_watch, args=(handle, step, emit), name=f"watch-{step}").start()
        quarantined = [{"key": q.key, "reason": q.reason} for q in loader.quarantine]
    emit("end", weights=_digest(model), quarantined=quarantined, seconds=time.perf_counter() - started)
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_up_torch(seed: int) -> str:
    """Make torch deterministic, join the process group if torchrun started this process, and return the device."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _endless(loader: VideoLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _one_step(
    step: int,
    batches: Iterator[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    emit: Emit,
) -> None:
    began = time.perf_counter()
    batch = next(batches)
    loaded_at = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(batch["video"])
    loss.backward()
    optimizer.step()
    scheduler.step()
    value = float(loss.detach())
    emit(
        "step",
        step=step,
        ids=[int(i) for i in batch["id"]],
        keys=list(batch["key"]),
        loss=value.hex(),
        wait=loaded_at - began,
        compute=time.perf_counter() - loaded_at,
    )


def _watch(handle: Any, step: int, emit: Emit) -> None:
    try:
        handle.staged(_WAIT_SECONDS)
        emit("staged", step=step)
        result = handle.result(_WAIT_SECONDS)
    except HeadraceError as error:
        emit("save-failed", step=step, code=error.code, message=str(error))
        return
    emit(
        "committed",
        step=step,
        bytes_state=result.bytes_state,
        bytes_written=result.bytes_written,
        bytes_deduplicated=result.bytes_deduplicated,
    )


def _digest(model: nn.Module) -> str:
    """Return the BLAKE3 digest of all parameters and buffers, in the order of their names."""
    hasher = blake3.blake3()
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(name.removeprefix("module.").encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _downsampling(channels_in: int, channels_out: int, stride: tuple[int, int, int]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1),
        nn.GroupNorm(8, channels_out),
        nn.SiLU(),
    )


def _upsampling(channels_in: int, channels_out: int, scale: tuple[float, float, float]) -> nn.Sequential:
    return nn.Sequential(
        nn.Upsample(scale_factor=scale),
        nn.Conv3d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.GroupNorm(8, channels_out),
        nn.SiLU(),
    )


class MaskedClipModel(nn.Module):
    """A masked autoencoder for clips, with about 0.4 million parameters.

    `forward` takes uint8 video (B, T, 3, H, W), with T divisible by 4 and H and W by 8. It returns the mean absolute
    error of the reconstruction, a float32 scalar.
    """

    def __init__(self, hidden_share: float = 0.5) -> None:
        super().__init__()
        self.hidden_share = hidden_share
        self.encoder = nn.Sequential(
            _downsampling(3, 24, (1, 2, 2)),
            _downsampling(24, 48, (2, 2, 2)),
            _downsampling(48, 96, (2, 2, 2)),
            nn.Dropout3d(0.1),
        )
        self.decoder = nn.Sequential(_upsampling(96, 64, (2.0, 2.0, 2.0)), _upsampling(64, 32, (2.0, 2.0, 2.0)))
        self.head = nn.Conv3d(
            32, 3 * 4, kernel_size=3, padding=1
        )  # 4 RGB values at each position: a 2x2 patch of pixels

    def forward(self, video: Tensor) -> Tensor:
        clip = video.transpose(1, 2).float().div(255.0).sub(0.5)
        batch, _, frames, height, width = clip.shape
        keep = torch.rand(batch, 1, frames // 2, height // 8, width // 8, device=clip.device) >= self.hidden_share
        mask = keep.float().repeat_interleave(2, 2).repeat_interleave(8, 3).repeat_interleave(8, 4)
        patches = self.head(self.decoder(self.encoder(clip * mask)))
        restored = nn.functional.pixel_shuffle(patches.transpose(1, 2), 2).transpose(1, 2)
        error: Tensor = (restored - clip).abs().mean()
        return error


if __name__ == "__main__":
    sys.exit(main())
