"""Opening a step of several ranks."""

from __future__ import annotations

import threading

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.repository.fetch import open_step
from headrace.dataio.core.errors import DeadlineError
from headrace.dataio.core.limits import SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Store
from headrace.dataio.testing.system import ManualClock
from tests.support.checkpoint_states import RUN, Wrapped, begin, make, save

_RANKS = 4


class Meeting(Wrapped):
    """Answers for no manifest before it is asked for all of them."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked = threading.Barrier(_RANKS, timeout=60)

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        at = names.parse_step_key(key)
        if at is not None and at.kind == "manifest":
            self.asked.wait()
        return self.inner.get(key, max_bytes=max_bytes)


def test_the_manifests_of_a_step_are_asked_for_several_at_a_time_and_come_by_rank(store: Store) -> None:
    number, attempt = begin(store), make(store, {}, step=1).plan.attempt
    for rank in range(_RANKS):
        made = make(
            store,
            {"own": bytes([rank]) * 9},
            step=1,
            number=number,
            attempt=attempt,
            rank=rank,
            world_size=_RANKS,
            commit_timeout=0.0,
        )
        if rank < _RANKS - 1:
            with pytest.raises(DeadlineError):
                save(store, made, clock=ManualClock())
        else:
            base = save(store, made)
    found = open_step(Meeting(store), RUN, base).manifests
    assert [manifest.rank for manifest in found] == list(range(_RANKS))
