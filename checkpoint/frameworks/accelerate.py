"""Accelerate: `attach(accelerator, checkpointer)` lets `save_state` and `load_state` keep the models in the repository.

Accelerate's own files then hold what is left: optimizers, schedulers, generators. The step is the number that ends the
folder's name (`step_1200`, `checkpoints/checkpoint_3`).
Invariant: the models are not written a second time by Accelerate.
Failure behaviour: as `Checkpointer`; `UsageError` for a folder whose name ends in no number.
"""

from __future__ import annotations

import re
from typing import Any

from accelerate import Accelerator

from checkpoint.api import Checkpointer
from dataio.core.errors import UsageError


def attach(accelerator: Accelerator, checkpointer: Checkpointer) -> None:
    """Register the two hooks."""

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        checkpointer.save(_step(output_dir), {"models": [accelerator.unwrap_model(model) for model in models]})
        weights.clear()  # nothing is left for Accelerate to write

    def load(models: list[Any], input_dir: str) -> None:
        checkpointer.restore({"models": [accelerator.unwrap_model(model) for model in models]}, _step(input_dir))
        models.clear()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _step(folder: str) -> int:
    found = re.search(r"(\d+)/?$", str(folder))
    if found is None:
        raise UsageError(f"the folder {str(folder)!r:.200} names no step", hint="end its name with the step's number")
    return int(found[1])
