"""A trainer's save through the daemon, without torch: `client.py URL SOCKET STEP SEED BYTES PARENT`; says what it knows,
line by line."""

from __future__ import annotations

import os
import sys

import msgspec
import numpy as np

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.saving.executor import SaveExecutor
from headrace.checkpoint.saving.staged_save import StagedSave
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.sidecar.client import SaveMeter
from headrace.dataio.sidecar.jobs.memfd import sealed
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, make


def state(seed: int, size: int) -> dict[str, bytes]:
    """A tensor of `size` bytes, one that does not depend on the seed, and a small one."""
    new, old = np.random.default_rng(seed), np.random.default_rng(0)
    return {"frozen": old.bytes(160 << 10), "weights": new.bytes(size), "step": new.bytes(4)}


def say(line: str) -> None:
    print(line, flush=True)


def main(url: str, socket: str, step: str, seed: str, size: str, parent: str) -> None:
    base = msgspec.json.decode(parent, type=Base)
    with open_store(url) as store:
        made = make(store, state(int(seed), int(size)), step=int(step), number=base.timeline, bases=(base,))
        fd = sealed("arena", bytes(made.arena))
        save = StagedSave(
            plan=made.plan,
            arena_fd=fd,
            view=lambda: made.arena,
            give_back=lambda: say("given back"),
            abandon=lambda: say("abandoned"),
            handed_over=say,
        )
        executor = SaveExecutor(store, socket, meter=SaveMeter(RUN))
        try:
            result = executor.commit_staged(save)
            say(f"committed {result['step']} {result['attempt'] == made.plan.attempt}")
        except HeadraceError as error:
            say(f"failed {error.code}: {error}")
        executor.close()
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
