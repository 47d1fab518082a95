"""`Checkpointer`: save and restore the state of a training run.

Invariant: `save` returns after one copy of the state in memory; everything else happens behind it, in the node's sidecar or in
a thread. A step exists when it is committed, whole, and is then restored bit for bit. The first save opens the run's next
timeline, as a child of the step that was restored, which stops any trainer that still believes the run to be its own.
Failure behaviour: a save that fails in the background is logged as an error, raised by its handle, and by the next `save`
or `close` if nobody has fetched it by then; training goes on meanwhile and earlier steps are untouched.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from checkpoint import fit, names, plan, repository, restore, timeline, tree, ulid
from checkpoint import layout as layouts
from checkpoint.carriers import Cargo, Carriers
from checkpoint.codec import COMPRESSIONS
from checkpoint.documents import Base, StepName
from checkpoint.handle import Handle, SaveResult
from checkpoint.kinds import TensorSink, TorchKinds
from checkpoint.layout import TensorSpec
from checkpoint.lease import DEFAULT_LIFE
from checkpoint.prepare import Prepared, prepare
from checkpoint.ranks import Ranks
from checkpoint.stage import Staging
from dataio.core import metrics
from dataio.core.errors import ConflictError, DeadlineError, MillraceError, UnsupportedError, UsageError
from dataio.core.log import get_logger
from dataio.core.trace import span
from dataio.sidecar.client import SaveMeter
from dataio.store.contract import Store
from dataio.store.open import open_store

_log = get_logger(__name__)
_KINDS = TorchKinds()
_IN_FLIGHT = 2
"""Saves on their way at once: one whose arena is still needed, one that only waits for its commit."""


class _Ticket(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 decides for one save."""

    attempt: str
    timeline: int
    base: Base | None


class Checkpointer:
    """Saves to and restores from one run of the repository at `url`.

    `url` is a path, `file:///path`, `s3://bucket/prefix` or an open `Store`; `storage_options` as for `open_store`.
    `sidecar` is "auto" (the node's daemon where one answers), the path of its socket, or None (inside this process).
    `rank` and `world_size` come from torch.distributed when it is initialised. `compression` is "none" or "zstd".
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
        wait_seconds: float = 600.0,
        **storage_options: object,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise UsageError(f"no compression {compression!r}", hint=f"there are: {', '.join(COMPRESSIONS)}")
        self._run = names.check_run(run)
        self._ranks = Ranks.here(rank, world_size)
        self._owns_store = not isinstance(url, Store)
        self._store = url if isinstance(url, Store) else open_store(url, **storage_options)
        self._meter = SaveMeter(self._run)
        self._carriers = Carriers(self._store, sidecar, self._meter)
        self._staging = Staging()
        self._compression, self._wait = compression, wait_seconds
        self._timeline = 0
        self._parent: StepName | None = None
        self._base: Base | None = None
        self._saves: dict[int, Handle] = {}
        self._committed: set[int] = set()
        self._closed = False
        _before_exit(self._wait_at_exit)

    def save(self, step: int, state: dict[str, Any]) -> Handle:
        """Start saving `state` as `step`; return when it is copied and may change again.

        Raises the error of an earlier save that nobody has fetched, `ConflictError` when this timeline has the step
        already, `UsageError` naming the path of a value that cannot be saved, `DeadlineError` when the previous save
        keeps the arena too long.
        """
        began = time.perf_counter()
        ticket, prepared = self._begin(step, state)
        specs = prepared.specs()
        layout = layouts.lay_out(specs)
        self._wait_for_room()
        arena = self._staging.take(layout, self._wait)
        handle = Handle(step, ticket.attempt)
        try:
            with span("stage.d2h", step=step, bytes=layout.total):
                self._staging.copy(arena, [x.tensor for x in prepared.mine], specs, layout)
            cargo = Cargo(
                self._plan(step, ticket, prepared, specs, layout),
                arena.fd,
                arena.view,
                self._staging.give_back,
                self._staging.abandon,
                handle.set_staged,
            )
            handle.stall = time.perf_counter() - began
            threading.Thread(target=self._carry, args=(cargo, handle), name=f"millrace-save-{step}").start()
        except BaseException:
            self._staging.give_back()
            raise
        self._saves[step] = handle
        metrics.checkpoint_stall_seconds.observe(handle.stall)
        self._meter.held(handle.stall)
        return handle

    def restore(self, state: dict[str, Any], step: int | str = "latest") -> int | None:
        """Restore `state` in place from `step`, or the newest one; return the step, None when the run has none.

        Raises `MismatchError`, before anything is changed, naming every entry that is missing, not expected, or of
        another shape or type; `NotFoundError` for a step that is not there; `CorruptionError` naming step, tensor, pack
        and offset, with the state then partly restored.
        """
        self._check_open()
        base = self._agree_on_base(step)
        if base is None:
            return None
        with restore.reading(self._store, self._run, base) as opened:
            self._apply(state, opened)
        self._parent, self._base, self._timeline = StepName(base.timeline, base.step), base, 0
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
            self._raise_unfetched()
        finally:
            self._staging.close()
            self._carriers.close()
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

    def _begin(self, step: int, state: dict[str, Any]) -> tuple[_Ticket, Prepared]:
        """Agree with the other ranks on the attempt, with the state taken apart on each."""
        prepared, message, error = None, b"", None
        try:
            prepared = self._prepare(step, state)
            if self._ranks.rank == 0:
                message = msgspec.msgpack.encode(self._draw())
        except Exception as caught:  # the other ranks must learn of it, whatever it is
            error = caught
        number = step if isinstance(step, int) and 0 <= step < names.STEP_LIMIT else 0
        ticket = msgspec.msgpack.decode(self._ranks.agree(number, message, error), type=_Ticket)
        assert prepared is not None
        self._timeline = ticket.timeline
        return ticket, prepared

    def _prepare(self, step: int, given: dict[str, Any]) -> Prepared:
        self._check_open()
        self._raise_unfetched()
        names.check_step(step)
        self._settle()
        if step in self._committed or step in self._saves:
            how = "is saved" if step in self._committed else "is being saved"
            raise ConflictError(f"step {step} of run {self._run} {how} in this timeline", hint="save each step once")
        return prepare(given, _KINDS, self._ranks.rank, self._ranks.world_size)

    def _settle(self) -> None:
        """Forget saves that have ended and were heard of; the newest committed one is what the next save leans on."""
        for step, handle in list(self._saves.items()):
            if handle.done and (handle.error is None or handle.fetched):
                del self._saves[step]
                if handle.error is None:
                    self._committed.add(step)
                    self._base = Base(self._timeline, step, handle.attempt)

    def _draw(self) -> _Ticket:
        """On rank 0. Opens the run's next timeline before the first save; otherwise asks the store nothing."""
        number = self._timeline
        if not number:
            repository.ensure_repo(self._store)
            if self._base is None:
                self._base = repository.find(self._store, self._run, "latest")
            number = timeline.open_timeline(self._store, self._run, self._parent)
        return _Ticket(ulid.new(), number, self._base)

    def _plan(
        self, step: int, ticket: _Ticket, prepared: Prepared, specs: list[TensorSpec], layout: layouts.Layout
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
            bases=(ticket.base,) if ticket.base else (),
            tensors=plan.plan_tensors(specs, layout),
            small_bytes=layout.small_bytes,
            tree=prepared.tree,
            replicas=prepared.replicas,
            compression=self._compression,
            lease_seconds=DEFAULT_LIFE,
            commit_timeout=self._wait,
        )

    def _carry(self, cargo: Cargo, handle: Handle) -> None:
        """In its own thread: from staged to committed."""
        try:
            with span("commit", step=handle.step):
                result = self._carriers.carry(cargo)
        except BaseException as error:
            metrics.checkpoint_saves.labels("failed").inc()
            detail = None if isinstance(error, MillraceError) else error
            _log.error("step %d was not saved; training goes on without it: %s", handle.step, error, exc_info=detail)
            handle.set_error(error)
            return
        saved = msgspec.convert(result | {"stall": handle.stall, "carrier": handle.carrier}, SaveResult)
        metrics.checkpoint_saves.labels("committed").inc()
        self._meter.committed(handle.step, msgspec.convert(result["committed"], float))
        for kind in ("state", "written", "deduplicated"):
            metrics.checkpoint_bytes.labels(kind).inc(getattr(saved, f"bytes_{kind}"))
        handle.set_result(saved)

    def _agree_on_base(self, step: int | str) -> Base | None:
        found, error = None, None
        try:
            self._wait_for_all(self._wait)
            self._settle()
            if self._ranks.rank == 0:
                found = repository.find(self._store, self._run, step)
        except Exception as caught:  # the other ranks must learn of it, whatever it is
            error = caught
        number = step if isinstance(step, int) and 0 <= step < names.STEP_LIMIT else 0
        message = self._ranks.agree(number, msgspec.msgpack.encode(found), error)
        return msgspec.msgpack.decode(message, type=Base | None)

    def _apply(self, given: dict[str, Any], opened: repository.Step) -> None:
        rank = self._ranks.rank if self._ranks.rank < len(opened.manifests) else 0
        saved = restore.tensors_of(opened, rank)
        for _, tensor in saved.values():
            if tensor.local != tensor.shape:
                raise UnsupportedError(f"tensor {tensor.name!r} was saved in shards", hint="install a newer Millrace")
        shapes = {name: (tensor.dtype, tensor.shape) for name, (_, tensor) in saved.items()}
        todo = fit.fit(given, tree.decode(opened.manifests[rank].tree), shapes, _KINDS)
        with torch.no_grad():
            for targets, actions in ((todo.fresh, todo.early), (todo.in_place, todo.late)):
                restore.read(self._store, opened, [restore.Want(*saved[name], TensorSink(t)) for name, t in targets])
                for action in actions:
                    action()

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

    def _raise_unfetched(self) -> None:
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
