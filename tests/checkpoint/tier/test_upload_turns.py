"""Processes of one node send what only its tier has one after the other, and none waits for ever."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from headrace.checkpoint.tier import restoring
from headrace.dataio.core.errors import DeadlineError
from tests.support.local_tier import local_tier


def test_a_process_that_stands_still_while_it_sends_is_not_waited_for_without_end(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    held = os.open(tier.root / "sending", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(DeadlineError, match="still sending"), restoring._one_sender(tier, time.monotonic() + 0.15):
        raise AssertionError("it has the lock")
    os.close(held)
    with restoring._one_sender(tier, time.monotonic()):
        pass


def test_a_process_forked_while_another_sends_does_not_keep_the_turn(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    with restoring._one_sender(tier, time.monotonic()):
        ours = [int(fd) for fd in os.listdir("/proc/self/fd") if _names(fd) == str(tier.root / "sending")]
        forked = os.dup(ours[0])  # the same open file, as a fork has it
    try:
        with restoring._one_sender(tier, time.monotonic()):
            pass
    finally:
        os.close(forked)


def _names(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the listing's own
        return ""
