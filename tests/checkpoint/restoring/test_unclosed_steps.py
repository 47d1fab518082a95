"""Steps that are never closed: the garbage collector finds them, in any thread and under any lock of the store's."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.dcp import RepositoryReader
from headrace.checkpoint.format import names
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import MetricsStore, Wrapper
from tests.support.waiting import wait_for


class Noting(Wrapper):
    """Which threads ask."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked = list[int]()

    def _through(self, operation: str, key: str, size: int, work: Callable[[], Any]) -> Any:
        self.asked.append(threading.get_ident())
        return work()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Noting]:
    with Checkpointer(str(tmp_path), run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1000)}).result(60)
    with open_store(tmp_path) as store:
        yield Noting(MetricsStore(store, "posix"))


def dcp_reader(store: Store) -> RepositoryReader:
    """One that has been asked what the step holds and no more, as when another rank could not say it."""
    reader = RepositoryReader(store, run="exp", step=1)
    reader.read_metadata()
    return reader


def opened(store: Store) -> SavedStep:
    return read(store, run="exp")


@pytest.mark.parametrize("open_step", [dcp_reader, opened])
def test_a_step_that_is_forgotten_asks_nothing_of_the_store_in_the_thread_that_collects_it(
    store: Noting, open_step: Callable[[Store], object]
) -> None:
    circle: list[object] = [open_step(store)]
    circle.append(circle)
    assert list(store.list(names.LEASES))
    store.asked.clear()
    del circle
    gc.collect()
    assert threading.get_ident() not in store.asked
    wait_for(lambda: not list(store.list(names.LEASES)))  # its lease is deleted all the same
