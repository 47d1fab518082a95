"""A trainer as a process: `trainer.py save|again|restore URL SOCKET STEPS`. Saving, it waits to be killed."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import HeadraceError


def state_of(step: int) -> dict[str, Any]:
    """Real tensors that depend on the step, all but one."""
    generator = torch.Generator().manual_seed(step)
    frozen = torch.randn(500_000, generator=torch.Generator().manual_seed(0))
    return {"w": torch.randn(900_000, generator=generator), "frozen": frozen, "step": step}


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def save(checkpointer: Checkpointer, steps: range) -> None:
    """Save these steps, and wait to be killed."""
    for step in steps:
        try:
            result = checkpointer.save(step, state_of(step)).result(120)
            say(step=step, kept=result.kept, committed_by=result.committed_by)
        except HeadraceError as error:
            say(step=step, error=str(error))
    time.sleep(600)


def main(mode: str, url: str, socket: str, steps: str) -> None:
    checkpointer = Checkpointer(url, run="exp", sidecar=socket, timeout=120)
    if mode == "save":
        save(checkpointer, range(1, int(steps) + 1))
    state = {"w": torch.zeros(900_000), "frozen": torch.zeros(500_000), "step": 0}
    step = checkpointer.restore(state)
    if mode == "again":
        assert step is not None
        save(checkpointer, range(step + 1, step + 1 + int(steps)))
    wanted = state_of(step or 0)
    same = all(torch.equal(state[name], wanted[name]) for name in ("w", "frozen")) and state["step"] == step  # type: ignore[arg-type]
    say(step=step, same=same)


if __name__ == "__main__":
    main(*sys.argv[1:])
