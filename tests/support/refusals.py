"""Objects that refuse another state than their own, alone and on one of two ranks: `refusals.py FOLDER`.

Rank 1 alone refuses. Each rank prints what it raised, and whether model and optimizer are as they were.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import MismatchError
from tests.support.ranks import in_group


class Foreign:
    """Refuses another size while it loads."""

    def __init__(self, size: Any) -> None:
        self.size, self.loaded = size, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if str(state["size"]) != str(self.size):
            raise ValueError(f"size {state['size']}")
        self.loaded = state


class Checking(Foreign):
    """Can check a state without loading it."""

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if str(state["size"]) != str(self.size):
            raise MismatchError(f"size was {state['size']}, and is {self.size} now", hint=f"take {state['size']}")


def state_of(own: Foreign, value: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=value)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"optimizer": optimizer, "model": model, "own": own}


def contents(state: dict[str, Any]) -> str:
    return str([state[name].state_dict() for name in ("model", "optimizer")])


@in_group
def main(folder: str) -> None:
    odd = dist.get_rank() == 1
    saved = {
        "checks, no tensors": Checking(8),
        "checks, with tensors": Checking(torch.ones(2)),
        "cannot check": Foreign(8),
    }
    with Checkpointer(folder, run="exp", sidecar=None, timeout=60) as checkpointer:
        for step, (case, own) in enumerate(saved.items()):
            checkpointer.save(step, state_of(own, 1.0)).result(60)
            mine = type(own)(own.size * 2 if odd else own.size)
            into, raised = state_of(mine, 2.0), None
            before = contents(into)
            try:
                checkpointer.restore(into, step)
            except Exception as error:
                raised = type(error).__name__
            told = {"raised": raised, "unchanged": contents(into) == before, "loaded": bool(mine.loaded)}
            print(json.dumps({"case": case} | told), flush=True)
        checkpointer.restore(state_of(Checking(8), 2.0), 0)
    print(json.dumps({"case": "fits", "raised": None}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
