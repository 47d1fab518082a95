"""Copies one step: lease, packs, manifests, decision, COMMIT (`docs/design/0045-copy.md` has the order and its reasons).

Invariant: the step is committed only if every chunk that its manifests name was compared with its digest, and is in a
pack of the attempt or of a step that the lease names.
Failure behaviour: `CorruptionError` names the tensor that needs a damaged chunk. `ConflictError` if the destination has
another step of this number. If a collector aborted the attempt, or removed a step whose chunks are referenced, the copy
begins again, `_TRIES` times. The lease of a copy that fails stays until it expires, so that the next copy finds its packs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace.checkpoint.copies import chunks as chunk_copies
from headrace.checkpoint.copies.chunks import ChunkCopier, DamagedChunk, Links
from headrace.checkpoint.copies.identity import GENERATIONS, attempt_of, same_content, same_step
from headrace.checkpoint.copies.index import ChunkIndex
from headrace.checkpoint.copies.placing import Placing, build, place
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import commit, descriptions, fetch, group_commit
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt, FinalError
from headrace.checkpoint.repository.fetch import Sealed
from headrace.checkpoint.repository.lease import DEFAULT_LIFE, LeaseKeeper
from headrace.checkpoint.restoring.chunk_reader import StepLease
from headrace.checkpoint.saving.dedup import Stored
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, TransientError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
_TRIES = 5
_MOST_OWN = 200_000
"""The maximum number of chunks of the attempt itself that other ranks of the step can reference."""

_leased = declare("copy.leased", "the lease of a copy exists: nothing visible")
_packs_copied = declare("copy.packs", "the packs of one rank are copied; its manifest is not: nothing visible")
_manifest_copied = declare("copy.manifest", "one rank's manifest is copied; no decision: nothing visible")
_lease_deleted = declare("copy.lease-deleted", "the step is committed, and its leases are deleted")


@dataclass(frozen=True, slots=True)
class Route:
    """From where a step is copied, and where to."""

    source: Store
    source_run: str
    store: Store
    run: str


@dataclass(slots=True)
class Sent:
    """What one copy has done. `bytes_sent`: stored bytes that were written. `bytes_found`: of the step's chunks, the
    bytes that the destination had. `bytes_total`: bytes of all chunks that the manifests name."""

    bytes_sent: int = 0
    chunks_sent: int = 0
    bytes_found: int = 0
    bytes_total: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, sent: int = 0, chunks: int = 0, found: int = 0, total: int = 0) -> None:
        with self._lock:
            self.bytes_sent += sent
            self.chunks_sent += chunks
            self.bytes_found += found
            self.bytes_total += total


class _BaseRemovedError(TransientError):
    """A step whose chunks were to be referenced is removed, or is being removed."""


class RemovedThereError(TransientError):
    """The step has a tombstone at the destination: it was removed there."""


class StepCopier:
    """Copies steps along one route, one after another. `life`: the lifetime of leases in seconds."""

    def __init__(
        self,
        route: Route,
        index: ChunkIndex,
        *,
        workers: int = 2,
        life: float = DEFAULT_LIFE,
        clock: Clock = SYSTEM_CLOCK,
        report: Callable[[Sent], object] = lambda _: None,
    ) -> None:
        self._route, self._index, self._workers, self._life, self._clock = route, index, workers, life, clock
        self._report = report

    def copy(self, base: Base) -> tuple[Base, Sent, bool]:
        """Copy one committed step. Returns the step at the destination, and whether this call committed it."""
        for tries_left in reversed(range(_TRIES)):
            sent = Sent()
            try:
                with StepLease(self._route.source, self._route.source_run, base, self._clock):
                    return self._copy_once(base, sent)
            except (FinalError, _BaseRemovedError):
                if not tries_left:
                    raise
        raise AssertionError

    def _copy_once(self, base: Base, sent: Sent) -> tuple[Base, Sent, bool]:
        r = self._route
        step = fetch.sealed(r.source, r.source_run, base)
        if (existing := self._existing(base)) is not None:
            return existing, sent, False
        attempt, is_decided = self._attempt(base, step.attempt.world_size)
        if not is_decided:
            self._index_source(base)
            bases = self._bases(step)
            lease = LeaseKeeper(
                r.store,
                attempt.id,
                run=r.run,
                timeline=base.timeline,
                step=base.step,
                bases=sorted(bases, key=lambda each: (each.run, each.timeline, each.step)),
                life=self._life,
                clock=self._clock,
                holder=os.urandom(4).hex(),
            )
            with lease:
                _leased()
                self._require_bases(bases)
                _Copy(self._route, self._index, step, attempt, bases, self._workers, sent, self._report).run()
                lease.require_alive()
                group_commit.decide_copy(r.store, attempt, lease, grouped=bool(step.groups))
                found = self._commit(attempt, base)
                lease.release()
        else:
            found = self._commit(attempt, base)
        r.store.delete_many([info.key for info in r.store.list(names.leases_of(attempt.id))])
        _lease_deleted()
        self._index.load(r.store, r.run, [found])
        return found, sent, found.attempt == attempt.id and not is_decided

    def _attempt(self, base: Base, world_size: int) -> tuple[Attempt, bool]:
        """The attempt that copies the step, and whether it has the decision "commit" already."""
        r = self._route
        for generation in range(GENERATIONS):
            id_ = attempt_of(base.attempt, r.run, generation)
            attempt = Attempt(r.run, base.timeline, base.step, id_, world_size)
            decision = commit.find_decision(r.store, attempt.decision_key)
            if decision is None or decision.outcome == "commit":
                return attempt, decision is not None
        raise ConflictError(
            f"{attempt}: {GENERATIONS} copies of it were aborted by collections",
            hint="copy it under another run name with --as",
        )

    def _index_source(self, base: Base) -> None:
        """If both runs are in one repository, index the source's step: nothing needs to be copied then."""
        r = self._route
        if r.source.location.url == r.store.location.url:
            self._index.load(r.store, r.run, [Base(base.timeline, base.step, base.attempt, r.source_run)])

    def _bases(self, step: Sealed) -> set[Base]:
        """The steps of the destination whose chunks the copy will reference."""
        bases: set[Base] = set()
        for manifest in _manifests(self._route.source, step):
            bases |= place(manifest, self._index, {}, self._route.store).bases
        return bases

    def _require_bases(self, bases: set[Base]) -> None:
        """Check that the bases exist and that no collector is about to remove them. The lease names them already."""
        store, run = self._route.store, self._route.run
        pending = repository.pending_deletes(store) if bases else set()
        gone = {
            base
            for base in bases
            if (base.run or run, base.timeline, base.step) in pending
            or not repository.is_committed(store, base.run or run, base)
        }
        for base in gone:
            self._index.drop(base)
        if gone:
            raise _BaseRemovedError("a step at the destination was removed during the copy", hint="copy again")

    def _existing(self, base: Base) -> Base | None:
        """The step of this number at the destination, if COMMIT exists there: a copy of the source's step."""
        r = self._route
        found = commit.find_commit(r.store, names.commit(r.run, base.timeline, base.step))
        if found is None:
            return None
        if found.tombstone:
            raise RemovedThereError(f"step {base.step} of run {r.run} was removed at {r.store.location.url}")
        existing = Base(base.timeline, base.step, found.attempt)
        require_same(r, base, existing)
        return existing

    def _commit(self, attempt: Attempt, base: Base) -> Base:
        """Write COMMIT if the decision is "commit", and return the step that COMMIT names.

        Raises `FinalError` if the attempt was aborted.
        """
        store = self._route.store
        decision = commit.find_decision(store, attempt.decision_key)
        action = commit.decide(attempt, commit.View(decision=decision))
        if isinstance(action, commit.Stop):
            raise action.error
        commit.write_commit(store, attempt, self._clock)
        existing = self._existing(base)
        if existing is None:
            raise RemovedThereError(f"{attempt} was removed at {store.location.url}")
        return existing


def require_same(route: Route, base: Base, found: Base) -> None:
    """Raise `ConflictError` if the step that the destination has is not the step of the source."""
    if not same_step(route.source, route.source_run, base, route.store, route.run, found):
        raise ConflictError(
            f"step {base.step} of run {route.run} exists at {route.store.location.url} with other content",
            hint="copy it under another run name with --as",
        )


@dataclass(slots=True)
class _Copy:
    """The packs and manifests of one attempt. `own`: chunks in packs of the attempt."""

    route: Route
    index: ChunkIndex
    step: Sealed
    attempt: Attempt
    bases: set[Base]
    workers: int
    sent: Sent
    report: Callable[[Sent], object]
    own: dict[bytes, Stored] = field(default_factory=dict)

    def run(self) -> None:
        """Write everything up to the last manifest."""
        store, attempt = self.route.store, self.attempt
        self.own = chunk_copies.take_over(store, attempt.id)
        stored_ranks = commit.look(store, attempt, lease_alive=True).manifests
        copier = ChunkCopier(self.route.source, store, attempt.id, self.workers, self._copied)
        ranks = chunk_copies.executor(min(self.workers, attempt.world_size), "copy-rank")
        try:
            work = ((manifest, manifest.rank in stored_ranks) for manifest in _manifests(self.route.source, self.step))
            for _ in fetch.in_order(ranks, lambda each: self._rank(copier, *each), work, self.workers):
                pass
        finally:
            ranks.shutdown(cancel_futures=True)
            copier.close()

    def _rank(self, copier: ChunkCopier, manifest: Manifest, is_stored: bool) -> None:
        total = sum(chunk.raw for chunk in manifest.chunks)
        if is_stored:
            self._require_stored(manifest)
            self.sent.add(found=total, total=total)
            return
        placing = place(manifest, self.index, self.own, self.route.store)
        if placing.bases - self.bases:
            raise _BaseRemovedError("the destination changed during the copy", hint="copy again")
        copied = sum(manifest.chunks[number].raw for number in (*placing.plain, *placing.differences))
        self.sent.add(found=total - copied, total=total)
        self._send(copier, manifest, placing)
        _packs_copied()
        self._copy_description(manifest)
        encoded = manifests.encode(
            build(
                manifest,
                placing.places,
                run=self.route.run,
                attempt=self.attempt.id,
                bases=tuple(sorted(placing.bases, key=lambda each: (each.run, each.timeline, each.step))),
            )
        )
        if not self.route.store.put_if_absent(self.attempt.manifest_key(manifest.rank), encoded):
            self._require_stored(manifest)
        _manifest_copied()

    def _send(self, copier: ChunkCopier, manifest: Manifest, placing: Placing) -> None:
        """Copy the chunks that the destination lacks: first those that are stored whole, then differences from them."""
        try:
            for numbers, links in ((placing.plain, False), (placing.differences, True)):
                rows = [manifest.chunks[number] for number in numbers]
                targets = {row.digest: placing.places[placing.base_of[row.digest]] for row in rows} if links else {}
                keyed = [(manifest.packs[row.pack].key, row) for row in rows]
                new = copier.copy(manifest.rank, keyed, Links(targets)) if rows else {}
                placing.places.update(new)
                if not links:
                    self._remember(new)
        except DamagedChunk as damaged:
            raise self._damage(manifest, damaged) from None

    def _copy_description(self, manifest: Manifest) -> None:
        """Copy the description that the step names. One that the source lacks, or that is damaged there, is left out."""
        digest = manifest.description
        if not digest:
            return
        try:
            data = descriptions.read_data(self.route.source, self.step.run, digest)
        except CorruptionError as error:
            _log.warning(
                "step %s of run %s is copied without its description: %s", self.step.base.step, self.step.run, error
            )
            return
        if data is not None:
            self.route.store.put_if_absent(names.description(self.route.run, digest), data)

    def _remember(self, new: Mapping[bytes, Stored]) -> None:
        """Let other ranks of the step reference these chunks."""
        if self.attempt.world_size > 1 and len(self.own) + len(new) <= _MOST_OWN:
            self.own.update(new)

    def _require_stored(self, manifest: Manifest) -> None:
        """Check that the manifest that another copier stored has the content of the source's manifest."""
        key = self.attempt.manifest_key(manifest.rank)
        found = manifests.decode(self.route.store.get(key, max_bytes=manifests.MAX_BYTES), key)
        if not same_content(manifest, found):
            raise CorruptionError(
                f"{key} is not a copy of the manifest of rank {manifest.rank}",
                hint="please report this as a bug of Headrace; the step is not committed",
            )

    def _copied(self, stored: int) -> None:
        self.sent.add(sent=stored, chunks=1)
        self.report(self.sent)

    def _damage(self, manifest: Manifest, damaged: DamagedChunk) -> HeadraceError:
        chunk, step = damaged.chunk, self.step
        hit = sorted(
            {
                tensor.name
                for tensor in manifest.tensors
                if any(manifest.chunks[span.chunk].digest == chunk.digest for span in tensor.spans)
            }
        )
        more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
        tensor = f"tensor {hit[0]!r:.200}{more}" if hit else "the base of a difference"
        return CorruptionError(
            f"step {step.base.step} of run {step.run} is damaged: rank {manifest.rank}, {tensor}, "
            f"{chunk.stored} bytes at offset {chunk.offset} of {damaged.pack_key}; the step is not copied",
            hint="copy other steps; `headrace ckpt check` at the source lists what else is damaged",
        )


def _manifests(store: Store, step: Sealed) -> Iterator[Manifest]:
    """The manifests of a step, by rank. Few of them are in memory."""
    return fetch.read_manifests(store, step, fetch.digests_of(store, step, range(step.attempt.world_size)))
