"""By how many threads staging copies, and what the doctor says of the machine's copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace.checkpoint.saving import copy_threads
from headrace.checkpoint.saving.copy_threads import SETTING, VARIABLE, advice, streaming, threads
from headrace.dataio.core.limits import MIB


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(2, 1, 2), (1, 1, 1), (64, 8, 8), (64, 1, 8), (96, 16, 6), (2, 4, 1), (4, 0, 4)]
)
def test_a_rank_copies_by_its_share_of_the_cores_up_to_eight(cores: int, ranks: int, expected: int) -> None:
    assert threads(cores, ranks) == expected


@pytest.mark.parametrize(
    ("local_world_size", "ranks"), [("", 1), ("many", 1), ("1", 1), (str(len(os.sched_getaffinity(0))), 0)]
)
def test_the_share_is_by_what_the_launcher_says_of_this_node(
    local_world_size: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    cores = len(os.sched_getaffinity(0))
    assert copy_threads.num_copy_threads() == threads(cores, ranks or cores)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SETTING),
        ("glibc.malloc.check=3", f"glibc.malloc.check=3:{SETTING}"),
        (f"{copy_threads.TUNABLE}=0x10000", f"{copy_threads.TUNABLE}=0x10000"),
    ],
)
def test_the_setting_leaves_what_is_set_already(given: str | None, expected: str) -> None:
    before = {"A": "b"} | ({VARIABLE: given} if given is not None else {})
    assert streaming(before) == {"A": "b", VARIABLE: expected}


def test_the_setting_is_advised_where_it_saves_a_sixth_of_the_time_or_more() -> None:
    output = advice(0.080, 0.052, {})
    assert f"{VARIABLE}={SETTING}" in output
    assert "0.65 of the time" in output
    assert advice(0.080, 0.070, {}) == ""


def test_a_measurement_is_of_real_copies() -> None:
    assert copy_threads.measure(32 * MIB, rounds=1) > 0


def test_the_doctor_measures_with_and_without_the_setting_in_processes_of_their_own() -> None:
    command = [sys.executable, "-m", "headrace.dataio.cli", "doctor", "--memory", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["threads"] == copy_threads.num_copy_threads()
    assert found["seconds_per_gib"] > 0
    assert found["with"] > 0
    assert bool(found["advice"]) == (found["with"] < 0.85 * found["seconds_per_gib"])


def test_without_memory_for_it_the_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert copy_threads.main([]) == 6
    assert "copies could not be measured" in capsys.readouterr().err
