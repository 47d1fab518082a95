"""A checkpointer beside a daemon with a tier: the store goes away and comes back, and somebody else may have gone on."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.repository import timeline
from headrace.dataio.core.errors import ConflictError, TransientError
from headrace.dataio.store.open import open_store
from tests.checkpoint.test_sidecar import Daemon, wait_for
from tests.support.local_tier import Counting


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        made = Daemon(Path(folder))
        made.start(HEADRACE_SIDECAR_TIER_DIR=f"{folder}/tier", HEADRACE_SIDECAR_TIER_BYTES="128MiB")
        yield made
        made.stop()


@pytest.fixture
def trainer(daemon: Daemon, tmp_path: Path) -> Callable[..., tuple[Checkpointer, Counting]]:
    """Opens a checkpointer on the node whose own view of the store can be cut off."""

    def open_one() -> tuple[Checkpointer, Counting]:
        store = Counting(open_store(tmp_path / "store"))
        return Checkpointer(store, run="exp", sidecar=daemon.socket), store

    return open_one


def cut_off(store: Counting) -> None:
    def away(_operation: str, _key: str) -> None:
        raise TransientError("the store is away")

    store.before = away


def back(store: Counting) -> None:
    store.before = lambda _operation, _key: None


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((200_000,), value)}


Trainer = Callable[..., tuple[Checkpointer, Counting]]


def test_a_save_says_when_it_was_kept_and_a_restore_reads_it_there(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    checkpointer, store = trainer()
    with checkpointer:
        result = checkpointer.save(1, state(1)).result(60)
        assert result.committed_by == "sidecar"
        assert result.kept is not None
        assert 0 < result.kept < 60
        store.calls.clear()
        found = state(0)
        assert checkpointer.restore(found) == 1
        assert torch.equal(found["w"], state(1)["w"])
        assert not any(key.startswith("packs/") for _, key in store.calls)
    assert re.search(r"restored step 1: [\d.]+ [KM]iB from the tier, \d+ B from the store", caplog.text)


def test_going_on_from_a_step_that_is_not_the_latest_any_more_is_stopped_before_anything_is_written(
    trainer: Trainer, tmp_path: Path
) -> None:
    first, _ = trainer()
    with first:
        first.save(1, state(1)).result(60)
    with Checkpointer(str(tmp_path / "store"), run="exp", sidecar=None) as elsewhere:
        assert elsewhere.restore(state(0)) == 1
        elsewhere.save(2, state(2)).result(60)
    second, store = trainer()
    with second:
        cut_off(store)
        found = state(0)
        assert second.restore(found) == 1
        assert torch.equal(found["w"], state(1)["w"])
        with pytest.raises(TransientError, match="away"):
            second.save(3, found).result(60)
        back(store)
        for _ in range(2):
            with pytest.raises(ConflictError, match="restored while the store was unreachable, but step 2 of timeline"):
                second.save(3, found)
        assert timeline.numbers(store, "exp") == [1, 2]
        assert second.restore(found) == 2
        assert torch.equal(found["w"], state(2)["w"])
        assert second.save(3, found).result(60).timeline == 3


def test_going_on_from_the_latest_is_fine_once_the_store_is_back(trainer: Trainer) -> None:
    first, _ = trainer()
    with first:
        first.save(1, state(1)).result(60)
    second, store = trainer()
    with second:
        cut_off(store)
        assert second.restore(state(0)) == 1
        back(store)
        assert second.save(2, state(2)).result(60).timeline == 2
        assert second.steps() == [1, 2]


def test_a_step_that_only_the_tier_had_is_committed_by_the_next_restore(
    trainer: Trainer, daemon: Daemon, tmp_path: Path
) -> None:
    checkpointer, _ = trainer()
    with checkpointer:
        checkpointer.save(1, state(1)).result(60)
        packs = tmp_path / "store" / "packs"
        packs.rename(tmp_path / "packs")
        packs.write_text("in the way: no pack can be written")
        handle = checkpointer.save(2, state(2))
        handle.wait(60)
        assert handle.error is not None
        assert checkpointer.steps() == [1]
        wait_for(lambda: (Path(daemon.folder) / "tier" / "records").exists())
        packs.unlink()
        (tmp_path / "packs").rename(packs)
        with pytest.raises(type(handle.error)):
            handle.result()
    second, _ = trainer()
    with second:
        found = state(0)
        assert second.restore(found) == 2
        assert torch.equal(found["w"], state(2)["w"])
