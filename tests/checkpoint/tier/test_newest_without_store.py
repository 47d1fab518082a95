"""`uploads="newest"` while the store is unreachable, or while other ranks fail."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.tier.saving import KeptSteps, LocalOnlyError
from headrace.checkpoint.trackers.events import CommittedStep, Tracker
from headrace.dataio.core.errors import DeadlineError, TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.local_tier.records import Record, TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.open import open_store
from tests.checkpoint.test_sidecar import Daemon
from tests.support import nursery
from tests.support.local_tier import Counting
from tests.support.ranks import launch, meeting
from tests.support.waiting import wait_for

STEP_BYTES, BUDGET = 4 * MIB, 80 * MIB


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        made = Daemon(Path(folder))
        made.start(HEADRACE_SIDECAR_TIER_DIR=f"{folder}/tier", HEADRACE_SIDECAR_TIER_BYTES=str(BUDGET))
        yield made
        made.stop()


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(STEP_BYTES // 4, generator=torch.Generator().manual_seed(step))}


def unreachable(_operation: str, _key: str) -> None:
    raise TransientError("the store is away")


def test_while_the_store_is_unreachable_the_tier_has_the_newest_steps(daemon: Daemon, tmp_path: Path) -> None:
    store, last = Counting(open_store(tmp_path / "store")), 2 * BUDGET // STEP_BYTES
    with Checkpointer(store, run="exp", sidecar=daemon.socket, uploads="newest", timeout=60) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
        store.before = unreachable
        for step in range(2, last + 1):
            handle = checkpointer.save(step, state(step))
            assert handle.wait_kept(60), f"step {step}"
            with pytest.raises(LocalOnlyError):
                handle.result(60)
        tier = LocalTier(daemon.folder / "tier", TierLimits(BUDGET, 2))
        kept = [r.step for r in tier.records() if not r.committed]
        assert kept == list(range(last, last - 4, -1))
        store.before = lambda _operation, _key: None
    found = state(0)
    with Checkpointer(tmp_path / "store", run="exp", sidecar=daemon.socket) as successor:
        assert successor.restore(found) == last
    assert torch.equal(found["w"], state(last)["w"])


def test_close_waits_for_the_upload_of_the_last_step_no_longer_than_told(daemon: Daemon, tmp_path: Path) -> None:
    store, gate = Counting(open_store(tmp_path / "store")), threading.Event()

    def hold(operation: str, _key: str) -> None:
        if operation == "put_multipart":
            assert gate.wait(60)

    checkpointer = Checkpointer(store, run="exp", sidecar=daemon.socket, uploads="newest", timeout=60)
    store.before = hold
    first = checkpointer.save(1, state(1))
    assert first.wait_kept(60)
    assert checkpointer.save(2, state(2)).wait_kept(60)
    store.before = lambda _operation, _key: None
    gate.set()
    first.result(60)
    gate.clear()
    store.before = hold
    with pytest.raises(DeadlineError, match=r"step 2 is still in flight after 0\.\d+ s"):
        checkpointer.close(timeout=0.5)
    gate.set()
    wait_for(lambda: not any(thread.name == "headrace-save-2" for thread in threading.enumerate()))
    assert committed_steps(tmp_path) == [1, 2]


def test_close_says_that_the_tier_has_the_last_step_if_the_store_does_not_take_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    store, gate = Counting(open_store(tmp_path / "store")), threading.Event()
    store.before = lambda operation, _key: operation != "put_multipart" or gate.wait(60)  # type: ignore[assignment]
    checkpointer = Checkpointer(store, run="exp", sidecar=daemon.socket, uploads="newest", timeout=60)
    first = checkpointer.save(1, state(1))
    assert first.wait_kept(60)
    assert checkpointer.save(2, state(2)).wait_kept(60)
    gate.set()
    first.result(60)
    store.before = unreachable
    with pytest.raises(
        LocalOnlyError, match="step 2 is not committed, but kept in this node's tier: the store is away"
    ):
        checkpointer.close()
    found = state(0)
    with Checkpointer(tmp_path / "store", run="exp", sidecar=daemon.socket) as successor:
        assert successor.restore(found) == 2
    assert torch.equal(found["w"], state(2)["w"])


def test_close_uploads_the_last_step_although_an_earlier_one_was_kept_after_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate, add, third = (
        Counting(open_store(tmp_path / "store")),
        threading.Event(),
        KeptSteps.add,
        threading.Event(),
    )
    store.before = lambda operation, _key: operation != "put_multipart" or gate.wait(60)  # type: ignore[assignment]

    def late(self: KeptSteps, local_tier: LocalTier, record: Record) -> None:
        assert record.step != 2 or third.wait(60)
        add(self, local_tier, record)

    monkeypatch.setattr(KeptSteps, "add", late)
    with Checkpointer(store, run="exp", sidecar=daemon.socket, uploads="newest", timeout=60) as checkpointer:
        assert checkpointer.save(1, state(1)).wait_kept(60)
        second, last = (checkpointer.save(step, state(step)) for step in (2, 3))
        assert second.local
        assert last.local
        assert last.wait(60)
        assert not second.done
        third.set()
        gate.set()
    assert committed_steps(tmp_path) == [1, 3]


def test_the_last_step_reaches_the_trackers(daemon: Daemon, tmp_path: Path) -> None:
    store, gate, tracker = Counting(open_store(tmp_path / "store")), threading.Event(), Recording()
    store.before = lambda operation, _key: operation != "put_multipart" or gate.wait(60)  # type: ignore[assignment]
    with Checkpointer(store, run="exp", sidecar=daemon.socket, uploads="newest", trackers=[tracker]) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, state(step), metadata={"loss": step / 2}).wait_kept(60)
        gate.set()
    assert tracker.seen == [(1, {"loss": 0.5}), (3, {"loss": 1.5})]


class Recording(Tracker):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, object]]] = []

    def committed(self, step: CommittedStep) -> None:
        self.seen.append((step.step, dict(step.metadata)))


def test_a_rank_that_is_killed_is_not_waited_for_and_its_kept_step_is_not_lost(daemon: Daemon, tmp_path: Path) -> None:
    """Rank 1 was killed before it uploaded anything, but the tier has its parts of two steps."""
    arguments = (str(tmp_path / "store"), daemon.socket)
    with meeting(2) as place:
        running = [
            nursery.start("tests.support.newest_rank_lost", "killed", *arguments, **place, RANK=str(rank))
            for rank in (0, 1)
        ]
        try:
            output = [process.communicate(timeout=170) for process in running]
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, -signal.SIGKILL], output
    (line,) = [json.loads(text) for text in output[0][0].splitlines() if text.startswith("{")]
    assert line["outcome"].startswith("LocalOnlyError: step 1 is not committed, but kept in this node's tier")
    assert "the process of rank 1 has ended" in line["outcome"]
    restored = launch(3, "tests.support.newest_rank_lost", "restore-from-others", *arguments)
    assert [line["step"] for (line,) in restored] == [2, 2, 2]  # although rank 0 is on a new node


def test_a_rank_that_ends_by_an_error_does_not_wait_for_the_others(daemon: Daemon, tmp_path: Path) -> None:
    arguments = (str(tmp_path / "store"), daemon.socket)
    ranks = launch(2, "tests.support.newest_rank_lost", "raises", *arguments)
    assert ranks[1] == [{"outcome": "ValueError: training has failed"}]
    assert "the process of rank 1 has ended" in ranks[0][0]["outcome"]
    restored = launch(2, "tests.support.newest_rank_lost", "restore", *arguments)
    assert restored == [[{"step": 2, "same": True}]] * 2


def test_if_a_rank_has_no_tier_all_ranks_upload_every_step(daemon: Daemon, tmp_path: Path) -> None:
    ranks = launch(2, "tests.support.newest_rank_lost", "lacks", str(tmp_path / "store"), daemon.socket)
    assert ranks == [[{"local": [False] * 5}, {"steps": [1, 2, 3, 4, 5]}]] * 2


def committed_steps(tmp_path: Path) -> list[int]:
    with Checkpointer(tmp_path / "store", run="exp", sidecar=None) as checkpointer:
        return checkpointer.steps()
