"""Ranks that save metadata and artifacts, or restore them: `metadata_ranks save|restore DIRECTORY`."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import names
from tests.support.ranks import in_group


@in_group
def main(what: str, directory: str) -> None:
    names.GROUP_RANKS = 2  # here, not in the process that forks
    rank = dist.get_rank()
    torch.manual_seed(1)
    state: dict[str, Any] = {"model": torch.nn.Linear(40, 40), "own": torch.full((3,), float(rank))}
    with Checkpointer(directory, run="exp", sidecar=None, timeout=60) as checkpointer:
        if what == "restore":
            step = checkpointer.restore(state)
            print(json.dumps({"step": step, "own": state["own"].tolist()}), flush=True)
            return
        for step in (1, 2, 3):
            if step == 2 and rank != 1:
                checkpointer.put_artifact(step, "log.txt", f"rank {rank}".encode())
            metadata = {"loss": rank + step / 2} if rank or step < 3 else None
            checkpointer.save(step, state, metadata=metadata).result(60)
        print(json.dumps({"saved": True}), flush=True)


if __name__ == "__main__":
    main()
