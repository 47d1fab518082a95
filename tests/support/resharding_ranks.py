"""A job of several ranks for the tests of sharded checkpoints: `job.py URL RUN:KIND[:how] ...`, one rank of it.

For each RUN: builds a small transformer spread over the ranks as KIND says, restores the run's newest step into it, prints what
is there, trains, saves the next step, and prints what was saved. KIND is single, ddp, fsdp, tp, hsdp (2 x n) or 2d (n x 2).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headrace.checkpoint import RNG, Checkpointer
from tests.support.ranks import in_group

DIM, HEADS, HIDDEN, WORDS = (
    48,
    12,
    5472,
    29,
)  # WORDS is no multiple of 2, 3, 4; the largest weight has over 1 MiB


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 3)  # fewer rows than ranks: some shards are empty
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def build(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Transformer()
    world = dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind in ("tp", "2d"):
        dims = (world,) if kind == "tp" else (world // 2, 2)
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=("tp",) if kind == "tp" else ("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], PLAN)
        if kind == "2d":
            shard(model, mesh["dp"])
    elif kind == "hsdp":
        shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "fsdp":
        shard(model, init_device_mesh("cpu", (world,)))
    return model


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Trainer:
    def __init__(self, kind: str, how: str, seed: int) -> None:
        self.how = how
        self.model = build(kind, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.loader = Loader(-1)

    def train(self) -> None:
        words = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(5))
        self.model(words).float().square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.loader.position = 100 + dist.get_rank()

    def state(self) -> dict[str, Any]:
        rest = {"scheduler": self.scheduler, "loader": self.loader, "rng": RNG()}
        if self.how == "dicts":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            return {"model": model, "optimizer": optimizer, **rest}
        return {"model": self.model, "optimizer": self.optimizer, **rest}

    def restore(self, checkpointer: Checkpointer) -> int | None:
        state = self.state()
        step = checkpointer.restore(state)
        if self.how == "dicts" and step is not None:
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        return step

    def summary(self) -> dict[str, str]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found: dict[str, Any] = {f"model/{k}": v for k, v in model.items()}
        slots_of: Any = optimizer["state"]
        found |= {f"{name}/{k}": v for name, slots in slots_of.items() for k, v in slots.items()}
        return {k: digest(v) for k, v in sorted(found.items())}


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not whole.dim():
        return hashlib.sha256(str(whole.item()).encode()).hexdigest()[:16]
    return hashlib.sha256(whole.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def turn(url: str, run: str, kind: str, how: str) -> None:
    rank = dist.get_rank()
    trainer = Trainer(kind, how, seed=len(run) + dist.get_world_size())
    same = ("model", "optimizer") if how == "dicts" else ()  # of plain dicts nothing else says so
    with Checkpointer(url, run=run, sidecar=None, timeout=60, replicated=same) as checkpointer:
        step = trainer.restore(checkpointer)
        random = torch.get_rng_state().sum().item()
        say(run=run, rank=rank, restored=step, state=trainer.summary(), position=trainer.loader.position,
            lr=trainer.optimizer.param_groups[0]["lr"], random=random)  # fmt: skip
        trainer.train()
        torch.manual_seed(1000 + rank + (step or 0))
        random = torch.get_rng_state().sum().item()
        result = checkpointer.save((step or 0) + 1, trainer.state()).result(60)
        say(run=run, rank=rank, saved=result.step, state=trainer.summary(), position=trainer.loader.position,
            lr=trainer.optimizer.param_groups[0]["lr"], random=random, bytes=result.bytes_state)  # fmt: skip


@in_group
def main(url: str, *turns: str) -> None:
    for each in turns:
        run, kind, *how = each.split(":")
        turn(url, run, kind, *(how or ["objects"]))
