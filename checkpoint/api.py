"""`Checkpointer`: save and restore the state of a training run.

Invariant: `save` returns after one copy of the state in memory. The rest happens in the background, in the node's
sidecar or in a thread. A step exists only when the parts of all ranks are committed. It is restored bit for bit. A
timeline is a sequence of steps within a run. The first save of a trainer opens a new timeline, or joins that of another
writer in the process. A save that begins a branch opens one, too. Saves of an earlier trainer of the run then raise
`ConflictError`. Restoring changes nothing in the run.
Failure behaviour: if a save fails in the background, the error is logged, and the handle's `result` raises it. If the
caller has not fetched the error, `close` raises it. If there are several such errors, it raises one. Training
continues, and earlier steps are unchanged.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.checkpoint import preemption
from headrace.checkpoint.attachments import Attachments, Extras
from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format import names
from headrace.checkpoint.format.codec import COMPRESSIONS
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.restoring import direct_for
from headrace.checkpoint.gds.saving import RING_BYTES
from headrace.checkpoint.handle import Handle, Name
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.recording import Description
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Retention
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.restoring.restorer import Restorer
from headrace.checkpoint.run_extras import RunExtras
from headrace.checkpoint.saver import Options, Saver
from headrace.checkpoint.saves import Saves
from headrace.checkpoint.saving.executor import SaveExecutor
from headrace.checkpoint.saving.slices import check_limit
from headrace.checkpoint.state.fit import Selection, matching
from headrace.checkpoint.state.replicas import POLICIES
from headrace.checkpoint.trackers.background import BackgroundTrackers, started
from headrace.checkpoint.trackers.events import Tracker
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.sidecar.client import SaveMeter
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.url_policy import scheme_of

PRIORITIES = ("normal", "preemption")


@suggests_arguments(name="run", run_name="run", max_to_keep="keep", keep_last="keep", callbacks="trackers")
class Checkpointer(RunExtras):
    """Saves and restores one run of the checkpoint repository at `url`.

    With several ranks, call `save` and `restore` on all of them with the same step. Tensors of modules, optimizers and
    schedulers are expected to be equal on all ranks and are written once; the work is spread over the ranks. Buffers of
    modules, such as running means, may differ between ranks. Those of the lowest rank are saved. Everything else is
    saved per rank. If a step is restored by more ranks than saved it, the additional ranks get the rank-local values of
    rank 0.

    A checkpointer is not thread-safe. Its handles may be used from any thread. A forked child (a DataLoader worker)
    does not wait for its parent's saves when it ends. It needs a checkpointer of its own to save or restore.

    Args:
        url (str | os.PathLike[str] | Store): The repository: a path, `file:///path`, `s3://bucket/prefix`, or an open
            `Store`.
        run (str): The run's name: letters, digits, dot, dash and underscore, at most 128.
        sidecar (str | os.PathLike[str] | None): "auto" uses the node's daemon if it answers; a path names its
            socket; None saves in this process. Default: "auto".
        rank (int | None): This process's rank. Default: None, torch.distributed's rank, or 0 without it.
        world_size (int | None): Number of ranks. Default: None, torch.distributed's, or 1 without it.
        compression (str): "none"; "zstd"; "auto"; or "delta". "auto" measures for each tensor which codec makes the
            save durable sooner. On fast stores it compresses nothing. "delta" also tries differences from an earlier
            step. Default: "none".
        base (str | tuple[str, int] | None): Another run of this repository, or (run, step), that this run starts from.
            The first save is deduplicated against it. It is ignored if this run already has a step, or if a step was
            restored before the first save. Default: None.
        uploads (str): Which steps are uploaded. "all" uploads every step, and a save may wait for earlier ones. "newest"
            needs a sidecar with a local tier (docs/howto/save-every-step.md). It keeps every step in the tier. A step
            whose save begins while an earlier one is being uploaded stays there, and is not uploaded: its handle is
            `local`. `close` uploads the last step. This process saves, not the daemon. Default: "all".
        keep (Keep | None): The retention policy. After each commit, rank 0 removes the run's steps that the policy does
            not keep.
            Default: None, which keeps all steps.
        on_save_error (str): "log" reports a save that failed in the background in the log, in metrics, at its handle
            and at `close`. "raise" raises it at the next `save` too. A `ConflictError`, for example because another
            trainer took the run over, is always raised there. Default: "log".
        staging (str): "eager" copies the state before `save` returns. "lazy" copies parameters and optimizer state
            while training continues. The next step of an optimizer in the state waits until they are copied. Default:
            "eager".
        staging_bytes (int | None): Maximum size of the staging memory, in bytes. A larger state is copied in slices, as
            fast as they are written. This process then commits the save, not the daemon. Default: None, as much as the
            state needs.
        check_replicas (str): At each save, compare samples of the tensors that several ranks hold. If some differ,
            "error" fails the save on all ranks. "warn" saves the copy of the rank that writes the tensor, and names the
            tensor in a warning, a metric and `SaveResult.diverged`. "off" compares nothing. Default: "error".
        replicated (str | Iterable[str]): Patterns on paths, as `include` of `restore`, of plain tensors that are equal
            on all ranks. For example, the dicts of `get_state_dict` under DDP are equal. These tensors are written once
            and compared. Default: none.
        gds (bool): Use GPUDirect Storage if a probe of the directory succeeds; otherwise, the log gives the reason. Raw
            chunks then move directly between GPU memory and pack files, in slices of `staging_bytes` (128 MiB by
            default). They are hashed on a copy in main memory. Default: False.
        record (bool): Record a description of the run with its steps: the git commit of the script's folder, the script's
            name and arguments without secrets, versions of Python, torch and Headrace, and the world size. Default:
            True. `describe` adds to it.
        trackers (Sequence[Tracker]): Log committed steps and published versions to experiment trackers, by reference: for
            example `MlflowTracker()` of `headrace.checkpoint.trackers.mlflow`. Rank 0 calls them, in threads of their own.
            Default: none.
        timeout (float): Limit of each wait in seconds: for staging memory, for other ranks, and for a save in flight
            on `close` and `restore`. Default: 600.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Default: None.

    Raises:
        UsageError: An argument is invalid; the message lists the valid values.

    Example:
        >>> import tempfile, torch
        >>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     handle = checkpointer.save(10, {"model": model})
        ...     result = handle.result(timeout=60)
        ...     checkpointer.restore({"model": model})
        10
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        *,
        run: str,
        sidecar: str | os.PathLike[str] | None = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        compression: str = "none",
        base: str | tuple[str, int] | None = None,
        uploads: str = "all",
        keep: Keep | None = None,
        on_save_error: str = "log",
        staging: str = "eager",
        staging_bytes: int | None = None,
        check_replicas: str = "error",
        replicated: str | Iterable[str] = (),
        gds: bool | Direct = False,
        record: bool = True,
        trackers: Sequence[Tracker] = (),
        timeout: float = 600.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_choice("compression", compression, COMPRESSIONS)
        _check_choice("uploads", uploads, ("all", "newest"))
        _check_choice("on_save_error", on_save_error, ("log", "raise"))
        _check_choice("staging", staging, ("eager", "lazy"))
        _check_choice("check_replicas", check_replicas, POLICIES)
        kept: object = keep
        if kept is not None and not isinstance(kept, Keep):
            raise UsageError(f"keep is {kept!r:.200}", hint="give a policy, such as Keep(last=3)")
        if uploads == "newest" and sidecar is None:
            raise UsageError('uploads="newest" needs a sidecar', hint='give sidecar="auto", and the sidecar a tier_dir')
        self._run = names.check_run(run)
        self._ranks = Ranks.from_environment(rank, world_size)
        own_trackers = started(trackers, self._ranks.rank)
        self._owns_store = not isinstance(url, Store)
        self._store = url if isinstance(url, Store) else open_store(url, storage_options=storage_options)
        _check_writable(self._store)
        direct = direct_for(self._store, gds)
        if direct is not None:
            staging_bytes = staging_bytes or RING_BYTES
        meter = SaveMeter(self._run)
        newest_only = uploads == "newest"
        self._executor = SaveExecutor(self._store, sidecar, meter=meter, through_tier=newest_only)
        self._retention = Retention(self._store, self._run, keep) if keep and self._ranks.rank == 0 else None
        self._lineage = Lineage(self._store, self._run, base)
        self._trackers = BackgroundTrackers(
            self._store, own_trackers
        )  # before `Saves`, whose work at exit must come first
        self._saves = Saves(self._run, self._lineage, raises=on_save_error == "raise", wait=timeout)
        options = Options(
            compression=compression,
            check_replicas=check_replicas,
            lazy=staging == "lazy",
            timeout=timeout,
            staging_bytes=check_limit(staging_bytes),
            replicated=matching(replicated),
            newest_only=newest_only,
        )
        self._attachments = Attachments()
        self._description = Description(self._ranks.world_size, record)
        self._saver = Saver(
            self._store,
            run=self._run,
            ranks=self._ranks,
            lineage=self._lineage,
            saves=self._saves,
            executor=self._executor,
            meter=meter,
            direct=direct,
            retention=self._retention,
            description=self._description if self._ranks.rank == 0 else None,
            options=options,
        )
        self._restorer = Restorer(self._store, ranks=self._ranks, lineage=self._lineage, sidecar=sidecar, direct=direct)
        self._publisher = None
        self._wait, self._closed, self._pid = timeout, False, os.getpid()

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        priority: str = "normal",
        metadata: Mapping[str, int | float | bool | str | None] | None = None,
    ) -> Handle:
        """Start to save `state` as `step`, and return after the copy of the state.

        With lazy staging, the copy may still be in progress (see `Handle.copied`). If the store is unreachable, the
        handle's `result` raises the error; `save` does not. This is true even for the first save.

        Args:
            step (int): The step's number.
            state (dict[str, Any]): Nested dicts and lists of modules, optimizers, objects with `state_dict`, tensors
                and plain values.
            priority (str): "normal", or "preemption" for the last save before the machine is preempted. That save does
                not wait for the memory of earlier saves, and overtakes them in the sidecar. Default: "normal".
            metadata (Mapping[str, int | float | bool | str | None] | None): Values that describe the step, such as
                `{"loss": 2.1}`: at most 64, and 16 KiB. They are committed with the step. With several ranks, those of rank
                0 are stored. Default: None, no metadata.

        Returns:
            Handle: The save in flight. `handle.result()` waits for the commit.

        Raises:
            ConflictError: This timeline already has the step, or another trainer took the run over.
            UsageError: A value of the state or of the metadata cannot be saved; the message names it.
            DeadlineError: An earlier save did not release its memory within `timeout`.
            HeadraceError: An earlier save failed and `on_save_error` is "raise".

        Example:
            >>> import tempfile
            >>> with Checkpointer(tempfile.mkdtemp(), run="exp42", sidecar=None) as checkpointer:
            ...     checkpointer.save(1, {"epoch": 3}).result(timeout=60).step
            1
        """
        return self._save(step, state, None, priority, metadata, overwrites=False)

    def save_as(
        self,
        step: int,
        state: dict[str, Any],
        name: Name | None,
        metadata: Mapping[str, int | float | bool | str | None] | None = None,
    ) -> Handle:
        """As `save`, for the adapters of `headrace.checkpoint.frameworks`.

        `name` is the file or folder by which the framework finds the step, on ranks that create one. Frameworks
        overwrite their files. A step that was already saved is therefore saved again, in a branch that begins before
        it.
        """
        return self._save(step, state, name, "normal", metadata, overwrites=True)

    def _save(
        self, step: int, state: dict[str, Any], name: Name | None, priority: str, metadata: object, overwrites: bool
    ) -> Handle:
        _check_choice("priority", priority, PRIORITIES)
        urgent = priority == "preemption"

        def check() -> Extras:
            self._check_open()
            names.check_step(step)
            extras = self._attachments.of(step, step_metadata.check(metadata))
            self._lineage.again = self._lineage.timeline == 0 or self._saves.again(step) if overwrites else False
            self._saves.raise_failures()  # also those of the saves that `again` has waited for
            self._saves.require_new(step)
            if not urgent:
                self._saves.wait_for_room(self._wait)
            return extras

        handle = self._saver.start(step, state, urgent, check, name, may_skip=not urgent and not overwrites)
        if handle.error is None:
            self._attachments.saved(step)
        self._trackers.follow_save(handle, step_metadata.check(metadata))
        return handle

    def warm_up(self, state: dict[str, Any]) -> None:
        """Allocate the memory that saves of `state` need and probe the store, in the background, before the first save.

        Call it once the optimizer has its state: after its first step, or after `restore`. It exchanges nothing with
        other ranks.

        Args:
            state (dict[str, Any]): The state as it will be saved.
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
        """Install signal handlers that request a last save when the machine is about to be preempted.

        Call `guard.reached(step)` between two steps, on all ranks: `if guard.reached(step): sys.exit(guard.exit_code)`.
        The exit code is 99 if the state was committed, 98 if not.

        Args:
            state (Callable[[], dict[str, Any]]): Returns the state to save.
            deadline (float): Seconds from the signal within which the save must be committed. Default: 100.
            signals (Sequence[signal.Signals]): Default: SIGTERM and SIGUSR1.
            report (str | os.PathLike[str] | None): A JSON file for the outcome; `.<rank>` is appended to its name.
                Default: None, which reads the name from $HEADRACE_PREEMPTION_REPORT.

        Returns:
            Preemption: The guard to ask.

        Raises:
            UsageError: Not called in the main thread.
        """
        self._check_open()
        ranks = self._ranks
        return preemption.Preemption(
            self, state, deadline=deadline, signals=signals, world_size=ranks.world_size, rank=ranks.rank, report=report
        )

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
        force: str | Iterable[str] = (),
        required: bool = False,
    ) -> int | None:
        """Restore `state` in place; call it on all ranks. Restoring changes nothing in the run.

        A later save of a step newer than the run's newest step continues from that newest step, whichever step was
        restored. A later save of any other step begins a branch (docs/explanation/commit.md). Mesh, placement and number of
        ranks may differ from the save.

        Args:
            state (dict[str, Any]): The state to fill.
            step (int | str): A step's number, or "latest". Default: "latest".
            tag (str | None): The tag of a step, instead of `step`. Default: None.
            run (str | None): Another run of this repository. Default: None, this run.
            include (str | Iterable[str] | None): Patterns on paths, such as "model/*", of the entries to restore; the
                others stay as they are (`headrace.checkpoint.state.fit`). Default: None, all entries.
            exclude (str | Iterable[str]): Patterns of entries to leave as they are. Default: none. A pattern without a
                match is an error.
            strict (bool): Require the same entries in the state and the step. Otherwise entries that only one of them
                has are skipped and logged. Default: True.
            cast (bool): Convert tensors of another dtype. Default: False.
            force (str | Iterable[str]): Patterns of objects, such as "loader", that load a state that does not match them,
                by `load_state_dict(state, force=True)`. A loader then logs the differences. Default: none.
            required (bool): Raise `NotFoundError` if the run has no step, instead of returning None. Default: False.

        Returns:
            int | None: The step that was restored; None if the run has none.

        Raises:
            MismatchError: An entry is missing, unexpected, or of another shape or dtype, or a loader does not fit. The
                message names each; nothing has changed on any rank.
            NotFoundError: The step or the tag does not exist.
            CorruptionError: Stored bytes are damaged. The message names step, tensor, pack and offset; the state is
                partly restored.

        Example:
            >>> import tempfile
            >>> state = {"epoch": 3}
            >>> with Checkpointer(tempfile.mkdtemp(), run="exp42", sidecar=None) as checkpointer:
            ...     _ = checkpointer.save(1, state).result(timeout=60)
            ...     state["epoch"] = 0
            ...     checkpointer.restore(state, step=1)
            1
            >>> state
            {'epoch': 3}
        """
        requested = step if isinstance(step, Base) else repository.step_or_tag(step, tag)
        source = self._run if run is None else run

        def prepare() -> Selection:
            self._check_open()
            self._saves.wait_for_all(self._wait)
            self._saves.forget_ended()
            return Selection.of(include, exclude, strict, cast, force)

        restored = self._restorer.restore(state, source, requested, prepare, required)
        if restored is None:
            return None
        self._lineage.restored(source, restored, latest=requested == "latest")
        if source == self._run:
            self._saves.start_over()
            self._executor.tier.kept_steps.clear()
        return restored.base.step


def _check_writable(store: Store) -> None:
    """Refuse a server that takes no writes before the first save. Other stores are probed when they are written to."""
    url = store.location.url
    if scheme_of(url) in ("http", "https"):
        raise UsageError(
            f"{url} cannot be written to over HTTP, so no run is saved there",
            hint="give a directory or s3://bucket/prefix; headrace.read reads a step from a server",
        )


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `UsageError` unless the argument has one of the valid values."""
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"choose one of: {', '.join(choices)}")
