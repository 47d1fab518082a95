"""Ranks that save or restore through divided manifests: `divided_ranks save|restore DIRECTORY`.

The ranks commit in groups of two, and even two ranks divide the manifests.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import names
from headrace.checkpoint.restoring import divided_step, shared_reads
from headrace.dataio.core.errors import HeadraceError
from tests.support.ranks import in_group

ROWS, COLUMNS = 70, 3000


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 5)
        self.head = torch.nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight


def state(factor: float) -> dict[str, Any]:
    """Sharded tensors, replicas, a tied model with its optimizer, views, and values of each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    torch.manual_seed(int(factor))
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=factor)
    if factor:
        model.head(model.embed(torch.arange(11))).sum().backward()
        optimizer.step()
    own = torch.full((7,), factor * (1 + dist.get_rank()))
    return {
        "rows": distribute_tensor(whole * factor, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole * factor, mesh, [Shard(1)]),
        "few": distribute_tensor(whole[:2, :3] * factor, mesh, [Shard(0)]),
        "common": distribute_tensor(whole + factor, mesh, [Replicate()]),
        "empty": torch.empty(0, 3),
        "model": model,
        "optimizer": optimizer,
        "own": own,
        "views": [own, own[2:]],
        "value": {"factor": factor, "rank": dist.get_rank() if factor else -1, "text": "abc"},
    }


def bits(value: object) -> object:
    """The state as plain values."""
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return bits(value.state_dict())
    if isinstance(value, dict):
        return {str(key): bits(each) for key, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The entries that differ. Entries of one rank come from rank 0 if the saving job had no such rank."""
    return [name for name in wanted if bits(found[name]) != bits(wanted[name])]


@in_group
def main(what: str, directory: str) -> None:
    names.GROUP_RANKS, divided_step.WHOLE_RANKS, shared_reads.FEW_RANKS = 2, 1, 1  # here, not in the process that forks
    with Checkpointer(directory, run="own", sidecar=None, timeout=60) as checkpointer:
        if what == "save":
            for step in (1, 2):
                checkpointer.save(step, {"state": state(float(step))}).result(60)
            return
        if what == "elsewhere":  # as a store that is on no rank's node
            shared_reads._LOCAL_FILE_SYSTEMS.clear()
        into = {"state": state(0.0)}
        try:
            checkpointer.restore(into)
        except HeadraceError as error:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
            return
        tied = into["state"]["model"].head.weight is into["state"]["model"].embed.weight
        wrong = differing(into["state"], state(2.0))
        print(json.dumps({"wrong": wrong, "tied": tied}), flush=True)


if __name__ == "__main__":
    main()
