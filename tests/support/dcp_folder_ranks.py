"""A folder of torch's own DCP, imported and restored: `dcp_folder_ranks.py DIRECTORY`. Prints what is equal.

The state is saved under FSDP2, as a folder and through our storage. Rank 0 imports the folder. The state is then loaded
under tensor parallelism: by `dcp.load` from the folder and from the imported step, and by a `Checkpointer` from both steps.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

from headrace.checkpoint import Checkpointer, import_checkpoint
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from tests.support.dcp_state_dict_ranks import made, mesh_of, same, train
from tests.support.ranks import in_group


def extra(dim: int, seed: int) -> dict[str, Any]:
    """Tensors whose shards have different sizes, and values."""
    torch.manual_seed(seed)
    cube = distribute_tensor(torch.randn(5, 3, 7).bfloat16(), mesh_of("tp"), [Shard(dim)])
    return {"cube": cube, "list": [torch.randn(3), seed], "scalar": torch.tensor(float(seed)), "name": f"seed {seed}"}


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors that this rank holds."""
    tensors: list[Any] = [*model.parameters(), state["cube"], state["list"][0], state["scalar"]]
    for parameter in model.parameters():
        slots = optimizer.state[parameter]
        tensors += [slots[key] for key in sorted(slots)]
    return [getattr(tensor.detach(), "_local_tensor", tensor.detach()).clone() for tensor in tensors]


@in_group
def main(directory: str) -> None:
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        folder = f"{directory}/flat-{flat}"
        first = made(1, mesh_of("fsdp"))
        train(*first, 2)
        model, optim = get_state_dict(*first, options=options)
        dcp.save({"model": model, "optim": optim, "extra": extra(0, 5)}, checkpoint_id=folder)
        into = RepositoryWriter(f"{directory}/r", run=f"own-{flat}", step=0)
        dcp.save({"model": model, "optim": optim, "extra": extra(0, 5)}, storage_writer=into)
        if dist.get_rank() == 0:
            import_checkpoint(folder, f"{directory}/r", run=f"in-{flat}")
        dist.barrier()
        compare(directory, flat, options)


def compare(directory: str, flat: bool, options: StateDictOptions) -> None:
    found = []
    ways = ["dcp", "reader", "in", "own"] + ([] if flat else ["in objects", "own objects"])
    for way in ways:
        pair, other = made(2, mesh_of("tp")), extra(1, 6)
        run, _, objects = way.partition(" ")
        if objects:  # the objects themselves, not their state dicts
            restore(directory, f"{run}-{flat}", {"model": pair[0], "optim": pair[1], "extra": other})
        else:
            model, optim = get_state_dict(*pair, options=options)
            into: dict[str, Any] = {"model": model, "optim": optim, "extra": other}
            if way == "dcp":
                dcp.load(into, checkpoint_id=f"{directory}/flat-{flat}")
            elif way == "reader":
                dcp.load(into, storage_reader=RepositoryReader(f"{directory}/r", run=f"in-{flat}", step=0))
            else:
                restore(directory, f"{run}-{flat}", into)
            set_state_dict(*pair, model_state_dict=model, optim_state_dict=optim, options=options)
            other = into["extra"]
        found.append((held(*pair, other), (other["list"][1], other["name"])))
    untouched = held(*made(2, mesh_of("tp")), extra(1, 6))
    equal = [same(each[0], found[0][0]) and each[1] == found[0][1] for each in found[1:]]
    print(json.dumps({"equal": equal, "changed": not same(found[0][0], untouched), "values": found[0][1]}), flush=True)


def restore(directory: str, run: str, state: dict[str, Any]) -> None:
    with Checkpointer(f"{directory}/r", run=run, sidecar=None, timeout=60) as checkpointer:
        assert checkpointer.restore(state) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
