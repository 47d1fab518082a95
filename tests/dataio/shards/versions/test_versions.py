"""Making versions: one winner for each number, losers build again, and views are not the newest version."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headrace.dataio.core.errors import ConflictError, NotFoundError, UsageError
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.documents import VersionDocument
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store


@pytest.fixture
def posix(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "store")
    history.publish(store, versions.new_document("set", (), (), version=1, parent=None, message="first"))
    return store


def shard(name: str) -> versions.Shard:
    return versions.Shard(key=f"shards/{name}.tar", size=10, samples=0)


def adding(name: str):  # type: ignore[no-untyped-def]
    def build(base: VersionDocument) -> VersionDocument:
        return versions.new_document(
            base.name, (*base.shards, shard(name)), base.index, version=0, parent=base.version, message=name
        )

    return build


def test_commit_makes_the_next_version_from_the_newest(posix: Store) -> None:
    made = history.commit(posix, adding("a"))
    assert (made.version, made.parent, made.trunk, made.message) == (2, 1, 2, "a")
    assert history.load(posix)[0] == made


def test_of_racing_writers_every_one_gets_a_version_with_all_before_it(posix: Store) -> None:
    barrier, made = threading.Barrier(8), list[VersionDocument]()

    def write(name: str) -> None:
        barrier.wait()
        made.append(history.commit(posix, adding(name)))

    threads = [threading.Thread(target=write, args=(f"w{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.sort(key=lambda d: d.version)
    assert [d.version for d in made] == list(range(2, 10))
    assert [len(d.shards) for d in made] == list(range(1, 9))
    assert {s.key for s in made[-1].shards} == {f"shards/w{i}.tar" for i in range(8)}


def test_a_writer_that_cannot_continue_after_a_lost_race_gets_the_winner_in_its_error(posix: Store) -> None:
    calls = list[int]()

    def build(base: VersionDocument) -> VersionDocument:
        calls.append(base.version)
        if len(calls) == 2:
            raise UsageError("sample 'k' is gone", hint="look again")
        history.commit(posix, adding("rival"))
        return adding("mine")(base)

    with pytest.raises(ConflictError, match=r"another writer made version 2 \(rival\) at .*: sample 'k' is gone"):
        history.commit(posix, build)
    assert calls == [1, 2]
    assert history.list_versions(posix) == [1, 2]


def test_a_refusal_without_a_race_is_the_callers_own_error(posix: Store) -> None:
    def build(_: VersionDocument) -> VersionDocument:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        history.commit(posix, build)


def test_races_that_are_always_lost_come_to_an_end(posix: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "COMMIT_TRIES", 3)
    calls = list[int]()

    def build(base: VersionDocument) -> VersionDocument:
        calls.append(base.version)
        history.publish(posix, versions.new_document("set", (), (), version=base.version + 1, parent=1, message="r"))
        return adding("mine")(base)

    with pytest.raises(ConflictError, match="3 attempts"):
        history.commit(posix, build)
    assert len(calls) == 3


def test_a_version_off_the_trunk_is_not_opened_by_default(posix: Store) -> None:
    history.commit(posix, adding("a"))
    view = history.commit(posix, adding("view"), trunk=False)
    assert (view.version, view.trunk) == (3, 2)
    assert history.load(posix)[0].version == 2
    assert history.load(posix, 3)[0] == view
    assert (after := history.commit(posix, adding("b"))).version == 4
    assert (after.parent, [s.key for s in after.shards]) == (2, ["shards/a.tar", "shards/b.tar"])


def test_there_is_no_next_version_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no dataset"):
        history.commit(open_store(tmp_path), adding("a"))
