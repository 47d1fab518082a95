"""Two ranks with torch_checkpointing's manager on our storage: `meta_job.py REPO`.

Without a resharder: that library gathers what one needs to know through CUDA (0.1.1)."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # the framework's own

from torch_checkpointing import CheckpointManager  # noqa: E402

from headrace.checkpoint.frameworks.torch_checkpointing import RepositoryManager  # noqa: E402
from tests.support.ranks import in_group  # noqa: E402


@in_group
def main(repo: str) -> None:
    rank = dist.get_rank()
    manager = RepositoryManager(repo, run="exp", config=CheckpointManager.Config.with_sync_save())
    weights = torch.arange(500.0 * 64).view(500, 64) + rank
    manager.save("step_7", {"model": {"w": weights}, "loader": {"at": 100 + rank}})
    into: dict[str, Any] = {"model": {"w": torch.zeros(500, 64)}, "loader": {"at": 0}}
    found = manager.load("latest", into=into)
    said = {"same": torch.equal(into["model"]["w"], weights), "loader": found["loader"]["at"]}
    other = manager.save("step_8", {"model": {"w": weights}, "loader": {"at": 200 + rank}})
    print(json.dumps(said | {"second": other}), flush=True)
    manager.close()
