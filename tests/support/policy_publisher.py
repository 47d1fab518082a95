"""Publishes changed weights of the policy of examples/rl_publish.py: `policy_publisher URL VERSIONS`. Continues the run."""

from __future__ import annotations

import sys

import torch
from torch import nn

from headrace.checkpoint import Checkpointer


def main(url: str, versions: str) -> None:
    layers = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    model = nn.ModuleDict({"layers": layers})
    with Checkpointer(url, run="rl", sidecar=None) as checkpointer:
        step = checkpointer.restore({"model": model}) or 0
        for number in range(step + 1, step + 1 + int(versions)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            handle = checkpointer.save(number, {"model": model})
            future = checkpointer.publish("policy", handle, dtype=torch.bfloat16)
            assert future is not None
            future.result(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
