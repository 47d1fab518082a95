"""What a loader may be asked for, and what is taken when nothing is said.

Purpose: keep the checks of arguments and the look at the surroundings (ranks, cores, CUDA) out of the loader.
Invariant: nothing here reads data or starts anything.
Failure behaviour: `UsageError` that names the argument and what would do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.batch.batch import AXES, Output
from headrace.loaders.validation import plain
from headrace.loaders.works.added import check_columns, known_columns

if TYPE_CHECKING:  # what few loaders need is imported where they need it
    from headrace.loaders.decode.isolated import IsolatedDecoder

MAX_SIDE = 16_384
MAX_THREADS = 256
MAX_PREFETCH = 64
MAX_BATCH = 1 << 16
MAX_MEMORY = 1 << 44
MAX_SECONDS = 3600.0
DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_log = get_logger(__name__)


def checked(name: str, value: int, most: int) -> int:
    """`value` if it is a whole number from 1 to `most`."""
    number: int = plain(name, value, int)
    if not 1 <= number <= most:
        raise UsageError(f"{name} is a number from 1 to {most}, not {number}")
    return number


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """`UsageError` when `value` is none of `known`."""
    if value not in known:
        raise UsageError(f"{name}={value!r} is not known", hint=f"use {', '.join(map(repr, known))}")


def of_kind(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """`UsageError` when `value` is something else; None is always right."""
    if value is not None and not isinstance(value, kinds):
        raise UsageError(f"{name} cannot be {value!r}", hint=f"give {example}")


def cores() -> int:
    """This process's share of the cores it may run on, when torchrun started several; at most 16."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(16, usable // max(1, int(sharing) if sharing.isdecimal() else 1)))


def checked_size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) within bounds, or None."""
    if size is None:
        return None
    of_kind("size", size, (tuple, list), "size=(height, width)")
    sides: Sequence[int] = size
    if len(sides) != 2:
        raise UsageError(f"size={size!r} is not two numbers", hint="give size=(height, width)")
    height, width = sides
    return checked("size's height", height, MAX_SIDE), checked("size's width", width, MAX_SIDE)


def in_world() -> bool:
    """Whether torch.distributed knows this process's rank."""
    return dist.is_available() and dist.is_initialized()


def place_in_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: given, or torch.distributed's, or alone."""
    if (rank is None) != (world_size is None):
        raise UsageError("of rank and world_size one is missing", hint="give both, or neither")
    rank, world_size = plain("rank", rank, int | None), plain("world_size", world_size, int | None)
    if rank is None or world_size is None:
        if in_world():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
                warn_once(
                    _log, "WORLD_SIZE is set but torch.distributed is not initialised: every rank reads everything"
                )
            rank, world_size = 0, 1
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is outside a world of {world_size}", hint="ranks count from 0")
    return rank, world_size


def target(device: str | torch.device) -> tuple[torch.device, bool]:
    """Where batches are, and whether they are pinned, if this machine can: "cpu" (pinned where CUDA is), "pinned", or
    "cuda"."""
    named: str = plain("device", str(device) if isinstance(device, torch.device) else device, str)
    if named.split(":")[0] not in ("cpu", "pinned", "cuda"):
        raise UsageError(f"device {named!r} is not known", hint="use 'cpu', 'pinned' or 'cuda'")
    here = torch.cuda.is_available()
    if not here and named != "cpu":
        raise UsageError(f"device={named!r}, but torch sees no GPU", hint="use device='cpu'")
    if named.startswith("cuda"):
        chosen = torch.device(named)
        return (torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen), False
    return torch.device("cpu"), here


def output(
    device: str | torch.device,
    normalize: tuple[Sequence[float], Sequence[float]] | None,
    dtype: str | torch.dtype | None = None,
    axes: str = "TCHW",
) -> Output:
    """What batches are made of."""
    if axes not in AXES:
        raise UsageError(f"layout {axes!r} is not known", hint=f"use {', '.join(AXES)}")
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and kind not in DTYPES.values():
        raise UsageError(f"dtype {dtype!r} is not known", hint=f"use {', '.join(DTYPES)}")
    if normalize is not None and kind == torch.uint8:
        raise UsageError("normalized pixels are not whole numbers", hint="use a floating dtype")
    made_of = Output(*target(device), dtype=kind, axes=axes)
    if normalize is None:
        return made_of
    try:
        mean, std = (tuple(float(value) for value in values) for values in normalize)
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(
            f"normalize={normalize!r} is not (mean, std), three numbers each, the deviations positive",
            hint="such as ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))",
        ) from None
    return replace(made_of, mean=mean, std=std)


def added(dataset: Dataset, columns: Sequence[str]) -> tuple[str, ...]:
    """`columns`, if this dataset has them."""
    if not columns:
        return ()
    from headrace.dataio.shards.query.conditions import field_types  # with DuckDB, which most loaders need not wait for

    return check_columns(columns, known_columns(field_types(dataset.document)), dataset.url)


def check_isolate(isolate: bool | float) -> None:
    """`UsageError` for what is no time limit, before anything is started."""
    plain("isolate", isolate, bool | float)
    if not isinstance(isolate, bool) and not 0 < isolate <= MAX_SECONDS:
        raise UsageError(f"isolate={isolate!r} is no time limit", hint=f"True, or seconds, up to {MAX_SECONDS:.0f}")


def isolated(isolate: bool | float, threads: int) -> IsolatedDecoder | None:
    """A process for each thread where they are wanted; `isolate` is their time limit in seconds, or True for the usual one."""
    if isolate is False:
        return None
    from headrace.loaders.decode.isolated import SECONDS, IsolatedDecoder

    return IsolatedDecoder(threads, SECONDS if isolate is True else float(isolate))
