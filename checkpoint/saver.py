"""One save, from a state to its commit: the ranks agree, each copies its state, and a thread commits it.

Invariant: `start` returns after one copy of the state in memory, or with the copy in progress if staging is lazy. A
rank that fails after the ranks have agreed aborts the attempt. The other ranks then stop waiting when they next read
the store.
Failure behaviour: `start` raises errors that occur before the copy is made. Later errors are logged, and the handle
keeps them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from headrace.checkpoint.attachments import NOTHING, Extras
from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Layout, TensorSpec, lay_out
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.saving import DeviceSlices
from headrace.checkpoint.handle import Handle, Name, SaveResult
from headrace.checkpoint.lineage import Lineage, Ticket
from headrace.checkpoint.peers import PeerProbe, Peers, card
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.recording import Description
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.collect import Retention
from headrace.checkpoint.repository.commit import Attempt, FinalError
from headrace.checkpoint.repository.lease import DEFAULT_LIFE
from headrace.checkpoint.saves import Saves
from headrace.checkpoint.saving import plan
from headrace.checkpoint.saving.arena import Arena, StagedCopy, Staging
from headrace.checkpoint.saving.copying import Copying, OptimizerGate, late_tensors, optimizers_in
from headrace.checkpoint.saving.executor import SaveExecutor
from headrace.checkpoint.saving.slices import SlicedState, released_after
from headrace.checkpoint.saving.staged_save import StagedSave
from headrace.checkpoint.saving.stored_files import WithFiles
from headrace.checkpoint.state import replicas as comparing
from headrace.checkpoint.state.save_plan import (
    FlatState,
    PreparedSave,
    SavePlanner,
    expected,
    flatten_state,
    with_artifacts,
)
from headrace.checkpoint.tier.saving import LocalOnlyError, not_uploaded
from headrace.dataio.core import metrics
from headrace.dataio.core.errors import ConflictError, HeadraceError, MismatchError, TransientError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.core.tracing import span
from headrace.dataio.sidecar.client import SaveMeter
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
_HINT_BYTES, _SLOW_SPEED = 64 << 20, 300e6
"""The next save gets the speed of a slow save as a hint, so that it can compress from its first byte on.

A save is slow if it has at least this many bytes and stores fewer than this many bytes per second.
"""

_RETURN_SECONDS = 1.0
"""Seconds that a commit waits for `save` to return after the copy. It takes microseconds."""

_ABORT_SECONDS = 30.0
"""Seconds that closing waits for the thread that aborts an attempt, and for the thread that prepares the repository."""

_KEPT_PLANS = 4
"""The number of plans of kept steps that are remembered, to find the last one. Two such saves may end in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a `Checkpointer` that concern saves."""

    compression: str
    check_replicas: str
    lazy: bool
    timeout: float
    staging_bytes: int | None
    replicated: Callable[[str], bool]
    newest_only: bool = False
    """Whether a save is only kept in the tier while an earlier one is being uploaded."""


class Saver:
    """Runs the saves of one checkpointer. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        ranks: Ranks,
        lineage: Lineage,
        saves: Saves,
        executor: SaveExecutor,
        meter: SaveMeter,
        direct: Direct | None,
        retention: Retention | None,
        options: Options,
        description: Description | None = None,
    ) -> None:
        self._store, self._run, self._ranks, self._lineage = store, run, ranks, lineage
        self._saves, self._executor, self._meter, self._direct = saves, executor, meter, direct
        self._retention, self._options, self.timeout = retention, options, options.timeout
        self._description = description
        self.staging = Staging(options.staging_bytes)
        self._optimizer_gate, self._planner = OptimizerGate(), SavePlanner()
        self._peers: Peers | None = None
        self._kept_plans = deque[plan.PutPlan](maxlen=_KEPT_PLANS)
        self._newest_attempt = ""
        self._some_lack_tier = False
        self._aborting: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self.upload_hint = 0.0

    def start(
        self,
        step: int,
        state: dict[str, Any],
        urgent: bool,
        check: Callable[[], Extras],
        name: Name | None = None,
        may_skip: bool = False,
    ) -> Handle:
        """Copy the state and start its commit in a thread.

        `check` is called first, and returns what is saved with the state. If it raises on one rank, all ranks raise.
        `name` is published when the step is committed. `may_skip`: the step may be kept without being uploaded.
        """
        with span("save", step=step):
            began = time.perf_counter()
            ticket, flat, extras = self._agree(step, state, check, may_skip)
            if not ticket.timeline:
                return self._not_begun(step, ticket)
            try:
                handle, copying, commit_thread, undo = self._begin(step, ticket, state, flat, extras, urgent, name)
                del flat  # PyTorch takes far longer to free many tensors while another thread runs Python
                with undo:
                    commit_thread.start()
                    undo.pop_all()  # from now on the thread owns the arena and the copy
            except BaseException as error:
                if name is not None:
                    name.withdraw(error)
                self._abort_in_background(self._attempt(step, ticket), error)
                raise
            self._newest_attempt = ticket.attempt
            self._saves.add(handle)
            if self._options.lazy or not copying.sealed:
                self._wait_or_watch(state, copying)
            handle.set_stall(time.perf_counter() - began)
            metrics.checkpoint_stall_seconds.observe(handle.stall)
            self._meter.stalled(handle.stall)
            return handle

    def _wait_or_watch(self, state: dict[str, Any], copying: Copying | SlicedState) -> None:
        """With lazy staging, make the optimizers wait for the copy. Else, wait here until all slices are copied."""
        self._optimizer_gate.watch(optimizers_in(state) if self._options.lazy else (), copying)
        if not self._options.lazy:
            self._optimizer_gate.pass_all()
            copying.wait_seconds = 0.0  # this wait counts as part of the stall

    def _not_begun(self, step: int, ticket: Ticket) -> Handle:
        """A handle that has failed because the store is unreachable and the save has no timeline. Nothing is copied."""
        error = TransientError(
            f"step {step} is not saved: rank 0 could not open the run's timeline: {ticket.store_error}",
            hint="the next save tries again",
        )
        handle = Handle(step, ticket.attempt)
        self._log_failure(step, error)
        handle.set_error(error)
        self._saves.add(handle)
        return handle

    def warm_up(self, state: dict[str, Any]) -> None:
        """Allocate the memory for saves of `state` and prepare the repository, in threads.

        No collective calls are made.
        """
        self.staging.warm_up(
            expected(flatten_state(state, self._options.replicated), self._ranks.rank, self._ranks.world_size)
        )
        if self._ranks.rank == 0 and self._preparing is None:
            self._preparing = threading.Thread(target=self._prepare, name="headrace-prepare")
            self._preparing.start()

    def join(self) -> None:
        """Wait for the thread that prepares the repository. It ends soon after the store is closed."""
        if self._preparing is not None:
            self._preparing.join(_ABORT_SECONDS)

    def close(self) -> None:
        """Release memory, connections and hooks."""
        if self._aborting is not None:
            self._aborting.join(_ABORT_SECONDS)
        if self._peers is not None:
            self._peers.close()
        self._optimizer_gate.close()
        self.staging.close()

    def _prepare(self) -> None:
        try:
            self._lineage.prepare()
        except HeadraceError as error:  # the first save raises it
            _log.warning("the store could not be checked in advance: %s", error)

    # with the other ranks

    def _agree(
        self, step: int, state: dict[str, Any], check: Callable[[], Extras], may_skip: bool
    ) -> tuple[Ticket, FlatState, Extras]:
        """Agree on one attempt on all ranks; return its ticket, this rank's flattened state, and what `check` returned."""
        flat, extras, message, error = None, NOTHING, b"", None
        try:
            extras = check()
            with gc_paused():
                flat = self._planner.known(flatten_state(state, self._options.replicated))
            if self._ranks.rank == 0:
                local = may_skip and self._is_skipped()
                message = msgspec.msgpack.encode(self._lineage.new_ticket(step, local))
        except Exception as caught:  # any error must be reported to the other ranks
            error = caught
        number = step if isinstance(step, int) and 0 <= step < names.STEP_LIMIT else 0
        ticket = msgspec.msgpack.decode(self._ranks.agree(number, message, error), type=Ticket)
        assert flat is not None
        if ticket.timeline:
            self._lineage.set_timeline(ticket.timeline)
        if self._peers is None and self._ranks.world_size > 1:
            probe = PeerProbe()
            self._peers = Peers(self._ranks.all(card(probe)), self._ranks.rank, probe)
            if self._options.newest_only:
                self._agree_on_tiers()
        return ticket, flat, extras

    def _agree_on_tiers(self) -> None:
        """Upload every step if a rank has no tier: otherwise that rank could not keep its part of the others."""
        lacks_tier = self._executor.tier.find() is None
        self._some_lack_tier = bool(self._ranks.maximum(bytes([lacks_tier]))[0])
        if self._some_lack_tier and not lacks_tier:
            warn_once(
                _log, 'uploads="newest": the node of another rank has no local tier: every step is uploaded', "job"
            )

    def _is_skipped(self) -> bool:
        """Whether the next step is only kept, because an earlier one is on its way to the store. Rank 0 decides it."""
        is_possible = self._options.newest_only and self._executor.tier.is_there and not self._some_lack_tier
        return is_possible and self._saves.uploading

    def _compare_replicas(self, step: int, prepared: PreparedSave) -> tuple[str, ...]:
        """Names of replicated tensors that differ between ranks. The ranks concerned and rank 0 log them."""
        if self._options.check_replicas == "off" or self._ranks.world_size == 1:
            return ()
        differing = comparing.diverged(prepared, self._ranks, step)
        concerned = any(self._ranks.rank in (0, *each.ranks) for each in differing)
        if concerned:
            metrics.checkpoint_replicas_diverged.inc(len(differing))
        if differing and self._options.check_replicas == "error":
            raise MismatchError(
                f"step {step} is not saved: tensors with the same name, which are written once, differ between ranks: "
                f"{', '.join(map(str, differing[:8]))}",
                hint="give values of one rank (a pipeline stage, experts) a separate name, as in "
                '{f"stage{stage}": model}; if they should be equal, check those ranks; check_replicas="warn" saves one of them',
            )
        if concerned:
            _log.warning(
                "step %d: tensors that should be the same on several ranks differ: %s",
                step,
                ", ".join(map(str, differing[:8])),
            )
        return tuple(each.name for each in differing)

    # the copy

    def _begin(
        self,
        step: int,
        ticket: Ticket,
        state: dict[str, Any],
        flat: FlatState,
        extras: Extras,
        urgent: bool,
        name: Name | None,
    ) -> tuple[Handle, Copying | SlicedState, threading.Thread, contextlib.ExitStack]:
        """Copy the state. Return its handle, the copy, the thread that commits it, and what undoes all that."""
        prepared = self._planner.prepare(flat, self._ranks)
        handle = Handle(step, ticket.attempt, local=ticket.local)
        handle.diverged = self._compare_replicas(step, prepared)
        # the next two come after all collective calls, because they may fail on this rank alone
        prepared = with_artifacts(prepared, extras.artifacts, {n: file.nbytes for n, file in extras.files.items()})
        if name is not None:
            name.prepare(Base(ticket.timeline, step, ticket.attempt))
        # an urgent save gets its own memory instead of waiting for an earlier save to release the arena
        staging = Staging(self.staging.limit) if urgent and self.staging.busy else self.staging
        specs = prepared.specs[: len(prepared.tensors)]
        layout = lay_out(specs) if extras.files else prepared.layout
        with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
            if staging is not self.staging:
                always.callback(staging.close)  # its memory is freed when its worker releases it
            arena = staging.take(layout, self.timeout)
            undo.callback(staging.give_back)
            with span("stage.d2h", step=step, bytes=layout.total):
                copying = self._copy(staging, arena, state, prepared.tensors, specs, layout)
            undo.callback(copying.cancel)
            handle.follow(copying)
            put_plan = self._plan(step, ticket, prepared, extras)
            save = _with_files(self._staged_save(put_plan, staging, arena, copying, handle, urgent), prepared, extras)
            save = replace(save, local=ticket.local, kept=handle.set_kept)
            kept = staging is self.staging and not isinstance(copying, SlicedState)
            copy = StagedCopy(ticket.attempt, prepared.tree, tuple(specs), layout) if kept else None
            commit_thread = threading.Thread(
                target=self._commit_staged, args=(save, handle, copying, copy, name), name=f"headrace-save-{step}"
            )
            return handle, copying, commit_thread, undo.pop_all()

    def _plan(self, step: int, ticket: Ticket, prepared: PreparedSave, extras: Extras) -> plan.PutPlan:
        location = self._store.location
        return plan.PutPlan(
            location=plan.PlanLocation(location.url, dict(location.options)),
            run=self._run,
            timeline=ticket.timeline,
            step=step,
            attempt=ticket.attempt,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            bases=ticket.bases,
            tensors=plan.plan_tensors(prepared.specs, prepared.layout),
            small_bytes=prepared.layout.small_bytes,
            tree=prepared.tree,
            replicas=prepared.replicas,
            compression=self._options.compression,
            upload_hint=self.upload_hint,
            lease_seconds=DEFAULT_LIFE,
            commit_timeout=self.timeout,
            own_manifest=self._executor.own_manifest,
            metadata=extras.metadata if self._ranks.rank == 0 else {},
        )

    def _copy(
        self,
        staging: Staging,
        arena: Arena,
        state: object,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        layout: Layout,
    ) -> Copying | SlicedState:
        if not staging.fits(layout):
            sliced = "the state is larger than staging_bytes: it is copied in slices, as fast as it is written"
            warn_once(_log, sliced, "job")
            if self._direct is None or not any(tensor.device.type == self._direct.device for tensor in tensors):
                return SlicedState(arena, tensors, specs=specs, layout=layout)
            return DeviceSlices(self._direct, arena, tensors=tensors, specs=specs, layout=layout)
        late = late_tensors(state, tensors) if self._options.lazy else frozenset()
        return Copying(staging.pool, arena, tensors=tensors, specs=specs, layout=layout, late=late)

    def _staged_save(
        self,
        put_plan: plan.PutPlan,
        staging: Staging,
        arena: Arena,
        copying: Copying | SlicedState,
        handle: Handle,
        urgent: bool,
    ) -> StagedSave:
        sliced = copying if isinstance(copying, SlicedState) else None
        peers = self._peers
        return StagedSave(
            plan=put_plan,
            arena_fd=-1 if sliced else arena.fd,
            view=(lambda: sliced) if sliced is not None else arena.view,
            give_back=staging.give_back if sliced is None else released_after(sliced, staging.give_back),
            abandon=staging.abandon if sliced is None else released_after(sliced, staging.abandon),
            handed_over=handle.set_staged,
            urgent=urgent,
            through=copying.store if isinstance(copying, DeviceSlices) else None,
            failed_ranks=peers.failed_ranks if peers is not None else commit.no_failed_ranks,
            silent_ranks=peers.silent_ranks if peers is not None and peers.across else None,
        )

    # in a thread

    def _commit_staged(
        self,
        save: StagedSave,
        handle: Handle,
        copying: Copying | SlicedState,
        copy: StagedCopy | None,
        name: Name | None,
    ) -> None:
        """Wait for the copy, commit it, and set the handle's result or error. Runs in a thread."""
        try:
            try:
                copying.join()
                if copy is not None:
                    self.staging.set_copy(copy)
            except BaseException:
                save.give_back()
                raise
            save = self._described(save, None if isinstance(copying, SlicedState) else handle)
            with span("commit", step=handle.step):
                if save.local:
                    self._keep(save, handle)
                    return
                result = self._executor.commit_staged(save)
            if name is not None:
                name.publish()
        except BaseException as error:
            if name is not None:
                name.withdraw(error)
            self._failed(save.plan, handle, error)
            return
        self._committed(save.plan, handle, result, sliced=isinstance(copying, SlicedState))

    def _committed(self, put_plan: plan.PutPlan, handle: Handle, result: dict[str, object], *, sliced: bool) -> None:
        """Report a commit, remove older steps, and set the handle's result."""
        waits = {"stall": handle.stall, "wait_seconds": handle.wait_seconds, "sliced": sliced}
        saved = msgspec.convert(
            result | waits | {"committed_by": handle.committed_by, "diverged": handle.diverged}, SaveResult
        )
        metrics.checkpoint_saves.labels("committed").inc()
        metrics.checkpoint_waited_seconds.observe(saved.wait_seconds)
        self._meter.committed(handle.step, msgspec.convert(result["committed"], float), saved.wait_seconds)
        for kind in ("state", "written", "deduplicated"):
            metrics.checkpoint_bytes.labels(kind).inc(getattr(saved, f"bytes_{kind}"))
        if saved.bytes_written >= _HINT_BYTES and saved.bytes_written / max(saved.seconds, 1e-9) < _SLOW_SPEED:
            self.upload_hint = saved.bytes_written / saved.seconds
        self._lineage.release()
        if self._description is not None:
            self._description.stored(put_plan.description)
        if self._retention is not None:
            self._retention.committed()
        handle.set_result(saved)  # last: the caller may close the store as soon as it is set

    def _keep(self, save: StagedSave, handle: Handle) -> None:
        """Keep the step in the tier only. That is no failure, so the next save does not raise it."""
        self._executor.tier.keep(save)
        metrics.checkpoint_saves.labels("kept").inc()
        self._kept_plans.append(save.plan)
        handle.fetched = True
        handle.set_error(not_uploaded(handle.step))

    def upload_last(self) -> tuple[Handle, step_metadata.Metadata] | None:
        """Start to upload the last step, if it was only kept in the tier; returns its new handle and its metadata.

        All ranks call it, after all saves ended.
        """
        last = next((each for each in self._kept_plans if each.attempt == self._newest_attempt), None)
        if last is None:
            return None
        handle = Handle(last.step, last.attempt)
        handle.set_kept()
        self._saves.add(handle)
        threading.Thread(target=self._upload_last, args=(last, handle), name=f"headrace-save-{last.step}").start()
        return handle, step_metadata.given(last.metadata)

    def _upload_last(self, last: plan.PutPlan, handle: Handle) -> None:
        """Upload a kept step, and set the handle's result or error. Runs in a thread."""
        peers = self._peers
        try:
            result = self._executor.tier.commit_kept(
                last, peers.failed_ranks if peers is not None else commit.no_failed_ranks
            )
        except BaseException as error:
            self._failed(last, handle, error)
            return
        self._committed(last, handle, result, sliced=False)

    def _described(self, save: StagedSave, handle: Handle | None) -> StagedSave:
        """The save with the description of the run, and with the stall of `handle`.

        The first call may take the time of `git`. `handle` is None if the stall ends later than the commit begins.
        """
        if self._description is None:
            return save
        name, data = self._description.current(urgent=save.urgent)
        metadata = dict(save.plan.metadata)
        if self._description.records and handle is not None:
            stall = handle.stall_within(_RETURN_SECONDS)
            metadata = metadata if stall is None else step_metadata.with_stall(metadata, stall)
        described = msgspec.structs.replace(save.plan, description=name, description_data=data, metadata=metadata)
        return replace(save, plan=described)

    def _failed(self, put_plan: plan.PutPlan, handle: Handle, error: BaseException) -> None:
        self._log_failure(handle.step, error)
        if not handle.may_commit_after(error):
            self._abort(
                Attempt(put_plan.run, put_plan.timeline, put_plan.step, put_plan.attempt, put_plan.world_size), error
            )
        handle.set_error(error)  # last: the caller may close the store as soon as it is set

    # when this rank has failed

    @staticmethod
    def _log_failure(step: int, error: BaseException) -> None:
        metrics.checkpoint_saves.labels("failed").inc()
        detail = None if isinstance(error, HeadraceError) else error
        _log.error("step %d was not saved; training continues: %s", step, error, exc_info=detail)

    def _attempt(self, step: int, ticket: Ticket) -> Attempt:
        return Attempt(self._run, ticket.timeline, step, ticket.attempt, self._ranks.world_size)

    def _abort_in_background(self, attempt: Attempt, error: BaseException) -> None:
        if self._ranks.world_size > 1:
            name = f"headrace-abort-{attempt.step}"
            self._aborting = threading.Thread(target=self._abort, args=(attempt, error), name=name)
            self._aborting.start()

    def _abort(self, attempt: Attempt, error: BaseException) -> None:
        """Abort the attempt, so that the other ranks stop waiting.

        An attempt that has ended, or that may still be committed, is not aborted.
        """
        if self._ranks.world_size == 1 or isinstance(error, ConflictError | FinalError | LocalOnlyError):
            return
        with contextlib.suppress(Exception):  # the original error of this rank must not be hidden
            reason = f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}"
            commit.abort(self._store, attempt, reason)


def _with_files(save: StagedSave, prepared: PreparedSave, extras: Extras) -> StagedSave:
    """The save with large artifacts after the state. The daemon does not have their files, so this process saves."""
    if not extras.files:
        return save
    places = prepared.layout.offsets[len(prepared.tensors) :]
    files, total = list(zip(places, extras.files.values(), strict=True)), prepared.layout.total
    view = save.view
    return replace(save, arena_fd=-1, view=lambda: WithFiles(view(), files, total))
