"""Evaluation: each sample once on any number of ranks, equally many steps, and the ranks without samples named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.schedule import Evaluation, Population


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3))
def test_every_clip_is_delivered_once_and_all_ranks_take_equally_many_steps(
    samples: int, per_rank: int, world_size: int, clips: int
) -> None:
    schedule = Evaluation.of([Population(samples, clips=clips)], [per_rank * world_size])
    seen: list[int] = []
    for number in range(schedule.batches):
        shares = [schedule.share(5, number, rank, world_size) for rank in range(world_size)]
        assert {share.sizes for share in shares} == {tuple(map(len, shares))}
        assert max(map(len, shares)) <= per_rank
        empty = [rank for rank, share in enumerate(shares) if not len(share)]
        assert [share.empty_ranks for share in shares] == [empty] * world_size
        assert not empty or number == schedule.batches - 1
        seen.extend(virtual for share in shares for virtual in share.virtual.tolist())
    assert seen == list(range(samples * clips))


def test_no_step_is_without_samples_on_all_ranks() -> None:
    assert Evaluation.of([Population(16)], [8]).batches == 2
    assert Evaluation.of([Population(1)], [8]).batches == 1
    assert Evaluation.of([Population(2)], [4]).share(0, 0, 0, 4).empty_ranks == [0, 2]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=6), st.integers(1, 7))
def test_streams_come_one_after_the_other_and_every_batch_is_of_one(
    streams: list[tuple[int, int]], world_size: int
) -> None:
    schedule = Evaluation.of([Population(samples) for samples, _ in streams], [batch for _, batch in streams])
    seen: list[tuple[int, int]] = []
    for number in range(schedule.batches):
        whole = schedule.share(3, number)
        assert len(set(whole.stream.tolist())) == 1
        assert len(whole) <= streams[whole.stream[0]][1]
        shares = [schedule.share(0, number, rank, world_size) for rank in range(world_size)]
        together = [pair for s in shares for pair in zip(s.stream.tolist(), s.virtual.tolist(), strict=True)]
        assert together == list(zip(whole.stream.tolist(), whole.virtual.tolist(), strict=True))
        seen.extend(together)
    assert seen == [(n, virtual) for n, (samples, _) in enumerate(streams) for virtual in range(samples)]
    with pytest.raises(UsageError, match="outside"):
        schedule.share(0, schedule.batches)


def test_a_description_names_the_buckets() -> None:
    def described(*numbers: int) -> dict[str, object]:
        return Evaluation.of([Population(9)] * 2, [4, 2], buckets=[0, 3], numbers=numbers).described()

    assert described(1, 2) == described(1, 2) != described(1, 3)
    assert [Evaluation.of([Population(9)] * 2, [4, 2], buckets=[0, 3]).share(0, n).bucket for n in (0, 3)] == [0, 3]
