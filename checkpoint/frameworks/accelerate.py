"""Accelerate: `attach(accelerator, checkpointer)` lets `save_state` and `load_state` keep the state in the repository.

Models, optimizers, schedulers, the gradient scaler, what was given to `register_for_checkpointing`, and the generators of
every rank are one step of the run; Accelerate's folder keeps what is left (samplers, a stateful loader's position), which is
small. The step is the number that ends the folder's name (`step_1200`, `checkpoints/checkpoint_3`).
How: Accelerate calls its hooks before it writes or reads anything, with the lists that it is going to walk; they are taken
away there. The last thing it does is to save or load the registered objects: one of them is ours, and gives the lists back.
Invariant: nothing of the step is written a second time by Accelerate; outside of `save_state` and `load_state` the
accelerator is as it always is.
Failure behaviour: as `Checkpointer`; `UsageError` for a folder whose name ends in no number; `UnsupportedError` under FSDP,
DeepSpeed and Megatron-LM, whose states Accelerate writes without asking its hooks.
"""

from __future__ import annotations

import re
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from checkpoint.api import Checkpointer
from checkpoint.rng import RNG
from dataio.core.errors import UnsupportedError, UsageError

_ON_ITS_OWN = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_LISTS = ("_optimizers", "_schedulers")


def attach(accelerator: Accelerator, checkpointer: Checkpointer) -> None:
    """Register the hooks; once, at any time before the first `save_state`."""
    if accelerator.distributed_type in _ON_ITS_OWN:
        raise UnsupportedError(
            f"under {accelerator.distributed_type.value} Accelerate saves without asking its hooks",
            hint="save with a Checkpointer, or through torch.distributed.checkpoint with checkpoint.dcp",
        )
    _Attached(accelerator, checkpointer)


class _Attached:
    """The hooks; and, as the one registered object that Accelerate sees, what is called last."""

    def __init__(self, accelerator: Accelerator, checkpointer: Checkpointer) -> None:
        self._accelerator, self._checkpointer = accelerator, checkpointer
        self._away: dict[str, list[Any]] = {}
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def _save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        self._give_back()
        self._checkpointer.save(_step(output_dir), self._state(models) | {"rng": RNG()})
        weights.clear()  # nothing is left for Accelerate to write
        self._take_away()

    def _load(self, models: list[Any], input_dir: str) -> None:
        self._give_back()
        self._checkpointer.restore(self._state(self._accelerator._models) | {"rng": RNG()}, _step(input_dir))
        models.clear()
        self._take_away()

    def _state(self, models: list[Any]) -> dict[str, Any]:
        accelerator = self._accelerator
        state = {
            "models": [accelerator.unwrap_model(model) for model in models],
            "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
            "schedulers": [scheduler.scheduler for scheduler in accelerator._schedulers],
            "objects": list(accelerator._custom_objects),
        }
        return state if accelerator.scaler is None else state | {"scaler": accelerator.scaler}

    def _take_away(self) -> None:
        accelerator = self._accelerator
        for name in _LISTS:  # it has hold of these lists already; of the objects it asks for the list again
            self._away[name] = list(getattr(accelerator, name))
            getattr(accelerator, name).clear()
        self._away["_custom_objects"], accelerator._custom_objects = accelerator._custom_objects, [self]

    def _give_back(self) -> None:
        """Also at the next hook, should Accelerate have failed in between."""
        if self._away:
            for name in _LISTS:
                getattr(self._accelerator, name)[:] = self._away[name]
            self._accelerator._custom_objects = self._away["_custom_objects"]
        self._away = {}

    def state_dict(self) -> dict[str, Any]:
        """The last call of `save_state`."""
        self._give_back()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The last call of `load_state`."""
        self._give_back()


def _step(folder: str) -> int:
    found = re.search(r"(\d+)/?$", str(folder))
    if found is None:
        raise UsageError(f"the folder {str(folder)!r:.200} names no step", hint="end its name with the step's number")
    return int(found[1])
