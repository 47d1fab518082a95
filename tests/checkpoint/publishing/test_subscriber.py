"""Publishing a step and applying it: updates, skipped versions, rollbacks, late joiners, and everything that can go wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer, Keep, Subscriber
from headrace.checkpoint.publishing import changes, comparison, records
from headrace.checkpoint.repository import collect
from headrace.dataio.core.errors import ConflictError, CorruptionError, DeadlineError, NotFoundError, UsageError
from headrace.dataio.store.open import open_store
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same


def test_a_subscriber_follows_from_version_to_version(trainer: Trainer) -> None:
    first = trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        version = subscriber.wait(10)
        assert (version.number, version.parent, version.step) == (1, None, 1)
        assert version.bytes_to_fetch == first.bytes
        version.apply(held)
        assert same(held, trainer.weights[1])
        for _ in range(3):
            record = trainer.next_version()
            version = subscriber.wait(10)
            assert version.bytes_to_fetch < 0.1 * record.bytes
            version.apply(held)
            assert same(held, trainer.weights[trainer.step])
            assert subscriber.version == record.number
        assert subscriber.newest() is None


def test_published_tensors_are_converted(trainer: Trainer) -> None:
    trainer.next_version(dtype=torch.bfloat16)
    held = empty_like(trainer.weights[1], torch.bfloat16)
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        assert held["count"].dtype == torch.int64
        assert same(held, trainer.weights[1])
        trainer.next_version(dtype=torch.bfloat16)
        subscriber.wait(10).apply(held)
        assert same(held, trainer.weights[2])


def test_a_slow_subscriber_skips_versions(trainer: Trainer) -> None:
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        for _ in range(3):
            record = trainer.next_version()
        version = subscriber.wait(10)
        assert (version.number, version.parent) == (4, 1)
        assert version.bytes_to_fetch < 0.2 * record.bytes
        version.apply(held)
        assert same(held, trainer.weights[4])


def test_an_older_step_is_published_again_to_roll_back(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        assert trainer.publish(step=1).number == 4
        version = subscriber.wait(10)
        assert (version.number, version.step) == (4, 1)
        version.apply(held)
    assert same(held, trainer.weights[1])


def test_many_changes_are_applied_from_the_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_WORTH", 0.5)
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        with torch.no_grad():
            for tensor in trainer.model.parameters():
                tensor.uniform_(-1e4, 1e4)
        record = trainer.next_version(share=1.0)
        assert record.update is None
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])


def test_a_new_tensor_and_a_new_shape_are_published(tmp_path: Path) -> None:
    def version(number: int) -> dict[str, torch.Tensor]:
        tensors = {
            "a": torch.full((300, 1000), 1.0 * number),
            "b": torch.arange(7 + number),
            "empty": torch.empty(0, 3),
        }
        return tensors | ({"new": torch.ones(5)} if number > 1 else {})

    with Checkpointer(tmp_path, run="r", sidecar=None) as checkpointer, Subscriber(tmp_path, "policy") as subscriber:
        for number in (1, 2):
            handle = checkpointer.save(number, {"model": version(number)})
            future = checkpointer.publish("policy", handle)
            assert future is not None
            future.result(60)
            if number == 1:
                subscriber.wait(10).apply(empty_like(version(1)))
        held = empty_like(version(2))
        with pytest.raises(UsageError, match="new"):
            subscriber.wait(10).apply(empty_like(version(1)))
        subscriber.wait(10).apply(held)  # these tensors do not hold version 1, so everything is read from the step
    assert same(held, version(2))


def test_tensors_that_the_program_changed_are_read_whole(trainer: Trainer) -> None:
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        held["2.weight"][0, 0] += 1
        held["1.bias"] += 1
        trainer.next_version()
        subscriber.wait(10).apply(held)
        assert same(held, trainer.weights[2])


@pytest.mark.parametrize("fault", ["damaged", "damaged table", "deleted"])
def test_an_update_that_cannot_be_read_is_replaced_by_the_step(
    trainer: Trainer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    caplog.set_level(logging.INFO)
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        record = trainer.next_version()
        assert record.update is not None
        path = trainer.url / record.key_of(record.update)
        data = bytearray(path.read_bytes())
        data[record.update.table // 2 if fault == "damaged" else -5] ^= 1
        path.unlink() if fault == "deleted" else path.write_bytes(data)
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])
    assert "is read from its step" in caplog.text


def test_a_damaged_table_of_weights_is_refused(trainer: Trainer) -> None:
    record = trainer.next_version()
    path = trainer.url / record.key_of(record.weights)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with Subscriber(trainer.url, "policy") as subscriber, pytest.raises(CorruptionError, match="digest"):
        subscriber.wait(10)
    assert trainer.next_version().update is None  # the next version does not depend on it
    held = empty_like(trainer.weights[2])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[2])


def test_a_damaged_step_leaves_the_tensors_unchanged(trainer: Trainer) -> None:
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        record = trainer.next_version()
        assert record.update is not None
        (trainer.url / record.key_of(record.update)).unlink()
        for pack in trainer.url.glob(f"packs/{record.attempt}/*.pack"):
            data = bytearray(pack.read_bytes())
            data[:4096] = bytes(b ^ 1 for b in data[:4096])
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)
        with pytest.raises(CorruptionError):
            subscriber.wait(10).apply(held)
        assert subscriber.version == 1
    assert same(held, trainer.weights[1])


def test_retention_keeps_the_steps_of_the_newest_two_versions(trainer: Trainer) -> None:
    for _ in range(4):
        trainer.next_version()
    trainer.train()
    trainer.save()
    with open_store(str(trainer.url)) as store:
        keep = Keep(last=1, tags=())
        collect.collect(store, collect.to_delete(store, "exp42", keep), keep=keep)
    assert trainer.checkpointer.steps() == [3, 4, 5]
    held = empty_like(trainer.weights[4])
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
    assert same(held, trainer.weights[4])


def test_old_records_and_updates_are_deleted(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT_VERSIONS", 2)
    monkeypatch.setattr(records, "ORPHAN_SECONDS", -60.0)
    for _ in range(5):
        record = trainer.next_version()
    assert record.update is not None
    with open_store(str(trainer.url)) as store:
        numbered, others = records.listed(store, "policy")
    assert sorted(numbered) == [4, 5]
    assert len(others) == 4
    assert len(list((trainer.url / "tags").iterdir())) == 2


def test_of_two_publishers_one_wins(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.next_version()
    write, second = records.write, [True]

    def slow(store: object, record: records.Published) -> bool:
        if second and second.pop():
            trainer.checkpointer.publish("policy", 1)
            from headrace.checkpoint.publishing.publisher import publish
            from headrace.checkpoint.publishing.source import Choice

            publish(store, "policy", "exp42", record.base, Choice(("model/*",)))  # type: ignore[arg-type]
        return write(store, record)  # type: ignore[arg-type]

    monkeypatch.setattr(records, "write", slow)
    trainer.train()
    future = trainer.checkpointer.publish("policy", trainer.save())
    assert future is not None
    with pytest.raises(ConflictError, match="version 2"):
        future.result(60)
    with open_store(str(trainer.url)) as store:
        numbered, _ = records.listed(store, "policy")
    assert max(numbered) >= 2


def test_a_name_of_another_run_is_moved_only_on_request(trainer: Trainer) -> None:
    trainer.next_version()
    other = Trainer(trainer.url, "exp43")
    with other.checkpointer:
        with pytest.raises(ConflictError, match="exp42"):
            other.next_version()
        future = other.checkpointer.publish("policy", 1, move=True)
        assert future is not None
        assert future.result(60).run == "exp43"


def test_waiting_and_mistakes(trainer: Trainer) -> None:
    with Subscriber(trainer.url, "policy", poll=0.01) as subscriber:
        with pytest.raises(DeadlineError, match="policy"):
            subscriber.wait(0.05)
        trainer.next_version()
        version = subscriber.wait(10)
        with pytest.raises(UsageError, match="not among"):
            version.apply({})
        wrong = empty_like(trainer.weights[1], torch.float16)
        with pytest.raises(UsageError, match="float16"):
            version.apply(wrong)
        held = empty_like(trainer.weights[1])
        version.apply(held)
        with pytest.raises(UsageError, match="wait"):
            version.apply(held)
    for name in ("a/b", "", "x" * 81):
        with pytest.raises(UsageError):
            Subscriber(trainer.url, name)
    with pytest.raises(UsageError, match="bfloat"):
        trainer.checkpointer.publish("policy", 1, dtype="int8")
    for step, include in ((99, "model/*"), (1, "nothing/*")):
        future = trainer.checkpointer.publish("policy", step, include=include)
        assert future is not None
        with pytest.raises((NotFoundError, UsageError)):
            future.result(60)


def test_parts_of_tensors_get_their_elements(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.checkpoint.format.chunking import Box
    from headrace.checkpoint.publishing import targets

    trainer.next_version()
    boxes = [((0, 0), (450, 700)), ((450, 0), (450, 700)), ((0, 300), (900, 400)), ((100, 50), (700, 600))]
    parts = [torch.zeros(local) for _, local in boxes]
    real = targets._local

    for (offset, local), part in zip(boxes, parts, strict=True):
        box = Box((900, 700), offset, local)

        def of_box(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Box]:
            return (tensor, box) if name == "0.weight" else real(tensor, name)  # noqa: B023

        monkeypatch.setattr(targets, "_local", of_box)
        held = empty_like(trainer.weights[1]) | {"0.weight": part}
        with Subscriber(trainer.url, "policy") as subscriber:
            subscriber.wait(10).apply(held)
            for _ in range(2):
                trainer.next_version(share=0.02)
            assert subscriber.wait(10).bytes_to_fetch < 500_000
            subscriber.wait(10).apply(held)
        (top, left), (height, width) = offset, local
        assert torch.equal(part, trainer.weights[trainer.step]["0.weight"][top : top + height, left : left + width])


def test_every_change_is_one_write_of_what_changed(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    written = list[int]()
    run = changes._Write.run
    with Subscriber(trainer.url, "policy") as subscriber:
        subscriber.wait(10).apply(held)
        monkeypatch.setattr(changes._Write, "run", lambda write: (written.append(len(write.values)), run(write)))
        trainer.next_version()
        subscriber.wait(10).apply(held)
    differ = sum(int((trainer.weights[1][n] != trainer.weights[2][n]).sum()) for n in held)
    assert sum(written) == differ
