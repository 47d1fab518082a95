"""This rank's share of a save that other software planned, carried to its commit inside this process.

Invariant: no more than `LEAST_BYTES` of copies at once, besides the tensors themselves, which must not change meanwhile.
Failure behaviour: a rank that fails aborts the attempt, so that the others do not wait for its manifest until their time is up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.checkpoint.dcp.session import Ticket
from headrace.checkpoint.format import chunking as layouts
from headrace.checkpoint.format.chunking import Layout, TensorSpec
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.saving import DeviceSlices
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.lease import DEFAULT_LIFE
from headrace.checkpoint.saving import plan
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.slices import LEAST_BYTES, SlicedState
from headrace.dataio.store.base import Store


@dataclass(frozen=True, slots=True)
class Share:
    """Which step, as which attempt, and who of how many writes this. `wait`: seconds for the other ranks."""

    run: str
    step: int
    ticket: Ticket
    rank: int
    world_size: int
    compression: str = "none"
    wait: float = 600.0


def carry_here(
    store: Store,
    share: Share,
    tensors: Sequence[torch.Tensor],
    specs: Sequence[TensorSpec],
    tree: bytes,
    direct: Direct | None = None,
) -> None:
    """Store the tensors; returns when the step is committed, by all ranks. `direct`: what it reaches goes by it."""
    try:
        _commit_staged(store, share, tensors, list(specs), tree, direct)
    except BaseException as error:
        abort(store, share, error)
        raise


def abort(store: Store, share: Share, error: BaseException) -> None:
    """Let the ranks that wait for this one's manifest know that it will not come."""
    attempt = Attempt(share.run, share.ticket.timeline, share.step, share.ticket.attempt, share.world_size)
    reason = f"rank {share.rank} failed: {error}"
    with contextlib.suppress(Exception):  # the error that is on its way is the one to be seen
        commit.abort(store, attempt, reason)


def _commit_staged(
    store: Store,
    share: Share,
    tensors: Sequence[torch.Tensor],
    specs: list[TensorSpec],
    tree: bytes,
    direct: Direct | None,
) -> None:
    specs, tensors = layouts.in_bands(specs, tensors)
    layout = layouts.lay_out(specs)
    put = plan.encode(_plan(store, share, specs, layout, tree))
    arena = Arena(LEAST_BYTES)
    sliced: SlicedState | None = None
    try:
        if direct is not None and any(tensor.device.type == direct.device for tensor in tensors):
            sliced = there = DeviceSlices(direct, arena, tensors, specs, layout)
            store = there.store(store)
        else:
            sliced = SlicedState(arena, tensors, specs, layout)
        commit_staged(sliced, put, lambda _: None, store=store)
    finally:
        if sliced is not None:
            sliced.cancel()
        arena.close()


def _plan(store: Store, share: Share, specs: list[TensorSpec], layout: Layout, tree: bytes) -> plan.PutPlan:
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
        replicas=b"",
        compression=share.compression,
        lease_seconds=DEFAULT_LIFE,
        commit_timeout=share.wait,
    )
