"""A trainer of the tests as a process: `trainer.py MODE URL [ARGUMENT ...]`; prints lines of JSON for the test to look at."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import HeadraceError


class Local:
    """Rank-local state, as a loader's."""

    def __init__(self, position: int) -> None:
        self.position, self.buffer = position, torch.full((3,), position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], state["buffer"]


def state_for(rank: int, seed: int) -> dict[str, Any]:
    """A model and optimizer that are the same on every rank, and what is not."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 64), nn.Linear(64, 4))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 64) + rank).sum().backward()  # the ranks' running means differ now
    optimizer.step()
    return {"model": model, "optim": optimizer, "loader": Local(100 + rank), "tag": f"rank {rank}"}


def summary(state: dict[str, Any]) -> dict[str, Any]:
    model = state["model"]
    weights = {k.removeprefix("module."): v.double().sum().item() for k, v in model.state_dict().items()}
    moments = [v["exp_avg"].double().sum().item() for v in state["optim"].state_dict()["state"].values()]
    loader = state["loader"]
    return {
        "weights": weights,
        "moments": moments,
        "loader": [loader.position, loader.buffer.tolist()],
        "tag": state["tag"],
    }


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def saving(url: str, rank: int) -> None:
    """Save on every rank, then do what only some ranks do wrong."""
    state = state_for(rank, seed=1)
    with Checkpointer(url, run="exp", sidecar=None, timeout=60) as checkpointer:
        result = checkpointer.save(5, state).result(60)
        say(rank=rank, attempt=result.attempt, written=result.bytes_written, state=result.bytes_state, **summary(state))
        fine = state["tag"]
        state["tag"] = object() if rank == 1 else fine
        try:
            checkpointer.save(6, state)
        except HeadraceError as error:
            say(rank=rank, code=error.code, message=str(error))
        state["tag"] = fine
        try:
            checkpointer.save(6 + rank, state)
        except HeadraceError as error:
            say(rank=rank, code=error.code, message=str(error))
        state["loader"].position = -1
        other = state_for(rank, seed=2)
        other["loader"].position = -1
        assert checkpointer.restore(other) == 5
        say(rank=rank, **summary(other))


def hand_over(url: str, socket: str) -> None:
    """Save, say when it is staged, and wait to be killed."""
    checkpointer = Checkpointer(url, run="exp", sidecar=socket)
    handle = checkpointer.save(1, {"w": torch.arange(200_000.0), "n": 7})
    handle.staged(60)
    say(committed_by=handle.committed_by)
    time.sleep(60)


def staging(url: str) -> None:
    """Save a second step; the crash point kills this process."""
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        state = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
        assert checkpointer.restore(state) == 1
        checkpointer.save(2, {"a": torch.ones(100_000), "b": torch.ones(100_000)}).result(60)


def ending(url: str) -> None:
    """Save and come to the program's end without closing."""
    Checkpointer(url, run="exp", sidecar=None).save(1, {"a": torch.ones(10_000_000)})


def main(mode: str, url: str, *more: str) -> None:
    if mode == "ranks":
        dist.init_process_group("gloo")
        saving(url, int(os.environ["RANK"]))
        dist.destroy_process_group()
    else:
        modes: dict[str, Callable[..., None]] = {"hand-over": hand_over, "staging": staging, "ending": ending}
        modes[mode](url, *more)


if __name__ == "__main__":
    main(*sys.argv[1:])
