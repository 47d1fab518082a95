"""The commit protocol, restores and collections hold in random histories, and those histories find planted faults.

`make test` runs `FEW` histories, shared among `PARTS` tests. The variable HISTORIES sets their number. `make soak` runs
`MANY`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.history import BrokenPromiseError, History
from tests.simulation.planted import PLANTED

FEW, MANY, PARTS = int(os.environ.get("HISTORIES", "300")), 100_000, 6
TRIES = 400
"""The most histories until a planted fault is found."""
FIRST = {
    "collectors remove attempts whose lease is over without aborting them": 840,
    "a replaced worker uses its predecessor's pack names": 115,
    "a decision is overwritten": 188,
    "a COMMIT is overwritten": 30,
    "readers and savers ignore pending deletes": 880,
    "collectors judge an attempt by COMMIT": 75,
    "COMMIT is written before the decision": 70,
    "the packs of an attempt without a decision are read once": 420,
    "collectors read a step once, although it has no outcome": 400,
}
"""The first history that is tried, for faults that few histories find: one that finds it comes soon after."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of leases cannot be deleted, on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def tried(seeds: range) -> Counter[str]:
    """Run these histories; what happened in all of them together."""
    count = Counter[str]()
    for seed in seeds:
        history = History(seed)
        journal = history.run()
        count += history.bucket.fired
        count += Counter(
            commits=len(journal.acked),
            reads=journal.reads,
            killed=journal.killed,
            paused=journal.paused,
            removed=journal.removed,
            timelines=len(journal.opened),
        )
    return count


def require_eventful(count: Counter[str]) -> None:
    """Whatever a history can meet has happened."""
    wanted = (
        "refused",
        "lost",
        "late",
        "twice",
        "flipped",
        "commits",
        "reads",
        "killed",
        "paused",
        "removed",
        "timelines",
    )
    assert not [name for name in wanted if not count[name]]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_history_breaks_a_promise(part: int) -> None:
    each = FEW // PARTS
    require_eventful(tried(range(part * each, (part + 1) * each)))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(100))
def test_none_of_a_hundred_thousand_histories_breaks_a_promise(part: int) -> None:
    each = (MANY - FEW) // 100
    require_eventful(tried(range(FEW + part * each, FEW + (part + 1) * each)))


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    first = FIRST.get(fault, 0)
    with pytest.raises(BrokenPromiseError), PLANTED[fault]():
        tried(range(first, first + TRIES))


def test_one_seed_is_one_history() -> None:
    first, second = History(11), History(11)
    first.run()
    second.run()
    assert first.bucket.requests == second.bucket.requests
    assert first.simulation.now == second.simulation.now
