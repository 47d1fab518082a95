"""One restore by the ranks of a job. The ranks find the step, compare it with the state, and then read it.

Invariant: all ranks restore the same step, or all raise. Every rank takes part in every exchange, even a rank that has
failed. If tensors are only filled in place, the exchanges are these:

1. All ranks are ready to begin.
2. Rank 0 sends the step that it found, with its decision. It holds a lease on the step.
3. The step is open and fits on every rank. If the step or the job has more than `WHOLE_RANKS` ranks, the ranks divide
   the manifests for this (`headrace.checkpoint.restoring.divided_step`). Otherwise every rank reads all manifests.
4. The ranks exchange which chunks several of them need.
5. All ranks are done.

The state is unchanged until the step is known to fit on all ranks. The restorer then reads new values and passes them
to objects that load their own state. It fills tensors in place last. Objects that load their own state come in this
order, and all ranks agree after each point:

1. Objects that can check their state do so. Nothing has changed yet.
2. Objects that may refuse their state load it.
3. The others load theirs, schedulers first.

Failure behaviour: after a `MismatchError` of the fit or of point 1, the state is unchanged. If an object refuses its
state at point 2, only objects of point 2 have changed. A `CorruptionError` is raised while reading, and the
state is then partly restored. An error of the store on any rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.restoring import GdsStore
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.fetch import Sealed, Step
from headrace.checkpoint.restoring import aliases, chunk_reader, dcp_names, shared_reads
from headrace.checkpoint.restoring.aliases import Target
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, Saved, StepLease, Want
from headrace.checkpoint.restoring.divided_step import DividedStep, is_divided, open_divided
from headrace.checkpoint.restoring.opening import Exchange, open_found, read_decision
from headrace.checkpoint.state import fit, tensors, tree
from headrace.checkpoint.state.build import Fit
from headrace.checkpoint.state.fit import Selection
from headrace.checkpoint.state.own_states import refusing_first
from headrace.checkpoint.state.tensors import LocalTensor, TensorSink
from headrace.checkpoint.tier.restoring import Found, NodeTier, log_offline, log_sources, node_tier
from headrace.dataio.core.errors import MismatchError, UsageError
from headrace.dataio.core.log import get_logger, warn_first
from headrace.dataio.sidecar.connection import SidecarName
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
_PATTERN_HINT = (
    "`headrace ckpt show URL --run RUN --tensors` lists the tensors of a step. An optimizer or a loader is restored as "
    "a whole: name it, not a part of it. strict=False ignores these patterns"
)
_MAX_NAMED = 8
_FORCE_HINT = "name an object whose load_state_dict has an argument force, such as a loader"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A step that fits the state. New values (`fresh`) are read first, then the tensors to fill in place."""

    step: Step
    todo: Fit
    saved: Mapping[str, Saved]
    fresh: ChunkReader
    in_place: ChunkReader


def fitted(state: dict[str, Any], opened: Step, rank: int, selection: Selection) -> Fitted:
    """Compare the selected part of `state` with the step as this rank sees it. The ranks do not communicate."""
    rank = rank if rank < len(opened.manifests) else 0
    document, saved = tree.decode(opened.manifests[rank].tree), chunk_reader.tensors_of(opened, rank)
    if dcp_names.is_dcp(document):
        document, saved = dcp_names.state_of(opened, rank)
    types = {name: (tensor.dtype, tensor.shape) for name, tensor in saved.items()}
    todo = fit.fit(state, document, types, selection)
    return _fitted(opened, todo, saved)


def fitted_in_parts(
    state: dict[str, Any], sealed: Sealed, opened: DividedStep, ranks: Exchange, selection: Selection
) -> Callable[[], Fitted]:
    """As `fitted`, for a step whose manifests the ranks divided. All ranks call it.

    The function that is returned does the last part without communication.
    """
    with ranks.agreed():
        document = _document(opened.own)
        named = list(tree.tensor_names(document))
    types = opened.types(named)
    boxes: dict[str, dict[Box, None]] = defaultdict(dict)
    with ranks.agreed():
        todo = fit.fit(state, document, types, selection)
        for name, _, local in (*_described(todo.fresh), *todo.in_place):
            boxes[name][local.box] = None
    saved = opened.tensors(types, {name: list(its) for name, its in boxes.items()})
    return lambda: _fitted(Step(sealed.run, sealed.base, ()), todo, saved)


def _document(manifest: Manifest) -> object:
    """The document in the manifest of a rank. It names all tensors of the rank, unless DCP saved the step."""
    document = tree.decode(manifest.tree)
    if dcp_names.is_dcp(document):
        raise MismatchError(
            f"step {manifest.step} was saved through torch.distributed.checkpoint, and many ranks saved or restore it",
            hint="load it with dcp.load(state, storage_reader=RepositoryReader(...))",
        )
    return document


def _fitted(step: Step, todo: Fit, saved: Mapping[str, Saved]) -> Fitted:
    fresh = ChunkReader(step, _wants(_described(todo.fresh), saved))
    return Fitted(step, todo, saved, fresh, ChunkReader(step, _wants(todo.in_place, saved)))


def require_one_content(work: Fitted, store: Store) -> None:
    """Check that tensors that share memory receive one content. The ranks do not communicate."""
    targets = [Target(name, work.saved[name], seen.box, seen.tensor) for name, _, seen in work.todo.in_place]
    aliases.require_one_content(store, work.step, targets)


def apply(work: Fitted, ranks: Ranks, store: Store) -> None:
    """Read into the state. All ranks call it. If one rank fails, all raise."""
    todo, in_place = work.todo, work.in_place
    first = bool(todo.fresh or todo.own or todo.checks)
    common = shared_reads.compare(store, (work.fresh, in_place), first, ranks)
    with torch.no_grad():
        if common.marked:
            pending = shared_reads.read(store, work.fresh, 0, common, ranks)
            with ranks.agreed(alike=(MismatchError,)):
                pending.raise_kept()
                for check in todo.checks:
                    check()
                for one in todo.own:
                    if one.reads:
                        one.check()
            may_refuse, others = refusing_first(todo.own)
            with ranks.agreed():
                for one in may_refuse:
                    one.load()
            with ranks.agreed():
                for one in others:
                    one.load()
                if first:  # an object that loaded its state may have moved its tensors
                    moved = _described((name, tensor) for name, tensor, _ in todo.in_place)
                    in_place = ChunkReader(work.step, _wants(moved, work.saved))
        tensors.synchronize(tensor.device for _, tensor, _ in todo.in_place)
        pending = shared_reads.read(store, in_place, 1, common, ranks)
        with ranks.agreed():
            pending.raise_kept()
            for action in todo.late:
                action()


def _left_as_they_are(todo: Fit) -> str:
    """Text that lists the entries that only one side has; "" if there are none. At most `_MAX_NAMED` of each side."""
    sides = {"in the state, not in the step": todo.only_state, "in the step, not in the state": todo.only_step}
    parts = []
    for side, paths in sides.items():
        more = f", and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
        if paths:
            parts.append(f"{side}: {', '.join(paths[:_MAX_NAMED])}{more}")
    return "; ".join(parts)


def _described(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, LocalTensor]]:
    return [(name, tensor, tensors.describe(tensor, name)) for name, tensor in pairs]


def _wants(targets: Sequence[tuple[str, Any, LocalTensor]], saved: Mapping[str, Saved]) -> list[Want]:
    """One request for each distinct piece of memory. Tied tensors are read once."""
    wants: dict[Any, Want] = {}
    times = Counter(name for name, _, _ in targets)
    for number, (name, _, local) in enumerate(targets):
        key = (name, local.memory, local.box) if times[name] > 1 and local.address is not None else number
        if key not in wants:
            sink = TensorSink(local.tensor, getattr(torch, saved[name].dtype))
            wants[key] = Want(saved[name], local.box, sink)
    return list(wants.values())


class Restorer:
    """Restores for one checkpointer, from its store or from the node's local tier."""

    def __init__(
        self, store: Store, *, ranks: Ranks, lineage: Lineage, sidecar: SidecarName, direct: Direct | None
    ) -> None:
        self._store, self._ranks, self._lineage = store, ranks, lineage
        self._sidecar, self._direct = sidecar, direct

    def restore(
        self,
        state: dict[str, Any],
        run: str,
        step: int | str | Base,
        prepare: Callable[[], Selection],
        required: bool = False,
    ) -> Found | None:
        """Restore a step. All ranks call it.

        `prepare` is called first and returns the selection. If it raises on any rank, all ranks raise. The result is
        the step that was restored. If the run has no step, the result is None, unless a step is `required`.
        """
        requested = step.step if isinstance(step, Base) else step
        number = requested if isinstance(requested, int) and 0 <= requested < names.STEP_LIMIT else 0
        with contextlib.ExitStack() as stack:
            with self._ranks.agreed(number):
                selection = prepare()
                tier = stack.enter_context(node_tier(self._sidecar))
                sent = tier.send(self._store, names.check_run(run))
                reader = self._reader(tier)
            tier.add_unfinished(self._ranks.gather(sent))
            # from here on, steps that were only in the local tiers of nodes are also in the store
            found_here = self._finder(stack, run, step, tier, reader, required)
            opened = open_found(run, number, found_here, self._ranks)
            if opened is None:
                return None
            found, sealed = opened
            if self._ranks.rank and not found.offline:
                stack.enter_context(StepLease(reader, run, found.base, writes=False))
            with gc_paused():
                work = self._fit(state, sealed, reader, selection)
            apply(work, self._ranks, reader)
            log_sources(reader, found.base.step)
        if left := _left_as_they_are(work.todo):
            warn_first(_log, "node", "step %d: left as they are: %s", found.base.step, left)
        return found

    def _finder(
        self,
        stack: contextlib.ExitStack,
        run: str,
        step: int | str | Base,
        tier: NodeTier,
        reader: Store,
        required: bool,
    ) -> Callable[[], tuple[Found, Sealed] | None]:
        """The work of rank 0: find the step, lease it, and read its decision."""

        def find() -> tuple[Found, Sealed] | None:
            step_found = self._lineage.find(run, step, tier)
            if step_found is None:
                if required:
                    raise repository.missing(self._store, run)
                repository.warn_of_mistakes(self._store, run)
                return None
            if step_found.offline:
                log_offline(run, step_found.base)
            else:
                stack.enter_context(StepLease(reader, run, step_found.base))
            return step_found, read_decision(reader, run, step_found.base)

        return find

    def _reader(self, tier: NodeTier) -> Store:
        reader = tier.reader(self._store)
        return GdsStore(reader, self._direct) if self._direct is not None and reader is self._store else reader

    def _require_matches(self, selection: Selection) -> None:
        """Raise an error for a pattern without a match.

        With several ranks, only log it, because the pattern may be meant for another rank.
        """
        if not selection.unmatched or not selection.strict:
            return
        message = "; ".join(
            f"{name} has patterns without a match: {', '.join(map(repr, patterns[:8]))}"
            for name, patterns in selection.unmatched.items()
        )
        if self._ranks.world_size == 1:
            raise UsageError(message, hint=_FORCE_HINT if set(selection.unmatched) == {"force"} else _PATTERN_HINT)
        warn_first(_log, "node", "%s on this rank", message)

    def _fit(self, state: dict[str, Any], sealed: Sealed, reader: Store, selection: Selection) -> Fitted:
        """Read the manifests and compare the step with the state. All ranks call it."""
        ranks = self._ranks

        def whole() -> Fitted:
            return fitted(state, fetch.open_sealed(reader, sealed), ranks.rank, selection)

        finish = whole
        if is_divided(sealed, ranks):
            opened = open_divided(reader, sealed, ranks)
            finish = fitted_in_parts(state, sealed, opened, ranks, selection)
        with ranks.agreed(alike=(MismatchError,)):
            work = finish()
            self._require_matches(selection)
            for one in work.todo.own:
                if not one.reads:
                    one.check()
            require_one_content(work, reader)
        return work
