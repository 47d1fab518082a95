"""Five ranks that commit in groups of two, and ranks that restore their steps: `grouped_ranks save|restore DIRECTORY`."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.format import names
from tests.support.ranks import in_group

ROWS, COLUMNS = 70, 3000


def state(factor: float) -> dict[str, Any]:
    """Tensors that are split by rows and by columns, one that all ranks hold, and a value of each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return {
        "rows": distribute_tensor(whole * factor, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole * factor, mesh, [Shard(1)]),
        "frozen": distribute_tensor(whole, mesh, [Shard(0)]),
        "common": distribute_tensor(whole + 1, mesh, [Replicate()]),
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def whole(tensor: DTensor) -> torch.Tensor:
        return tensor.full_tensor()

    return all(torch.equal(whole(one[name]), whole(other[name])) for name in one)


@in_group
def main(what: str, directory: str) -> None:
    names.GROUP_RANKS = 2  # here, not in the process that forks
    with Checkpointer(directory, run="own", sidecar=None) as checkpointer:
        if what == "save":
            for step in (1, 2):
                result = checkpointer.save(step, {"model": state(float(step))}).result(60)
                print(json.dumps({"step": step, "deduplicated": result.bytes_deduplicated}), flush=True)
            dcp.save(state(3.0), storage_writer=RepositoryWriter(directory, run="dcp", step=3))
            return
        into = {"model": state(0.0)}
        checkpointer.restore(into)
    loaded = state(0.0)
    dcp.load(loaded, storage_reader=RepositoryReader(directory, run="dcp", step=3))
    found = [equal(into["model"], state(2.0)), equal(loaded, state(3.0))]
    print(json.dumps({"equal": found}), flush=True)


if __name__ == "__main__":
    main()
