"""Two ranks, then one, with Megatron-Core's `dist_checkpointing`: `megatron_job.py FOLDER REPO save|queue|load`.

queue saves twice through Megatron-Core's own queue of asynchronous saves, and changes the state meanwhile; it then loads, and
saves to where nothing can be.
"""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # Megatron's own, about what is not installed

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper  # noqa: E402

from headrace.checkpoint.frameworks.megatron import RepositoryLoad, RepositorySave  # noqa: E402
from tests.support.ranks import in_group  # noqa: E402

ROWS, COLUMNS = 600, 512


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def state(filled: bool) -> dict[str, Any]:
    """A tensor in row shards, a replicated one, an object for each rank of the save, and common values."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = whole()[rank * ROWS // world : (rank + 1) * ROWS // world]
    bias = torch.arange(7, dtype=torch.bfloat16)
    state: dict[str, Any] = {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", rows if filled else torch.zeros_like(rows), (0, rank, world)
        ),
        "bias": ShardedTensor.from_rank_offsets("bias", bias if filled else torch.zeros_like(bias), replica_id=rank),
    }
    if filled:
        state |= {"iteration": 12, "rng": ShardedObject("rng", objects(rank), (world,), (rank,))}
    elif world == 2:  # as many as saved
        state["rng"] = ShardedObject("rng", None, (2,), (rank,))
    return state


def objects(rank: int) -> dict[str, Any]:
    return {
        "numpy": ("MT19937", np.arange(5, dtype=np.uint32) + rank, 3),
        "torch": torch.arange(9, dtype=torch.uint8) + rank,
        "extra": io.BytesIO(b"scales"),
        "step": np.int64(4),
    }


def same(found: dict[str, Any], given: dict[str, Any]) -> bool:
    array, expected = found["numpy"][1], given["numpy"][1]
    return (
        found["numpy"][::2] == given["numpy"][::2]
        and array.dtype == expected.dtype
        and bool((array == expected).all())
        and torch.equal(found["torch"], given["torch"])
        and found["extra"].getvalue() == given["extra"].getvalue()
        and bool(found["step"] == given["step"])
    )


def queued(folder: Path, repo: str) -> str | None:
    """What the finalization of a save raised."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    ours = RepositorySave(repo, run="exp")
    queue, strategy = AsyncCallsQueue(), FullyParallelSaveStrategyWrapper(ours)
    for step in (11, 12):
        where, given = folder.with_name(f"iter_{step:07}"), state(True)
        where.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        ours.metadata = {"step": step}
        queue.schedule_async_request(dist_checkpointing.save(given, where, strategy, async_sharded_save=True))
        given["weight"].data.fill_(step)
        given["rng"].data["torch"].fill_(0)
        try:
            while queue.get_num_unfinalized_calls():
                queue.maybe_finalize_async_calls(blocking=step == 12)
        except BaseException as error:  # as which DCP raises
            return str(error)
    return None


@in_group
def main(folder: str, repo: str, what: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if what == "queue":
        print(json.dumps({"raised": queued(Path(folder), repo)}), flush=True)
    elif what == "save":
        Path(folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        strategy = FullyParallelSaveStrategyWrapper(RepositorySave(repo, run="exp", metadata={"loss": 2.5}))
        dist_checkpointing.save(state(True), folder, strategy)
        print(json.dumps({"saved": sorted(path.name for path in Path(folder).iterdir())}), flush=True)
        return
    found = dist_checkpointing.load(state(False), folder, RepositoryLoad(repo, run="exp"))
    rows = whole()[rank * ROWS // world : (rank + 1) * ROWS // world]
    said = {
        "weight": torch.equal(found["weight"], rows),
        "bias": torch.equal(found["bias"], torch.arange(7, dtype=torch.bfloat16)),
        "iteration": found["iteration"],
        "keys": sorted(RepositoryLoad(repo, run="exp").load_sharded_metadata(folder)),
    }
    if world == 2:
        said["rng"] = same(found["rng"], objects(rank))
    print(json.dumps(said), flush=True)
    if what == "queue":
        print(json.dumps({"raised": queued(Path(folder), f"{folder}/common.pt/repo")}), flush=True)
