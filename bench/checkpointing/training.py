"""The state that the checkpoint benchmark saves: of a transformer that really trains, in bf16 with fp32 masters and AdamW.

Invariant: every number in it comes from steps of the optimizer on gradients of a loss, so that it compresses and changes as
such states do. 14 bytes for each parameter: bf16 weight, fp32 master, two fp32 moments.
Failure behaviour: none of its own.
"""

from __future__ import annotations

import torch
from torch import nn

State = dict[str, torch.Tensor]
_BYTES_PER_PARAMETER = 14
_TOKENS, _WIDTH = 16, 256


class Training:
    """A stack of transformer layers of about `mib` MiB of state; `step` trains them once."""

    def __init__(self, mib: int, seed: int = 0) -> None:
        torch.set_num_threads(
            1
        )  # training has a core, and so has whoever saves; idle threads of torch would spin on both
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        each = sum(p.numel() for p in layer.parameters()) * _BYTES_PER_PARAMETER
        self.model = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(max(2, round(mib * 2**20 / each)))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)
        self.weights = {name: p.detach().bfloat16() for name, p in self.model.named_parameters()}
        for _ in range(2):
            self.step()

    def train_only(self, share: float) -> None:
        """Freeze all but the last `share` of the layers."""
        first = min(round(len(self.model) * (1 - share)), len(self.model) - 1)
        for number, layer in enumerate(self.model):
            layer.requires_grad_(number >= first)

    def forward_backward(self) -> None:
        """Gradients of a small batch of random tokens."""
        self.optimizer.zero_grad(set_to_none=True)
        x = torch.randn(1, _TOKENS, _WIDTH)
        for layer in self.model:
            x = layer(x)
        x.square().mean().backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """One whole step of training."""
        self.forward_backward()
        self.optimizer.step()
        self.to_bf16()

    def to_bf16(self) -> None:
        """What a mixed-precision optimizer does at the end of its step."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    self.weights[name].copy_(p)

    def state(self) -> State:
        """Every tensor by name, not copied."""
        found = {f"weight/{name}": tensor for name, tensor in self.weights.items()}
        for name, p in self.model.named_parameters():
            found[f"master/{name}"] = p.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key}/{name}"] = self.optimizer.state[p][key]
        return found
