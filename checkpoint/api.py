"""`Checkpointer`: save and restore the state of a training run.

Invariant: `save` returns after one copy of the state in memory; everything else happens behind it, in the node's sidecar or in
a thread. A step exists when it is committed, whole, and is then restored bit for bit. The first save opens the run's next
timeline, as a child of the step that was restored, which stops any trainer that still believes the run to be its own.
Failure behaviour: a save that fails in the background is logged as an error, raised by its handle, and by the next `save`
or `close` if nobody has fetched it by then; training goes on meanwhile and earlier steps are untouched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from checkpoint import preemption
from checkpoint.format import layout as layouts
from checkpoint.format import names
from checkpoint.format.codec import COMPRESSIONS
from checkpoint.format.layout import TensorSpec
from checkpoint.gds.file import Direct
from checkpoint.gds.saving import RING_BYTES, DeviceSlices
from checkpoint.gds.store import GdsStore, direct_for
from checkpoint.handle import Handle, SaveResult
from checkpoint.lifecycle.automatic import Retention
from checkpoint.lifecycle.keep import Keep
from checkpoint.lineage import Lineage, Ticket
from checkpoint.ranks import Ranks
from checkpoint.repository import steps as repository
from checkpoint.repository.lease import DEFAULT_LIFE
from checkpoint.restoring import restore
from checkpoint.restoring.apply import apply
from checkpoint.saving import plan
from checkpoint.saving.carriers import Cargo, Carriers
from checkpoint.staging import governed
from checkpoint.staging.arena import Arena, Staging
from checkpoint.staging.copying import Copying
from checkpoint.staging.slices import SlicedState, check_limit
from checkpoint.state import replicas as comparing
from checkpoint.state.kinds import TorchKinds
from checkpoint.state.prepare import Prepared, Taken, expected, prepare, take_apart
from checkpoint.state.selection import Selection
from checkpoint.tier import reading
from checkpoint.tier.reading import NodeTier, node_tier
from dataio.core import metrics
from dataio.core.errors import ConflictError, DeadlineError, MillraceError, MismatchError, UsageError
from dataio.core.log import get_logger, warn_once
from dataio.core.trace import span
from dataio.sidecar.client import SaveMeter
from dataio.store.contract import Store
from dataio.store.open import open_store

_log = get_logger(__name__)
_KINDS = TorchKinds()
PRIORITIES = ("normal", "preemption")
_TELLING, _SLOW = 64 << 20, 300e6
"""A save of so many bytes, slower than so many a second, tells the next one that compression may pay from its first byte on."""
_IN_FLIGHT = 2
"""Saves on their way at once: one whose arena is still needed, one that only waits for its commit."""


class Checkpointer:
    """Saves to and restores from one run of the repository at `url`.

    `url` is a path, `file:///path`, `s3://bucket/prefix` or an open `Store`; `storage_options` as for `open_store`.
    `sidecar` is "auto" (the node's daemon where one answers), the path of its socket, or None (inside this process).
    `rank` and `world_size` come from torch.distributed when it is initialised. `compression` is "none", "zstd", "auto" (for
    each tensor what makes the save durable sooner at the store's speed, by measurement: on fast stores nothing) or "delta"
    (as "auto", with differences from an earlier step as one more choice).
    `base`: another run of this repository, or (run, step) of one, that this run starts from: its first save finds there what
    has not changed. A step of another run that was restored is leaned on likewise.
    `keep`: after each commit rank 0 removes the run's steps that this policy does not keep; None keeps all.
    `failed_saves` is "log" (a save that failed in the background is an error in the log, in metrics, at its handle and at
    `close`; training goes on) or "raise" (the next `save` raises it as well). That another trainer took over is always raised.
    `staging` is "eager" (`save` returns when the state is copied) or "lazy" (parameters and optimizer state are copied behind
    what the trainer does next, and the next step of an optimizer in the state waits for what is not copied by then).
    `replicas`: tensors that several ranks hold are compared at each save, by samples (`checkpoint.state.replicas`): those that
    differ are named in a warning, a metric and `SaveResult.diverged` ("warn"), or the save is refused on all ranks ("error");
    "trust" compares nothing.
    `staging_bytes`: the most memory for the copy, None for what the state needs; a larger state is copied in slices, as
    fast as they are written, inside this process.
    `gds`: by GPUDirect Storage where a probe of the directory says that it works, else as ever, which the log explains: raw
    chunks go between tensors on the GPU and packs without the CPU. A save is then in slices (`staging_bytes`, 128 MiB if
    nothing is said).
    `wait_seconds` bounds each wait: for the arena, for other ranks, for a save in flight on `close` and `restore`.
    Methods are for one thread at a time; handles are for any.

    With several ranks `save` and `restore` are called on all of them with the same step. Tensors of modules, optimizers
    and schedulers are taken to be the same everywhere and written once, the work spread over the ranks (modules' buffers,
    such as running means, may differ: rank 0's are written). Everything else is kept per rank; a rank that the step was
    not saved with gets the rank-local values of rank 0.
    """

    def __init__(
        self,
        url: str | Store,
        *,
        run: str,
        sidecar: str | os.PathLike[str] | None = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        compression: str = "none",
        base: str | tuple[str, int] | None = None,
        keep: Keep | None = None,
        failed_saves: str = "log",
        staging: str = "eager",
        staging_bytes: int | None = None,
        replicas: str = "warn",
        gds: bool | Direct = False,
        wait_seconds: float = 600.0,
        **storage_options: object,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise UsageError(f"no compression {compression!r}", hint=f"there are: {', '.join(COMPRESSIONS)}")
        if failed_saves not in ("log", "raise"):
            raise UsageError(f"failed_saves is {failed_saves!r}", hint="there are: log, raise")
        if staging not in ("eager", "lazy"):
            raise UsageError(f"no staging {staging!r}", hint="there are: eager, lazy")
        if replicas not in comparing.POLICIES:
            raise UsageError(f"replicas is {replicas!r}", hint=f"there are: {', '.join(comparing.POLICIES)}")
        self._replicas = replicas
        self._run = names.check_run(run)
        self._ranks = Ranks.here(rank, world_size)
        self._owns_store = not isinstance(url, Store)
        self._store = url if isinstance(url, Store) else open_store(url, **storage_options)
        self._direct = direct_for(self._store, gds)
        if self._direct is not None:
            staging_bytes = staging_bytes or RING_BYTES
        self._meter = SaveMeter(self._run)
        self._sidecar = sidecar
        self._carriers = Carriers(self._store, sidecar, self._meter)
        self._staging = Staging(check_limit(staging_bytes))
        self._lazy, self._gates = staging == "lazy", governed.Gates()
        self._upload_hint = 0.0
        self._raises = failed_saves == "raise"
        self._retention = Retention(self._store, self._run, keep) if keep and self._ranks.rank == 0 else None
        self._compression, self._wait = compression, wait_seconds
        self._lineage = Lineage(self._store, self._run, base)
        self._saves: dict[int, Handle] = {}
        self._committed: dict[int, Handle] = {}
        self._unheard: Handle | None = None
        self._closed = False
        _before_exit(self._wait_at_exit)

    def save(self, step: int, state: dict[str, Any], *, priority: str = "normal") -> Handle:
        """Start saving `state` as `step`; return when it is copied and may change again.

        `priority` is "normal", or "preemption" for the last save before this machine is taken away: it waits for no earlier
        save's memory, and in the sidecar it overtakes what waits and holds what runs.

        Raises the error of an earlier save that nobody has fetched (see `failed_saves`), `ConflictError` when this timeline
        has the step already, `UsageError` naming the path of a value that cannot be saved, `DeadlineError` when the previous save
        keeps the arena too long.
        """
        began = time.perf_counter()
        urgent = _is_urgent(priority)
        ticket, prepared = self._begin(step, state)
        diverged = self._compare_replicas(step, prepared)
        specs = prepared.specs()
        layout = layouts.lay_out(specs)
        staging = self._staging_for(urgent)
        arena = staging.take(layout, self._wait)
        handle = Handle(step, ticket.attempt)
        handle.diverged = diverged
        try:
            with span("stage.d2h", step=step, bytes=layout.total):
                copying = self._copy(staging, arena, state, prepared.tensors(), specs, layout)
            handle.follow(copying)
            put = self._plan(step, ticket, prepared, specs, layout)
            cargo = self._cargo(put, staging, arena, copying, handle, urgent)
            threading.Thread(target=self._carry, args=(cargo, handle, copying), name=f"millrace-save-{step}").start()
        except BaseException:
            staging.give_back()
            raise
        finally:
            if staging is not self._staging:
                staging.close()  # its memory goes when its carrier lets go of it
        self._saves[step] = handle
        self._gates.watch(governed.optimizers_in(state) if self._lazy else (), copying)
        if not self._lazy:
            self._gates.pass_all()  # a state in slices is copied as fast as it is written
            copying.waited = 0.0  # that was part of the stall
        handle.stall = time.perf_counter() - began
        metrics.checkpoint_stall_seconds.observe(handle.stall)
        self._meter.held(handle.stall)
        return handle

    def warm_up(self, state: dict[str, Any]) -> None:
        """Allocate the memory that saves of `state` need now, in a thread, so that the first save need not.

        Worth calling once the optimizer has its state: after its first step, or after `restore`. Takes no part in anything
        that ranks do together.
        """
        self._check_open()
        self._staging.warm_up(
            layouts.lay_out(expected(take_apart(state, _KINDS), self._ranks.rank, self._ranks.world_size))
        )

    def on_preemption(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        deadline: float = preemption.DEADLINE_SECONDS,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        report: str | os.PathLike[str] | None = None,
    ) -> preemption.Preemption:
        """From now on these signals ask for a last save of `state()`, committed within `deadline` seconds of the signal.

        Ask the returned object between two steps: `if guard.reached(step): sys.exit(guard.exit_code)`. The exit code is 99
        when the state is committed and 98 when not; `report` (or $MILLRACE_PREEMPTION_REPORT) with `.<rank>` added is a file
        that says it in JSON. With several ranks all call this, and `reached` at every step.
        """
        self._check_open()
        ranks = self._ranks
        return preemption.Preemption(self, state, deadline, signals, ranks.world_size, ranks.rank, report)

    def last_save_of(self, step: int) -> Handle | None:
        """The save of this step when it is on its way or committed by this checkpointer; saves that failed are forgotten."""
        for handle in self._saves.values():
            handle.fetched = handle.fetched or (handle.done and handle.error is not None)
        self._settle()
        return self._saves.get(step) or self._committed.get(step)

    def restore(
        self,
        state: dict[str, Any],
        step: int | str = "latest",
        *,
        run: str | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> int | None:
        """Restore `state` in place from `step`, the newest one, or the one that a tag names ("tag:best"); return the step, None
        when the run has none.

        `run`: another run of this repository. `include` and `exclude`: patterns on paths such as "model/*", see
        `checkpoint.state.selection`; the rest of `state` is left as it is. `strict=False`: so are entries that the
        checkpoint does not hold, and what it holds beyond `state` is not read. `cast`: tensors of another type are
        converted. Mesh, placement and number of ranks may be others than at the save. Raises `MismatchError`, before
        anything is changed, naming every entry that is missing, not expected, or of another shape or type; `NotFoundError`
        for a step that is not there; `CorruptionError` naming step, tensor, pack and offset, with the state then partly
        restored.
        """
        with contextlib.ExitStack() as stack:
            with self._ranks.agreed():
                self._check_open()
                selection = Selection.of(include, exclude, strict, cast)
                source = self._run if run is None else names.check_run(run)
                tier = stack.enter_context(node_tier(self._sidecar))
            found = self._agree_on_base(source, step, tier)
            if found is None:
                return None
            with self._ranks.agreed():
                base, near = found.base, tier.near(self._store)
                if self._direct is not None and near is self._store:
                    near = GdsStore(near, self._direct)
                opening = reading.away(near, source, base) if found.away else restore.reading(near, source, base)
                opened = stack.enter_context(opening)
            skipped = apply(state, opened, self._ranks, selection, near)
            reading.told(near, base.step)
        if skipped:
            _log.warning("step %d: left as they are: %s", base.step, ", ".join(skipped[:8]))
        self._lineage.restored(source, found, latest=step == "latest")
        if source == self._run:
            self._committed.clear()
        return base.step

    def steps(self) -> list[int]:
        """The steps that `restore` finds, ascending: those of the newest timeline and of its parents before the branch."""
        self._check_open()
        if repository.read_repo(self._store) is None:
            return []
        return sorted(base.step for base in repository.visible(self._store, self._run))

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight (at most `timeout` seconds, else `wait_seconds`), then let go of everything.

        Raises the error of a save that nobody has fetched, `DeadlineError` when one is still in flight.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._wait_for_all(self._wait if timeout is None else timeout)
            if self._retention is not None:
                self._retention.wait(self._wait if timeout is None else timeout)
            self._raise_unfetched()
        finally:
            self._gates.close()
            self._staging.close()
            self._carriers.close()
            self._lineage.let_go()
            if self._owns_store and all(handle.done for handle in self._saves.values()):
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            _log.error("closing after %s: %s", kind.__name__ if kind else "an error", second)

    def _begin(self, step: int, state: dict[str, Any]) -> tuple[Ticket, Prepared]:
        """Agree with the other ranks on the attempt, with the state taken apart on each."""
        taken, message, error = None, b"", None
        try:
            taken = self._take(step, state)
            if self._ranks.rank == 0:
                message = msgspec.msgpack.encode(self._lineage.draw())
        except Exception as caught:  # the other ranks must learn of it, whatever it is
            error = caught
        number = step if isinstance(step, int) and 0 <= step < names.STEP_LIMIT else 0
        ticket = msgspec.msgpack.decode(self._ranks.agree(number, message, error), type=Ticket)
        assert taken is not None
        self._lineage.timeline = ticket.timeline
        return ticket, prepare(taken, self._ranks)

    def _compare_replicas(self, step: int, prepared: Prepared) -> tuple[str, ...]:
        """Names of replicas that differ between ranks, told where they do and on rank 0."""
        if self._replicas == "trust" or self._ranks.world_size == 1:
            return ()
        found = comparing.diverged(prepared, self._ranks, step)
        if found and self._replicas == "error":
            raise MismatchError(
                f"step {step} is not saved: tensors that should be the same on several ranks differ: "
                f"{', '.join(map(str, found[:8]))}",
                hint='look at those ranks; replicas="warn" saves what the writing rank has',
            )
        if found and any(self._ranks.rank in (0, *each.ranks) for each in found):
            metrics.checkpoint_replicas_diverged.inc(len(found))
            _log.warning(
                "step %d: tensors that should be the same on several ranks differ: %s",
                step,
                ", ".join(map(str, found[:8])),
            )
        return tuple(each.name for each in found)

    def _take(self, step: int, given: dict[str, Any]) -> Taken:
        self._check_open()
        self._hear_failures()
        names.check_step(step)
        self._settle()
        if step in self._committed or step in self._saves:
            how = "is saved" if step in self._committed else "is being saved"
            raise ConflictError(f"step {step} of run {self._run} {how} in this timeline", hint="save each step once")
        return take_apart(given, _KINDS)

    def _settle(self) -> None:
        """Forget saves that have ended and were heard of; the newest committed one is what the next save leans on."""
        for step, handle in list(self._saves.items()):
            if handle.done and (handle.error is None or handle.fetched):
                del self._saves[step]
                if handle.error is None:
                    self._committed[step] = handle
                    self._lineage.committed(step, handle.attempt)

    def _plan(
        self, step: int, ticket: Ticket, prepared: Prepared, specs: list[TensorSpec], layout: layouts.Layout
    ) -> plan.PutPlan:
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
            tensors=plan.plan_tensors(specs, layout),
            small_bytes=layout.small_bytes,
            tree=prepared.tree,
            replicas=prepared.replicas,
            compression=self._compression,
            upload_hint=self._upload_hint,
            lease_seconds=DEFAULT_LIFE,
            commit_timeout=self._wait,
        )

    def _copy(
        self,
        staging: Staging,
        arena: Arena,
        state: object,
        tensors: list[torch.Tensor],
        specs: list[TensorSpec],
        layout: layouts.Layout,
    ) -> Copying | SlicedState:
        if not staging.fits(layout):
            warn_once(_log, "the state is larger than staging_bytes: it is copied in slices, as fast as it is written")
            return self._slices(arena, tensors, specs, layout)
        late = governed.late(state, tensors) if self._lazy else frozenset()
        return Copying(staging.pool, arena, tensors, specs, layout, late)

    def _slices(
        self, arena: Arena, tensors: list[torch.Tensor], specs: list[TensorSpec], layout: layouts.Layout
    ) -> SlicedState:
        if self._direct is None or not any(tensor.device.type == self._direct.device for tensor in tensors):
            return SlicedState(arena, tensors, specs, layout)
        return DeviceSlices(self._direct, arena, tensors, specs, layout)

    def _cargo(
        self,
        put: plan.PutPlan,
        staging: Staging,
        arena: Arena,
        copying: Copying | SlicedState,
        handle: Handle,
        urgent: bool,
    ) -> Cargo:
        sliced = isinstance(copying, SlicedState)
        return Cargo(
            put,
            -1 if sliced else arena.fd,
            (lambda: copying) if isinstance(copying, SlicedState) else arena.view,
            staging.give_back,
            staging.abandon,
            handle.set_staged,
            urgent,
            copying.store if isinstance(copying, DeviceSlices) else _as_it_is,
        )

    def _carry(self, cargo: Cargo, handle: Handle, copying: Copying | SlicedState) -> None:
        """In its own thread: from the copy to committed."""
        try:
            self._join(cargo, copying)
            with span("commit", step=handle.step):
                result = self._carriers.carry(cargo)
        except BaseException as error:
            metrics.checkpoint_saves.labels("failed").inc()
            detail = None if isinstance(error, MillraceError) else error
            _log.error("step %d was not saved; training goes on without it: %s", handle.step, error, exc_info=detail)
            handle.set_error(error)
            return
        finally:
            if isinstance(copying, SlicedState):
                copying.cancel()
        waits = {"stall": handle.stall, "waited": handle.waited, "sliced": isinstance(copying, SlicedState)}
        saved = msgspec.convert(result | waits | {"carrier": handle.carrier, "diverged": handle.diverged}, SaveResult)
        metrics.checkpoint_saves.labels("committed").inc()
        metrics.checkpoint_waited_seconds.observe(saved.waited)
        self._meter.waited(saved.waited)
        self._meter.committed(handle.step, msgspec.convert(result["committed"], float))
        for kind in ("state", "written", "deduplicated"):
            metrics.checkpoint_bytes.labels(kind).inc(getattr(saved, f"bytes_{kind}"))
        if saved.bytes_written >= _TELLING and saved.bytes_written / max(saved.seconds, 1e-9) < _SLOW:
            self._upload_hint = saved.bytes_written / saved.seconds
        self._lineage.let_go()
        handle.set_result(saved)
        if self._retention is not None:
            self._retention.committed()

    def _join(self, cargo: Cargo, copying: Copying | SlicedState) -> None:
        try:
            copying.join()
        except BaseException:
            cargo.give_back()
            raise

    def _agree_on_base(self, run: str, step: int | str, tier: NodeTier) -> reading.Found | None:
        found, error = None, None
        try:
            self._wait_for_all(self._wait)
            self._settle()
            tier.send(self._store, run)
        except Exception as caught:  # the other ranks must learn of it, whatever it is
            error = caught
        number = step if isinstance(step, int) and 0 <= step < names.STEP_LIMIT else 0
        self._ranks.agree(number, b"", error)  # now all that only the nodes' tiers had is in the store
        try:
            if self._ranks.rank == 0:
                found = self._lineage.find(run, step, tier)
        except Exception as caught:
            error = caught
        message = self._ranks.agree(number, msgspec.msgpack.encode(found), error)
        return msgspec.msgpack.decode(message, type=reading.Found | None)

    def _staging_for(self, urgent: bool) -> Staging:
        """Where the state is copied to. An urgent save gets memory of its own rather than wait for an earlier save's."""
        if urgent and self._staging.busy:
            return Staging(self._staging.limit)
        if not urgent:
            self._wait_for_room()
        return self._staging

    def _wait_for_room(self) -> None:
        running = [handle for handle in self._saves.values() if not handle.done]
        if len(running) >= _IN_FLIGHT and not running[0].wait(self._wait):
            raise DeadlineError(
                f"step {running[0].step} is not committed after {self._wait:g} s",
                hint="save less often, or look at the store",
            )

    def _wait_for_all(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for handle in list(self._saves.values()):
            if not handle.wait(max(deadline - time.monotonic(), 0)):
                raise DeadlineError(f"step {handle.step} is still in flight after {timeout:g} s", hint="wait longer")

    def _hear_failures(self) -> None:
        """Failed saves that nobody asked about: raised when that is wanted, or when this trainer was replaced."""
        for handle in self._saves.values():
            if handle.done and handle.error is not None and not handle.fetched:
                if self._raises or isinstance(handle.error, ConflictError):
                    handle.result()
                handle.fetched = True
                self._unheard = handle

    def _raise_unfetched(self) -> None:
        if self._unheard is not None:
            self._unheard.result()
        for handle in self._saves.values():
            if handle.done and handle.error is not None and not handle.fetched:
                handle.result()

    def _wait_at_exit(self) -> None:
        if any(not handle.done for handle in self._saves.values()):
            _log.warning("the program ends without close(): waiting for the save in flight")
            self._wait_for_all(self._wait)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpointer is closed", hint="make another one")


def _before_exit(method: Callable[[], None]) -> None:
    """Call `method`, if its object still lives, while threads can still be started: `atexit` would be too late."""
    reference = weakref.WeakMethod(method)
    register = getattr(threading, "_register_atexit", None)  # not public, but what concurrent.futures itself rests on
    if register is not None:
        register(lambda: (found := reference()) and found())


def _as_it_is(store: Store) -> Store:
    return store


def _is_urgent(priority: str) -> bool:
    if priority not in PRIORITIES:
        raise UsageError(f"no priority {priority!r}", hint=f"there are: {', '.join(PRIORITIES)}")
    return priority == "preemption"
