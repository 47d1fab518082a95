"""A trainer whose forked child ends in full, a program of the nursery: `main(URL)` prints what the trainer has afterwards."""

from __future__ import annotations

import gc
import json
import os
import sys

import torch

from headrace.checkpoint import Checkpointer, read
from headrace.dataio.store.open import open_store


def main(url: str) -> None:
    state = {"m": torch.arange(4.0)}
    with Checkpointer(url, run="a", sidecar=None) as first:
        first.save(1, state).result(60)
        first.save(2, state).result(60)
    kept = [read(url, run="a", step=1)]
    trainer = Checkpointer(url, run="a", sidecar=None)
    trainer.restore(state)
    store = open_store(url)
    leases = sorted(info.key for info in store.list("leases/"))
    pid = os.fork()
    if not pid:
        kept[0].close()  # as the end of a `with` does
        kept.append(read(url, run="a", step=2))  # its own, which it lets go of
        kept.clear()
        trainer.close()
        del trainer
        gc.collect()
        sys.exit(0)  # finalizers and what was registered for the end run
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = sorted(info.key for info in store.list("leases/"))
    entries = kept[0]["m"].read().tolist()
    trainer.save(3, state).result(60)
    found = {"status": status, "leases": len(leases), "kept": leases == left, "m": entries, "steps": trainer.steps()}
    print(json.dumps(found))
    kept[0].close()
    trainer.close()
