"""A save before the machine is taken away: it waits for no save that was there first."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import UsageError
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped

pytestmark = pytest.mark.slow


class Held(Wrapped):
    """Packs of the first save wait until they are let go."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reached, self.go, self.first = threading.Event(), threading.Event(), ""

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        attempt = key.split("/")[1]
        self.first = self.first or attempt
        if attempt == self.first:
            self.reached.set()
            assert self.go.wait(60)
        return super().put_multipart(key, parts)


def test_a_preemption_save_does_not_wait_for_the_memory_of_saves_in_flight(tmp_path: Path) -> None:
    state = {"w": torch.arange(100_000.0)}
    with open_store(tmp_path) as inner, Checkpointer(held := Held(inner), run="exp", sidecar=None) as checkpointer:
        first = checkpointer.save(1, state)
        assert held.reached.wait(60)
        state["w"].neg_()
        assert checkpointer.save(2, state, priority="preemption").result(60).step == 2
        assert not first.done
        state["w"].zero_()
        held.go.set()
        assert first.result(60).step == 1
        for step, expected in ((1, torch.arange(100_000.0)), (2, -torch.arange(100_000.0))):
            assert checkpointer.restore(state, step=step) == step
            assert torch.equal(state["w"], expected)


def test_an_unknown_priority_is_refused_before_anything_happens(tmp_path: Path) -> None:
    with (
        Checkpointer(str(tmp_path / "repo"), run="exp", sidecar=None) as checkpointer,
        pytest.raises(UsageError, match="priority is 'high'"),
    ):
        checkpointer.save(1, {"n": 1}, priority="high")
    assert not (tmp_path / "repo").exists()
