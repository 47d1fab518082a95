"""Two ranks of which only rank 0 calls `save`: `lone_rank URL`. Rank 0 prints what it raised and logged.

Rank 1 ends once rank 0 has warned that it waits.
"""

from __future__ import annotations

import json
import logging

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer, ranks
from headrace.dataio.core.errors import HeadraceError
from tests.support.ranks import in_group
from tests.support.waiting import wait_for

WARN_SECONDS = 1.0


@in_group
def main(url: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        wait_for(lambda: store.check(["warned"]))
        return
    warned = list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())
            store.set("warned", "yes")

    logging.getLogger(ranks.__name__).addHandler(Handler())
    ranks._WARN_SECONDS = WARN_SECONDS
    with Checkpointer(url, run="exp", sidecar=None, timeout=60) as checkpointer:
        try:
            checkpointer.save(1, {"w": torch.zeros(10)})
        except HeadraceError as error:
            outcome = {"raised": type(error).__name__, "message": error.message, "hint": error.hint, "warned": warned}
            print(json.dumps(outcome), flush=True)
