"""Puts a committed step into a state that is there: fit, read, act.

Invariant: nothing changes before everything was found to fit; then values made anew are read and handed to the objects that
judge their own state, and only then are tensors read in place.
Failure behaviour: `MismatchError` with nothing changed; `CorruptionError` from reading, with the state then partly restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from checkpoint.ranks import Ranks
from checkpoint.repository.steps import Step
from checkpoint.restoring import restore, together
from checkpoint.restoring.restore import Saved, Want
from checkpoint.state import fit, tree
from checkpoint.state.build import Fit
from checkpoint.state.kinds import TensorSink, TorchKinds
from checkpoint.state.selection import Selection
from dataio.core.errors import MismatchError
from dataio.store.contract import Store

_KINDS = TorchKinds()
DCP_MARK = "torch.distributed.checkpoint"
"""What the documents of `checkpoint.dcp` begin with."""


def apply(given: dict[str, Any], opened: Step, ranks: Ranks, selection: Selection, store: Store) -> list[str]:
    """Restore what is selected of `given` as this rank sees the step; return the paths that were skipped.

    Called by all ranks: one that fails makes all fail.
    """
    todo: Fit | None = None
    saved: dict[str, Saved] = {}
    with ranks.agreed():
        saved, todo = _plan(given, opened, ranks.rank, selection)
    assert todo is not None
    with torch.no_grad():
        for targets, actions in ((todo.fresh, todo.early), (todo.in_place, todo.late)):
            wants: list[Want] = []
            with ranks.agreed():
                wants = _wants(targets, saved)
            _read(store, opened, wants, ranks)
            with ranks.agreed():
                for action in actions:
                    action()
    return todo.skipped


def _read(store: Store, opened: Step, wants: list[Want], ranks: Ranks) -> None:
    if ranks.world_size == 1:
        restore.read(store, opened, wants)
    else:
        together.read(store, opened, wants, ranks)


def _plan(given: dict[str, Any], opened: Step, rank: int, selection: Selection) -> tuple[dict[str, Saved], Fit]:
    rank = rank if rank < len(opened.manifests) else 0
    saved = restore.tensors_of(opened, rank)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in saved.items()}
    document = tree.decode(opened.manifests[rank].tree)
    if isinstance(document, dict) and document.get("by") == DCP_MARK:
        raise MismatchError(
            f"step {opened.base.step} was saved through torch.distributed.checkpoint",
            hint="load it with dcp.load(state, storage_reader=RepositoryReader(...))",
        )
    return saved, fit.fit(given, document, shapes, _KINDS, selection)


def _wants(targets: list[tuple[str, Any]], saved: Mapping[str, Saved]) -> list[Want]:
    """One for each place in memory: tensors that are tied to one another are read once."""
    wants: dict[Any, Want] = {}
    for number, (name, tensor) in enumerate(targets):
        seen = _KINDS.describe(tensor, name)
        key = (name, seen.memory, seen.box) if seen.memory is not None else number
        if key not in wants:
            sink = TensorSink(seen.tensor, getattr(torch, saved[name].dtype))
            wants[key] = Want(saved[name], seen.box, sink)
    return list(wants.values())
