"""Accelerate: after `attach(accelerator, checkpointer)`, `save_state` and `load_state` use the repository.

One step of the run holds models, optimizers, schedulers, the gradient scaler, objects of `register_for_checkpointing`,
and the random generators of every rank. The step's number is the number at the end of the folder's name (`step_1200`,
`checkpoints/checkpoint_3`). Accelerate's folder holds the rest, which is small: samplers, and the position of a
stateful loader.

`save_state` returns after the state is copied. The folder appears when the step is committed (`naming`). Older folders
are removed after that (`total_limit`). To add your own files to the folder, wait for `checkpointer.close()`, or
register an object instead. `save_state(folder, metadata={"loss": 2.1})` gives the step metadata.

How it works: Accelerate calls its hooks before it writes or reads anything. It passes them the lists that it will
iterate over, and the hooks empty these lists. The replaced `save_state` and `load_state` refill them. `save_state`
saves after all ranks have written their files into a hidden folder.

Invariant: Accelerate does not write any part of the step a second time. Outside `save_state` and `load_state`, the
accelerator is unchanged.

Failure behaviour: as `Checkpointer`, and these errors:

- `UsageError` for a folder whose name does not end in a number.
- `MissingStepError`, a `FileNotFoundError`, for a folder whose step does not exist.
- `UnsupportedError` under FSDP, DeepSpeed and Megatron-LM. Accelerate writes their states without calling its hooks.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from headrace.checkpoint.api import Checkpointer
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format.metadata import Value
from headrace.checkpoint.frameworks.name_files import move_folder
from headrace.checkpoint.frameworks.naming import Names
from headrace.checkpoint.rng import RNG
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import UnsupportedError

_WITHOUT_HOOKS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_LISTS = ("_optimizers", "_schedulers")

_written = declare(
    "name.accelerate-folder-written", "all ranks have written Accelerate's files, hidden; no save has begun"
)


def attach(accelerator: Accelerator, checkpointer: Checkpointer) -> None:
    """Make an Accelerator save its checkpoints to the repository. Call it once, before the first `save_state`.

    Args:
        accelerator (Accelerator): Its `save_state` and `load_state` are replaced.
        checkpointer (Checkpointer): Saves and restores. Close it yourself.

    Raises:
        UnsupportedError: Under FSDP, DeepSpeed or Megatron-LM.
    """
    if accelerator.distributed_type in _WITHOUT_HOOKS:
        raise UnsupportedError(
            f"under {accelerator.distributed_type.value} Accelerate saves without calling its hooks",
            hint="save with a Checkpointer, or through torch.distributed.checkpoint with headrace.checkpoint.dcp",
        )
    _Attached(accelerator, checkpointer)


class _Attached:
    """The hooks, and the replacements of `save_state` and `load_state`, which call Accelerate's own."""

    def __init__(self, accelerator: Accelerator, checkpointer: Checkpointer) -> None:
        self._accelerator, self._names = accelerator, Names(checkpointer)
        self._removed: dict[str, list[Any]] = {}
        self._state: dict[str, Any] = {}
        self._from: Path | None = None
        accelerator.register_save_state_pre_hook(self._before_saving)
        accelerator.register_load_state_pre_hook(self._before_loading)
        self._save_state, self._load_state = accelerator.save_state, accelerator.load_state
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        if accelerator.project_configuration.automatic_checkpoint_naming:
            self._recover(Path(accelerator.project_dir) / "checkpoints")

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metadata: Mapping[str, Value] | None = None,
        **more: Any,
    ) -> str:
        """As `Accelerator.save_state`, but returns after the state is copied.

        The folder appears when the step is committed. `metadata` is that of the step, as for `Checkpointer.save`.
        """
        values = step_metadata.check(metadata)
        accelerator, settings = self._accelerator, self._accelerator.project_configuration
        automatic = bool(settings.automatic_checkpoint_naming)
        folder = self._next() if automatic else Path(os.path.abspath(os.fspath(output_dir)))  # type: ignore[arg-type]
        step, hidden = step_of(folder), folder.with_name(f".{folder.name}.unnamed")
        if accelerator.is_main_process:
            shutil.rmtree(hidden, ignore_errors=True)
        accelerator.wait_for_everyone()
        settings.automatic_checkpoint_naming = False
        try:
            self._save_state(str(hidden), safe_serialization, **more)
        finally:
            settings.automatic_checkpoint_naming = automatic
            self._refill_lists()
        accelerator.wait_for_everyone()  # all have written their files
        _written()
        state, self._state = self._state, {}
        then = functools.partial(self._rotate, folder.parent) if automatic else lambda: None
        self._names.save(step, state, folder if self._names_folders else None, move_folder(hidden), then, values)
        return str(folder)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **more: Any) -> Any:
        """As `Accelerator.load_state`, after the saves in flight have ended."""
        accelerator = self._accelerator
        self._names.wait_quietly()
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            parent = Path(accelerator.project_dir) / "checkpoints"
            self._recover(parent)
            input_dir = next(iter(reversed(_named_in(parent))), None)
        elif input_dir is not None:
            self._recover(Path(os.path.abspath(os.fspath(input_dir))).parent)
        try:
            return self._load_state(input_dir if input_dir is None else os.fspath(input_dir), *args, **more)
        finally:
            self._refill_lists()

    @property
    def _names_folders(self) -> bool:
        accelerator = self._accelerator
        return bool(
            accelerator.is_local_main_process
            if accelerator.project_configuration.save_on_each_node
            else accelerator.is_main_process
        )

    def _recover(self, folder: Path) -> None:
        """Publish names that an earlier process left hidden. After this call, all ranks see the same folders."""
        if self._names_folders:
            self._names.recover(folder)
        self._accelerator.wait_for_everyone()

    def _next(self) -> Path:
        """The next folder, with Accelerate's automatic naming."""
        folder = Path(self._accelerator.project_dir) / "checkpoints" / f"checkpoint_{self._accelerator.save_iteration}"
        if folder.exists():
            raise ValueError(
                f"Checkpoint directory {folder} already exists. Set `accelerator.project_configuration.iteration` to the "
                "number of the next checkpoint."
            )
        return folder

    def _rotate(self, parent: Path) -> None:
        """Apply `total_limit` after the new folder is published."""
        limit = self._accelerator.project_configuration.total_limit
        for folder in _named_in(parent)[:-limit] if limit else ():
            self._names.remove_now(folder)

    # hooks

    def _before_saving(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        self._refill_lists()
        self._state = self._full_state(models) | {"rng": RNG()}
        weights.clear()  # so Accelerate has no weights to write
        self._empty_lists()

    def _before_loading(self, models: list[Any], input_dir: str) -> None:
        self._refill_lists()
        self._names.restore(self._full_state(self._accelerator._models) | {"rng": RNG()}, input_dir)
        models.clear()
        self._empty_lists()
        # the first version's folders have one of these, which is empty
        self._accelerator._custom_objects = [self for _ in Path(input_dir).glob("custom_checkpoint_*.pkl")]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing. Accelerate calls this for objects of old folders."""

    def _full_state(self, models: list[Any]) -> dict[str, Any]:
        accelerator = self._accelerator
        state = {
            "models": [accelerator.unwrap_model(model) for model in models],
            "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
            "schedulers": [scheduler.scheduler for scheduler in accelerator._schedulers],
            "objects": list(accelerator._custom_objects),
        }
        return state if accelerator.scaler is None else state | {"scaler": accelerator.scaler}

    def _empty_lists(self) -> None:
        accelerator = self._accelerator
        for name in _LISTS:  # Accelerate already holds these lists; it reads the list of objects again
            self._removed[name] = list(getattr(accelerator, name))
            getattr(accelerator, name).clear()
        self._removed["_custom_objects"], accelerator._custom_objects = accelerator._custom_objects, []

    def _refill_lists(self) -> None:
        """Refill Accelerate's lists. The next hook also calls this, in case Accelerate failed before."""
        if self._removed:
            for name in _LISTS:
                getattr(self._accelerator, name)[:] = self._removed[name]
            self._accelerator._custom_objects = self._removed["_custom_objects"]
        self._removed = {}


def _named_in(parent: Path) -> list[Path]:
    """Folders that Accelerate has named, oldest first."""
    folders = [path for path in parent.glob("checkpoint_*") if path.name[len("checkpoint_") :].isdecimal()]
    return sorted(folders, key=step_of)
