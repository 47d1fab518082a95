"""Two ranks that save and load through DCP: `job.py DIRECTORY`; prints what the test looks at."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from tests.support.ranks import in_group


class Loader:
    def __init__(self, position: int) -> None:
        self.position, self.random = position, torch.full((5,), position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "random": self.random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.random = state["position"], state["random"]


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Linear(301, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(seed: int, position: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(*trained(seed))
    return {"model": model, "optim": optimizer, "loader": Loader(position)}


def seen(given: dict[str, Any]) -> dict[str, Any]:
    weights = [w.full_tensor().double().sum().item() for w in given["model"].values()]
    moments = [s["exp_avg"].full_tensor().double().sum().item() for s in given["optim"]["state"].values()]
    loader = given["loader"]
    return {"weights": weights, "moments": moments, "loader": [loader.position, loader.random.tolist()]}


def say(what: str, **line: Any) -> None:
    print(json.dumps({"what": what, **line}), flush=True)


def failing(work: Any) -> str:
    try:
        work()
    except CheckpointException as error:
        return " | ".join(sorted(f"{rank}: {type(e[0]).__name__}: {e[0]}" for rank, e in error.failures.items()))
    return "no failure"


@in_group
def main(directory: str) -> None:
    rank = dist.get_rank()
    first = state(1, 100 + rank)

    def writer(step: int, **more: Any) -> RepositoryWriter:
        return RepositoryWriter(directory, run="a", step=step, **more)

    dcp.save(first, storage_writer=writer(1))
    say("saved", **seen(first))
    other = state(2, -1)
    reader = RepositoryReader(directory, run="a")
    dcp.load(other, storage_reader=reader)
    say("loaded", step=reader.step, **seen(other))

    theirs = state(2, -1)
    dcp.save(first, checkpoint_id=f"{directory}-dcp")
    dcp.load(theirs, checkpoint_id=f"{directory}-dcp")
    say("theirs", **seen(theirs))

    saving = dcp.async_save(first, storage_writer=writer(2))
    assert isinstance(saving, Future)
    saving.result(60)
    saving = dcp.async_save(first, storage_writer=writer(3), async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    assert isinstance(saving, Future)
    saving.result(120)
    processed = state(3, -1)
    dcp.load(processed, storage_reader=RepositoryReader(directory, run="a", step=3))
    say("processed", **seen(processed))

    began = time.monotonic()
    first["bad"] = object() if rank == 1 else 3
    say("refused", why=failing(lambda: dcp.save(first, storage_writer=writer(4))), seconds=time.monotonic() - began)
    first.pop("bad")
    missing = RepositoryReader(directory, run="nothing", step=9)
    say("missing", why=failing(lambda: dcp.load(first, storage_reader=missing)))
    dcp.save(first, storage_writer=writer(5))
    say("again", why=failing(lambda: dcp.save(first, storage_writer=writer(5))))
