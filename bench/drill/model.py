"""A real training step: a transformer in bf16 with AdamW, sized for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Trainer:
    """`step()` is one forward, backward and optimizer step on a batch that stays on the device."""

    def __init__(self, gpu: bool, *, layers: int | None = None, width: int | None = None) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if gpu else "cpu")
        width, layers = width or (2048 if gpu else 128), layers or (8 if gpu else 2)
        layer = torch.nn.TransformerEncoderLayer(
            width, max(2, width // 128), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=gpu)
        self.batch = torch.randn(8 if gpu else 2, 512 if gpu else 32, width, device=self.device)

    def step(self) -> None:
        """One step; on a GPU it returns when the work is queued."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_bytes(self) -> int:
        """Bytes of parameters and moments."""
        moments = [
            value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *moments))

    def seconds_a_step(self, steps: int, between: Callable[[int], object] = lambda step: None) -> list[float]:
        """Seconds of each step, the device's work included; `between` runs before each."""
        found = []
        for number in range(steps):
            began = time.perf_counter()
            between(number)
            self.step()
            self.sync()
            found.append(time.perf_counter() - began)
        return found
