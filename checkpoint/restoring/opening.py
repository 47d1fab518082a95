"""Open the step of a restore: rank 0 finds it, reads its decision and holds its lease, for all ranks of the job.

Every rank takes part in the whole restore, and it ends with an exchange. So rank 0 releases the lease after the last
rank has read, and one lease protects the step for all of them.

Invariant: all ranks receive the decision that rank 0 read. It names the digests of all manifests or groups, so every
rank can check what it reads by itself.
Failure behaviour: if the step is damaged or does not exist, all ranks raise the error of rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.checkpoint.format.chunking import DIGEST_BYTES
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.ranks import Alike
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.fetch import Sealed
from headrace.checkpoint.state import home_plan
from headrace.checkpoint.tier.restoring import Found
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.store.base import Store

OF_ALL_RANKS: Alike = (CorruptionError, NotFoundError)
"""Errors about the step itself: all ranks raise them if one rank does."""
_IN_FIRST_MESSAGE = 256
"""Bytes of digests that the first message may hold."""


class Exchange(home_plan.Exchange, Protocol):
    """The collective operations of a restore, up to the reading of chunks."""

    def agree(self, number: int, message: bytes, error: Exception | None, alike: Alike = ()) -> bytes:
        """Return rank 0's message, or raise on all ranks."""
        ...

    def agreed(self, number: int = 0, alike: Alike = ()) -> contextlib.AbstractContextManager[None]:
        """Raise on all ranks if the block fails on one."""
        ...


class _First(msgspec.Struct, array_like=True, frozen=True):
    """Rank 0's message: the step and its decision. `count`: the number of digests, which may follow in another message."""

    found: Found
    world_size: int
    group_ranks: int
    grouped: bool
    count: int
    digests: bytes


def open_found(
    run: str, number: int, find: Callable[[], tuple[Found, Sealed] | None], ranks: Exchange
) -> tuple[Found, Sealed] | None:
    """The step that `find` returns on rank 0, with its decision, on all ranks. All ranks call it.

    `number`: the step that the caller asked for, which must be the same on all ranks.
    """
    first, error, joined = None, None, b""
    try:
        if ranks.rank == 0 and (opened := find()) is not None:
            first, joined = _first_message(*opened)
    except Exception as caught:  # of any type: the other ranks must receive it
        error = caught
    message = ranks.agree(number, msgspec.msgpack.encode(first), error, OF_ALL_RANKS)
    received = msgspec.msgpack.decode(message, type=_First | None)
    if received is None:
        return None
    joined = received.digests or ranks.maximum(joined or bytes(received.count * DIGEST_BYTES))
    return received.found, _decision_from(run, received, joined)


def read_decision(store: Store, run: str, base: Base) -> Sealed:
    """Read the decision, and check its digests, because the ranks exchange them as bytes of this length."""
    decision = fetch.sealed(store, run, base)
    if any(len(each) != DIGEST_BYTES for each in (*decision.digests, *decision.groups)):
        raise CorruptionError(f"{decision.attempt.decision_key} names digests of another length")
    return decision


def _first_message(found: Found, sealed: Sealed) -> tuple[_First, bytes]:
    named = sealed.groups or sealed.digests
    joined = b"".join(named)
    inside = joined if len(joined) <= _IN_FIRST_MESSAGE else b""
    world_size = sealed.attempt.world_size
    return _First(found, world_size, sealed.group_ranks, bool(sealed.groups), len(named), inside), joined


def _decision_from(run: str, first: _First, joined: bytes) -> Sealed:
    base = first.found.base
    digests = tuple(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))
    attempt = Attempt(run, base.timeline, base.step, base.attempt, first.world_size)
    if first.grouped:
        return Sealed(run, base, attempt, (), digests, first.group_ranks)
    return Sealed(run, base, attempt, digests)
