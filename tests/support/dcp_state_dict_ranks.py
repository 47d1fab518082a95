"""PyTorch's own state dicts, there and back: `state_dict_job.py DIRECTORY KIND...`; prints what is equal.

KIND is fsdp, tp or 2d. Model and optimizer go through `get_state_dict`, our storage under DCP or a Checkpointer, and
`set_state_dict` into a model that was made anew; both are then trained on.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from tests.support.ranks import in_group


def mesh_of(kind: str) -> DeviceMesh:
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("fsdp", "tp")) if kind == "2d" else ((world,), (kind,))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def made(seed: int, mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 66), torch.nn.ReLU(), torch.nn.Linear(66, 8))
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "fsdp" in names:
        fully_shard(model, mesh=mesh["fsdp"])
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.01}]
    return model, torch.optim.AdamW(groups)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 32), 1.0 + i)).square().mean().backward()
        optimizer.step()


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that this rank holds."""
    held: list[torch.Tensor] = list(model.parameters())
    held += [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [getattr(t.detach(), "_local_tensor", t.detach()).clone() for t in held]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@in_group
def main(directory: str, *kinds: str) -> None:
    for kind in kinds:
        mesh = mesh_of(kind)
        for number, flat in enumerate((False, True)):
            for way in ("dcp", "checkpointer"):
                told(f"{directory}/{kind}", mesh, way, number, flat)


def told(directory: str, mesh: DeviceMesh, way: str, number: int, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    first, second = made(1, mesh), made(2, mesh)
    train(*first, 2)
    saved = bits(*first)
    moved(directory, way, number, first, second, options)
    said: dict[str, Any] = {"way": way, "flat": flat, "loaded": same(bits(*second), saved)}
    train(*first, 2)
    train(*second, 2)
    said["trained on"] = same(bits(*second), bits(*first))
    said["changed"] = not same(bits(*second), saved)
    print(json.dumps(said), flush=True)


def moved(directory: str, way: str, step: int, first: Any, second: Any, options: StateDictOptions) -> None:
    model, optim = get_state_dict(*first, options=options)
    into_model, into_optim = get_state_dict(*second, options=options)
    state = {"model": model, "optim": optim}
    into: dict[str, Any] = {"model": into_model, "optim": into_optim}
    if way == "dcp":
        dcp.save(state, storage_writer=RepositoryWriter(directory, run=way, step=step))
        dcp.load(into, storage_reader=RepositoryReader(directory, run=way, step=step))
    else:
        with Checkpointer(directory, run=way, sidecar=None, timeout=60) as checkpointer:
            checkpointer.save(step, state).result(60)
            checkpointer.restore(into, step)
    set_state_dict(*second, model_state_dict=into["model"], optim_state_dict=into["optim"], options=options)
