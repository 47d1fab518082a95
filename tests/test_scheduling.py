"""Tests leave the scheduling of their process as it was, although an encoder changes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.lerobot_set import FRONT, LeRobotSet, write


@pytest.fixture
def policy_after_encoding(tmp_path: Path) -> int:
    """The scheduling policy of this thread right after SVT-AV1 has encoded a video."""
    write(tmp_path, LeRobotSet(codecs={FRONT: "libsvtav1"}))
    return os.sched_getscheduler(0)


def test_the_encoder_of_av1_does_not_leave_tests_with_real_time_priority(policy_after_encoding: int) -> None:
    if policy_after_encoding != os.SCHED_FIFO:
        pytest.skip("the encoder may not change the scheduling here")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
