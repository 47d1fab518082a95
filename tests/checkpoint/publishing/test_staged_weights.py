"""Publishing from staging memory: a step is not read back, and never published with other bytes than it has."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import Subscriber
from headrace.checkpoint.format import chunking
from headrace.checkpoint.publishing import background, comparison, early, staged
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.saving.arena import Staging
from headrace.dataio.core.errors import CapacityError, ConflictError
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same


def staging_of(trainer: Trainer) -> Staging:
    return trainer.checkpointer._saver.staging


def publish(trainer: Trainer, by_handle: bool, dtype: torch.dtype | None = None) -> Published:
    """Save the next step, and publish it by its handle while it is written, or by its number."""
    trainer.train()
    handle = trainer.checkpointer.save(trainer.step, {"model": trainer.model, "step": trainer.step})
    trainer.weights[trainer.step] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if not by_handle:
        handle.result(60)
    future = trainer.checkpointer.publish("policy", handle if by_handle else trainer.step, dtype=dtype)
    assert future is not None
    return future.result(60)


def updates(trainer: Trainer) -> int:
    return len(list(trainer.url.glob("published/policy/update-*")))


@pytest.mark.parametrize("by_handle", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fine", [True, False])
def test_a_staged_step_is_not_read_back(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, by_handle: bool, dtype: torch.dtype | None, fine: bool
) -> None:
    """With coarse chunks, several blocks belong to one chunk."""
    if not fine:
        monkeypatch.setattr(chunking, "FINE_BELOW", 0)
    reads, used = list[int](), list[bool]()
    read, is_of = chunk_reader.read, early.EarlyComparison.is_of
    monkeypatch.setattr(chunk_reader, "read", lambda *arguments: (reads.append(1), read(*arguments)))
    monkeypatch.setattr(early.EarlyComparison, "is_of", lambda *given: used.append(is_of(*given)) or used[-1])
    held = empty_like(trainer.model.state_dict(), dtype)
    with Subscriber(trainer.url, "policy") as subscriber:
        for number in (1, 2, 3):
            record = publish(trainer, by_handle, dtype)
            assert not reads
            subscriber.wait(10).apply(held)
            assert same(held, trainer.weights[number])
            assert (record.update is not None) == (number > 1)
            reads.clear()
    assert used == [True] * 3 if by_handle else not used


@pytest.mark.parametrize("by_handle", [True, False])
def test_the_next_save_takes_the_memory_at_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, by_handle: bool
) -> None:
    publish(trainer, by_handle)
    compare, saving = comparison._compare_bytes, list[threading.Thread]()
    lock, staging = threading.Lock(), staging_of(trainer)

    def slow(task: Any, new: Any, known: bytes = b"") -> Any:
        with lock:
            if task.new is None and not saving:
                state = {"model": {name: value + 1 for name, value in trainer.model.state_dict().items()}}
                save = threading.Thread(target=trainer.checkpointer.save, args=(100, state))
                saving.append(save)
                save.start()
                deadline = time.monotonic() + 20
                while staging._copy is not None and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert staging._copy is None
                assert save.is_alive()  # it waits for this block
        return compare(task, new, known)

    monkeypatch.setattr(comparison, "_compare_bytes", slow)
    record = publish(trainer, by_handle)
    saving[0].join(20)
    assert (record.number, record.step) == (2, 2)
    held = empty_like(trainer.weights[2])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])


def test_damaged_staging_memory_is_not_published(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    publish(trainer, by_handle=False)
    trainer.train()
    trainer.save()
    arena = staging_of(trainer)._arena
    assert arena is not None
    memory: np.ndarray[Any, np.dtype[np.uint8]] = arena.bytes
    memory[len(memory) // 2] ^= 1
    trainer.publish(step=2)
    assert "is read back" in caplog.text
    held = empty_like(trainer.weights[2])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])


def test_an_early_comparison_with_other_chunks_is_discarded(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(trainer, by_handle=True)
    real, refusals = staged.StagedStep.require_same, [True]

    def once(step: staged.StagedStep, manifest: Any) -> None:
        if refusals and refusals.pop():
            raise staged.StagedMemoryError("it holds other bytes")
        real(step, manifest)

    monkeypatch.setattr(staged.StagedStep, "require_same", once)
    caplog.set_level(logging.INFO)
    assert publish(trainer, by_handle=True).update is not None
    assert not refusals
    assert "other bytes" in caplog.text
    assert updates(trainer) == 1
    held = empty_like(trainer.weights[2])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])


def test_another_publisher_between_comparison_and_commit(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(trainer, by_handle=True)
    held = empty_like(trainer.weights[1])
    saved, other = background.BackgroundPublisher._saved, Trainer(trainer.url, "other")
    with other.checkpointer, Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)

        def between(publisher: background.BackgroundPublisher, handle: Any, until: float) -> Any:
            monkeypatch.undo()
            other.train()
            moved = other.checkpointer.publish("policy", other.save(), move=True)
            assert moved is not None
            assert moved.result(60).number == 2
            return saved(publisher, handle, until)

        monkeypatch.setattr(background.BackgroundPublisher, "_saved", between)
        trainer.train()
        handle = trainer.checkpointer.save(trainer.step, {"model": trainer.model})
        trainer.weights[2] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        future = trainer.checkpointer.publish("policy", handle, move=True)
        assert future is not None
        assert (future.result(60).number, future.result().parent) == (3, 2)
        assert updates(trainer) == 2  # the early update is deleted
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])


def test_a_failed_save_leaves_no_update(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(trainer, by_handle=True)

    def fail(*_: object) -> None:
        raise CapacityError("the store is full")

    monkeypatch.setattr(background.BackgroundPublisher, "_saved", fail)
    with pytest.raises(CapacityError):
        publish(trainer, by_handle=True)
    assert updates(trainer) == 0
    monkeypatch.undo()
    assert publish(trainer, by_handle=True).update is not None
    held = empty_like(trainer.weights[3])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[3])


def test_a_publication_that_is_refused_leaves_no_update(trainer: Trainer) -> None:
    """The name belongs to another run, which the early comparison does not ask."""
    other = Trainer(trainer.url, "other")
    with other.checkpointer:
        publish(other, by_handle=True)
        with pytest.raises(ConflictError, match="published from run other"):
            publish(trainer, by_handle=True)
        assert updates(trainer) == 0


def test_an_update_from_damaged_staging_memory_is_deleted(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(trainer, by_handle=False)

    def refuse(*_: object) -> None:
        raise staged.StagedMemoryError("it holds other bytes")

    monkeypatch.setattr(staged.StagedStep, "require_same", refuse)
    assert publish(trainer, by_handle=False).update is not None
    assert updates(trainer) == 1


def test_other_names_do_not_add_memory(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that publishes each step under a name of its own holds the weights of the newest name only."""
    monkeypatch.setattr(background, "HELD_BYTES", 1000)
    trainer.train()
    step = trainer.save()
    for number in range(3):
        future = trainer.checkpointer.publish(f"policy-{number}", step)
        assert future is not None
        future.result(60)
    publisher = trainer.checkpointer._publisher
    assert publisher is not None
    assert list(publisher._held) == ["policy-2"]
    assert publisher._held_of("policy-2").nbytes > 1000
