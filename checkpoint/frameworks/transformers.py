"""transformers: `Trainer(callbacks=[RepositoryCallback(checkpointer)])` saves when the Trainer does, and resumes when
training begins.

Invariant: at every save of the Trainer, model, optimizer, scheduler and generators are staged before training goes on. On
resuming, the Trainer's count of steps goes on; its data loader begins anew.
Failure behaviour: as `Checkpointer`; a save that fails in the background is raised at the end of training.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from checkpoint.api import Checkpointer
from checkpoint.rng import RNG


class RepositoryCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """`resume`: restore the run's newest step, if it has one, when training begins. Close the checkpointer yourself."""

    def __init__(self, checkpointer: Checkpointer, *, resume: bool = True) -> None:
        self._checkpointer, self._resume = checkpointer, resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        into = _state(given) | {"progress": {"global_step": 0, "epoch": 0.0}}
        if self._resume and self._checkpointer.restore(into) is not None:
            state.global_step, state.epoch = into["progress"]["global_step"], into["progress"]["epoch"]

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        progress = {"global_step": int(state.global_step), "epoch": float(state.epoch or 0)}
        self._checkpointer.save(int(state.global_step), _state(given) | {"progress": progress})


def _state(given: dict[str, Any]) -> dict[str, Any]:
    parts = {"model": given["model"], "optimizer": given.get("optimizer"), "scheduler": given.get("lr_scheduler")}
    return {name: part for name, part in parts.items() if part is not None} | {"rng": RNG()}
