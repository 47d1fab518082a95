"""The states that the checkpoint benchmark saves.

- `Training`: a transformer that trains, half in fp32 and half in bf16, with AdamW.
- `ManyTensors`: many tensors of 1 KiB.

Invariants of `Training`: all values come from optimizer steps on gradients of a loss, so the state compresses and
changes like a real one. Every tensor is a weight or one of its two moments. With several ranks, the layers are sharded by
FSDP2. After `to_lora`, the weights are frozen and small adapters are trained.

Failure behaviour: none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
from torch import nn

State = dict[str, torch.Tensor]
Guard = Callable[[], contextlib.AbstractContextManager[object]]
_TOKENS, _RANK = 16, 8


class Training:
    """A stack of transformer layers. The state, weights and moments, has about `mib` MiB.

    The optimizer steps within `guard`. `lost` is the number of seconds that it waited for `guard`.
    """

    def __init__(self, mib: int, ranks: int = 1, seed: int = 0) -> None:
        torch.set_num_threads(1)  # trainer and saver use one core each; idle threads of torch would spin on both
        torch.manual_seed(seed)
        self.width = 768 if mib >= 768 else 512 if mib >= 384 else 256
        self.guard: Guard = contextlib.nullcontext
        self.lost = 0.0
        pair = sum(3 * p.numel() * p.element_size() for kind in _KINDS for p in self._layer(kind).parameters())
        count = 2 * max(1, round(mib * 2**20 / pair))
        self.model = nn.ModuleList(self._layer(_KINDS[number % 2]) for number in range(count))
        if ranks > 1:
            _shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)
        self._adapters: list[nn.ParameterList] = []
        for _ in range(2):
            self.step()

    def _layer(self, dtype: torch.dtype) -> nn.Module:
        return nn.TransformerEncoderLayer(
            self.width, 8, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True, dtype=dtype
        )

    def train_only(self, share: float) -> None:
        """Freeze all but the last `share` of the layers."""
        first = min(round(len(self.model) * (1 - share)), len(self.model) - 1)
        for number, layer in enumerate(self.model):
            layer.requires_grad_(number >= first)

    def to_lora(self) -> None:
        """Freeze all weights, drop the moments, and train adapters of rank 8 for each layer."""
        self.model.requires_grad_(False)
        sizes = ((self.width, _RANK), (_RANK, self.width))
        self._adapters = [
            nn.ParameterList([nn.Parameter(torch.randn(size) / 100) for size in sizes]) for _ in self.model
        ]
        self.optimizer = torch.optim.AdamW([p for pair in self._adapters for p in pair], lr=3e-4, foreach=True)
        self.step()

    def step(self) -> None:
        """Train one step: forward, backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        x = torch.randn(1, _TOKENS, self.width)
        for number, layer in enumerate(self.model):
            y: torch.Tensor = layer(x.to(_KINDS[number % 2])).float()
            if self._adapters:
                down, up = self._adapters[number]
                y = y + x @ down @ up
            x = y
        x.square().mean().backward()  # type: ignore[no-untyped-call]
        reached = time.perf_counter()
        with self.guard():
            self.lost += time.perf_counter() - reached
            self.optimizer.step()

    def state(self) -> State:
        """Return every tensor by name, without copying."""
        parameters = [(f"layers.{name}", p) for name, p in self.model.named_parameters()]
        for number, pair in enumerate(self._adapters):
            parameters += [(f"adapters.{number}.{name}", p) for name, p in pair.named_parameters()]
        tensors = {f"weight/{name}": p.detach() for name, p in parameters}
        for name, p in parameters:
            if p in self.optimizer.state:
                for key in ("exp_avg", "exp_avg_sq"):
                    tensors[f"{key}/{name}"] = self.optimizer.state[p][key]
        return tensors


class ManyTensors:
    """`count` tensors of 1 KiB. A step of the optimizer changes all of them."""

    def __init__(self, count: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.guard: Guard = contextlib.nullcontext
        self.lost = 0.0
        self._tensors = {f"weight/layers.{number}": torch.randn(256) for number in range(count)}
        for tensor in self._tensors.values():
            tensor.grad = torch.full((256,), 1e-3)
        self.optimizer = torch.optim.SGD(list(self._tensors.values()), lr=0.1, foreach=True)

    def train_only(self, share: float) -> None:
        """Change only the last `share` of the tensors from now on."""
        tensors = list(self._tensors.values())
        for tensor in tensors[: round(len(tensors) * (1 - share))]:
            tensor.grad = None

    def step(self) -> None:
        """Change the tensors."""
        reached = time.perf_counter()
        with self.guard():
            self.lost += time.perf_counter() - reached
            self.optimizer.step()

    def state(self) -> State:
        """Return every tensor by name, without copying."""
        return dict(self._tensors)


_KINDS = (torch.float32, torch.bfloat16)


def _shard(model: nn.ModuleList) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
