"""Puts a committed step into a state that is there: fit, read, act.

Invariant: nothing changes before everything was found to fit, on all ranks; then values made anew are read and handed to the
objects that judge their own state, and only then are tensors read in place.
Failure behaviour: `MismatchError` with nothing changed; `CorruptionError` from reading, with the state then partly restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import overlaps, restore, together
from headrace.checkpoint.restoring.overlaps import Target
from headrace.checkpoint.restoring.restore import Reading, Saved, Want
from headrace.checkpoint.state import fit, kinds, tree
from headrace.checkpoint.state.build import Fit
from headrace.checkpoint.state.flatten import Seen
from headrace.checkpoint.state.kinds import TensorSink, TorchKinds
from headrace.checkpoint.state.selection import Selection
from headrace.dataio.core.errors import MismatchError
from headrace.dataio.store.base import Store

_KINDS = TorchKinds()
DCP_MARK = "torch.distributed.checkpoint"
"""What the documents of `headrace.checkpoint.dcp` begin with."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A step that was found to fit a state, and what is to be read for each of the two parts of the work."""

    step: Step
    todo: Fit
    saved: Mapping[str, Saved]
    fresh: Reading
    in_place: Reading


def fitted(given: dict[str, Any], opened: Step, rank: int, selection: Selection) -> Fitted:
    """What restoring the selected part of `given` takes, as this rank sees the step. Talks to nobody and changes nothing."""
    rank = rank if rank < len(opened.manifests) else 0
    saved = restore.tensors_of(opened, rank)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in saved.items()}
    document = tree.decode(opened.manifests[rank].tree)
    if isinstance(document, dict) and document.get("by") == DCP_MARK:
        raise MismatchError(
            f"step {opened.base.step} was saved through torch.distributed.checkpoint",
            hint="load it with dcp.load(state, storage_reader=RepositoryReader(...))",
        )
    todo = fit.fit(given, document, shapes, _KINDS, selection)
    fresh = Reading(opened, _wants(_described(todo.fresh), saved))
    return Fitted(opened, todo, saved, fresh, Reading(opened, _wants(todo.in_place, saved)))


def require_one_content(work: Fitted, store: Store) -> None:
    """That the state's tensors that share memory would get one content there. Talks to no other rank and changes nothing."""
    targets = [Target(name, work.saved[name], seen.box, seen.tensor) for name, _, seen in work.todo.in_place]
    overlaps.require_one_content(store, work.step, targets)


def apply(work: Fitted, ranks: Ranks, store: Store) -> None:
    """Restore; called by all ranks: one that fails makes all fail."""
    todo, in_place = work.todo, work.in_place
    first = bool(todo.fresh or todo.early or todo.checks)
    common = together.compare(store, work.step, (work.fresh, in_place), first, ranks)
    with torch.no_grad():
        if common.marked:
            pending = together.read(store, work.fresh, common.shared[0], common, ranks)
            with ranks.agreed():
                pending.tell()
                for action in (*todo.checks, *todo.early):
                    action()
                if first:  # an object that loaded its state may have moved its tensors
                    again = _described((name, tensor) for name, tensor, _ in todo.in_place)
                    in_place = Reading(work.step, _wants(again, work.saved))
        kinds.settle(tensor.device for _, tensor, _ in todo.in_place)
        pending = together.read(store, in_place, common.shared[1], common, ranks)
        with ranks.agreed():
            pending.tell()
            for action in todo.late:
                action()


def _described(given: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, Seen]]:
    return [(name, tensor, _KINDS.describe(tensor, name)) for name, tensor in given]


def _wants(targets: Iterable[tuple[str, Any, Seen]], saved: Mapping[str, Saved]) -> list[Want]:
    """One for each place in memory: tensors that are tied to one another are read once."""
    wants: dict[Any, Want] = {}
    for number, (name, _, seen) in enumerate(targets):
        key = (name, seen.memory, seen.box) if seen.memory is not None else number
        if key not in wants:
            sink = TensorSink(seen.tensor, getattr(torch, saved[name].dtype))
            wants[key] = Want(saved[name], seen.box, sink)
    return list(wants.values())
