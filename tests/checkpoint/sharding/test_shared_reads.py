"""A chunk that several ranks need leaves the store once."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.sharding import ROUND_BYTES, assign_readers, needs_bitmap, rounds
from headrace.dataio.core.limits import MIB
from tests.support.checkpoint_states import flip
from tests.support.ranks import launch


@given(st.lists(st.sets(st.integers(0, 29)), min_size=1, max_size=6), st.integers(1, 20))
def test_every_chunk_is_read_by_exactly_one_rank_of_those_that_need_it(needed: list[set[int]], mib: int) -> None:
    sizes = [mib * MIB] * 30
    found = assign_readers([needs_bitmap(sorted(own), 30) for own in needed], sizes)
    assert {each.chunk for each in found} == {c for c in range(30) if sum(c in own for own in needed) > 1}
    for each in found:
        assert {each.reader, *each.others} == {rank for rank, own in enumerate(needed) if each.chunk in own}
    given_turns = list(rounds(found, sizes))
    assert [each for turn in given_turns for each in turn] == found
    assert all(len(turn) == 1 or sum(sizes[e.chunk] for e in turn) <= ROUND_BYTES for turn in given_turns)


def test_work_is_spread_evenly_over_the_readers() -> None:
    needs = [needs_bitmap(range(40), 40)] * 4
    read = [sum(each.reader == rank for each in assign_readers(needs, [4 * MIB] * 40)) for rank in range(4)]
    assert read == [10] * 4
    assert assign_readers([b""] * 4, []) == []


def test_four_ranks_read_a_step_from_a_store_elsewhere_once_and_fail_together(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    with Checkpointer(str(damaged), run="exp", sidecar=None) as checkpointer:  # the same shapes as in the job
        layers = [torch.nn.Linear(1500, 1501), torch.nn.Linear(1501, 700), torch.nn.Linear(700, 3)]
        checkpointer.save(1, {"model": torch.nn.Sequential(*layers)}).result(60)
    flip(next((damaged / "packs").rglob("*.pack")), 5 * MIB)

    ranks = launch(4, "tests.support.shared_read_ranks", str(tmp_path / "repo"), str(damaged))
    total = ranks[0][0]["bytes"]
    for case in (
        1,
        2,
    ):  # from the node's own disk each rank takes what it needs, through the page cache where several do
        read = [lines[case]["read"] for lines in ranks]
        assert all(total <= own <= 1.02 * total for own in read) if case == 1 else sum(read) < 1.7 * total
        assert all(lines[case]["digests"] == ranks[0][0]["digests"] for lines in ranks)
    for case in (4, 5, 7, 8):  # from elsewhere, as all or only some ranks see it; replicated, sharded
        read = [lines[case]["read"] for lines in ranks]
        assert total <= sum(read) <= 1.02 * total
        assert max(read) < 0.6 * total
        assert all(lines[case]["digests"] == ranks[0][0]["digests"] for lines in ranks)
    assert [lines[3]["error"] for lines in ranks] == ["CorruptionError"] * 4  # each has seen it
    for case in (6, 9):
        errors = [lines[case] for lines in ranks]
        assert sorted(line["error"] for line in errors) == ["CorruptionError", *["TransientError"] * 3]
        assert any("damaged: tensor 'model/" in line["message"] for line in errors)
