"""`uploads="newest"`: every step is in the tier, and a slow store gets those that it can take."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.tier.saving import KeptSteps, LocalOnlyError
from headrace.dataio.core import log
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.store.open import open_store
from tests.checkpoint.test_sidecar import Daemon
from tests.support.local_tier import Counting, local_tier, record
from tests.support.ranks import launch
from tests.support.waiting import wait_for

Opens = Callable[..., tuple[Checkpointer, Counting]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        made = Daemon(Path(folder))
        made.start(HEADRACE_SIDECAR_TIER_DIR=f"{folder}/tier", HEADRACE_SIDECAR_TIER_BYTES="128MiB")
        yield made
        made.stop()


@pytest.fixture
def open_one(daemon: Daemon, tmp_path: Path) -> Opens:
    def open_one(sidecar: str = daemon.socket) -> tuple[Checkpointer, Counting]:
        store = Counting(open_store(tmp_path / "store"))
        return Checkpointer(store, run="exp", sidecar=sidecar, uploads="newest", timeout=60), store

    return open_one


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Packs reach the store once it is set."""
    made = threading.Event()
    yield made
    made.set()


def hold_packs(store: Counting, gate: threading.Event) -> None:
    def hold(operation: str, key: str) -> None:
        if operation == "put_multipart" and key.startswith("packs/"):
            assert gate.wait(60)

    store.before = hold


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((200_000,), float(value))}


def committed_steps(tmp_path: Path) -> list[int]:
    with Checkpointer(tmp_path / "store", run="exp", sidecar=None) as checkpointer:
        return checkpointer.steps()


def test_saves_do_not_wait_for_an_upload_and_are_kept_meanwhile(
    open_one: Opens, gate: threading.Event, tmp_path: Path
) -> None:
    checkpointer, store = open_one()
    with checkpointer:
        hold_packs(store, gate)
        first = checkpointer.save(1, state(1))
        assert first.wait_kept(60)
        assert not first.done
        kept = [checkpointer.save(step, state(step)) for step in range(2, 7)]
        assert all(handle.wait_kept(60) and handle.local for handle in kept)
        with pytest.raises(LocalOnlyError, match="step 2 is kept in this node's tier and is not uploaded"):
            kept[0].result(60)
        assert repr(kept[0]).endswith(", kept)")
        gate.set()
        assert first.result(60).committed_by == "process"
        last = checkpointer.save(7, state(7))
        assert not last.local
        assert last.result(60).kept is not None
    assert committed_steps(tmp_path) == [1, 7]


def test_steps_without_common_chunks_are_kept_before_the_store_is_asked(
    open_one: Opens, gate: threading.Event, tmp_path: Path
) -> None:
    """After an upload for which the bases had nothing, the arena is free although the store does not answer."""
    checkpointer, store = open_one()
    with checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).result(60)

        def hold_all(_operation: str, _key: str) -> None:
            assert gate.wait(60)

        store.before = hold_all
        third = checkpointer.save(3, state(3))
        assert not third.local
        assert third.wait_kept(60)
        fourth = checkpointer.save(4, state(4))
        assert fourth.wait_kept(60)
        assert not third.done
        gate.set()
        result = third.result(60)
        assert result.bytes_written == result.bytes_state == 800_000
        assert result.kept is not None
    assert committed_steps(tmp_path) == [1, 2, 3, 4]


def test_frozen_tensors_are_uploaded_once(open_one: Opens) -> None:
    checkpointer, _ = open_one()
    frozen = torch.randn(500_000)
    with checkpointer:
        results = [
            checkpointer.save(step, {"frozen": frozen, "w": torch.full((200_000,), float(step))}).result(60)
            for step in range(1, 5)
        ]
    assert results[0].bytes_deduplicated == 0
    assert all(result.bytes_deduplicated == 2_000_000 for result in results[1:])


def test_close_uploads_the_last_step(open_one: Opens, gate: threading.Event, tmp_path: Path) -> None:
    checkpointer, store = open_one()
    with checkpointer:
        hold_packs(store, gate)
        assert checkpointer.save(1, state(1)).wait_kept(60)
        for step in (2, 3):
            assert checkpointer.save(step, state(step)).wait_kept(60)
        gate.set()
    assert committed_steps(tmp_path) == [1, 3]
    found = state(0)
    with Checkpointer(tmp_path / "store", run="exp", sidecar=None) as elsewhere:
        assert elsewhere.restore(found) == 3
    assert torch.equal(found["w"], state(3)["w"])


def test_a_successor_restores_the_newest_kept_step(open_one: Opens, gate: threading.Event) -> None:
    first, store = open_one()
    with first:
        hold_packs(store, gate)
        assert first.save(1, state(1)).wait_kept(60)
        for step in (2, 3, 4):
            assert first.save(step, state(step)).wait_kept(60)
        second, sees = open_one()
        with second:
            found = state(0)
            assert second.restore(found) == 4
            assert torch.equal(found["w"], state(4)["w"])
            sent = {key for operation, key in sees.calls if operation == "put_multipart"}
            assert len(sent) == 1  # the older steps are not uploaded
        gate.set()


def test_a_restore_of_a_kept_step_makes_few_requests(open_one: Opens, gate: threading.Event) -> None:
    first, store = open_one()
    with first:
        first.save(1, state(1)).result(60)
        hold_packs(store, gate)
        for step in (2, 3, 4):
            assert first.save(step, state(step)).wait_kept(60)
        second, sees = open_one()
        with second:
            assert second.restore(state(0)) == 4
            requests = len(sees.calls)
        gate.set()
    assert requests <= 52


def test_all_ranks_keep_the_same_steps_and_upload_the_last_one(daemon: Daemon, tmp_path: Path) -> None:
    ranks = launch(2, "tests.support.newest_ranks", str(tmp_path / "store"), daemon.socket)
    assert ranks == [[{"local": [False, True, True]}, {"steps": [1, 3]}]] * 2


def test_a_save_before_a_preemption_is_uploaded(open_one: Opens, gate: threading.Event, tmp_path: Path) -> None:
    checkpointer, store = open_one()
    with checkpointer:
        hold_packs(store, gate)
        assert checkpointer.save(1, state(1)).wait_kept(60)
        assert checkpointer.save(2, state(2)).local
        last = checkpointer.save(3, state(3), priority="preemption")
        assert not last.local
        gate.set()
        last.result(60)
    assert committed_steps(tmp_path) == [1, 3]


def test_a_step_that_cannot_be_kept_fails_and_the_next_one_is_uploaded(
    gate: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        daemon = Daemon(Path(folder))
        daemon.start(HEADRACE_SIDECAR_TIER_DIR=f"{folder}/tier", HEADRACE_SIDECAR_TIER_BYTES="128MiB")
        store = Counting(open_store(tmp_path / "store"))
        with Checkpointer(store, run="exp", sidecar=daemon.socket, uploads="newest") as checkpointer:
            hold_packs(store, gate)
            assert checkpointer.save(1, state(1)).wait_kept(60)
            shutil.rmtree(f"{folder}/tier/writing")
            Path(f"{folder}/tier/writing").write_text("in the way")
            failed = checkpointer.save(2, state(2))
            assert not failed.wait_kept(60)
            assert isinstance(failed.error, NotFoundError)
            with pytest.raises(NotFoundError, match="the node's sidecar reports no local tier"):
                failed.result()
            third = checkpointer.save(3, state(3))
            assert not third.local
            gate.set()
            third.result(60)
        daemon.stop()
    assert "step 2 was not saved" in caplog.text
    assert committed_steps(tmp_path) == [1, 3]


def test_a_trainer_without_the_sidecars_directory_makes_none_and_uploads_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that mounts the sidecar's socket, but not its tier. The sidecar makes a directory again."""
    log._logged.clear()
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        daemon = Daemon(Path(folder))
        daemon.start(HEADRACE_SIDECAR_TIER_DIR=f"{folder}/tier", HEADRACE_SIDECAR_TIER_BYTES="128MiB")
        with Checkpointer(tmp_path / "store", run="exp", sidecar=daemon.socket, uploads="newest") as checkpointer:
            shutil.move(f"{folder}/tier", f"{folder}/elsewhere")
            assert checkpointer.save(1, state(1)).result(60).committed_by == "sidecar"
            wait_for(lambda: Path(f"{folder}/tier/records").is_dir())
            result = checkpointer.save(2, state(2)).result(60)
            assert result.committed_by == "process"
            assert result.kept is not None
        daemon.stop()
    assert "is not here: mount it in the trainer's container, too" in caplog.text
    assert committed_steps(tmp_path) == [1, 2]


def test_without_a_daemon_every_step_is_uploaded(open_one: Opens, tmp_path: Path) -> None:
    checkpointer, _ = open_one(str(tmp_path / "no.sock"))
    with checkpointer:
        for step in (1, 2, 3):
            assert not checkpointer.save(step, state(step)).local
    assert committed_steps(tmp_path) == [1, 2, 3]


def test_newest_needs_a_sidecar() -> None:
    with pytest.raises(UsageError, match='uploads="newest" needs a sidecar'):
        Checkpointer("/nowhere", run="exp", sidecar=None, uploads="newest")
    with pytest.raises(UsageError, match="choose one of: all, newest"):
        Checkpointer("/nowhere", run="exp", uploads="some")


def test_older_kept_steps_are_removed_but_not_one_that_was_committed(tmp_path: Path) -> None:
    tier, kept = local_tier(tmp_path, steps=1), KeptSteps(more=1)
    for step in range(1, 6):
        tier.keep("s", f"packs/{step}", b"a step")
        added = record("s", step, [f"packs/{step}"], committed=0.0)
        tier.put_record(added)
        if step == 2:
            tier.put_record(record("s", step, [f"packs/{step}"], committed=2.0))  # by another process
        kept.add(tier, added)
    assert [r.step for r in tier.records()] == [5, 4, 2]
    assert [step for step in range(1, 6) if tier.has("s", f"packs/{step}")] == [2, 4, 5]
    kept.clear()
    kept.add(tier, record("s", 6, ["packs/6"], committed=0.0))
    assert [r.step for r in tier.records()] == [5, 4, 2]
