"""A worker with a tier as a process of its own: `saver.py URL TIER`; it saves step 2 on top of step 1."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import latest, make, tiny_state


def main(url: str, tier: str) -> None:
    with open_store(url) as store:
        base = latest(store)
        assert base is not None
        made = make(store, tiny_state(2), step=2, number=1, bases=(base,))
        commit_staged(
            made.arena,
            made.plan,
            lambda _: None,
            store=store,
            local_tier=LocalTier(Path(tier), TierLimits(512 * MIB, 3)),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
