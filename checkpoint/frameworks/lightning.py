"""Lightning: `Trainer(plugins=[RepositoryIO("s3://bucket/ckpt", run="exp42")])` saves checkpoints to the repository.

- Lightning gathers the state on rank 0 and chooses file names. Each file is a small text that names the step, so
  `ckpt_path=` and the retention of ModelCheckpoint work as usual.
- `save_checkpoint` returns after the state is copied. The file appears when the step is committed. In a folder with
  symbolic links (ModelCheckpoint's `save_last="link"`), it returns after the commit.
- A file that Lightning removes is deleted after the newest save is committed (`naming`).
- A step has the number of `global_step`. A second save at the same `global_step` gets the next free number. From then
  on, saves are compared. If a repeated save has the same tensors as the one before, its file holds only its other
  values.
- `Model.load_from_checkpoint(path)` also reads such files, through the `RepositoryIO` of their run in this process.
- `map_location` works as for `torch.load`. Tensors that share memory still share it after the load.

Invariant: nothing is pickled, and the named file holds no tensor. Every named file leads to a complete state.

Failure behaviour: `UsageError` names the path of a value that cannot be saved. Hyper-parameters and callback state must
be plain values. A save that fails in the background is logged. `teardown` raises its error, or `close` if another save
has begun since. With `on_save_error="raise"`, the next save raises it. `MissingStepError`, a `FileNotFoundError`, is
raised for a missing file or step.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core import saving as pl_saving

from headrace.checkpoint.api import Checkpointer
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.frameworks.metrics import scalars
from headrace.checkpoint.frameworks.name_files import MAX_BYTES, Record, read_name, write_file
from headrace.checkpoint.frameworks.naming import Names
from headrace.checkpoint.repository import steps
from headrace.checkpoint.repository.steps import MissingStepError
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tensors import memory_of
from headrace.checkpoint.state.tree import TensorRef
from headrace.dataio.core.errors import CorruptionError, UsageError

_MAX_VALUES = MAX_BYTES // 2
"""The largest size of the encoded values that a file holds itself."""


class RepositoryIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """A `CheckpointIO` for `Trainer(plugins=[...])`.

    Args:
        url (str): The repository, as for `Checkpointer`.
        run (str): The run's name.
        **options: Further arguments of `Checkpointer`, such as `keep` or `storage_options`.

    Attributes:
        metadata (Mapping[str, object]): Values for the next saves, in addition to the epoch and the monitored metrics.
            Values that cannot be stored are left out. Default: none.
    """

    def __init__(self, url: str, *, run: str, **options: Any) -> None:
        self.metadata: Mapping[str, object] = {}
        self._checkpointer = Checkpointer(url, run=run, rank=0, world_size=1, **options)
        self._names = Names(self._checkpointer)
        self._global_step = self._step = -1
        self._digests: dict[str, bytes] = {}
        self._compares = False
        _instances.add(self)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint. Lightning calls it on rank 0. A state with several names (`last.ckpt`) is stored once."""
        place, global_step = _local(path), int(checkpoint["global_step"])
        is_repeated = global_step == self._global_step
        # only after the first repeated save, because comparing takes as long as a copy of the state
        self._compares = self._compares or is_repeated
        split = _split(checkpoint) if self._compares else None
        if is_repeated and split is not None and self._has(split) and self._names.also(place, split.values):
            return
        if is_repeated:
            step = self._step + 1
        else:
            step = max(global_step, self._step + 1) if global_step > self._global_step else global_step
        metadata = scalars({**metrics_of(checkpoint), **self.metadata})
        handle = self._names.save(step, {"checkpoint": checkpoint}, place, write_file, metadata=metadata)
        self._global_step, self._step = global_step, step
        self._digests = {} if split is None else split.digests
        if _has_links(place.parent):
            handle.result()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Where = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint, placed by `map_location` as in `torch.load`. By default, it is in main memory."""
        place, state = _local(path), {"checkpoint": None}
        self._names.wait_quietly()
        self._names.recover(place.parent, place.name)
        record = self._names.restore(state, place)
        checkpoint: Any = state["checkpoint"]
        if record.values:
            checkpoint = _joined(record.values, checkpoint)
        if self._step < 0 and record.run in ("", self._checkpointer.run):
            self._global_step, self._step = int(checkpoint["global_step"]), record.step
        loaded: dict[str, Any] = mapped(checkpoint, map_location)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the name after the newest save is committed. Only the run's retention removes the step."""
        self._names.remove(_local(path))

    def newest(self) -> Record | None:
        """The run's newest step, as the record of a name. None if the run has no step."""
        base = steps.find(self._checkpointer._store, self._checkpointer.run, "latest")
        return None if base is None else Record(base.step, self._checkpointer.run, base)

    def teardown(self) -> None:
        """Wait for the saves in flight. Lightning calls it at the end of each `fit`, and may save again later."""
        self._names.wait()

    def close(self) -> None:
        """Wait for the saves in flight and close the store."""
        self._checkpointer.close()
        _instances.discard(self)

    def _has(self, split: _Split) -> bool:
        """Whether the newest save has all of these tensors, bit for bit."""
        return len(split.values) < _MAX_VALUES and split.digests.items() <= self._digests.items()


def metrics_of(checkpoint: dict[str, Any]) -> Metadata:
    """The epoch, and the metrics that `ModelCheckpoint` callbacks monitor, as metadata of the step."""
    found: dict[str, Any] = {"epoch": checkpoint.get("epoch")}
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = state.get("current_score")
    return scalars(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Split:
    """A checkpoint as the digests of its tensors, by path, and its other values."""

    digests: dict[str, bytes]
    values: str


def _split(checkpoint: dict[str, Any]) -> _Split | None:
    """Split a checkpoint. None if it has tensors that are not plain memory, or values that a document cannot hold."""
    digests: dict[str, bytes] = {}

    def values_of(value: Any, path: tuple[object, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
                raise UsageError("not a plain tensor")
            plain = value.detach().cpu().contiguous()
            hasher = xxhash.xxh3_128(f"{plain.dtype} {tuple(plain.shape)}".encode())
            hasher.update(memory_of(plain))
            digests[repr(path)] = hasher.digest()
            return TensorRef(repr(path))
        return _rebuilt(value, path, values_of)

    try:
        return _Split(digests, base64.b64encode(tree.encode(values_of(checkpoint, ()))).decode())
    except UsageError:
        return None


def _joined(values: str, checkpoint: Any) -> Any:
    """The inverse of `_split`, with the tensors of another checkpoint."""
    tensors: dict[str, torch.Tensor] = {}

    def collect(value: Any, path: tuple[object, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[repr(path)] = value
            return value
        return _rebuilt(value, path, collect)

    def join(value: Any, path: tuple[object, ...]) -> Any:
        return tensors[value.name] if isinstance(value, TensorRef) else _rebuilt(value, path, join)

    collect(checkpoint, ())
    try:
        return join(tree.decode(base64.b64decode(values, validate=True)), ())
    except (KeyError, ValueError) as error:
        raise CorruptionError(f"the values in the named file do not fit its step: {error!r:.200}") from None


def _rebuilt(value: Any, path: tuple[object, ...], apply: Callable[[Any, tuple[object, ...]], Any]) -> Any:
    """A container with `apply` applied to its items. Any other value is returned unchanged."""
    if isinstance(value, dict):
        copied = value.copy()
        copied.update({key: apply(item, (*path, key)) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(apply(item, (*path, i)) for i, item in enumerate(value))
    return value


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise UsageError(
            f"{os.fspath(path)} is not a path of this machine's file system",
            hint="give ModelCheckpoint a local or shared `dirpath` for its small files; the repository stores the tensors",
        )
    return Path(path)


def _has_links(folder: Path) -> bool:
    """Whether ModelCheckpoint keeps `last.ckpt` as a symbolic link.

    It points the link to the new file as soon as `save_checkpoint` returns.
    """
    return any(entry.is_symlink() for entry in os.scandir(folder))


_instances: weakref.WeakSet[RepositoryIO] = weakref.WeakSet()
_load = pl_saving.pl_load


def _load_file(path: Any, map_location: Where = None, weights_only: bool | None = None) -> Any:
    """Replaces the load function of `load_from_checkpoint`.

    If the file names a step, the step is read from the repository. A file that does not exist yet may belong to a save
    in flight, so the function waits for those saves first.
    """
    if isinstance(path, (str, os.PathLike)) and not os.path.exists(path):
        for io in list(_instances):
            io._names.wait_quietly()
    record = _record_of(path)
    if record is None:
        return _load(path, map_location=map_location, weights_only=weights_only)
    run = record.run
    errors = []
    for io in [each for each in _instances if run in ("", each._checkpointer.run)]:
        try:
            return io.load_checkpoint(path, map_location)
        except MissingStepError as error:
            errors.append(error)
    if errors:
        raise errors[-1]
    raise UsageError(
        f"{path} names step {record.step} of run {run or 'unknown'}, but this process has no RepositoryIO of that run",
        hint=f"create RepositoryIO(url, run={run!r}) first, and keep it until the checkpoint is loaded",
    )


def _record_of(path: Any) -> Record | None:
    """The record of a name. None for any other file."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        is_name = file.read(len(_BEGIN)) == _BEGIN
    return read_name(path) if is_name else None


_BEGIN = b'{"headrace-step"'
pl_saving.pl_load = _load_file


Where = str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], Any] | None


def mapped(state: Any, where: Where) -> Any:
    """`state` with the tensors in main memory moved as `where` says. Other tensors stay on their devices."""
    return state if where is None else _mapped(state, where, {})


def _mapped(value: Any, where: Where, moved: dict[int, torch.Tensor | None]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, where, moved) if value.layout == torch.strided and value.device.type == "cpu" else value
    if isinstance(value, dict):
        copied = value.copy()
        copied.update({key: _mapped(item, where, moved) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, where, moved) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_mapped(item, where, moved) for item in value)
    return value


def _tensor(tensor: torch.Tensor, where: Where, moved: dict[int, torch.Tensor | None]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in moved:
        moved[storage._cdata] = _memory(storage, where)
    memory = moved[storage._cdata]
    if memory is None:
        return tensor
    elements = memory[: len(memory) - len(memory) % tensor.element_size()].view(tensor.dtype)
    return elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _memory(storage: torch.UntypedStorage, where: Where) -> torch.Tensor | None:
    """The storage's bytes at their new location; None if they stay in main memory."""
    if isinstance(where, dict):
        where = where.get("cpu")
    location = where(storage, "cpu") if callable(where) else where
    if isinstance(location, torch.TypedStorage):
        location = location._untyped_storage
    if isinstance(location, torch.UntypedStorage):
        return None if location is storage else _bytes(location)
    return None if location is None or torch.device(location).type == "cpu" else _bytes(storage).to(location)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
