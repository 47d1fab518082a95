"""What a loader may be asked for, and what is taken when nothing is said.

Purpose: keep the checks of arguments and the look at the surroundings (ranks, cores, CUDA) out of the loader.
Invariant: nothing here reads data or starts anything.
Failure behaviour: `UsageError` that names the argument and what would do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dataio.core.errors import UsageError
from dataio.core.log import get_logger, warn_once
from loaders.batch import Output

MAX_SIDE = 16_384
MAX_THREADS = 256
MAX_PREFETCH = 64
MAX_BATCH = 1 << 16
_log = get_logger(__name__)


def checked(name: str, value: int, most: int) -> int:
    """`value` if it is a whole number from 1 to `most`."""
    if not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{name} is a number from 1 to {most}, not {value!r}")
    return value


def cores() -> int:
    """This process's share of the cores it may run on, when torchrun started several; at most 16."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(16, usable // max(1, int(sharing) if sharing.isdecimal() else 1)))


def checked_size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) within bounds, or None."""
    if size is None:
        return None
    height, width = size
    return checked("size's height", height, MAX_SIDE), checked("size's width", width, MAX_SIDE)


def place_in_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: given, or torch.distributed's, or alone."""
    if (rank is None) != (world_size is None):
        raise UsageError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
                warn_once(
                    _log, "WORLD_SIZE is set but torch.distributed is not initialised: every rank reads everything"
                )
            rank, world_size = 0, 1
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is outside a world of {world_size}")
    return rank, world_size


def output(device: str, normalize: tuple[Sequence[float], Sequence[float]] | None) -> Output:
    """What batches are made of, if this machine can."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not known", hint="use 'cpu' or 'cuda'")
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda', but torch sees no GPU", hint="use device='cpu'")
    if target == torch.device("cuda"):
        target = torch.device("cuda", torch.cuda.current_device())
    pinned = target.type == "cpu" and torch.cuda.is_available()
    if normalize is None:
        return Output(target, pinned)
    mean, std = (tuple(float(value) for value in values) for values in normalize)
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UsageError("normalize is (mean, std), three numbers each, the deviations positive")
    return Output(target, pinned, mean, std)
