"""Publishing in the trainer's background: failed saves, cancelled futures, a store that hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer, Keep
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.publishing import background, publisher
from headrace.checkpoint.publishing.background import BackgroundPublisher
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice
from headrace.dataio.core.errors import CapacityError, DeadlineError
from headrace.dataio.store.open import open_store


def test_the_error_of_a_save_still_reaches_the_trainer(tmp_path: Path) -> None:
    handle = Handle(1, "A")
    with open_store(str(tmp_path)) as store:
        publishing = BackgroundPublisher(store, "r", 10)
        future = publishing.submit("policy", handle, Choice(), False)
        handle.set_error(CapacityError("no space"))
        with pytest.raises(CapacityError):
            future.result(10)
        publishing.close(10)
    assert not handle.fetched


def test_a_save_that_takes_too_long(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        publishing = BackgroundPublisher(store, "r", 0.1)
        future = publishing.submit("policy", Handle(1, "A"), Choice(), False)
        with pytest.raises(DeadlineError, match=r"step 1 is not committed after 0\.1 s"):
            future.result(10)
        publishing.close(10)


def test_a_cancelled_publication_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(BackgroundPublisher, "_publish", lambda *_: go.wait(20))
    with open_store(str(tmp_path)) as store:
        publishing = BackgroundPublisher(store, "r", 5)
        publishing.submit("policy", 1, Choice(), False)
        for _ in range(2 * background.MAX_WAITING):
            assert publishing.submit("policy", 1, Choice(), False).cancel()
        go.set()
        publishing.close(10)
        assert publishing.is_idle


def test_retention_keeps_the_steps_that_wait_to_be_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, publish = threading.Event(), publisher.publish

    def slowly(*args: Any, **more: Any) -> Published:
        assert go.wait(60)
        return publish(*args, **more)

    monkeypatch.setattr(publisher, "publish", slowly)
    with Checkpointer(tmp_path, run="r", keep=Keep(last=1), sidecar=None) as checkpointer:
        retention, futures = checkpointer._retention, []
        assert retention is not None
        for step in range(1, 6):
            handle = checkpointer.save(step, {"model": {"a": torch.full((3,), step)}})
            if step in (1, 2):
                futures.append(checkpointer.publish("policy", handle))
            handle.result(60)
            retention.wait(60)
        assert checkpointer.steps() == [1, 2, 5]
        go.set()
        assert [future.result(60).step for future in futures if future is not None] == [1, 2]
        third = checkpointer.publish("policy", 5)
        assert third is not None
        third.result(60)
        checkpointer.save(6, {"model": {"a": torch.ones(3)}}).result(60)
        retention.wait(60)
        assert checkpointer.steps() == [2, 5, 6], "the tags of the newest two versions keep their steps"
    assert not retention._protected


def test_close_does_not_wait_for_a_store_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(publisher, "publish", lambda *_, **__: go.wait(20))
    checkpointer = Checkpointer(tmp_path, run="r", sidecar=None)
    checkpointer.save(1, {"model": {"a": torch.ones(3)}}).result(60)
    checkpointer.publish("policy", 1)
    began = time.monotonic()
    try:
        with pytest.raises(DeadlineError, match="1 versions of run r"):
            checkpointer.close(timeout=0.3)
        assert time.monotonic() - began < 10
    finally:
        go.set()


def test_close_cancels_what_waits_also_if_a_save_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(publisher, "publish", lambda *_, **__: go.wait(20))
    checkpointer = Checkpointer(tmp_path, run="r", sidecar=None)
    checkpointer.save(1, {"model": {"a": torch.ones(3)}}).result(60)
    running, waiting = checkpointer.publish("policy", 1), checkpointer.publish("policy", 1)

    def late(_: float) -> None:
        raise DeadlineError("a save is still in flight")

    monkeypatch.setattr(checkpointer._saves, "wait_for_all", late)
    try:
        with pytest.raises(DeadlineError, match="a save is still in flight"):
            checkpointer.close(timeout=0.3)
        assert running is not None
        assert waiting is not None
        assert waiting.cancelled()
        assert not running.done()
    finally:
        go.set()
