"""Ranks that publish sharded weights, or subscribe to them on another mesh.

`publishing_ranks publish DIRECTORY STEP` saves and publishes the weights of this step, sharded by rows.
`publishing_ranks follow DIRECTORY` applies the versions of steps 1 and 2 to tensors that are sharded by rows, by columns, on two
dimensions, and not at all. When all ranks have applied the first, the file DIRECTORY-applied exists.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headrace.checkpoint import Checkpointer, Subscriber
from tests.support.ranks import in_group

ROWS, COLUMNS = 700, 1100


def weights(step: int) -> torch.Tensor:
    """The whole tensor of a step: a few elements differ from the step before."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    for number in range(step):
        whole[number::37, number::41] += 1
    return whole


def publish(directory: str, step: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = weights(step)
    model = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "both": distribute_tensor(whole.double(), mesh, [Shard(0)]),
        "same": distribute_tensor(whole[:3], mesh, [Replicate()]),
    }
    with Checkpointer(directory, run="exp42", sidecar=None, timeout=60) as checkpointer:
        handle = checkpointer.save(step, {"model": model})
        future = checkpointer.publish("policy", handle)
        assert (future is None) == (dist.get_rank() > 0)
        handle.result(60)
        if future is not None:
            future.result(60)


def follow(directory: str) -> None:
    """Apply the version of step 1, then that of step 2 once another job has published it."""
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    grid = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    whole = torch.zeros(ROWS, COLUMNS)
    held = {
        "rows": distribute_tensor(whole, line, [Shard(1)]),
        "columns": distribute_tensor(whole.bfloat16(), line, [Shard(0)]),
        "both": distribute_tensor(whole.double(), grid, [Shard(0), Shard(1)]),
        "same": whole[:3].clone(),
    }
    with Subscriber(directory, "policy", poll=0.05, sidecar=None) as subscriber:
        for step in (1, 2):
            version = subscriber.wait(120)
            assert version.step == step
            version.apply(held)
            full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in held.items()}
            wanted = weights(step)
            right = {name: torch.equal(t.double(), wanted[: len(t)].to(t.dtype).double()) for name, t in full.items()}
            print(json.dumps({"step": version.step, "right": right, "bytes": version.bytes_to_fetch}), flush=True)
            dist.barrier()
            Path(f"{directory}-applied").touch()


@in_group
def main(what: str, directory: str, step: str = "") -> None:
    publish(directory, int(step)) if what == "publish" else follow(directory)


if __name__ == "__main__":
    main()
