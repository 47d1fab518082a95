"""A copy of published weights in main memory, for engines that store weights in another form."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer, Subscriber
from headrace.checkpoint.publishing import changes, records
from headrace.checkpoint.publishing.host_copy import HostCopy
from headrace.dataio.core.errors import DeadlineError, NotFoundError, UsageError
from tests.checkpoint.publishing.conftest import Trainer, same
from tests.support.waiting import wait_for


def test_it_goes_to_any_version_and_names_what_changed(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.next_version()
    with HostCopy(Subscriber(trainer.url, "policy")) as copy:
        second = copy.bring_to(2, 10)
        assert same(copy.tensors, trainer.weights[2])
        assert copy.bring_to(2, 10) is second
        first = copy.bring_to(1, 10)
        assert same(copy.tensors, trainer.weights[1])
        assert first.changed_since(None) == sorted(trainer.weights[1])
        assert first.changed_since(first) == []
        third = copy.bring_to(3, 10)
        assert "count" in third.changed_since(first)
        assert same(copy.tensors, trainer.weights[3])


def test_tensors_of_other_names_and_shapes_replace_those_before(tmp_path: Path) -> None:
    shapes: dict[int, dict[str, tuple[int, ...]]] = {
        1: {"a": (5,), "b": (3, 2)},
        2: {"a": (5,), "b": (4, 2), "c": (1,)},
        3: {"a": (5,)},
    }
    with Checkpointer(tmp_path, run="r", sidecar=None) as checkpointer, HostCopy(Subscriber(tmp_path, "w")) as copy:
        kept: torch.Tensor | None = None
        for number, forms in shapes.items():
            weights = {name: torch.randn(shape) for name, shape in forms.items()}
            future = checkpointer.publish("w", checkpointer.save(number, {"model": weights}))
            assert future is not None
            future.result(60)
            copy.bring_to(number, 10)
            assert copy.tensors.keys() == weights.keys()
            assert same(copy.tensors, weights)
            assert kept is None or kept is copy.tensors["a"]
            kept = copy.tensors["a"]


def test_it_is_prepared_in_the_background_and_changes_when_it_is_asked_to(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with HostCopy(Subscriber(trainer.url, "policy", poll=0.01), poll=0.01) as copy:
        copy.follow()
        copy.follow()
        trainer.next_version()
        wait_for(lambda: copy.version is not None and copy.version.number == 1)
        trainer.next_version()
        wait_for(lambda: copy._prepared is not None and copy._prepared[0].number == 2)
        assert same(copy.tensors, trainer.weights[1])
        copy.bring_to(2, 0)
        assert same(copy.tensors, trainer.weights[2])
        record = trainer.url / records.key_of("policy", 2)
        with caplog.at_level(logging.WARNING):
            record.with_name("000000003.json").write_bytes(record.read_bytes())  # names another version than its key
            wait_for(lambda: caplog.records)
        assert "contradicts its own key" in caplog.text
        assert same(copy.tensors, trainer.weights[2])


def test_a_fetch_in_the_background_is_waited_for_so_long(trainer: Trainer) -> None:
    trainer.next_version()
    with HostCopy(Subscriber(trainer.url, "policy")) as copy, copy._lock, pytest.raises(DeadlineError, match="fetched"):
        copy.bring_to(1, 0.01)


def test_a_subscriber_waits_for_one_number(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT_VERSIONS", 2)
    with Subscriber(trainer.url, "policy", poll=0.01) as subscriber:
        publishing = threading.Thread(target=trainer.next_version)
        publishing.start()
        version = subscriber.at(1, 30)
        version.apply(held := version.empty_tensors())
        publishing.join()
        assert same(held, trainer.weights[1])
        with pytest.raises(UsageError, match="hold it already"):
            subscriber.at(1)
        with pytest.raises(UsageError, match="numbered from 1"):
            subscriber.at(0)
        with pytest.raises(DeadlineError, match="version 2 of policy is not published after 0 s, version 1 is"):
            subscriber.at(2, 0)
        for _ in range(3):
            trainer.next_version()
        subscriber.at(4, 1).apply(held)
        with pytest.raises(NotFoundError, match="version 1 of policy was removed: version 4 is the newest"):
            subscriber.at(1, 1)
    with pytest.raises(UsageError, match="closed"):
        subscriber.at(5)


def test_an_error_of_any_kind_does_not_end_the_background_thread(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, errors = HostCopy._prepare_newest, [RuntimeError("CUDA out of memory"), MemoryError("no memory")]

    def fail(copy: HostCopy) -> None:
        if errors:
            raise errors.pop()
        real(copy)

    monkeypatch.setattr(HostCopy, "_prepare_newest", fail)
    trainer.next_version()
    with HostCopy(Subscriber(trainer.url, "policy", poll=0.01), poll=0.01) as copy:
        copy.follow()
        wait_for(lambda: copy.version is not None)
    assert not errors
    assert "CUDA out of memory" in caplog.text
    assert "no memory" in caplog.text


def test_a_change_that_is_interrupted_leaves_no_version(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.next_version()
    trainer.next_version()
    with HostCopy(Subscriber(trainer.url, "policy")) as copy:
        copy.bring_to(1, 10)

        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(changes.PreparedChanges, "commit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                copy.bring_to(2, 10)
        assert copy.version is None
        copy.bring_to(2, 10)
        assert same(copy.tensors, trainer.weights[2])


def test_a_request_may_replace_what_the_background_thread_looks_at(trainer: Trainer) -> None:
    """The background thread looks at the prepared version twice. It is gone at the second look."""

    class Racing(HostCopy):
        looks = 0

        @property
        def _prepared(self) -> Any:
            self.looks += 1
            return self._value if self.looks == 1 else None

        @_prepared.setter
        def _prepared(self, value: Any) -> None:
            self._value = value

    trainer.next_version()
    with Racing(Subscriber(trainer.url, "policy")) as copy:
        version = copy._subscriber.at(1, 10)
        copy._prepared, copy.looks = (version, None, {}), 0
        copy._prepare_newest()
        assert copy.looks == 1
