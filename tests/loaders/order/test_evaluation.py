"""Evaluation: each sample once on any number of ranks, equally many steps, and the dry ranks named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loaders.order.evaluation import Evaluation, dry
from loaders.order.schedule import Population


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3))
def test_every_clip_comes_once_and_all_ranks_take_equally_many_steps(
    samples: int, per_rank: int, world_size: int, clips: int
) -> None:
    schedule = Evaluation.of(Population(samples, clips=clips), per_rank * world_size)
    seen = []
    for number in range(schedule.batches):
        shares = [schedule.share(5, number, rank, world_size) for rank in range(world_size)]
        assert {share.sizes for share in shares} == {tuple(map(len, shares))}
        assert max(map(len, shares)) <= per_rank
        empty = [rank for rank, share in enumerate(shares) if not len(share)]
        assert [dry(share) for share in shares] == [empty] * world_size
        assert not empty or number == schedule.batches - 1
        seen.extend(virtual for share in shares for virtual in share.virtual.tolist())
    assert seen == list(range(samples * clips))


def test_a_step_without_work_for_anyone_does_not_exist() -> None:
    assert Evaluation.of(Population(16), 8).batches == 2
    assert Evaluation.of(Population(1), 8).batches == 1
    assert dry(Evaluation.of(Population(2), 4).share(0, 0, 0, 4)) == [0, 2]
