"""Compares the weights of a save with the newest version while the save is still being written.

Purpose: after the commit, only the small objects of the version are left to write. The weights come from staging memory.
Invariant: an early comparison is used only if the committed step has these tensors and the same chunks, and if the
version before is still the one that was compared with. Nothing names its update before that.
Failure behaviour: `compare_early` raises `StagedMemoryError` if the next save takes the memory. Nothing is stored then. A
process that dies leaves an update that no record names, which a later publisher deletes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest, Tensor
from headrace.checkpoint.publishing.comparison import Comparison, Held, compare, discard_update
from headrace.checkpoint.publishing.records import Published, Stored
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, in_staging, published_tensors
from headrace.checkpoint.publishing.staged import StagedMemoryError, StagedStep
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.checkpoint.saving.arena import StagedCopy, Staging
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)


@dataclass(frozen=True)
class EarlyComparison:
    """A comparison with version `before`, and its update.

    Args:
        name: the published name.
        before: the record of the version; None if there was none.
        prefix, tensors: the result of `published_tensors`.
        staged: the staging memory that the weights came from.
    """

    name: str
    before: Published | None
    prefix: str
    tensors: Sequence[PublishedTensor]
    staged: StagedStep
    comparison: Comparison
    update: Stored | None

    def is_of(self, before: Published | None, prefix: str, tensors: Sequence[PublishedTensor], step: Step) -> bool:
        """Whether it belongs to this version and this committed step. If not, the update is of no use."""
        same = (self.before, self.prefix, _forms(self.tensors)) == (before, prefix, _forms(tensors))
        if same:
            try:
                self.staged.require_same(step.manifests[0])
            except StagedMemoryError as error:
                _log.error("step %s is read back to publish it: %s", step.base.step, error)
                return False
        return same

    def discard(self, store: Store) -> None:
        """Delete the update, which no record names."""
        discard_update(store, self.name, self.update)


def compare_early(
    store: Store,
    name: str,
    choice: Choice,
    attempt: str,
    staging: Staging,
    before: Published | None,
    held: Held,
    clock: Clock,
) -> EarlyComparison | None:
    """Compare a staged save with version `before`. None if the weights are not all in staging memory."""
    copy = staging.copy_of(attempt)
    if copy is None:
        return None
    staged = StagedStep(staging, copy)
    prefix, chosen = published_tensors(SavedStep(store, _step_of(copy), 0), choice)
    tensors = in_staging(chosen, staged, is_saved=False)
    if any(tensor.staged is None for tensor in tensors):
        return None
    comparison, update = compare(store, name, tensors, before, held, clock)
    return EarlyComparison(name, before, prefix, tensors, staged, comparison, update)


def _forms(tensors: Sequence[PublishedTensor]) -> list[tuple[object, ...]]:
    return [(t.name, t.lazy.name, t.lazy.dtype, t.shape, t.dtype) for t in tensors]


def _step_of(copy: StagedCopy) -> Step:
    """The tree and the tensors of the save as a step without chunks. Its tensors cannot be read."""
    tensors = tuple(
        Tensor(s.name, s.dtype, s.box.shape, s.box.offset, s.box.local, s.replicated, ()) for s in copy.specs
    )
    manifest = Manifest(
        run="",
        timeline=0,
        step=0,
        attempt=copy.attempt,
        rank=0,
        world_size=1,
        created=0.0,
        bases=(),
        packs=(),
        chunks=(),
        tensors=tensors,
        tree=copy.tree,
        replicas=b"",
        bytes_state=0,
        bytes_written=0,
        bytes_deduplicated=0,
    )
    return Step("", Base(0, 0, copy.attempt), (manifest,))
