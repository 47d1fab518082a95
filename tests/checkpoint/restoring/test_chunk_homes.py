"""A chunk that several ranks need is read by one of them, and reaches each of the others once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.format.manifest import Chunk
from headrace.checkpoint.restoring.chunk_homes import Routes, are_shared, encode_needs, find_routes, routes_among
from headrace.checkpoint.restoring.chunk_relay import ROUND_BYTES, rounds
from headrace.dataio.core.limits import MIB
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Simulation


def chunk(number: int, size: int = 4 * MIB) -> tuple[str, Chunk]:
    return "packs/one.pack", Chunk(number.to_bytes(32, "big"), 0, number * size, size, size)


def routes_of(needed: Sequence[Sequence[int]]) -> list[Routes]:
    """The routes of each rank, for chunks by number."""
    simulation = Simulation(1)
    group = Group(simulation, len(needed))
    tasks = [
        simulation.start(find_routes, [[], [chunk(number) for number in own]], SimulatedRanks(group, rank))
        for rank, own in enumerate(needed)
    ]
    simulation.run()
    results = [cast("list[Routes]", task.result) for task in tasks]
    assert all(found[0] == {} for found in results)
    return [found[1] for found in results]


@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=9))
def test_every_chunk_is_read_by_one_rank_of_those_that_need_it_and_reaches_the_others(needed: list[set[int]]) -> None:
    found = routes_of([sorted(own) for own in needed])
    for number in range(20):
        place = ("packs/one.pack", number * 4 * MIB)
        ranks = {rank for rank, own in enumerate(needed) if number in own}
        parts = {rank: routes[place] for rank, routes in enumerate(found) if place in routes}
        assert set(parts) == (ranks if len(ranks) > 1 else set())
        reached = [rank for rank, part in parts.items() if part.parent is None]
        assert len(reached) == bool(parts)
        for rank in reached:  # grows while it is iterated
            assert all(parts[child].parent == rank for child in parts[rank].children)
            assert len(parts[rank].children) <= 2
            reached.extend(parts[rank].children)
        assert sorted(reached) == sorted(parts)


@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=8))
def test_in_a_small_job_the_ranks_agree_without_homes(needed: list[set[int]]) -> None:
    sets = [[[], [chunk(number) for number in sorted(own)]] for own in needed]
    tables = [encode_needs(own) for own in sets]
    found = [routes_among(tables, own, rank)[1] for rank, own in enumerate(sets)]
    for place in {place for routes in found for place in routes}:
        parts = {rank: routes[place] for rank, routes in enumerate(found) if place in routes}
        assert sum(part.parent is None for part in parts.values()) == 1
        assert all(rank in parts[part.parent].children for rank, part in parts.items() if part.parent is not None)
    assert are_shared(tables) == (False, any(found))
    assert [set(routes) for routes in found] == [set(routes) for routes in routes_of([sorted(own) for own in needed])]


def test_work_is_spread_over_the_ranks() -> None:
    found = routes_of([range(400)] * 8)
    read = [sum(part.parent is None for part in routes.values()) for routes in found]
    assert sum(read) == 400
    assert max(read) <= 60
    assert routes_of([[]] * 3) == [{}] * 3


def test_rounds_hold_every_chunk_in_order_and_are_bounded() -> None:
    routes = routes_of([range(30)] * 2)[0]
    found = list(rounds(routes))
    assert [place for places in found for place in places] == sorted(routes)
    assert all(sum(routes[place].chunk.raw for place in places) <= ROUND_BYTES for places in found)
    assert len(found) == 4
