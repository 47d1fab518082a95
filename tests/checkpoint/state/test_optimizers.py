"""Optimizers of every make and schedulers of every kind: training goes on from a restored step as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from headrace.checkpoint import RNG, Checkpointer

Params = Any
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "adamw, for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, fused=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "adam, a tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "rmsprop, centred": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, history_size=3, max_iter=2),
    "nadam, groups": lambda p: torch.optim.NAdam([{"params": p[:1], "lr": 1e-3}, {"params": p[1:]}], lr=1e-2),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "a function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Training:
    def __init__(self, optimizer: str, scheduler: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 2))
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.state = {"model": self.model, "optim": self.optimizer, "schedule": self.scheduler, "rng": RNG()}

    def step(self) -> float:
        inputs = torch.randn(5, 8)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(inputs).square().mean()
            loss.backward()
            return loss

        loss = float(torch.as_tensor(self.optimizer.step(closure)).detach())  # type: ignore[arg-type]
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(loss) if plateau else self.scheduler.step()
        return loss

    def seen(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values()]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().numpy().tobytes() for t in tensors] + [
            repr(g["lr"]).encode() for g in self.optimizer.param_groups
        ]


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(optimizer, "warm restarts") for optimizer in OPTIMIZERS]
    + [("adamw, fused", scheduler) for scheduler in SCHEDULERS],
)
def test_training_goes_on_to_the_bit(optimizer: str, scheduler: str, tmp_path: Path) -> None:
    one, other = Training(optimizer, scheduler, 1), Training(optimizer, scheduler, 2)
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        for _ in range(3):
            one.step()
        checkpointer.save(3, one.state).result(60)
        first = [one.step() for _ in range(3)]
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        assert checkpointer.restore(other.state) == 3
    assert [other.step() for _ in range(3)] == first
    assert other.seen() == one.seen()
