"""The state that all DCP saves of this process share, and one rank's part of one save.

With DCP, every step may have its own `RepositoryWriter`. This module therefore keeps, once per process, the state that
a Checkpointer would keep between saves.

Invariants:

- All DCP writers of a process are one writer of `headrace.checkpoint.repository.writers`. This includes the writers
  that an asynchronous save sends to another process, because `export_session` is sent with them.
- A load changes nothing. After a load with `resume=True`, the next save may begin a branch. It does so if its step is
  not newer than the run's newest step.
- A save copies at most `LEAST_BYTES` at a time. The tensors must not change during the save.

Failure behaviour: errors of the store, and those that `writers` describes. A rank that fails aborts the attempt, so the
other ranks do not wait for its manifest.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from headrace.checkpoint.format import chunking as layouts
from headrace.checkpoint.format import group, names
from headrace.checkpoint.format.chunking import Layout, TensorSpec
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.saving import DeviceSlices
from headrace.checkpoint.repository import commit, timeline, writers
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.lease import DEFAULT_LIFE
from headrace.checkpoint.repository.writers import WriterState
from headrace.checkpoint.saving import plan
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.slices import LEAST_BYTES, SlicedState
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
_lock = threading.Lock()
_writer, _handed_on = "", False
_timelines: dict[tuple[str, str], int] = {}
"""The timeline of this process's last save, by URL and run."""
_resumed: dict[tuple[str, str], tuple[Base, int, bool]] = {}
"""The step that this process continues from, by URL and run.

With it: the run's newest timeline when the step was loaded, and whether it was loaded as the latest step.
"""


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """The coordinator's decision for one save."""

    attempt: str
    timeline: int
    base: Base | None


def new_ticket(store: Store, run: str, step: int, again: bool = False) -> Ticket:
    """Create the attempt of a save. The coordinator calls it once for each save.

    `again`: if this job has already saved the step, it is saved again in a branch.
    """
    at = (store.location.url, run)
    with _lock:
        repository.ensure_repo(store)
        restored, since, latest = _resumed.get(at, (None, 0, False))
        state = WriterState(
            _writer_name(),
            _timelines.get(at, 0),
            restored,
            since,
            handed_on=_handed_on,
            again=again,
            was_latest=latest,
        )
        place = writers.place(store, run, step, state)
        _timelines[at] = place.timeline
        _resumed.pop(at, None)
    if place.newer is not None:
        _log.warning(
            "run %s: step %d is saved before step %d, which stays the latest; to continue from an earlier step, load it with"
            " RepositoryReader(..., resume=True)",
            *(run, step, place.newer.step),
        )
    return Ticket(names.new_id(), place.timeline, place.base)


def resume(store: Store, run: str, base: Base, *, latest: bool) -> None:
    """Make later saves of this process continue from a step that it has loaded. `latest`: as the run's latest step."""
    since = max(timeline.numbers(store, run), default=0)
    with _lock:
        _resumed[store.location.url, run] = base, since, latest


def export_session() -> Any:
    """The state for a process that saves on behalf of this one. It is the argument of `adopt_session` there."""
    global _handed_on
    with _lock:
        _handed_on = True
        return _writer_name(), writers.of_this_job(), dict(_timelines), dict(_resumed)


def adopt_session(exported: Any) -> None:
    """Make this process save on behalf of the process that called `export_session`."""
    global _writer
    with _lock:
        _writer, writers_of_caller, timelines, resumed = exported
        writers.join(writers_of_caller)
        _resumed.update(resumed)
        for at, number in timelines.items():
            _timelines[at] = max(_timelines.get(at, 0), number)


def is_new_process() -> None:
    """Clear the state in a forked child, because it belongs to the parent process."""
    global _writer, _handed_on, _lock
    _writer, _handed_on, _lock = "", False, threading.Lock()
    _timelines.clear()
    _resumed.clear()


def _writer_name() -> str:
    global _writer
    if not _writer:
        _writer = writers.enter()
    return _writer


os.register_at_fork(after_in_child=is_new_process)


@dataclass(frozen=True, slots=True)
class RankSave:
    """One rank's part of a save. `wait`: the time limit for the other ranks, in seconds.

    `metadata`: the step's metadata, of which that of rank 0 counts.
    `plan`: the plan digest of a job that commits in groups (`headrace.checkpoint.format.group`). Without it, no rank
    may write a tensor that belongs to all ranks.
    """

    run: str
    step: int
    ticket: Ticket
    rank: int
    world_size: int
    compression: str = "none"
    wait: float = 600.0
    plan: bytes = b""
    metadata: Metadata = field(default_factory=dict)


def save_rank(
    store: Store,
    share: RankSave,
    tensors: Sequence[torch.Tensor],
    specs: Sequence[TensorSpec],
    tree: bytes,
    direct: Direct | None = None,
) -> None:
    """Store the tensors. Returns after all ranks have committed the step.

    `direct` copies the tensors on its device by GPUDirect Storage.
    """
    try:
        _commit_staged(store, share, tensors, list(specs), tree, direct)
    except BaseException as error:
        abort(store, share, error)
        raise


def abort(store: Store, share: RankSave, error: BaseException) -> None:
    """Abort the attempt, so that other ranks stop waiting for this rank's manifest."""
    attempt = Attempt(share.run, share.ticket.timeline, share.step, share.ticket.attempt, share.world_size)
    reason = f"rank {share.rank} failed: {error}"
    with contextlib.suppress(Exception):  # only the first error is raised
        commit.abort(store, attempt, reason)


def _commit_staged(
    store: Store,
    share: RankSave,
    tensors: Sequence[torch.Tensor],
    specs: list[TensorSpec],
    tree: bytes,
    direct: Direct | None,
) -> None:
    specs, tensors = layouts.in_bands(specs, tensors)
    layout = layouts.lay_out(specs)
    plan = _plan(store, share, specs, layout, tree)
    arena = Arena(LEAST_BYTES)
    sliced: SlicedState | None = None
    try:
        if direct is not None and any(tensor.device.type == direct.device for tensor in tensors):
            sliced = device_slices = DeviceSlices(direct, arena, tensors=tensors, specs=specs, layout=layout)
            store = device_slices.store(store)
        else:
            sliced = SlicedState(arena, tensors, specs=specs, layout=layout)
        commit_staged(sliced, plan, lambda _: None, store=store)
    finally:
        if sliced is not None:
            sliced.cancel()
        arena.close()


def _agreed(share: RankSave) -> bytes:
    if not names.is_grouped(share.world_size):
        return b""
    return share.plan or group.plan_digest([group.NO_SHARE] * share.world_size)


def _plan(store: Store, share: RankSave, specs: list[TensorSpec], layout: Layout, tree: bytes) -> plan.PutPlan:
    ticket = share.ticket
    return plan.PutPlan(
        location=plan.PlanLocation(store.location.url, dict(store.location.options)),
        run=share.run,
        timeline=ticket.timeline,
        step=share.step,
        attempt=ticket.attempt,
        rank=share.rank,
        world_size=share.world_size,
        bases=(ticket.base,) if ticket.base else (),
        tensors=plan.plan_tensors(specs, layout),
        small_bytes=layout.small_bytes,
        tree=tree,
        replicas=_agreed(share),
        compression=share.compression,
        lease_seconds=DEFAULT_LIFE,
        commit_timeout=share.wait,
        metadata=share.metadata if share.rank == 0 else {},
    )
