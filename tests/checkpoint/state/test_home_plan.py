"""A large job divides its writes as a small one does, and no rank sees more rows than concern it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.state import home_plan
from headrace.checkpoint.state.home_plan import Row, Share, divide, ranks_in, runs
from headrace.checkpoint.state.save_plan import WriteAssignment, assign_writes
from headrace.dataio.core.errors import MismatchError
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Simulation

Tables = list[list[Row]]


def whole(name: str, first: bool = False, size: int = 4) -> Row:
    return Row(name, "float32", (size,), (0,), (size,), first)


def shard(name: str, index: int, count: int) -> Row:
    return Row(name, "float32", (6 * count,), (6 * index,), (6,), False)


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """The rows of several ranks: whole tensors on some of them, and tensors that are split over all, perhaps twice."""
    world = draw(st.sampled_from((1, 2, 4, 6)))
    made: Tables = [[] for _ in range(world)]
    for number in range(draw(st.integers(0, 6))):
        name, kind = f"t{number}", draw(st.sampled_from(("whole", "first", "split", "split twice")))
        if kind in ("whole", "first"):
            row = whole(name, kind == "first", draw(st.integers(1, 50)))
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                made[rank].append(row)
            continue
        count = world // 2 if kind == "split twice" and world > 1 else world
        for rank in range(world):
            made[rank].append(shard(name, rank % count, count))
    return made


def together(made: Tables, work: Callable[[SimulatedRanks, list[Row]], object]) -> list[object]:
    """What each rank of a simulated job returns or raises."""
    simulation = Simulation(1)
    group = Group(simulation, len(made))
    tasks = [simulation.start(work, SimulatedRanks(group, rank), rows) for rank, rows in enumerate(made)]
    simulation.run()
    return [task.error or task.result for task in tasks]


def by_homes(made: Tables) -> list[object]:
    return together(made, lambda ranks, rows: divide(rows, ranks))


def by_tables(made: Tables) -> WriteAssignment:
    compress = zstandard.ZstdCompressor().compress
    return assign_writes(tuple(compress(msgspec.msgpack.encode(rows)) for rows in made))


@given(tables())
def test_every_rank_writes_what_it_would_write_if_all_ranks_had_all_tables(made: Tables) -> None:
    wanted = by_tables(made)
    for rank, share in enumerate(by_homes(made)):
        assert isinstance(share, Share)
        written = {made[rank][number].key for number in share.written}
        assert written == {key for key, owner in wanted.owners.items() if owner == rank}
        shared = {made[rank][n].key: each.holders for each in share.shared for n in each.rows}
        assert shared == {each.key: each.holders for each in wanted.replicas if rank in each.holders}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([[whole("w")], [Row("w", "float16", (4,), (0,), (4,), False)]], "it is float32[4] on rank 0 and float16[4]"),
        ([[shard("w", 0, 2)], [shard("w", 0, 2)]], "its shards hold 6 of 12 elements"),
        ([[shard("w", 0, 2)], [shard("w", 1, 2), Row("w", "float32", (12,), (5,), (2,), False)]], "overlap"),
    ],
    ids=["two types", "a part is missing", "an overlap"],
)
def test_all_ranks_raise_the_same_error_that_names_the_tensor(made: Tables, says: str) -> None:
    errors = by_homes([*made, [whole("other")]])
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert "tensor 'w': " in str(errors[0])
    assert says in str(errors[0])
    with pytest.raises(MismatchError) as small:
        by_tables(made)
    assert str(small.value) == str(errors[0])


def test_of_two_errors_all_ranks_raise_one() -> None:
    made = [[shard(f"w{number}", 0, 2)] for number in range(12)]
    errors = by_homes(made)
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], MismatchError)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_runs_hold_exactly_their_ranks(ranks: set[int]) -> None:
    assert ranks_in(runs(sorted(ranks))) == tuple(sorted(ranks))


def test_a_line_of_a_mesh_is_one_run() -> None:
    assert runs(range(16_384)) == ((0, 16_384, 1),)
    assert runs(range(3, 4096, 128)) == ((3, 32, 128),)


def test_no_rank_gets_more_than_its_part() -> None:
    count, world = 40, 64
    simulation = Simulation(1)
    group = Group(simulation, world)
    made = [[shard(f"layers.{number}.weight", rank, world) for number in range(count)] for rank in range(world)]
    tasks = [simulation.start(divide, rows, SimulatedRanks(group, rank)) for rank, rows in enumerate(made)]
    simulation.run()
    assert all(task.result == Share(frozenset(range(count)), ()) for task in tasks)
    rows_of_one = len(msgspec.msgpack.encode(made[0]))
    most_at_one_home = max(sum(home_plan.home_of(row.name, world) == home for row in made[0]) for home in range(world))
    assert group.bytes <= (most_at_one_home / count + 0.1) * world * rows_of_one  # a home has all rows of its tensors
