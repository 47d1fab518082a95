"""Three ranks of which one fails in the middle of a save: `failing_job.py HOW URL`.

HOW is kill (from outside), apart (the same, with every rank as if on a node of its own) or anything else: then rank 0's store is
away at first, and rank 1 fails while it makes the step's name, while it copies, while it uploads, and then not at all. Each rank
prints what its saves raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer, peers
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.saving.arena import Staging
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.faulty_stores import Fault, Faulty, Rule
from tests.support.checkpoint_states import Wrapped
from tests.support.ranks import in_group

WAIT_SECONDS = 900.0
"""For other ranks: much longer than any of this may take."""


class Breaking(Wrapped):
    """Sends no pack while `broken`."""

    broken = False

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        if self.broken:
            raise OSError("the cable is cut")
        return super().put_multipart(key, parts)


class NoRoom:
    """A name for which there is no room."""

    def prepare(self, attempt: Base) -> None:
        raise OSError("no room for the name")

    def publish(self) -> None:
        raise AssertionError("the step is not committed")

    def withdraw(self, error: BaseException) -> None:
        pass


def save(checkpointer: Checkpointer, step: int, name: NoRoom | None) -> str:
    torch.manual_seed(step)
    state = {"model": torch.nn.Linear(300, 300), "own": torch.randn(50_000)}
    try:
        checkpointer.save_as(step, state, name).result(WAIT_SECONDS)
    except (HeadraceError, OSError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "committed"


@in_group
def main(how: str, url: str) -> None:
    if how == "apart":
        peers._place = lambda: bytes([dist.get_rank()]) * 8
    odd, take = dist.get_rank() == 1, Staging.take
    with open_store(url) as inner:
        faulty = Faulty(inner, [])
        store = Breaking(faulty)
        with Checkpointer(store, run="exp", sidecar=None, timeout=WAIT_SECONDS) as checkpointer:
            for step, broken in enumerate(
                ["nothing"] if how in ("kill", "apart") else ["away", "name", "copy", "upload", "nothing"], 1
            ):
                faulty.rules = [Rule(Fault.TRANSIENT)] if broken == "away" and dist.get_rank() == 0 else []
                store.broken = odd and broken == "upload"
                Staging.take = _no_memory if odd and broken == "copy" else take  # type: ignore[assignment, method-assign]
                name = NoRoom() if odd and broken == "name" else None
                print(json.dumps({broken: save(checkpointer, step, name)}), flush=True)


def _no_memory(*_: object) -> object:
    raise MemoryError("no memory for the arena")
