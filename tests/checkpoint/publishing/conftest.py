"""A run whose model changes a little from step to step, and what publishes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.publishing.records import Published


class Trainer:
    """Saves and publishes steps of a small model."""

    def __init__(self, url: Path, run: str = "exp42") -> None:
        torch.manual_seed(0)
        self.url = url
        self.model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900), torch.nn.Linear(900, 300))
        self.model.register_buffer("count", torch.tensor(0))
        self.checkpointer = Checkpointer(url, run=run, sidecar=None)
        self.step = 0
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def train(self, share: float = 0.02) -> None:
        """Change a share of the elements."""
        self.step += 1
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.add_((torch.rand(tensor.shape) < share) * 0.01)
            self.model.get_buffer("count").fill_(self.step)

    def save(self) -> int:
        self.checkpointer.save(self.step, {"model": self.model, "step": self.step}).result(60)
        self.weights[self.step] = {name: value.clone() for name, value in self.model.state_dict().items()}
        return self.step

    def publish(self, step: int | None = None, dtype: torch.dtype | None = None) -> Published:
        future = self.checkpointer.publish("policy", step or self.save(), dtype=dtype)
        assert future is not None
        return future.result(60)

    def next_version(self, share: float = 0.02, dtype: torch.dtype | None = None) -> Published:
        self.train(share)
        return self.publish(dtype=dtype)


@pytest.fixture(autouse=True)
def no_daemon_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscribers read directly, unless a test names its daemon's socket."""
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path / "repository")
    with trainer.checkpointer:
        yield trainer


def empty_like(weights: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Tensors to apply versions to."""
    return {
        name: torch.full_like(value, 7, dtype=dtype if dtype and value.is_floating_point() else value.dtype)
        for name, value in weights.items()
    }


def same(held: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    """Whether the tensors hold these weights, converted."""
    return all(torch.equal(held[name], value.to(held[name].dtype)) for name, value in weights.items())
