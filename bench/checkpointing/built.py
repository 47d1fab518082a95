"""What every candidate is: the same few calls.

Invariant: a wait returns only when what was saved is durable: fsynced, or acknowledged by the object store. Failure behaviour:
exceptions go on up and fail the candidate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from headrace.bench.checkpointing.training import Guard, State

Wait = Callable[[], object]
SECONDS = 240


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Built:
    """`save` returns when training may go on, its result waits until durable. `guard`: within it the optimizer may step.

    What the wait returns may have `wait_seconds`, seconds for which the trainer was held later than in `save`.
    """

    save: Callable[[State], Wait]
    restore: Callable[[State], object]
    close: Callable[[], object] = _nothing
    guard: Guard = contextlib.nullcontext
    warm_up: Callable[[], object] = _nothing
    """What a trainer may call once, behind its first steps."""
