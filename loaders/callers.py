"""What iterates over a loader, and whether that would change its batches.

Purpose: a loader yields whole batches of its own rank, from its own threads, and knows its position. Code around it that
collates, splits, dispatches, copies or skips batches would deliver samples twice or not at all. This module finds such
code and says what to use instead.
Invariant: only the frames between the loader and the code of the caller are inspected, once for each iteration. A
function or dataset of the user ends the search, since it may regroup samples as it likes.
Failure behaviour: `UsageError` with the next step. A Trainer that resumes while its loader begins again is a warning in
the log, because new data may be meant.
"""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

import torch.distributed as dist
from torch.utils.data import default_collate, get_worker_info

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger, is_first

_DATALOADERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")
_ACCELERATE, _TRAINER = "accelerate.data_loader", "transformers.trainer"
_MAX_FRAMES = 12
"""Frames of a DataLoader between its user and its dataset; torch has three, torchdata five."""
_HOW = (
    "accelerator.prepare(loader) returns a loader as it is, and accelerator.register_for_checkpointing(loader) saves its "
    "position; for transformers there is LoaderTrainer in headrace.checkpoint.frameworks.transformers"
)
_log = get_logger(__name__)


class NotADataLoaderError(UsageError, AttributeError):
    """A loader was used as a `DataLoader`. It is also an `AttributeError`, so that `hasattr` is False."""


def check_caller(caller: FrameType, *, at_start: bool) -> None:
    """Raise an error if the code that iterates over a loader would change its batches.

    Args:
        caller (FrameType): the frame that asks the loader for its first batch.
        at_start (bool): whether the loader has delivered nothing, and no state was loaded.

    Raises:
        UsageError: a DataLoader with workers or a batch size, or Accelerate, would change the batches.
    """
    if get_worker_info() is not None:
        raise _in_a_worker()
    frame: FrameType | None = caller
    for _ in range(_MAX_FRAMES):
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        if frame is None or not module.startswith(_DATALOADERS):
            break
        if _is_collating(frame):
            raise UsageError(
                "a DataLoader with a batch_size would make batches of batches",
                hint="DataLoader(loader, batch_size=None): the loader yields whole batches of its own batch_size",
            )
        frame = frame.f_back
    if frame is None:
        return
    if module == _ACCELERATE:
        raise UsageError(
            "Accelerate would split the loader's batches again, or read them ahead of the position that is saved",
            hint=f"do not pass it in a DataLoader: {_HOW}",
        )
    if module == _TRAINER and frame.f_code.co_name == "get_batch_samples" and at_start:
        _warn_of_restart(frame)


def check_world(alone_by_default: bool) -> None:
    """Raise `UsageError` if a loader that took itself for the only one is one of several ranks.

    Args:
        alone_by_default (bool): whether neither the caller nor torch.distributed gave the loader a rank.
    """
    if not (alone_by_default and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    raise UsageError(
        f"the loader was made for one rank, before torch.distributed was initialised; now there are "
        f"{dist.get_world_size()} ranks, and each would read everything",
        hint="make it afterwards (with Accelerate after Accelerator(), with transformers after TrainingArguments(), "
        "with Lightning in train_dataloader()), or give it rank= and world_size=",
    )


def refuse_copy() -> NoReturn:
    """The error for a loader that is pickled, as a DataLoader with workers does where processes are spawned."""
    raise _in_a_worker()


def missing_attribute(loader: str, name: str) -> AttributeError:
    """The error for an attribute that a loader lacks.

    `skip_first_batches` of Accelerate, and a Trainer that resumes, ask for the sampler of a DataLoader.
    """
    if name not in ("sampler", "batch_sampler"):
        return AttributeError(f"{loader!r} object has no attribute {name!r}")
    return NotADataLoaderError(
        f"{loader} is no DataLoader and has no {name}; it continues at its saved position, so no batches need to be skipped",
        hint=f"leave out skip_first_batches; {_HOW}",
    )


def _in_a_worker() -> UsageError:
    return UsageError(
        "a loader was copied into another process, such as a DataLoader's worker, which would deliver every batch again",
        hint="use num_workers=0, and num_threads=... of the loader: it decodes in its own threads",
    )


def _is_collating(frame: FrameType) -> bool:
    """Whether this is the fetcher of a DataLoader with a batch_size. A `collate_fn` of the user is used as it is."""
    if frame.f_code.co_name != "fetch":
        return False  # reading a frame's variables would keep them alive, such as a batch
    fetcher = frame.f_locals.get("self")
    return getattr(fetcher, "auto_collation", False) and getattr(fetcher, "collate_fn", None) is default_collate


def _warn_of_restart(frame: FrameType) -> None:
    """Warn if a Trainer continues in the middle of a run with a loader that begins."""
    trainer = frame.f_locals.get("self")
    step = getattr(getattr(trainer, "state", None), "global_step", 0)
    if isinstance(step, int) and step > 0 and is_first("job"):
        _log.warning(
            "the Trainer continues at step %d, but its loader begins with the first batch: the Trainer does not save the "
            "position of a loader. Use LoaderTrainer or RepositoryTrainer of headrace.checkpoint.frameworks.transformers",
            step,
        )
