"""Ranks of which one alone cannot read what the others can: `agreeing_job.py WHOLE DAMAGED`.

Rank 1 sees DAMAGED, a copy whose manifests are cut short; the others see WHOLE. Each prints what it raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headrace.checkpoint import Checkpointer, ranks
from headrace.checkpoint.dcp import RepositoryReader
from headrace.dataio.core.errors import HeadraceError
from tests.support.ranks import in_group


def told(case: str, work: Callable[[], object]) -> None:
    """What `work` raised, by rank for DCP's own exception."""
    try:
        work()
    except HeadraceError as error:
        print(json.dumps({"case": case, "raised": type(error).__name__, "message": str(error)}), flush=True)
    except CheckpointException as error:
        named = {rank: f"{type(e[0]).__name__}: {e[0]}" for rank, e in error.failures.items()}
        print(json.dumps({"case": case, "raised": "CheckpointException", "failures": named}), flush=True)
    else:
        print(json.dumps({"case": case, "raised": None}), flush=True)


def restore(url: str) -> None:
    into = {"w": torch.zeros(1000)}
    with Checkpointer(url, run="exp", sidecar=None, timeout=60) as checkpointer:
        checkpointer.restore(into)
    assert into["w"].sum() == 1000


def load(url: str, step: int | str = "latest") -> None:
    into = {"w": torch.zeros(1000)}
    dcp.load(into, storage_reader=RepositoryReader(url, run="exp", step=step))
    assert into["w"].sum() == 1000


def exchange(size: int) -> None:
    """Rank 1 sends `size` bytes to rank 0, with a limit of 1,000 bytes."""
    rank = dist.get_rank()
    with mock.patch.object(ranks, "EXCHANGE_BYTES", 1000):
        received = ranks.Ranks(rank, dist.get_world_size()).all_to_all({0: b"x" * size} if rank == 1 else {})
    assert received == ({1: b"x" * size} if rank == 0 else {})


@in_group
def main(whole: str, damaged: str) -> None:
    odd = dist.get_rank() == 1
    mine = damaged if odd else whole
    told("restore", lambda: restore(mine))
    told("dcp, latest", lambda: load(mine))
    told("dcp, by number", lambda: load(mine, 1))
    told("dcp, no store", lambda: load("gopher://nowhere" if odd else whole))
    told("exchange of too much", lambda: exchange(1001))
    told("exchange of as much as is allowed", lambda: exchange(1000))
    told("whole", lambda: restore(whole))  # the ranks are still in step
    told("dcp, whole", lambda: load(whole))
