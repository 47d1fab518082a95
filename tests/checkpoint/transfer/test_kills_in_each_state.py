"""SIGKILL of trainer, daemon and worker, alone and together, in each of the twelve states of a transfer.

What was committed stays restorable to the bit; what was promised commits; what was not is absent or complete.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import combinations

import pytest

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import check
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.checkpoint.transfer.conftest import Node
from tests.support.checkpoint_states import begin, latest, load, make, save
from tests.support.transfer_client import state
from tests.support.waiting import wait_for

STATES = {
    "connecting": "trainer.plan-built",
    "received": "sidecar.stage-received",
    "journaled": "sidecar.stage-journaled",
    "acknowledged": "sidecar.stage-acknowledged",
    "started": "ckpt.commit-started",
    "leased": "ckpt.lease-written",
    "uploading": "ckpt.in-pack",
    "packed": "ckpt.packs-written",
    "released": "ckpt.arena-released",
    "manifest written": "ckpt.manifest-written",
    "fate written": "ckpt.decision-written",
    "committed": "ckpt.commit-written",
}
ORDER = list(STATES)
WORKS = ORDER[ORDER.index("started") :]
"""States in which there is a worker."""
SIZES = {"posix": 300 * KIB, "s3": 20 * MIB}
"""On S3 in three parts."""


def victims(state: str) -> list[tuple[str, ...]]:
    there = ("trainer", "daemon", "worker") if state in WORKS else ("trainer", "daemon")
    return [found for n in range(1, len(there) + 1) for found in combinations(there, n)]


def cases() -> Iterator[object]:
    """Every state with every set of victims on both stores; always run: one set a state, another one each time."""
    for turn, name in enumerate(STATES):
        sets = victims(name)
        for dead in sets:
            for kind in ("posix", "s3"):
                short = kind == "posix" and dead == sets[(turn * 2 + 2) % len(sets)]
                marks = [*([pytest.mark.s3] if kind == "s3" else []), *([] if short else [pytest.mark.soak])]
                yield pytest.param(name, dead, kind, id=f"{name}-{'+'.join(dead)}-{kind}", marks=marks)


def promised(name: str, dead: tuple[str, ...]) -> bool:
    """Whether the step must be committed: a living process has all of it, or the journal and the keeper have."""
    if "trainer" not in dead:
        return True
    return name != "connecting" and (name != "received" or "daemon" not in dead)


@pytest.mark.parametrize(("name", "dead", "store_url"), list(cases()), indirect=["store_url"])
def test_whoever_is_killed_what_was_staged_commits_and_what_was_committed_stays(
    node: Node, name: str, dead: tuple[str, ...], store_url: str
) -> None:
    size = SIZES["s3" if store_url.startswith("s3") else "posix"]
    hold = {"HEADRACE_HOLD": STATES[name]}
    with open_store(store_url) as store:
        first = save(store, make(store, state(1, size), step=1, number=begin(store)))
        node.start(**(hold if name != "connecting" else {}))
        trainer = node.trainer(store_url, 2, 2, size, first, **(hold if name == "connecting" else {}))
        held = node.held()
        assert node.mark.read_text().split()[0] == STATES[name]
        kill(node, dead, held)
        node.go()
        if "daemon" in dead:
            node.start()
        if "trainer" not in dead:
            assert trainer.ends() == "committed 2 True"
        elif promised(name, dead):
            wait_for(lambda: (found := latest(store)) is not None and found.step == 2)
        wait_for(lambda: idle(node))
        agree(store, first, promised(name, dead), size)


def kill(node: Node, dead: tuple[str, ...], held: int) -> None:
    if "daemon" in dead:  # first, so that it sees no other process die
        node.kill_daemon()
    if "worker" in dead:
        os.kill(held, signal.SIGKILL)
    if "trainer" in dead:
        node.trainers[0].kill()


def idle(node: Node) -> bool:
    found = Sidecar.find(node.socket)
    assert found is not None
    with found:
        return found.status()["jobs"]["jobs"] == [] or not node.entries  # type: ignore[index]


def agree(store: Store, first: Base, committed: bool, size: int) -> None:
    found = latest(store)
    assert found is not None
    assert load(store, first) == state(1, size)
    assert found.step == (2 if committed else 1)
    if committed:
        assert load(store, found) == state(2, size)
    assert check.check(store).clean
