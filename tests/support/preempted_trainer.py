"""A trainer that ends by a signal: `preempted.py URL [in-flight]`. Prints a line of JSON for every step and for its end."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main(url: str, mode: str = "") -> int:
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        guard = checkpointer.on_preemption(lambda: state, deadline=60)
        step = checkpointer.restore(state) or 0
        while True:
            step += 1
            torch.manual_seed(step)
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if mode == "in-flight":
                checkpointer.save(step, state)
            digest = sum(p.double().sum().item() for p in model.parameters())
            say(rank=rank, step=step, digest=digest)
            if guard.reached(step):
                break
            time.sleep(0.05)
        assert guard.outcome is not None
        say(rank=rank, end=step, digest=digest, committed=guard.outcome.committed, signal=guard.outcome.signal)
    if dist.is_initialized():
        dist.destroy_process_group()
    return guard.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
