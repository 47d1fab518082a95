"""Commits a staged arena by its put plan: in a thread of the trainer, or as a program that the daemon starts.

Order, each write durable before the next: lease → (base read) → packs → rank manifest → decision → COMMIT → lease
deleted. In a large job, most ranks take no lease (`headrace.checkpoint.repository.group_commit`).
Invariant: the worker only reads the arena, and never after `Released`. Two workers of one plan may run at the same
time, and the store may still apply late requests of a dead worker. So each process puts its own random digits into the
names of its packs, and the first manifest counts. When a worker ends, the step is absent, complete or committed.
Earlier steps are unchanged.
Failure behaviour: errors of `headrace.dataio.core.errors`. Packs that were uploaded before an error are garbage. As a
program (`python -m headrace.checkpoint.saving.commit_worker --arena-fd N --plan-fd M`) the worker prints events as
lines of JSON and ends with the error's exit code. It continues if its output is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from headrace.checkpoint.format import codec, names, own_digest
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Commit
from headrace.checkpoint.repository import commit, group_commit
from headrace.checkpoint.repository.commit import Attempt, FinalError
from headrace.checkpoint.repository.group_commit import LateLease
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.saving import plan as plans
from headrace.checkpoint.saving.plan import Committing, Done, Event, PutPlan, Released, failed, to_json
from headrace.checkpoint.saving.progress import ProgressFile, RecordingStore
from headrace.checkpoint.saving.upload import ArenaBytes, manifest_of, upload
from headrace.checkpoint.tier import saving
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CapacityError, HeadraceError, NotFoundError, TransientError, UsageError
from headrace.dataio.sidecar.jobs.gate import pass_by
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.open import open_location
from headrace.dataio.store.wrappers import PausableUploads

_ANY_BYTES = 1 << 62

_started = declare("ckpt.commit-started", "no object of the attempt is stored")
_leased = declare("ckpt.lease-written", "only the lease is stored: invisible")
_description_written = declare("ckpt.description-written", "only the lease and a description are stored: invisible")
_packs_written = declare("ckpt.packs-written", "all packs are stored, but no manifest: invisible")
_arena_released = declare(
    "ckpt.arena-released", "all packs are stored, the manifest is recorded, and the trainer owns the arena"
)
_manifest_written = declare("ckpt.manifest-written", "packs and this rank's manifest are stored: invisible")
_lease_deleted = declare("ckpt.lease-deleted", "committed, and the lease is deleted")


def commit_staged(
    arena: ArenaBytes | None,
    plan: PutPlan,
    emit: Callable[[Event], None],
    *,
    store: Store | None = None,
    local_tier: LocalTier | None = None,
    progress: ProgressFile | None = None,
    gate: Callable[[], None] | None = None,
    failed_ranks: commit.FailedRanks = commit.no_failed_ranks,
    on_kept: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, object]:
    """Commit the plan's step and return the report of the save.

    `store`: the store, if the caller has opened it already. `local_tier`: the node's tier. With `progress`, the worker
    continues where an earlier worker stopped; `arena` may be None if only the manifest is left to be written. `gate` is
    called before each piece is sent. `failed_ranks` is called with the ranks whose manifests are missing. `on_kept` is
    called when the tier has all of the rank's part.
    """
    progress = progress or ProgressFile(None)
    with contextlib.ExitStack() as opened:
        if store is None:
            inner: Store = opened.enter_context(open_location(plan.location.to_location()))
            store = RecordingStore(PausableUploads(inner, gate) if gate is not None else inner, progress)
        if local_tier is None:
            return _Commit(arena, plan, emit, store, None, progress, failed_ranks, clock).run() | {"kept": None}
        tier_save = opened.enter_context(saving.open_tier_save(store, plan, local_tier, clock, on_kept))
        work = _Commit(arena, plan, emit, tier_save.store, tier_save, progress, failed_ranks, clock)
        try:
            return work.run() | {"kept": tier_save.kept}
        except TransientError as error:
            if tier_save.can_save_locally:
                with contextlib.suppress(HeadraceError, OSError):  # the caller gets the store's error instead
                    work.keep_locally(tier_save)
            if tier_save.kept is None:
                raise
            raise saving.local_only_error(error, plan.step) from error


def keep_staged(
    arena: ArenaBytes,
    plan: PutPlan,
    emit: Callable[[Event], None],
    *,
    store: Store,
    local_tier: LocalTier,
    clock: Clock = SYSTEM_CLOCK,
) -> Record:
    """Keep the rank's part of the step in the node's tier only, and return its record. The store is not used.

    Raises `CapacityError` if the tier cannot take it.
    """
    with saving.open_tier_save(store, plan, local_tier, clock) as tier_save:
        work = _Commit(arena, plan, emit, tier_save.store, tier_save, ProgressFile(None), commit.no_failed_ranks, clock)
        work.keep_locally(tier_save)
        if tier_save.record is None:
            raise CapacityError(
                f"step {plan.step} is not saved: the tier in {local_tier.root} cannot be written",
                hint="see the log for the reason; the next save is uploaded",
            )
        return tier_save.record


def commit_kept(
    plan: PutPlan,
    *,
    store: Store,
    local_tier: LocalTier,
    failed_ranks: commit.FailedRanks = commit.no_failed_ranks,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, object]:
    """Upload the rank's part of a step that `keep_staged` has kept, and commit the step.

    Raises `NotFoundError` if the tier does not have it. `failed_ranks`: see `commit_staged`.
    """
    attempt = Attempt(plan.run, plan.timeline, plan.step, plan.attempt, plan.world_size)
    progress = ProgressFile(None)
    progress.finished(saving.kept_manifest(store.location.url, local_tier, attempt.manifest_key(plan.rank)))
    return commit_staged(
        None,
        plan,
        lambda _: None,
        store=store,
        local_tier=local_tier,
        progress=progress,
        failed_ranks=failed_ranks,
        clock=clock,
    )


@dataclass(slots=True)
class _Commit:
    """One commit. `store` writes through `tier_save` if the node has a local tier."""

    arena: ArenaBytes | None
    plan: PutPlan
    emit: Callable[[Event], None]
    store: Store
    tier_save: saving.TierSave | None
    progress: ProgressFile
    failed_ranks: commit.FailedRanks
    clock: Clock

    def run(self) -> dict[str, object]:
        """Commit the step and return the report."""
        plan, store, tier_save, began = self.plan, self.store, self.tier_save, self.clock.monotonic()
        attempt = Attempt(plan.run, plan.timeline, plan.step, plan.attempt, plan.world_size)
        is_head = group_commit.is_head(plan.rank, plan.world_size)
        _started()
        if (is_head or not self.progress.fresh) and (committed := _existing_commit(store, attempt)) is not None:
            self.emit(Released())
            return result_of(store, attempt, plan.rank, committed) | {"seconds": self.clock.monotonic() - began}
        with LateLease(self._lease(), now=is_head) as lease:
            _leased()
            self.progress.abandon(store)
            self._store_description()
            if tier_save is not None:
                tier_save.send_pending(self.progress.manifest)
            manifest, encoded = self._store_packs()
            if tier_save is not None:
                tier_save.complete(manifest, encoded)
            if self.progress.safe:
                self.emit(Released())
            _arena_released()
            won = store.put_if_absent(attempt.manifest_key(plan.rank), encoded)
            if not won and tier_save is not None:
                tier_save.withdraw()  # another worker's manifest counts
            _manifest_written()
            if not self.progress.safe:
                self.emit(Released())
            self.emit(Committing())
            committed = group_commit.finish(
                store,
                attempt,
                lease,
                timeout=plan.commit_timeout,
                rank=plan.rank,
                failed_ranks=self.failed_ranks,
                clock=self.clock,
            )
            if tier_save is not None:
                tier_save.committed(committed)
            lease.release()
            _lease_deleted()
        if won:
            result = _report(attempt, committed, manifest, digest(encoded))
        else:
            result = result_of(store, attempt, plan.rank, committed, manifest)
        return result | {"seconds": self.clock.monotonic() - began}

    def keep_locally(self, tier_save: saving.TierSave) -> None:
        """Keep the rank's whole part of the step in the tier while the store is unreachable.

        It is kept without references to bases, because no lease protects them. The next worker, or a restore, sends it
        from the tier. It has no description, unless an earlier save stored that: the store may never receive this one.
        """
        if self.arena is None:
            return
        tier_save.skip_store()
        alone = msgspec.structs.replace(self.plan, bases=())
        if alone.description_data:
            alone = msgspec.structs.replace(alone, description="", description_data=b"")
        stored = upload(self.arena, alone, self.emit, tier_save.store, ProgressFile(None))
        manifest = manifest_of(alone, stored, self.clock)
        encoded = manifests.encode(manifest)
        tier_save.complete(manifest, encoded)
        if tier_save.kept is not None:
            self.progress.finished(encoded)
            if self.progress.safe:
                self.emit(Released())

    def _lease(self) -> LeaseKeeper:
        plan = self.plan
        return LeaseKeeper(
            self.store,
            plan.attempt,
            run=plan.run,
            timeline=plan.timeline,
            step=plan.step,
            bases=plan.bases,
            life=plan.lease_seconds,
            clock=self.clock,
        )

    def _store_description(self) -> None:
        """Store the description, if the plan holds it. Its key is its digest, so another process writes the same bytes."""
        plan = self.plan
        if plan.description_data:
            self.store.put_if_absent(names.description(plan.run, plan.description), plan.description_data)
            _description_written()

    def _store_packs(self) -> tuple[manifests.Manifest, bytes]:
        """Store every pack that the manifest needs, and return the manifest and its encoding.

        Afterwards the arena is not needed.
        """
        progress, plan = self.progress, self.plan
        if progress.manifest is not None:
            return progress.require_packs(self.store, plan, progress.manifest), progress.manifest
        if self.arena is None:
            raise _lost(plan)
        stored = upload(self.arena, plan, self.emit, self.store, progress)
        _packs_written()
        manifest = manifest_of(plan, stored, self.clock)
        encoded = manifests.encode(manifest)
        progress.finished(encoded)
        return manifest, encoded


def _existing_commit(store: Store, attempt: Attempt) -> Commit | None:
    """The COMMIT, if an earlier worker wrote it. Raises if the attempt can no longer become the step."""
    grouped = names.is_grouped(attempt.world_size)
    view = group_commit.existing(store, attempt) if grouped else commit.look(store, attempt, lease_alive=True)
    action = commit.decide(attempt, view)
    if isinstance(action, commit.Stop):
        raise action.error
    if isinstance(action, commit.Committed):
        store.delete_many([names.lease(attempt.id)])
    return view.commit


def _lost(plan: PutPlan) -> FinalError:
    return FinalError(
        f"step {plan.step} of run {plan.run} is lost: the processes that held its bytes ended before they were stored",
        hint="the earlier steps are untouched; save again",
    )


def result_of(
    store: Store, attempt: Attempt, rank: int, committed: Commit, manifest: manifests.Manifest | None = None
) -> dict[str, object]:
    """The report of a committed save, from the rank's manifest in the store.

    `manifest`: the manifest that this worker built. The report is made from it if a policy has already removed the step,
    or if the store is unreachable. It then does not name the manifest, because another worker's manifest may count.
    """
    key = attempt.manifest_key(rank)
    try:
        data = own_digest.fetch(store, key, max_bytes=manifests.MAX_BYTES)
    except (NotFoundError, TransientError):
        if manifest is None:
            raise
        return _report(attempt, committed, manifest, None)  # which may not be the manifest that counts
    return _report(attempt, committed, manifests.decode(data, key), digest(data))


def _report(attempt: Attempt, committed: Commit, manifest: manifests.Manifest, name: bytes | None) -> dict[str, object]:
    """The report. `name`: the digest of the manifest that counts; None if it is not known."""
    named = {} if name is None else {"manifest": name.hex()}
    return named | {
        "run": attempt.run,
        "timeline": attempt.timeline,
        "step": attempt.step,
        "attempt": attempt.id,
        "rank": manifest.rank,
        "bytes_state": manifest.bytes_state,
        "bytes_written": manifest.bytes_written,
        "bytes_deduplicated": manifest.bytes_deduplicated,
        "encodings": {codec.NAMES[kind]: sizes for kind, sizes in manifests.encodings(manifest).items()},
        "committed": committed.committed,
        "seconds": max(committed.committed - manifest.created, 0.0),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The program that the module's docstring describes."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.checkpoint.saving.commit_worker", description="Commit one staged checkpoint."
    )
    parser.add_argument("--arena-fd", type=int, required=True, help="descriptor of the staging arena")
    parser.add_argument("--plan-fd", type=int, required=True, help="descriptor that the put plan is read from")
    saving.add_flags(parser)
    parser.add_argument("--progress-fd", type=int, default=-1, help="file that records the progress of earlier workers")
    parser.add_argument("--gate-fd", type=int, default=-1, help="lock that is passed before each piece that is sent")
    options = parser.parse_args(argv)
    progress = ProgressFile(options.progress_fd if options.progress_fd >= 0 else None)
    gate = partial(pass_by, options.gate_fd) if options.gate_fd >= 0 else None
    try:
        arena, local_tier = _mapped(options.arena_fd), saving.local_tier_from(options)
        plan = plans.decode(_read_plan(options.plan_fd), _ANY_BYTES if arena is None else len(arena))
        result = commit_staged(arena, plan, _print, local_tier=local_tier, progress=progress, gate=gate)
    except HeadraceError as error:
        _print(failed(error, again=_may_succeed_later(error)))
        return error.exit_code
    _print(Done(result))
    return 0


def _may_succeed_later(error: HeadraceError) -> bool:
    """Whether the same plan may be tried again: the store was unreachable, or the lease expired."""
    return isinstance(error, TransientError) and not isinstance(error, FinalError)


def _mapped(fd: int) -> memoryview | None:
    """Map the arena read-only until the process ends. Returns None for a negative `fd`: there is no arena then."""
    if fd < 0:
        return None
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))


def _read_plan(fd: int) -> bytes:
    with contextlib.suppress(OSError):  # a pipe has no position
        os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        data = file.read(plans.MAX_BYTES + 1)
    if len(data) > plans.MAX_BYTES:
        raise UsageError(f"the put plan is larger than {plans.MAX_BYTES} bytes")
    return data


def _print(event: Event) -> None:
    with contextlib.suppress(OSError):  # the pipe is closed or the disk is full; the repository holds the outcome
        sys.stdout.write(to_json(event) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
