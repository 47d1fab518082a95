"""Runs to copy, and what a copy of them must satisfy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import check
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.store.base import Store
from tests.support.checkpoint_states import RUN, begin, load, make, save, tiny_state

FROZEN = 160 << 10
"""Bytes of the tensor that all steps of a run share."""


def filled(store: Store, steps: int = 3) -> list[Base]:
    """A run whose steps share a part."""
    number, bases = begin(store), list[Base]()
    for step in range(1, steps + 1):
        bases.append(
            save(
                store,
                make(store, tiny_state(step), step=step, number=number, bases=tuple(bases[-1:]), values={"n": step}),
            )
        )
    return bases


def sharded(store: Store, world_size: int, data: bytes, step: int, number: int, run: str = RUN) -> Base:
    """A step of one tensor whose rows are divided over ranks."""
    rows, attempt = len(data) // world_size, names.new_id()
    made = [
        make(
            store,
            [
                ("w", Box((len(data),), (rank * rows,), (rows,)), data[rank * rows : (rank + 1) * rows]),
            ],
            step=step,
            number=number,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            replicas=b"r" * 32,
            run=run,
            commit_timeout=60.0,
        )
        for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as pool:
        return [*pool.map(lambda each: save(store, each), made)].pop()


def assert_copied(source: Store, store: Store, run: str = RUN, source_run: str = RUN) -> None:
    """The branch of the copy has the steps of the source's branch, with the same bytes, and nothing is damaged."""
    ours = list(repository.visible(source, source_run))
    theirs = list(repository.visible(store, run))
    assert [(each.timeline, each.step) for each in theirs] == [(each.timeline, each.step) for each in ours]
    for one, other in zip(ours, theirs, strict=True):
        assert load(source, one, run=source_run) == load(store, other, run=run)
    report = check.check(store)
    assert report.clean, report.problems
