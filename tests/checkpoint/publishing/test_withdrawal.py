"""`headrace ckpt unpublish`: a name without a version, whatever publishers, subscribers and crashes do meanwhile."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import Keep, Subscriber
from headrace.checkpoint.publishing import records, withdrawal
from headrace.checkpoint.publishing.publisher import publish
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.report.reading import read_report
from headrace.checkpoint.repository import collect, steps, tag_records
from headrace.dataio.cli import main
from headrace.dataio.core.clock import SYSTEM_CLOCK
from headrace.dataio.core.errors import ConflictError, DeadlineError, NotFoundError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same
from tests.support import nursery


@pytest.fixture
def store(trainer: Trainer) -> Store:
    return open_store(str(trainer.url))


def stored(trainer: Trainer) -> list[str]:
    """The objects of the name, and its tags."""
    found = [*(trainer.url / "published").rglob("*"), *(trainer.url / "tags").glob("published.*")]
    return sorted(path.name for path in found if path.is_file())


def test_a_withdrawn_name_has_no_version_and_its_steps_can_be_removed(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy", poll=0.01, sidecar=None) as subscriber:
        subscriber.wait(60).apply(held)
        done = withdrawal.withdraw(store, "policy")
        assert (done.number, done.version and done.version.step, len(done.tags)) == (3, 2, 2)
        assert stored(trainer) == ["000000001.json", "000000002.json", "000000003.json"]
        assert subscriber.newest() is None
        with pytest.raises(DeadlineError):
            subscriber.wait(0.05)
        assert same(held, trainer.weights[2])
        with pytest.raises(NotFoundError, match="nothing was published as policy"):
            records.require(store, "policy")
        trainer.train()
        trainer.save()
        removed = collect.retain(store, "exp42", Keep(last=1))
        assert removed is not None
        assert sorted(step.step for step in removed.tombstones) == [1, 2]

        assert trainer.publish(3).number == 4, "numbers go on, so that late requests harm nothing"
        subscriber.wait(60).apply(held)
        assert same(held, trainer.weights[3])


def test_a_withdrawn_name_may_be_published_by_another_run(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    withdrawal.withdraw(store, "policy")
    other = Trainer(trainer.url, "exp43")
    with other.checkpointer:
        assert other.next_version().number == 3


def test_a_name_that_another_run_publishes_after_a_withdrawal_is_not_taken(
    trainer: Trainer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run publishes right after this publisher has seen the withdrawal."""
    trainer.next_version()
    withdrawal.withdraw(store, "policy")
    other, real, numbers = Trainer(trainer.url, "exp43"), records.read_record, list[int]()

    def read(at: Store, name: str, number: int) -> records.Published:
        monkeypatch.setattr(records, "read_record", real)
        try:
            return real(at, name, number)
        finally:
            numbers.append(other.next_version().number)

    with other.checkpointer:
        trainer.train()
        trainer.save()
        monkeypatch.setattr(records, "read_record", read)
        with pytest.raises(ConflictError):
            trainer.publish(2)
    assert numbers == [3]
    assert records.require(store, "policy").run == "exp43"


def test_to_withdraw_again_changes_nothing(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    withdrawal.withdraw(store, "policy")
    again = withdrawal.withdraw(store, "policy")
    assert (again.number, again.is_withdrawn, again.objects, again.tags) == (2, True, (), ())
    assert stored(trainer) == ["000000001.json", "000000002.json"]


def test_a_withdrawal_that_is_killed_is_finished_by_the_next_one(
    trainer: Trainer, store: Store, tmp_path: Path
) -> None:
    trainer.next_version()
    mark = tmp_path / "mark"
    process = nursery.start(
        "tests.support.headrace_command",
        *("ckpt", "unpublish", str(trainer.url), "policy", "--apply"),
        HEADRACE_CRASH="unpublish.recorded",
        HEADRACE_CRASH_MARK=str(mark),
    )
    _, err = process.communicate(120)
    assert process.returncode == -signal.SIGKILL, err
    assert mark.read_text() == "unpublish.recorded\n"
    assert records.find(store, "policy") is None
    assert len(stored(trainer)) == 4
    withdrawal.withdraw(store, "policy")
    assert stored(trainer) == ["000000001.json", "000000002.json"]


def test_a_publisher_that_is_slower_gets_a_conflict(
    trainer: Trainer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is withdrawn after the publisher has written table, update and tag, and before its record."""
    trainer.next_version()
    trainer.train()
    trainer.save()
    base = steps.find(store, "exp42", 2)
    assert base is not None
    real, done = records.write, list[withdrawal.Withdrawal]()

    def write(at: Store, record: records.Published) -> bool:
        if not record.withdrawn:
            done.append(withdrawal.withdraw(store, "policy"))
        return real(at, record)

    monkeypatch.setattr(records, "write", write)
    with pytest.raises(ConflictError, match="version 2 of policy first"):
        publish(store, "policy", "exp42", base, Choice(("model/*",)))
    assert len(done) == 1
    assert stored(trainer) == ["000000001.json", "000000002.json"]


def test_a_publisher_that_slept_through_a_version_and_a_withdrawal_gets_a_conflict(
    trainer: Trainer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is that of a version that was withdrawn. It must not become another version."""
    trainer.next_version()
    trainer.train()
    trainer.save()
    base = steps.find(store, "exp42", 2)
    assert base is not None
    real, before = records.write, list[bytes]()

    def write(at: Store, record: records.Published) -> bool:
        monkeypatch.setattr(records, "write", real)
        assert trainer.next_version().number == 2
        before.append(store.get(records.key_of("policy", 2)))
        withdrawal.withdraw(store, "policy")
        return real(at, record)

    monkeypatch.setattr(records, "write", write)
    with pytest.raises(ConflictError, match="version 2 of policy first"):
        publish(store, "policy", "exp42", base, Choice(("model/*",)))
    assert [store.get(records.key_of("policy", 2))] == before
    assert not list(tag_records.listed(store))


def test_the_next_publisher_removes_what_a_killed_withdrawal_left(
    trainer: Trainer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trainer.next_version()
    trainer.next_version()
    assert records.write(store, withdrawal._record("policy", 3, SYSTEM_CLOCK))
    monkeypatch.setattr(records, "ORPHAN_SECONDS", -60.0)  # all objects that no version needs are old enough
    record = trainer.next_version()
    tables = sorted(path.name for path in (trainer.url / "published" / "policy").glob("weights-*"))
    assert tables == [record.weights.key] != [first.weights.key]
    assert list(tag_records.listed(store)) == [record.tag]


def test_a_report_shows_no_version_of_a_withdrawn_name(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    assert [each.name for each in read_report(store).published] == ["policy"]
    withdrawal.withdraw(store, "policy")
    assert not read_report(store).published


def test_a_subscriber_that_asks_for_the_number_of_a_withdrawal_is_told_so(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    withdrawal.withdraw(store, "policy")
    with Subscriber(store, "policy", sidecar=None) as subscriber:
        with pytest.raises(NotFoundError, match="policy was withdrawn"):
            subscriber.at(2)
        with pytest.raises(NotFoundError):
            subscriber.at(1)


def test_a_withdrawal_that_is_slower_gets_a_conflict_and_deletes_nothing(
    trainer: Trainer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.next_version()
    real = records.write

    def write(at: Store, record: records.Published) -> bool:
        monkeypatch.setattr(records, "write", real)
        trainer.next_version()
        return real(at, record)

    monkeypatch.setattr(records, "write", write)
    with pytest.raises(ConflictError, match="record 2 of policy first"):
        withdrawal.withdraw(store, "policy")
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy", sidecar=None) as subscriber:
        subscriber.wait(60).apply(held)
    assert same(held, trainer.weights[2])


def test_the_objects_and_tags_of_a_later_publisher_stay(
    trainer: Trainer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leftover of the first withdrawal is removed while another version is being published."""
    trainer.next_version()
    withdrawal.withdraw(store, "policy")
    real, before = records.write, list[Any]()

    def write(at: Store, record: records.Published) -> bool:
        before.append(withdrawal.withdraw(store, "policy"))
        return real(at, record)

    monkeypatch.setattr(records, "write", write)
    record = trainer.next_version()
    assert (record.number, before[0].objects) == (3, ())
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy", sidecar=None) as subscriber:
        subscriber.wait(60).apply(held)
    assert same(held, trainer.weights[2])
    assert list(tag_records.listed(store)) == [record.tag]


def test_a_damaged_record_can_be_withdrawn(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    (trainer.url / "published" / "policy" / "000000001.json").write_text("{")
    assert withdrawal.withdraw(store, "policy").version is None
    assert records.find(store, "policy") is None
    assert stored(trainer) == ["000000001.json", "000000002.json"]


def test_the_command_prints_a_plan_and_executes_it(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.next_version()
    url, before = str(trainer.url), stored(trainer)
    assert main(["ckpt", "unpublish", url, "policy"]) == 0
    out = capsys.readouterr().out
    assert "policy  version 1" in out
    assert "to delete: 1 objects with" in out
    assert "--apply executes the plan" in out
    assert stored(trainer) == before
    assert main(["ckpt", "unpublish", url, "policy", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["number"], planned["version"]["step"], planned["applied"]) == (2, 1, False)
    assert main(["ckpt", "unpublish", url, "policy", "--apply"]) == 0
    assert "deleted: 1 objects with" in capsys.readouterr().out
    assert main(["ckpt", "published", url]) == 0
    assert capsys.readouterr().out == "nothing is published\n"
    assert main(["ckpt", "unpublish", url, "other"]) == NotFoundError.exit_code
    assert "nothing was published as other" in capsys.readouterr().err
