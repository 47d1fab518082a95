"""Copies hold their promises in random histories, and those histories find planted faults."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from headrace.checkpoint.copies import chunks
from headrace.checkpoint.copies.identity import TimelineCopier
from tests.simulation.copies import CopyHistory
from tests.simulation.history import BrokenPromiseError

FEW, PARTS, TRIES = int(os.environ.get("HISTORIES", "300")) // 10, 1, 300


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def tried(seeds: range) -> Counter[str]:
    """Run these histories; what happened in all of them together."""
    count = Counter[str]()
    for seed in seeds:
        history = CopyHistory(seed)
        journal = history.run()
        count += history.bucket.fired
        count += Counter(
            copies=len(journal.acked),
            reads=journal.reads,
            killed=journal.killed,
            paused=journal.paused,
            removed=journal.removed,
        )
    return count


@pytest.mark.parametrize("part", range(PARTS))
def test_no_history_of_a_copy_breaks_a_promise(part: int) -> None:
    each = FEW // PARTS
    count = tried(range(part * each, (part + 1) * each))
    assert all(count[name] for name in ("lost", "late", "twice", "flipped", "copies", "reads", "killed", "removed"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(20))
def test_none_of_many_histories_of_a_copy_breaks_a_promise(part: int) -> None:
    tried(range(FEW + part * 500, FEW + (part + 1) * 500))


PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "timelines are not copied": lambda: mock.patch.object(TimelineCopier, "copy", return_value=None),
    "packs that are taken over are not of the attempt": lambda: mock.patch.object(chunks, "take_over", _of_any_attempt),
}


def _of_any_attempt(store: object, attempt: str) -> object:
    """The chunks of all packs of the destination."""
    found: dict[bytes, object] = {}
    for other in store.list_folders("packs/"):  # type: ignore[attr-defined]
        found |= _take_over(store, other)  # type: ignore[arg-type]
    return found


_take_over = chunks.take_over


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_copies_is_found(fault: str) -> None:
    with pytest.raises(BrokenPromiseError), PLANTED[fault]():
        tried(range(TRIES))
