"""Ranks that restore one step together: `sharing_job.py DIRECTORY DAMAGED`.

Each prints what it read from the store and what it got.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.restoring import shared_reads
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped
from tests.support.ranks import in_group


class Counting(Wrapped):
    read = 0

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.read += sum(len(view) for _, view in ranges)
        self.inner.get_ranges_into(key, ranges)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def state(seed: int, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(1500, 1501), torch.nn.Linear(1501, 700), torch.nn.Linear(700, 3))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
    return {"model": model}


def restore(directory: str, run: str, sharded: bool) -> None:
    into = state(99, sharded)
    with open_store(directory) as inner:
        store = Counting(inner)
        try:
            with Checkpointer(store, run=run, sidecar=None, timeout=60) as checkpointer:
                checkpointer.restore(into)
        except HeadraceError as error:
            say(run=run, error=type(error).__name__, message=str(error))
            return
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in into["model"].parameters()]
    say(run=run, read=store.read, digests=[digest(p) for p in params])


@in_group
def main(directory: str, damaged: str) -> None:
    saved = state(1, False)
    with Checkpointer(directory, run="exp", sidecar=None, timeout=60) as checkpointer:
        checkpointer.save(1, saved).result(60)
    say(
        bytes=sum(p.nbytes for p in saved["model"].parameters()),
        digests=[digest(p) for p in saved["model"].parameters()],
    )
    own = set(shared_reads._LOCAL_FILE_SYSTEMS)
    exports = own if dist.get_rank() == 0 else set()
    for file_systems in (
        own,
        set(),
        exports,
    ):  # a disk of the node; one that the ranks share, as NFS; one that rank 0 exports
        shared_reads._LOCAL_FILE_SYSTEMS.clear()
        shared_reads._LOCAL_FILE_SYSTEMS.update(file_systems)
        restore(directory, "exp", False)
        restore(directory, "exp", True)
        restore(damaged, "exp", False)
