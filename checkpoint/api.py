"""`Checkpointer`: save and restore the state of a training run. `saver` and `restorer` do it, `saves` keeps the books.

Invariant: `save` returns after one copy of the state in memory; everything else happens behind it, in the node's sidecar or in
a thread. A step exists when it is committed, whole, and is then restored bit for bit. The first save opens the run's next
timeline, which stops any trainer that still believes the run to be its own. Restoring changes nothing of the run.
Failure behaviour: a save that fails in the background is logged as an error, raised by its handle, and by the next `save`
or `close` if nobody has fetched it by then; training goes on meanwhile and earlier steps are untouched.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.checkpoint import preemption
from headrace.checkpoint.format import names
from headrace.checkpoint.format.codec import COMPRESSIONS
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.restoring import direct_for
from headrace.checkpoint.gds.saving import RING_BYTES
from headrace.checkpoint.handle import Handle, Name, Saves
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.repository.collect import Retention
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.restoring.restorer import Restorer
from headrace.checkpoint.saver import Options, Saver
from headrace.checkpoint.saving.executor import SaveExecutor
from headrace.checkpoint.saving.slices import check_limit
from headrace.checkpoint.state.fit import Selection, matching
from headrace.checkpoint.state.replicas import POLICIES
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.client import SaveMeter
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

_log = get_logger(__name__)
PRIORITIES = ("normal", "preemption")


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
    `on_save_error` is "log" (a save that failed in the background is an error in the log, in metrics, at its handle and at
    `close`; training goes on) or "raise" (the next `save` raises it as well). That another trainer took over is always raised.
    `staging` is "eager" (`save` returns when the state is copied) or "lazy" (parameters and optimizer state are copied behind
    what the trainer does next, and the next step of an optimizer in the state waits for what is not copied by then).
    `replicas`: tensors that several ranks hold are compared at each save, by samples
    (`headrace.checkpoint.state.replicas`). Where some
    differ, all ranks refuse the save ("error"), or save the writing rank's and name them in a warning, a metric and
    `SaveResult.diverged` ("warn"). "trust" compares nothing.
    `replicated`: patterns on paths (as `include` of `restore`) of plain tensors that are the same on all ranks although no module
    or optimizer says so, such as the dicts of `get_state_dict` under DDP: they are written once, and compared as above.
    `staging_bytes`: the most memory for the copy, None for what the state needs; a larger state is copied in slices, as
    fast as they are written, inside this process.
    `gds`: by GPUDirect Storage where a probe of the directory says that it works, else as ever, which the log explains: raw
    chunks go between tensors on the GPU and packs without the CPU. A save is then in slices (`staging_bytes`, 128 MiB if
    nothing is said).
    `wait_seconds` bounds each wait: for the arena, for other ranks, for a save in flight on `close` and `restore`.
    Methods are for one thread at a time; handles are for any. A forked child (a DataLoader's worker) does not wait for its
    parent's saves at its end, and needs a checkpointer of its own to save or restore.

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
        on_save_error: str = "log",
        staging: str = "eager",
        staging_bytes: int | None = None,
        check_replicas: str = "error",
        replicated: str | Iterable[str] = (),
        gds: bool | Direct = False,
        timeout: float = 600.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise UsageError(f"no compression {compression!r}", hint=f"there are: {', '.join(COMPRESSIONS)}")
        if on_save_error not in ("log", "raise"):
            raise UsageError(f"on_save_error is {on_save_error!r}", hint="there are: log, raise")
        if staging not in ("eager", "lazy"):
            raise UsageError(f"no staging {staging!r}", hint="there are: eager, lazy")
        if check_replicas not in POLICIES:
            raise UsageError(f"check_replicas is {check_replicas!r}", hint=f"there are: {', '.join(POLICIES)}")
        kept: object = keep
        if kept is not None and not isinstance(kept, Keep):
            raise UsageError(f"keep is {kept!r:.200}", hint="give a policy, such as Keep(last=3)")
        self._run = names.check_run(run)
        self._ranks = Ranks.here(rank, world_size)
        self._owns_store = not isinstance(url, Store)
        self._store = url if isinstance(url, Store) else open_store(url, storage_options=storage_options)
        direct = direct_for(self._store, gds)
        if direct is not None:
            staging_bytes = staging_bytes or RING_BYTES
        meter = SaveMeter(self._run)
        self._executor = SaveExecutor(self._store, sidecar, meter)
        self._retention = Retention(self._store, self._run, keep) if keep and self._ranks.rank == 0 else None
        self._lineage = Lineage(self._store, self._run, base)
        self._saves = Saves(self._run, self._lineage, on_save_error == "raise", timeout)
        self._saver = Saver(
            *(self._store, self._run, self._ranks, self._lineage, self._saves),
            *(self._executor, meter, direct, self._retention),
            Options(
                *(compression, check_replicas, staging == "lazy", timeout),
                *(check_limit(staging_bytes), matching(replicated)),
            ),
        )
        self._restorer = Restorer(self._store, self._ranks, self._lineage, sidecar, direct)
        self._wait, self._closed, self._pid = timeout, False, os.getpid()

    def save(self, step: int, state: dict[str, Any], *, priority: str = "normal") -> Handle:
        """Start saving `state` as `step`; return when it is copied and may change again.

        `priority` is "normal", or "preemption" for the last save before this machine is taken away: it waits for no earlier
        save's memory, and in the sidecar it overtakes what waits and holds what runs.

        A store that is away fails the handle, also at the first save. Raises the error of an earlier save that nobody has fetched
        (see `on_save_error`), `ConflictError` when this timeline has the step already, `UsageError` naming the path of a value
        that cannot be saved, `DeadlineError` when the previous save keeps the arena too long.
        """
        return self._save(step, state, None, priority, overwrites=False)

    def save_as(self, step: int, state: dict[str, Any], name: Name | None) -> Handle:
        """As `save`, for `headrace.checkpoint.frameworks`: `name` is what their users find the step by, on the ranks
        that have one. A step
        that was saved already is saved again, as those users expect of their files: in a branch that begins before it."""
        return self._save(step, state, name, "normal", overwrites=True)

    def _save(self, step: int, state: dict[str, Any], name: Name | None, priority: str, overwrites: bool) -> Handle:
        urgent = _is_urgent(priority)

        def check() -> None:
            self._check_open()
            names.check_step(step)
            self._lineage.again = self._lineage.timeline == 0 or self._saves.again(step) if overwrites else False
            self._saves.raise_failures()  # also those of the saves that `again` has waited for
            self._saves.require_new(step)
            if not urgent:
                self._saves.wait_for_room(self._wait)

        return self._saver.start(step, state, urgent, check, name)

    def warm_up(self, state: dict[str, Any]) -> None:
        """Allocate the memory that saves of `state` need, and look at the store, in threads, so that the first save need not.

        Worth calling once the optimizer has its state: after its first step, or after `restore`. Takes no part in anything
        that ranks do together.
        """
        self._check_open()
        self._saver.warm_up(state)

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
        when the state is committed and 98 when not; `report` (or $HEADRACE_PREEMPTION_REPORT) with `.<rank>` added is a file
        that says it in JSON. With several ranks all call this, and `reached` at every step.
        """
        self._check_open()
        ranks = self._ranks
        return preemption.Preemption(self, state, deadline, signals, ranks.world_size, ranks.rank, report)

    def last_save_of(self, step: int) -> Handle | None:
        """The save of this step when it is on its way or committed by this checkpointer; saves that failed are forgotten."""
        return self._saves.of(step)

    def restore(
        self,
        state: dict[str, Any],
        step: int | str | Base = "latest",
        *,
        tag: str | None = None,
        run: str | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        strict: bool = True,
        cast: bool = False,
        required: bool = False,
    ) -> int | None:
        """Restore `state` in place from `step`, the newest one, or the one that a tag names ("tag:best"); return the step, None
        when the run has none. A `Base` is one attempt, in whichever timeline it lies.

        Restoring changes nothing of the run. A later save of a newer step goes on from the newest one, whatever was restored; a
        later save of a step that the run has already, or has passed, begins a branch (docs/checkpoints.md).
        `required`: a run without a step is a `NotFoundError` that says what is there instead; else a warning names other runs.
        `run`: another run of this repository. `include` and `exclude`: patterns on paths such as "model/*", see
        `headrace.checkpoint.state.fit`; the rest of `state` is left as it is. `strict=False`: so are entries that the
        checkpoint does not hold, and what it holds beyond `state` is not read. `cast`: tensors of another type are
        converted. Mesh, placement and number of ranks may be others than at the save. Raises `MismatchError`, before
        anything is changed, naming every entry that is missing, not expected, or of another shape or type; `NotFoundError`
        for a step that is not there; `CorruptionError` naming step, tensor, pack and offset, with the state then partly
        restored.
        """

        asked = step if isinstance(step, Base) else repository.step_or_tag(step, tag)

        def begin() -> None:
            self._check_open()
            self._saves.wait_for_all(self._wait)
            self._saves.settle()

        def select() -> Selection:
            return Selection.of(include, exclude, strict, cast)

        source = self._run if run is None else run
        found = self._restorer.restore(state, source, asked, begin, select, required)
        if found is None:
            return None
        base = found.base
        self._lineage.restored(source, found, latest=asked == "latest")
        if source == self._run:
            self._saves.start_over()
        return base.step

    @property
    def run(self) -> str:
        """The run that this checkpointer saves to."""
        return self._run

    def is_committed(self, run: str, attempt: Base) -> bool:
        """Whether this attempt is a step of the run, in whichever timeline."""
        self._check_open()
        return repository.settled(self._store, run, attempt)

    def is_over(self, run: str, attempt: Base) -> bool:
        """Whether a newer timeline keeps this attempt from being committed."""
        self._check_open()
        return timeline.newest_after(self._store, run, attempt.timeline) is not None

    def steps(self) -> list[int]:
        """The steps that `restore` finds, ascending: those of the newest timeline and of its parents before the branch."""
        self._check_open()
        if repository.read_repo(self._store) is None:
            return []
        return sorted(base.step for base in repository.visible(self._store, self._run))

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight (at most `timeout` seconds, else `wait_seconds`), then let go of everything.

        Raises the error of a save that nobody has fetched, `DeadlineError` when one is still in flight. Does nothing in a forked
        child: saves, leases and connections are its parent's.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._saves.wait_for_all(self._wait if timeout is None else timeout)
            if self._retention is not None:
                self._retention.wait(self._wait if timeout is None else timeout)
            self._saves.raise_unfetched()
        finally:
            self._saver.close()
            self._executor.close()
            self._lineage.close()
            if self._owns_store and self._saves.all_done:
                self._store.close()
            self._saver.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            _log.error("closing after %s: %s", kind.__name__ if kind else "an error", second)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpointer is closed", hint="make another one")
        if os.getpid() != self._pid:
            raise UsageError(
                f"the checkpointer belongs to process {self._pid}, from which this one was forked",
                hint="make another one",
            )


def _is_urgent(priority: str) -> bool:
    if priority not in PRIORITIES:
        raise UsageError(f"no priority {priority!r}", hint=f"there are: {', '.join(PRIORITIES)}")
    return priority == "preemption"
