"""Two ranks that are told to stop while the save of that step fails on rank 1 and is still under way on rank 0:
`preempted_pair.py URL`. Each prints what became of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped
from tests.support.ranks import in_group

SLOW_SECONDS = 1.0


class FailsOnce(Wrapped):
    """On rank 1 there is no space for the first pack; on rank 0 it takes long."""

    calls = 0

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        self.calls += 1
        if self.calls == 1 and dist.get_rank():
            raise CapacityError("no space left")
        if self.calls == 1:
            time.sleep(SLOW_SECONDS)
        return self.inner.put_multipart(key, parts)


@in_group
def main(url: str) -> None:
    with open_store(url) as inner:
        store = FailsOnce(inner)
        state = {"own": torch.full((300_000,), float(dist.get_rank()))}
        with Checkpointer(store, run="exp", sidecar=None, record=False, timeout=60) as checkpointer:
            with checkpointer.on_preemption(lambda: state, deadline=60) as guard:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert not guard.reached(1)  # the answer follows by one call
                first = checkpointer.save(2, state)
                failed = dist.get_rank() == 1 and first.wait(60)
                under_way = not first.done
                assert guard.reached(2)
            assert guard.outcome is not None
            line = {"failed": failed, "under_way": under_way, "committed": guard.outcome.committed}
            print(json.dumps(line | {"why": guard.outcome.why, "packs": store.calls}), flush=True)
