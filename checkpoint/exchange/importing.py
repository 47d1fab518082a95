"""`import_checkpoint` saves a file or folder of another tool as a step.

The step is a normal one: chunks are deduplicated, a lease protects the save, and one conditional write commits it.
Invariant: an import never hides a step. It is refused if the run has the step or a newer one. A process that dies
leaves no step.
Failure behaviour: the errors of `sources`, before anything is stored. `ConflictError` if the run has a newer step, or if
another trainer starts on it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.checkpoint.exchange import entries, sources
from headrace.checkpoint.exchange.entries import Keys, Leaf, Rename
from headrace.checkpoint.exchange.file_slices import AddressReader, FileSlices, MappedFiles
from headrace.checkpoint.exchange.sources import Source
from headrace.checkpoint.exchange.writing import Progress, Report
from headrace.checkpoint.format import names
from headrace.checkpoint.format.codec import COMPRESSIONS
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.saving import plan as plans
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.plan import Event, PlanLocation, PutPlan
from headrace.checkpoint.saving.slices import LEAST_BYTES
from headrace.checkpoint.state.fit import Selection
from headrace.checkpoint.state.save_plan import PreparedSave, SavePlanner, flatten_state
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.errors import ConflictError, TransientError, UsageError, translate_os_errors
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

_MOST_NAMED = 8


class ImportedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the source.

    - `path`: where it is in the step, such as "model/head.weight". `source`: its name in the source, which the patterns
      of `exclude` match.
    - `dtype`: such as "bfloat16". `shape`: the sizes of its dimensions.
    """

    path: str
    source: str
    dtype: str
    shape: list[int]


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `import_checkpoint` saved, or would save.

    - `format`: the format of the source: "safetensors", "hf", "torch" or "dcp".
    - `tensors`: the number of different tensors. `contents`: all names of tensors, also the tied ones.
    - `bytes_state`, `bytes_written`, `bytes_deduplicated`: as in `SaveResult`. With `dry_run`, the last two are 0.
    - `entries`: the names of the entries of the step. `values`: the paths of what is not a tensor.
    - `tied`: names that share the values of another name. `left_out`: names in the source that are excluded.
    """

    run: str
    step: int
    format: str
    tensors: int
    bytes_state: int
    bytes_written: int
    bytes_deduplicated: int
    entries: list[str]
    tied: dict[str, str]
    contents: list[ImportedTensor]
    values: list[str]
    left_out: list[str]


class _Module(torch.nn.Module):
    """Stands for the module whose tensors are imported."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.imported = tensors

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.imported


class _Optimizer(torch.optim.Optimizer):
    """Stands for the optimizer whose state is imported."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.imported = state

    def state_dict(self) -> dict[str, Any]:
        return self.imported


def import_checkpoint(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str] | Store,
    *,
    run: str,
    step: int = 0,
    entry: str = "model",
    base: str | tuple[str, int] | None = None,
    rename: Rename = None,
    exclude: str | Iterable[str] = (),
    compression: str = "none",
    dry_run: bool = False,
    progress: Report | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Save a file or folder of another tool as a step. Memory does not grow with its size.

    These are recognised: safetensors files, folders of Hugging Face models, files of `torch.save`, and folders of
    `torch.distributed.checkpoint`. Tensors by name become one module at `entry`. In a nested state, dicts of tensors
    become modules and dicts with `param_groups` become optimizers.

    Args:
        source (str | os.PathLike[str]): The file or folder, on a disk of this machine. URLs are refused.
        url (str | os.PathLike[str] | Store): The repository: a path, `s3://bucket/prefix`, or an open `Store`.
        run (str): The run's name.
        step (int): The number of the new step. It must be newer than all steps of the run. Default: 0.
        entry (str): The name of the entry of the state for tensors without a structure. Default: "model".
        base (str | tuple[str, int] | None): Another run, or a step of one, of this repository. Chunks that it has are
            not stored again. Default: None.
        rename (Mapping[str, str] | Callable[[str], str] | None): New names of the tensors, as for `export`. In a nested
            dict they are paths with slashes. Default: None.
        exclude (str | Iterable[str]): Patterns of entries to leave out, as for `restore`. They match the names in the
            source. For tensors without a structure, a pattern with a slash may also have `entry` in front: "head.*" and
            "model/head.*" are the same. Default: none. A pattern without a match is an error.
        compression (str): "none", "zstd", "auto" or "delta", as for `Checkpointer`. Default: "none".
        dry_run (bool): Check the source and the arguments, and store nothing. The report lists what would be saved. The
            names, types and shapes of the tensors are read, and not their elements. Default: False.
        progress (Callable[[Progress], object] | None): Called with the bytes that are stored. Default: None.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Returns:
        ImportReport: The step, its sizes, and the name, type and shape of each tensor.

    Raises:
        NotFoundError: The source does not exist, or the repository does not have `base`.
        UsageError: The source is a URL or is not recognised, or an argument is invalid.
        UnsupportedError: The source can run code when it is loaded.
        CorruptionError: The source is damaged or cut off.
        ConflictError: The run has this step or a newer one.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer, import_checkpoint
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 2)
        >>> torch.save(model.state_dict(), f"{folder}/model.pt")
        >>> plan = import_checkpoint(f"{folder}/model.pt", f"{folder}/repository", run="start", dry_run=True)
        >>> [(each.path, each.dtype, each.shape) for each in plan.contents]
        [('model/weight', 'float32', [2, 2]), ('model/bias', 'float32', [2])]
        >>> report = import_checkpoint(f"{folder}/model.pt", f"{folder}/repository", run="start")
        >>> with Checkpointer(f"{folder}/repository", run="start", sidecar=None) as checkpointer:
        ...     checkpointer.restore({"model": model})
        0
    """
    _check(run, step, entry, compression, rename)
    path, selection = _local(source), Selection.of((), exclude, strict=True, cast=False)
    with contextlib.ExitStack() as stack:
        with translate_os_errors(f"reading {path}"):
            found = sources.open_source(path, stack, selection)
        planned = _planned(found, entry, rename, selection)
        store = url if isinstance(url, Store) else stack.enter_context(open_store(url, storage_options=storage_options))
        _require_newest(store, run, step)
        _require_base(store, base)
        flat = SavePlanner().known(flatten_state(planned.state))
        prepared = SavePlanner().prepare(flat, Ranks(0, 1))
        result: dict[str, object] = {"bytes_state": sum(spec.nbytes for spec in prepared.specs)}
        if not dry_run:
            with translate_os_errors(f"reading {path}"):
                lineage = Lineage(store, run, base)
                stack.callback(lineage.close)
                readers: list[AddressReader] = [MappedFiles(found.files), *([found.joined] if found.joined else [])]
                emit = _emitter(path.name, progress)
                result = _commit(store, lineage, run, step, prepared, readers, compression, emit)
    sizes = ("bytes_state", "bytes_written", "bytes_deduplicated")
    return ImportReport(
        run=run,
        step=step,
        format=found.format,
        tensors=len({spec.name for spec in prepared.specs}),
        entries=[str(key) for key in planned.state],
        tied=found.tied,
        contents=planned.contents,
        values=planned.values,
        left_out=planned.left_out,
        **{size: msgspec.convert(result.get(size, 0), int) for size in sizes},
    )


def _check(run: str, step: int, entry: str, compression: str, rename: Rename) -> None:
    names.check_run(run)
    names.check_step(step)
    if not entry:
        raise UsageError("entry is empty", hint='name the entry of the state, such as "model"')
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression is {compression!r:.60}", hint=f"choose one of: {', '.join(COMPRESSIONS)}")
    if rename is not None and not callable(rename):
        entries.check_rules(rename)


def _local(source: str | os.PathLike[str]) -> Path:
    """The path of the source. A URL is refused: as a path it would only be a file that does not exist."""
    text = os.fspath(source)
    if "://" in text:
        raise UsageError(f"{text:.300} is a URL: import reads local files", hint="copy it to a disk first")
    return Path(text)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The state to save, and what the report says about it."""

    state: dict[Any, Any]
    contents: list[ImportedTensor]
    values: list[str]
    left_out: list[str]


def _planned(found: Source, entry: str, rename: Rename, selection: Selection) -> _Planned:
    """The state to save. Its leaves are those of the source that are not excluded, with their new names."""
    tensors = found.state | {name: found.state[kept] for name, kept in found.tied.items()}
    all_leaves = list(entries.leaves(tensors, lists=False))
    chosen = _chosen(found, all_leaves, entry, selection)
    if not chosen:
        raise UsageError("all entries are excluded", hint="exclude fewer of them")
    places = _flat_places(chosen, entry, rename) if found.is_flat else entries.new_places(chosen, rename)
    if found.is_flat:
        state = {entry: _Module({keys[1]: leaf.node for leaf, keys in zip(chosen, places, strict=True)})}
    else:
        tensors = entries.nested(chosen, places) if rename is not None or selection.exclude else tensors
        state = {key: _typed(value) for key, value in tensors.items()}
    kept = {leaf.path for leaf in chosen}
    left_out = found.left_out + [leaf.path for leaf in all_leaves if leaf.path not in kept]
    return _Planned(state, *_described(chosen, places), left_out)


def _described(chosen: Iterable[Leaf], places: Iterable[Keys]) -> tuple[list[ImportedTensor], list[str]]:
    """The tensors that are imported, and the paths of the other values. A list with tensors is described entry by entry."""
    tensors, values = list[ImportedTensor](), list[str]()
    for leaf, keys in zip(chosen, places, strict=True):
        inside = list(entries.leaves(leaf.node, lists=True))
        if not any(isinstance(each.node, torch.Tensor) for each in inside):
            inside = [Leaf("", (), leaf.node)]
        for each in inside:
            path, source = (entries.join_all((*place, *each.keys)) for place in (keys, leaf.keys))
            if isinstance(each.node, torch.Tensor):
                dtype, shape = name_of(each.node.dtype), list(each.node.shape)
                tensors.append(ImportedTensor(path=path, source=source, dtype=dtype, shape=shape))
            else:
                values.append(path)
    return tensors, values


def _chosen(found: Source, all_leaves: list[Leaf], entry: str, selection: Selection) -> list[Leaf]:
    """The leaves that are not excluded. In a source without a structure, a pattern with a slash names the entry first."""
    with_entry = replace(selection, exclude=tuple(pattern for pattern in selection.exclude if "/" in pattern))

    def is_chosen(leaf: Leaf) -> bool:
        known = found.format == "dcp" or selection.selects(leaf.path)  # those of DCP were selected before
        inside = not found.is_flat or with_entry.selects(entries.join_all((entry, *leaf.keys)))
        return known and inside

    chosen = [leaf for leaf in all_leaves if is_chosen(leaf)]
    paths = [f"{leaf.path!r:.100}" for leaf in all_leaves[:_MOST_NAMED]]
    more = f", and {len(all_leaves) - len(paths)} more" if len(all_leaves) > len(paths) else ""
    entries.require_matches(selection, f"the source has {', '.join(paths)}{more}")
    return chosen


def _flat_places(chosen: Sequence[Leaf], entry: str, rename: Rename) -> list[Keys]:
    """The keys of tensors by name: the entry and the new name."""
    renaming = entries.Renaming(rename)
    names = [renaming.of(leaf.keys[0]) for leaf in chosen]
    renaming.require_used()
    for name, count in Counter(names).items():
        if count > 1:
            one, other = [leaf.keys[0] for leaf, new in zip(chosen, names, strict=True) if new == name][:2]
            raise entries.collision(one, other, name)
    return [(entry, name) for name in names]


def _typed(value: Any) -> Any:
    """A dict of tensors as a module, and the state of an optimizer as an optimizer."""
    if not isinstance(value, dict) or not value:
        return value
    if all(isinstance(key, str) and isinstance(each, torch.Tensor) for key, each in value.items()):
        return _Module(value)
    if value.keys() == {"state", "param_groups"} and isinstance(value["param_groups"], list):
        return _Optimizer(value)
    return value


def _require_newest(store: Store, run: str, step: int) -> None:
    """Refuse a step that is not newer than the newest step of the run. Saving it would hide newer steps."""
    if repository.read_repo(store) is None:
        return
    latest = repository.find(store, run, "latest")
    if latest is not None and latest.step >= step:
        raise ConflictError(
            f"run {run} has step {latest.step}, so step {step} is not imported",
            hint="import into a run of its own, or give a newer step",
        )


def _require_base(store: Store, base: str | tuple[str, int] | None) -> None:
    """Raise `NotFoundError` for a base that does not exist. Without its chunks, all would be stored again."""
    if base is None:
        return
    run, step = (base, "latest") if isinstance(base, str) else base
    if repository.find(store, names.check_run(run), step) is None:
        raise repository.missing(store, run)


def _commit(
    store: Store,
    lineage: Lineage,
    run: str,
    step: int,
    prepared: PreparedSave,
    readers: Sequence[AddressReader],
    compression: str,
    emit: Callable[[Event], None],
) -> dict[str, object]:
    """Save the tensors as `Checkpointer.save` does, from the files."""
    arena = Arena(LEAST_BYTES)
    sliced: FileSlices | None = None
    try:
        ticket = lineage.new_ticket(step)
        if not ticket.timeline:
            raise TransientError(f"step {step} is not imported: {ticket.store_error}", hint="try again")
        plan = PutPlan(
            location=PlanLocation(store.location.url, dict(store.location.options)),
            run=run,
            timeline=ticket.timeline,
            step=step,
            attempt=ticket.attempt,
            rank=0,
            world_size=1,
            bases=ticket.bases,
            tensors=plans.plan_tensors(prepared.specs, prepared.layout),
            small_bytes=prepared.layout.small_bytes,
            tree=prepared.tree,
            replicas=prepared.replicas,
            compression=compression,
        )
        sliced = FileSlices(readers, arena, prepared.tensors, specs=prepared.specs, layout=prepared.layout)
        return commit_staged(sliced, plan, emit, store=store)
    finally:
        if sliced is not None:
            sliced.cancel()
        arena.close()


def _emitter(name: str, progress: Report | None) -> Callable[[Event], None]:
    """Passes the worker's progress on."""

    def emit(event: Event) -> None:
        if progress is not None and isinstance(event, plans.Progress):
            progress(Progress(event.done, event.total, name))

    return emit
