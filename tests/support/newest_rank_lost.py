"""Two ranks with `uploads="newest"` that do not end alike: `newest_rank_lost.py HOW URL SOCKET`.

The store takes no pack until both ranks have kept two steps. HOW is "killed": rank 1 is killed then, and rank 0 closes. Or
"raises": rank 1 leaves the block of the checkpointer by an error, and rank 0 is still training. Each rank prints how its
checkpointer was closed. They would wait much longer than the test. With "restore", each rank prints the step it restored;
with "restore-from-others", rank 0 is on a node without a tier. With "lacks", rank 1 saves without a tier. Each rank prints
which of five saves were only kept, and the steps of the run.
"""

from __future__ import annotations

import json
import os
import signal

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.handle import Handle
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.open import open_store
from tests.support.newest_ranks import Held, state
from tests.support.ranks import in_group

WAIT_SECONDS = 900.0


def train(checkpointer: Checkpointer, how: str) -> None:
    odd, handles = dist.get_rank() == 1, list[Handle]()
    for step in (1, 2):
        handles.append(checkpointer.save(step, state(step)))
        assert handles[-1].wait_kept(WAIT_SECONDS)
        dist.barrier()
    assert [handle.local for handle in handles] == [False, True]
    if odd and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    Held.gate.set()
    if how == "raises":
        handles[0].result(WAIT_SECONDS)
        if odd:
            raise ValueError("training has failed")
        dist.barrier()  # until rank 1 has left its block


def restore(url: str, socket: str, has_tier: bool) -> None:
    found = state(0)
    with Checkpointer(url, run="exp", sidecar=socket if has_tier else None) as checkpointer:
        step = checkpointer.restore(found)
    same = step is not None and torch.equal(found["own"], state(step)["own"])  # type: ignore[arg-type]
    print(json.dumps({"step": step, "same": same}), flush=True)


def save_with_one_tier(url: str, socket: str) -> None:
    Held.gate.set()
    sidecar = socket if dist.get_rank() == 0 else f"{socket}-absent"
    with Checkpointer(
        Held(open_store(url)), run="exp", sidecar=sidecar, uploads="newest", timeout=WAIT_SECONDS
    ) as checkpointer:
        handles = [checkpointer.save(step, state(step)) for step in range(1, 6)]
        print(json.dumps({"local": [handle.local for handle in handles]}), flush=True)
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        print(json.dumps({"steps": checkpointer.steps()}), flush=True)


@in_group
def main(how: str, url: str, socket: str) -> None:
    if how == "lacks":
        save_with_one_tier(url, socket)
        return
    if how.startswith("restore"):
        restore(url, socket, has_tier=how == "restore" or dist.get_rank() > 0)
        return
    outcome = "closed"
    try:
        with Checkpointer(
            Held(open_store(url)), run="exp", sidecar=socket, uploads="newest", timeout=WAIT_SECONDS
        ) as checkpointer:
            train(checkpointer, how)
    except (HeadraceError, ValueError) as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps({"outcome": outcome}), flush=True)
    if how == "raises" and dist.get_rank() == 1:
        dist.barrier()
    os._exit(0)  # the other rank has ended, so the group cannot end in order


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
