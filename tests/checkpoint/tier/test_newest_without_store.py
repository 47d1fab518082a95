"""`uploads="newest"` while the store is unreachable, or while other ranks fail."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.tier.saving import LocalOnlyError
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.open import open_store
from tests.checkpoint.test_sidecar import Daemon
from tests.support.local_tier import Counting

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
