"""Which kept steps may go, and in which order. Pure.

Invariants: to make room a step goes whole, all ranks' records of its attempt together. One that is not known to be
committed goes only when it never can be, or when a newer step of the same run is committed for every rank that it has here:
then no progress is lost with it.
Failure behaviour: none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.dataio.store.tier.record import Record

Rank = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """`bytes` in all, `steps` of each run."""

    bytes: int
    steps: int


def beyond(records: Iterable[Record], steps: int) -> list[Record]:
    """Records of steps that are over, or older than the newest `steps` committed ones of their run and may go."""
    known = list(records)
    newest = {rank: sorted(places, reverse=True)[:steps] for rank, places in _committed(known).items()}
    return [r for r in known if r.over or (_expendable(r, newest) and _too_old(r, newest, steps))]


def order(records: Iterable[Record]) -> list[list[Record]]:
    """Steps that may go to make room, oldest first, each with all its records."""
    known = list(records)
    newest = {rank: [max(places)] for rank, places in _committed(known).items()}
    steps: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in known:
        steps[record.source, record.run, record.attempt].append(record)
    free = [step for step in steps.values() if all(_expendable(r, newest) for r in step)]
    return sorted(free, key=lambda step: (step[0].created, step[0].place))


def _committed(records: list[Record]) -> dict[Rank, set[tuple[int, int]]]:
    places: dict[Rank, set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        if record.committed and not record.over:
            places[_rank(record)].add(record.place)
    return places


def _expendable(record: Record, newest: dict[Rank, list[tuple[int, int]]]) -> bool:
    if record.committed or record.over:
        return True
    return any(place > record.place for place in newest.get(_rank(record), ()))


def _too_old(record: Record, newest: dict[Rank, list[tuple[int, int]]], steps: int) -> bool:
    kept = newest.get(_rank(record), [])
    return record.place not in kept and (len(kept) >= steps or not record.committed) and record.place < max(kept)


def _rank(record: Record) -> Rank:
    return record.source, record.run, record.rank
