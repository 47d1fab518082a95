"""A job that saves a sharded model, rank-local values and a stage of one rank: `exchange_ranks.py FOLDER`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headrace.checkpoint import Checkpointer
from tests.support.ranks import in_group


def whole() -> dict[str, torch.Tensor]:
    """The tensors of the model, unsharded."""
    torch.manual_seed(0)
    return {"rows": torch.randn(301, 700), "columns": torch.randn(500, 333).bfloat16(), "plain": torch.randn(7)}


@in_group
def main(folder: str) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = whole()
    model = torch.nn.Module()
    for name, dim in (("rows", 0), ("columns", 1)):
        sharded = distribute_tensor(tensors[name], mesh, [Shard(dim)])
        model.register_parameter(name, torch.nn.Parameter(sharded, requires_grad=False))
    model.register_buffer("plain", tensors["plain"])
    state = {"model": model, "local": torch.full((3,), float(rank)), f"stage{rank}": {"rank": rank}}
    with Checkpointer(folder, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
