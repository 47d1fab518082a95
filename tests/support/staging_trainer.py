"""A small real training run whose every state can be compared with a stop-the-world copy of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from headrace.checkpoint import RNG


class Counter:
    """State that changes outside of the optimizer, as a loader's."""

    def __init__(self) -> None:
        self.position, self.buffer = 0, torch.zeros(7)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], state["buffer"].clone()


class Training:
    """Dropout, BatchNorm with running means, Adam, a schedule, a frozen layer, a loader's position, generators."""

    def __init__(self, seed: int, width: int = 256) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(32, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, width), nn.Linear(width, 4)
        )
        self.model[3].requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.loader = Counter()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": RNG(),
        }

    def forward_backward(self) -> None:
        self.loader.position += 1
        self.loader.buffer += torch.rand(7)
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 32)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def snapshot(self) -> dict[str, Any]:
        """A copy of everything, made while nothing else runs."""
        return copy.deepcopy({name: part.state_dict() for name, part in self.state.items()})


def equal(a: object, b: object) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(torch.as_tensor(a == b).all())
