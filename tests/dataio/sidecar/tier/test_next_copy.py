"""Which step a node copies to its buddy next: whole steps, and the newest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.sidecar.tier.client import CopyId, next_copy
from headrace.dataio.store.local_tier.records import Record
from tests.dataio.store.local_tier.test_records import record


def newest_first(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: r.place, reverse=True)


def kept(step: int, rank: int = 0) -> Record:
    return record(step, committed=False, rank=rank)


def copies(*records: Record) -> set[CopyId]:
    return {(r.attempt, r.rank, r.committed > 0) for r in records}


def test_the_newest_step_is_next_and_older_ones_are_left_out_once_it_is_there() -> None:
    records = [kept(3), kept(2), kept(1)]
    assert next_copy(records, set()) == (records[0], 3)
    assert next_copy(records, copies(kept(3))) == (None, 0)
    assert next_copy(records, copies(kept(2))) == (records[0], 1)


def test_a_step_that_was_begun_is_completed_before_a_newer_one_begins() -> None:
    records = newest_first([kept(step, rank) for step in (1, 2) for rank in (0, 1)])
    record_, waiting = next_copy(records, copies(kept(1, 0)))
    assert record_ == kept(1, 1)
    assert waiting == 3


def test_an_older_step_is_not_left_out_if_the_newer_one_lacks_a_rank() -> None:
    records = [kept(2, 0), kept(1, 0), kept(1, 1)]
    assert next_copy(records, copies(kept(2, 0)))[0] in (kept(1, 0), kept(1, 1))


def test_a_step_that_was_committed_is_told_to_the_buddy() -> None:
    records = [kept(2), record(1)]
    assert next_copy(records, copies(kept(2), kept(1))) == (record(1), 1)


def test_a_run_that_saves_often_does_not_keep_out_another_one() -> None:
    other = record(1, committed=False, run="other")
    records = [kept(9), kept(8), other]
    assert next_copy(records, copies(kept(8))) == (other, 2)
    assert next_copy(records, copies(kept(8), other)) == (kept(9), 1)


@pytest.mark.parametrize("ranks", [1, 3])
@given(data=st.data())
def test_however_fast_steps_come_the_buddy_gets_whole_ones(ranks: int, data: st.DataObject) -> None:
    """Steps come while records are sent one by one. At most one step is on the buddy in part."""
    records, copied, newest = list[Record](), set[CopyId](), 0
    for _ in range(40):
        if data.draw(st.booleans()):
            newest += 1
            records += [kept(newest, rank) for rank in range(ranks)]
        following, _ = next_copy(newest_first(records), copied)
        if following is not None:
            copied |= copies(following)
        begun = {r.step for r in records if copies(r) <= copied}
        whole = {step for step in begun if all(copies(kept(step, rank)) <= copied for rank in range(ranks))}
        assert len(begun - whole) <= 1
