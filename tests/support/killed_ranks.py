"""Ranks that are killed with SIGKILL in the middle of steps and started again: a program of the nursery, `main(JSON)`.

One process imports everything and forks the ranks, so that a restart costs a second and not ten. Rank 0 appends what all ranks
got in a step to a log, then replaces the state file; a restart cuts the log to the state's step, as a trainer goes back to
its last checkpoint. Prints how each run of ranks ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Bucket, Buckets, Clip, Loader, Mixture, Npy, Rows, Video, VideoLoader

GLOBAL_BATCH = 12
SECONDS = 120.0
FURTHER = 2


@dataclass(frozen=True)
class Job:
    """`runs` are (world size, log lines a random moment after which it is killed; None lets it finish). One that is to be killed
    goes on for `FURTHER` steps at most, however quick it is, so that it is killed before it ends."""

    url: str
    folder: str
    steps: int
    runs: list[tuple[int, int | None]]
    seed: int = 0
    kind: str = "plain"

    def text(self) -> str:
        return json.dumps(asdict(self))


def make_loader(url: str, rank: int, world_size: int, kind: str = "plain") -> VideoLoader | Loader:
    """The loader that every run has: of a dataset, or (`kind="mixed"`) of a mixture in buckets whose weights change.

    With `kind="fields"`, it has images and videos in buckets, a second camera and states that images lack, latents, and
    noise that a transform draws.
    """
    if kind == "fields":
        return Loader(
            url,
            fields={
                "camera": Video(size=(16, 16), file="cam1.mp4", like="video", crop="random", required=False),
                "video": Video(Clip(4, per_video=3), crop="random"),
                "state": Rows("state.npy", like="video", rate=30, required=False),
                "latent": Npy("latent.npy"),
            },
            buckets=Buckets(
                (Bucket((16, 16), 1), Bucket((16, 28), 1), Bucket((16, 16), 4)), 16 * 16 * 4 * 6, multiple=2
            ),
            transform=add_noise,
            drop_last=False,
            seed=5,
            sidecar=None,
            num_threads=1,
            rank=rank,
            world_size=world_size,
        )
    source: str | Mixture = url
    batch: dict[str, Any] = {"batch_size": GLOBAL_BATCH // world_size, "size": (16, 16)}
    if kind == "mixed":
        views: dict[str, str | Dataset] = {"wide": Dataset(url).where("width >= 64"), "all": url}
        source = Mixture(views, weights=[(0, {"wide": 1, "all": 1}), (9, {"wide": 1, "all": 4})])
        batch = {
            "buckets": Buckets((Bucket((16, 16)), Bucket((16, 28)), Bucket((28, 16), 4)), 28 * 16 * 4 * 6, multiple=2)
        }
    return VideoLoader(
        source,
        clip=Clip(2, per_video=3),
        seed=5,
        sidecar=None,
        num_threads=1,
        rank=rank,
        world_size=world_size,
        **batch,
    )


def add_noise(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return values | {"noise": torch.randn(values["latent"].shape, generator=generator)}


def row(batch: dict[str, Any]) -> list[list[Any]]:
    """What a batch holds: (sample, start, digests of the tensors) of each clip."""
    starts = batch["video.start" if "video.start" in batch else "clip"].tolist()
    names = [name for name in ("video", "latent", "camera", "state", "noise") if name in batch]
    digests = [_digests(batch, name) for name in names]
    return [list(one) for one in zip(batch["id"].tolist(), starts, *digests, strict=True)]


def _digests(batch: dict[str, Any], name: str) -> list[str]:
    """The digest of each sample's value. Empty if the sample lacks it."""
    present = batch.get(f"{name}.present", [True] * len(batch["key"]))
    tensor = batch[name] if batch[name] is not None else [None] * len(batch["key"])
    return [
        hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] if there and one is not None else ""
        for one, there in zip(tensor, present, strict=True)
    ]


def train(job: Job, rank: int, world_size: int, port: int, most: int | None) -> None:
    """One rank, until `job.steps` lines are in the log; at `most` it waits to be killed."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, timedelta(seconds=SECONDS), rank=rank, world_size=world_size)
    log, saved = Path(job.folder, "log"), Path(job.folder, "state")
    lines = 0
    with make_loader(job.url, rank, world_size, job.kind) as loader:
        if saved.exists():
            state = json.loads(saved.read_text())
            loader.load_state_dict(state["loader"])
            lines = state["lines"]
        dist.barrier()
        if rank == 0:
            log.touch()
            kept = log.read_text().splitlines(keepends=True)[:lines]
            log.write_text("".join(kept))
        dist.barrier()
        while lines < job.steps:
            for batch in loader:
                parts: list[Any] = [None] * world_size
                dist.all_gather_object(parts, (row(batch), loader.state_dict()))
                assert all(part[1] == parts[0][1] for part in parts)
                lines += 1
                if rank == 0:
                    _write(log, saved, lines, [one for part in parts for one in part[0]], parts[0][1])
                if lines == most:
                    signal.pause()
                if lines == job.steps:
                    break
        dist.barrier()
    dist.destroy_process_group()


def _write(log: Path, saved: Path, lines: int, rows: list[Any], state: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps(rows) + "\n")
    fresh = saved.with_suffix(".tmp")
    fresh.write_text(json.dumps({"lines": lines, "loader": state}))
    fresh.replace(saved)


def run(job: Job, world_size: int, kill_at: int | None, delay: float) -> dict[str, Any]:
    """Fork the ranks, kill them all when the log has `kill_at` lines, and say how they ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    most = None if kill_at is None else kill_at + FURTHER
    ranks = [_fork(job, rank, world_size, port, most) for rank in range(world_size)]
    log, end = Path(job.folder, "log"), time.monotonic() + SECONDS
    try:
        while kill_at is not None and time.monotonic() < end:
            if log.exists() and log.read_bytes().count(b"\n") >= kill_at:
                time.sleep(delay)
                break
            time.sleep(0.002)
    finally:
        if kill_at is not None:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
    ends = [os.waitpid(pid, 0)[1] for pid in ranks]
    lines = log.read_bytes().count(b"\n")
    return {"world_size": world_size, "ends": [os.waitstatus_to_exitcode(end) for end in ends], "lines": lines}


def _fork(job: Job, rank: int, world_size: int, port: int, most: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        train(job, rank, world_size, port, most)
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def main(job_text: str) -> None:
    torch.set_num_threads(1)
    values = json.loads(job_text)
    job, draw = Job(**values), random.Random(values["seed"])
    found = [run(job, world_size, kill_at, draw.uniform(0, 0.03)) for world_size, kill_at in job.runs]
    print(json.dumps(found))
