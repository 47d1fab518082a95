"""Retention by a trainer: in a thread that a checkpointer waits for, and does without where it cannot be had."""

from __future__ import annotations

import doctest
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer, Keep
from headrace.checkpoint.repository import retention
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Retention
from headrace.dataio.store.open import open_store


def steps_at(folder: Path) -> list[int]:
    with open_store(str(folder)) as store:
        return [base.step for base in repository.visible(store, "exp")]


def save_two(folder: Path) -> None:
    with Checkpointer(str(folder), run="exp", sidecar=None, keep=Keep(last=1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.arange(5.0) * step}).result(60)


def test_what_the_policy_lets_go_is_gone_when_the_checkpointer_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = []

    def late(self: Retention) -> None:
        time.sleep(0.6)
        messages.append(self)
        committed(self)

    committed = Retention.committed
    monkeypatch.setattr(Retention, "committed", late)
    save_two(tmp_path)
    assert len(messages) == 2
    assert steps_at(tmp_path) == [2]


def test_a_trainer_that_saves_a_lower_number_than_it_restored_removes_no_higher_step(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    with Checkpointer(tmp_path, run="exp", sidecar=None) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state).result(60)
    with Checkpointer(tmp_path, run="exp", sidecar=None, keep=Keep(last=1)) as checkpointer:
        assert checkpointer.restore(state) == 30
        checkpointer.save(15, state).result(60)
    assert steps_at(tmp_path) == [15, 30, 20]
    with Checkpointer(tmp_path, run="exp", sidecar=None, keep=Keep(last=1)) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(31, state).result(60)
    assert steps_at(tmp_path) == [31]


def test_a_process_without_room_for_a_thread_keeps_its_old_steps_and_its_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "headrace-retention":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    save_two(tmp_path)
    assert caplog.text.count("can't start new thread") == 2
    assert steps_at(tmp_path) == [2, 1]


def test_the_example_of_keep_runs() -> None:
    assert doctest.testmod(retention).failed == 0
