"""Which step of the destination is a copy of which step of the source, and the timelines of the copied run.

Invariant: all copiers of one step compute the same attempt id (`attempt_of`). A timeline is identified by its nonce, so
the copied timeline keeps it. The destination's run has no timeline that the source's run does not have.
Failure behaviour: `ConflictError` if the run at the destination has other content. Then nothing of it is changed.
"""

from __future__ import annotations

from blake3 import blake3
from msgspec.structs import replace

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Timeline, encode
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import fetch, timeline
from headrace.checkpoint.repository.inventory import many
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError
from headrace.dataio.store.base import Store

GENERATIONS = 64
"""The maximum number of attempts to copy one step that collectors have aborted."""
_TIME_BYTES = 6

_one_timeline = declare("copy.one-timeline", "one timeline is copied; the run has no step of it")
_timelines_copied = declare("copy.timelines", "all timelines are copied, and the followed one is marked; no step is")


def attempt_of(source: str, run: str, generation: int) -> str:
    """The id of the attempt that copies the attempt `source` into `run`. It has the time of the source's id."""
    text = f"copy {source} {run} {generation}".encode()
    return names.id_from_bytes(names.bytes_of_id(source)[:_TIME_BYTES] + blake3(text).digest()[:10])


def is_copy(source: str, source_run: str, copied: str, run: str) -> bool:
    """Whether one of two attempts is a copy of the other, as far as their ids show."""
    pairs = ((source, copied, run), (copied, source, source_run))
    return source == copied or any(
        attempt_of(one, into, generation) == other for one, other, into in pairs for generation in range(GENERATIONS)
    )


def same_step(source: Store, source_run: str, base: Base, store: Store, run: str, found: Base) -> bool:
    """Whether two committed steps have the same content. If their ids do not show it, all manifests are read."""
    if is_copy(base.attempt, source_run, found.attempt, run):
        return True
    one, other = fetch.sealed(source, source_run, base), fetch.sealed(store, run, found)
    if one.attempt.world_size != other.attempt.world_size:
        return False
    ranks = range(one.attempt.world_size)
    pairs = zip(
        fetch.read_manifests(source, one, fetch.digests_of(source, one, ranks)),
        fetch.read_manifests(store, other, fetch.digests_of(store, other, ranks)),
        strict=True,
    )
    return all(same_content(ours, theirs) for ours, theirs in pairs)


def same_content(ours: Manifest, theirs: Manifest) -> bool:
    """Whether two manifests of one rank have the same values and the same tensors, by the digests of their chunks."""
    if (ours.rank, ours.world_size, ours.tree) != (theirs.rank, theirs.world_size, theirs.tree):
        return False
    if len(ours.tensors) != len(theirs.tensors):
        return False
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        if (one.name, one.dtype, one.box, one.replicated) != (other.name, other.dtype, other.box, other.replicated):
            return False
        spans = [(ours.chunks[span.chunk].digest, span.start, span.length) for span in one.spans]
        if spans != [(theirs.chunks[span.chunk].digest, span.start, span.length) for span in other.spans]:
            return False
    return True


class TimelineCopier:
    """Copies the timelines of one run. A timeline that was copied or compared once is not read again."""

    def __init__(self, source: Store, source_run: str, store: Store, run: str) -> None:
        self._source, self._source_run, self._store, self._run = source, source_run, store, run
        self._known: set[int] = set()

    def copy(self) -> None:
        """Copy the missing timelines, and mark the timeline that readers of the source follow."""
        theirs = timeline.numbers(self._store, self._run)  # first: a copier that runs meanwhile adds newer ones
        followed = timeline.followed(self._source, self._source_run)
        numbers = timeline.numbers(self._source, self._source_run)
        if unknown := sorted(set(theirs) - set(numbers)):
            raise _diverged(self._store, self._run, unknown[0], "the source does not have it")
        new = [number for number in numbers if number not in self._known]
        documents = list(many(lambda number: timeline.read_timeline(self._source, self._source_run, number), new))
        self._compare([document for document in documents if document.timeline in theirs])
        for document in documents:  # in order, so that a parent is copied before its children
            if document.timeline not in self._known:
                self._copy(document)
        if followed and timeline.newest_step(self._store, self._run, followed) is None:
            newest = next(timeline.steps_newest_first(self._source, self._source_run, followed), 0)
            timeline.record_newest(self._store, self._run, followed, newest)
        _timelines_copied()

    def _copy(self, document: Timeline) -> None:
        wanted = replace(document, run=self._run)
        if self._store.put_if_absent(names.timeline(self._run, document.timeline), encode(wanted)):
            _one_timeline()
            self._known.add(document.timeline)
        else:
            self._compare([document])

    def _compare(self, documents: list[Timeline]) -> None:
        """Check that the destination has these timelines, and not others with their numbers."""
        numbers = [document.timeline for document in documents]
        found = many(lambda number: timeline.read_timeline(self._store, self._run, number), numbers)
        for wanted, there in zip(documents, found, strict=True):
            if (there.nonce, there.parent) != (wanted.nonce, wanted.parent):
                raise _diverged(self._store, self._run, wanted.timeline, f"there it was opened by {there.process}")
            self._known.add(wanted.timeline)


def _diverged(store: Store, run: str, number: int, how: str) -> ConflictError:
    return ConflictError(
        f"run {run} at {store.location.url} is not a copy of the source: timeline {number} differs, {how}",
        hint="copy it under another name with --as, or into another repository",
    )
