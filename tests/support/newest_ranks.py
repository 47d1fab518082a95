"""Two ranks of one node with `uploads="newest"`: `newest_ranks.py URL SOCKET`.

The store takes no pack until both ranks have kept two steps. Each rank prints which of its saves were only kept, and then
which steps the run has.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped
from tests.support.ranks import in_group


class Held(Wrapped):
    """Takes no pack until `gate` is set."""

    gate = threading.Event()

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        assert self.gate.wait(120)
        return super().put_multipart(key, parts)


def state(step: int) -> dict[str, object]:
    torch.manual_seed(step)
    return {"model": torch.nn.Linear(300, 300), "own": torch.randn(50_000) + dist.get_rank()}


@in_group
def main(url: str, socket: str) -> None:
    with Checkpointer(Held(open_store(url)), run="exp", sidecar=socket, uploads="newest", timeout=120) as checkpointer:
        handles = []
        for step in (1, 2, 3):
            handles.append(checkpointer.save(step, state(step)))
            assert handles[-1].wait_kept(120)
            dist.barrier()
        print(json.dumps({"local": [handle.local for handle in handles]}), flush=True)
        Held.gate.set()
    dist.barrier()
    with Checkpointer(url, run="exp", sidecar=None) as checkpointer:
        found = state(0)
        assert checkpointer.restore(found) == 3
        assert torch.equal(found["own"], state(3)["own"])  # type: ignore[arg-type]
        print(json.dumps({"steps": checkpointer.steps()}), flush=True)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
