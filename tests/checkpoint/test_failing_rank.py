"""A rank that fails alone in the middle of a save: the others know at once, and not when their time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.checkpoint.peers import PeerProbe, Peers, card, wait_closed, watched_rank
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.ranks import launch, meeting

OWN = {
    "name": "OSError: no room for the name",
    "copy": "MemoryError: no memory for the arena",
    "upload": "OSError: the cable is cut",
}


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    ranks = launch(3, "tests.support.failing_rank", "raise", str(tmp_path))
    output = {how: [line[how] for lines in ranks for line in lines if how in line] for how in (*OWN, "away")}
    assert all("rank 0 could not open the run's timeline" in line for line in output["away"])
    for how, own in OWN.items():
        assert output[how][1] == own
        assert f"was aborted: rank 1 failed: {own}" in output[how][0]
        assert f"was aborted: rank 1 failed: {own}" in output[how][2]
    assert [lines[-1] for lines in ranks] == [{"nothing": "committed"}] * 3
    with open_store(tmp_path) as store:
        assert [base.step for base in repository.visible(store, "exp")] == [5]


@pytest.mark.parametrize("how", ["kill", "apart"])
def test_a_rank_that_is_killed_is_missed_on_its_node_and_on_the_one_before_and_the_next_save_works(
    how: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    crash = {"HEADRACE_CRASH": "ckpt.packs-written", "HEADRACE_CRASH_MARK": str(mark)}
    with meeting(3) as place:
        running = [
            nursery.start(
                "tests.support.failing_rank", how, str(tmp_path / "repo"), **place, RANK=str(rank),
                **(crash if rank == 2 else {}),
            )
            for rank in range(3)
        ]  # fmt: skip
        try:
            output = [process.communicate(timeout=170) for process in running]
        finally:
            for process in running:
                process.kill()
    assert mark.read_text().strip() == "ckpt.packs-written"
    assert [process.returncode for process in running] == [0, 0, -signal.SIGKILL], output
    for out, _ in output[:2]:
        assert "was aborted: the process of rank 2 has ended" in json.loads(out.splitlines()[-1])["nothing"]
    with open_store(tmp_path / "repo") as store:
        assert not list(repository.visible(store, "exp"))
    assert launch(2, "tests.support.failing_rank", how, str(tmp_path / "repo")) == [[{"nothing": "committed"}]] * 2


def test_a_save_on_rank_0_alone_says_that_every_rank_must_call_it(tmp_path: Path) -> None:
    (lines, _) = launch(2, "tests.support.lone_rank", str(tmp_path))
    (outcome,) = lines
    assert outcome["raised"] == "TransientError"
    assert "the ranks could not agree on a save or a restore" in outcome["message"]
    assert "call save and restore on every rank, not only on rank 0" in outcome["hint"]
    assert outcome["warned"] == [
        "rank 0 has waited 1 s for other ranks to join its save or restore: "
        "call save and restore on every rank, not only on rank 0"
    ]


def test_only_the_very_process_counts_and_of_other_nodes_nothing_is_said() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from headrace.checkpoint.peers import card; print(card().hex(), flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    other_card = bytes.fromhex(child.stdout.readline())
    on_another_node = bytes(8) + other_card[8:]
    started = int.from_bytes(other_card[16:24])
    later = other_card[:16] + (started + 1).to_bytes(8) + other_card[24:]  # another process that had the number
    peers = Peers([card(), other_card, on_another_node, later])
    assert peers.failed_ranks([0, 1, 2]) == ""
    assert peers.failed_ranks([3]) == "the process of rank 3 has ended"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
    assert peers.failed_ranks([0, 1, 2, 3]) == "the process of rank 1, 3 has ended"
    child.communicate()
    assert peers.failed_ranks([0, 1, 2]) == "the process of rank 1 has ended"


def test_the_ranks_of_a_node_hold_on_to_different_ranks_of_the_next() -> None:
    nodes = [b"a", b"a", b"a", b"b", b"b", b"c"]
    assert [watched_rank(nodes, rank) for rank in range(6)] == [3, 4, 3, 5, 5, 0]
    assert [watched_rank([b"a"] * 3, rank) for rank in range(3)] == [None] * 3


def test_where_there_is_one_node_no_door_stays_open() -> None:
    probe = PeerProbe("127.0.0.1")
    peers = Peers([card(probe), card()], 0, probe)
    assert not peers.across
    wait_closed(probe.address)
