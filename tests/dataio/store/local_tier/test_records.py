"""Which kept steps go: whole, oldest first, and never the only copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.store.local_tier.records import Record, TierLimits, removable_steps, removable_surplus


def record(
    step: int, *, committed: bool = True, rank: int = 0, timeline: int = 1, run: str = "r", **more: Any
) -> Record:
    attempt = more.pop("attempt", f"{timeline}-{step}")
    return Record(
        source="s",
        run=run,
        timeline=timeline,
        step=step,
        attempt=attempt,
        rank=rank,
        world_size=2,
        own=(f"packs/{attempt}/{rank}.pack",),
        created=float(timeline * 1000 + step),
        committed=1.0 if committed else 0.0,
        **more,
    )


def steps(records: list[Record]) -> list[int]:
    return sorted({r.step for r in records})


def test_the_newest_steps_of_each_run_and_rank_stay() -> None:
    records = [record(s, rank=rank, run=run) for s in range(5) for rank in (0, 1) for run in ("a", "b")]
    gone = removable_surplus(records, 2)
    assert steps(gone) == [0, 1, 2]
    assert len(gone) == 3 * 4


def test_a_step_of_a_newer_timeline_is_newer_whatever_its_number() -> None:
    assert steps(removable_surplus([record(1000), record(900, timeline=2)], 1)) == [1000]


def test_a_step_without_another_copy_stays_until_a_newer_one_is_committed() -> None:
    alone = [record(3), record(4, committed=False)]
    assert removable_surplus(alone, 1) == []
    assert [steps(s) for s in removable_steps(alone)] == [[3]]
    later = [*alone, record(5)]
    assert steps(removable_surplus(later, 1)) == [3, 4]


def test_a_step_that_can_never_be_committed_goes_first() -> None:
    assert steps(removable_surplus([record(4, committed=False, over=True)], 3)) == [4]


def test_a_step_waits_for_all_its_ranks() -> None:
    records = [record(1, rank=0), record(1, rank=1, committed=False)]
    assert removable_steps(records) == []
    assert [len(s) for s in removable_steps([*records, record(2, rank=1)])] == [2, 1]


KEPT = st.builds(
    record,
    st.integers(0, 6),
    committed=st.booleans(),
    rank=st.integers(0, 1),
    timeline=st.integers(1, 3),
    over=st.booleans(),
)


@given(st.lists(KEPT, max_size=20, unique_by=lambda r: (r.attempt, r.rank)), st.integers(1, 3))
def test_nothing_goes_that_may_be_the_only_copy_of_the_newest_state(records: list[Record], keep: int) -> None:
    gone = [*removable_surplus(records, keep), *(r for step in removable_steps(records) for r in step)]
    sound = [r for r in records if r.committed and not r.over]
    for r in gone:
        newer = [o for o in sound if o.rank == r.rank and o.place > r.place]
        assert r.committed or r.over or newer
    left = [r for r in records if r not in removable_surplus(records, keep)]
    for rank in (0, 1):
        best = sorted({r.place for r in sound if r.rank == rank}, reverse=True)[:keep]
        assert {r.place for r in left if r.rank == rank} >= set(best)


def test_limits_can_be_changed_by_replace() -> None:
    assert replace(TierLimits(1, 2), steps=3).steps == 3
    assert msgspec.structs.replace(record(1), committed=0.0).committed == 0


def guests(*places: int, rank: int = 0) -> list[Record]:
    return [record(step, committed=False, guest=True, rank=rank) for step in places]


def test_a_guests_step_goes_when_its_node_has_sent_enough_newer_ones() -> None:
    assert removable_surplus(guests(1, 2, 3), 1) == []
    assert steps(removable_surplus(guests(1, 2, 3, 4, 5), 1)) == [1, 2]
    assert [steps(s) for s in removable_steps(guests(1, 2, 3, 4))] == [[1]]


def test_a_guests_step_stays_if_only_another_rank_has_newer_ones() -> None:
    records = [*guests(1, 2, 3, 4), *guests(1, rank=1)]
    assert removable_surplus(records, 1) == [records[0]]
    assert removable_steps(records) == []


def test_a_step_of_this_node_does_not_go_for_newer_ones_without_a_commit() -> None:
    assert removable_surplus([record(step, committed=False) for step in range(6)], 1) == []


def test_a_guests_record_makes_no_step_of_this_node_removable() -> None:
    """A guest with a valid certificate may send a record of any place, for the same run and rank."""
    own = [record(1), *(record(step, committed=False) for step in (2, 3))]
    sent = [record(step, timeline=99, guest=True, attempt=f"wrong-{step}") for step in (1, 2, 3)]
    assert {r for r in removable_surplus([*own, *sent], 1) if not r.guest} == set()
    assert [step for step in removable_steps([*own, *sent]) if not step[0].guest] == [[own[0]]]
    assert removable_surplus([*guests(1), record(2)], 1) == guests(1)  # as after a restart on the buddy's node
