"""Trainers, collectors, readers and taggers as processes that a test kills, without torch.

They are forks (`tests.support.nursery`), so that a thousand of them cost minutes. A worker writes what it was told is true
("committed", "tagged") into a journal, one line with one write, *after* it was told. The bytes of a step follow from its
timeline and number, so that anybody can say what must be restored.
"""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import headrace.dataio.store.posix  # its crash points are declared when it is imported
import headrace.dataio.store.s3
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.lineage import ParentLease
from headrace.checkpoint.repository import collect, tags, writers
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Retention
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import HeadraceError, NotFoundError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.checkpoint_states import RUN, load, make, save
from tests.support.nursery import Child

assert headrace.dataio.store.posix, headrace.dataio.store.s3
LIFE = 4.0
"""Seconds that leases of these processes live, so that what the dead left is collected while the test runs."""


@dataclass(frozen=True)
class Task:
    """`kind`: trainer, collector, reader or tagger. `crash`: a crash point's name, where it kills itself the `nth` time."""

    kind: str
    url: str
    journal: str
    last: int
    rounds: int = 4
    crash: str = ""
    nth: int = 1
    mark: str = ""
    name: str = ""


def state_of(number: int, step: int) -> dict[str, bytes]:
    """A part that never changes, one that changes every third step, one that always does."""

    def some(*seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)

    return {
        "frozen": some(1).bytes(96 * KIB),
        "slow": some(2, step // 3).bytes(70 * KIB),
        "weights": some(3, number, step).bytes(100 * KIB + 13),
        "small": some(4, number, step).bytes(9),
    }


class Journal:
    """Lines that are whole or not there."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


def read_journal(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []


def trainer(task: Task, store: Store, journal: Journal) -> None:
    """Restores the latest step, opens a timeline, and saves some steps, with a policy applied behind each."""
    repository.ensure_repo(store)
    base, parent = repository.find(store, RUN, "latest"), ParentLease(store, life=LIFE)
    if base is not None:
        parent.hold(RUN, base)
        assert load(store, base) == state_of(base.timeline, base.step), f"restored {base}, which is not what was saved"
    state = writers.WriterState(writers.enter(), restored=base, may_start_fresh=True)
    first = base.step + 1 if base else 1
    number = writers.place(store, RUN, first, state, lambda base: parent.hold(RUN, base)).timeline
    retention = Retention(store, RUN, Keep(last=task.last))
    for _ in range(task.rounds):
        step = base.step + 1 if base else 1
        made = make(
            store,
            state_of(number, step),
            step=step,
            number=number,
            bases=(base,) if base else (),
            lease_seconds=LIFE,
            commit_timeout=30.0,
        )
        base = save(store, made)
        journal.say("committed", number, step, base.attempt)
        parent.release()
        retention.committed()
    retention.wait(60)


def collector(task: Task, store: Store, journal: Journal) -> None:
    for _ in range(task.rounds):
        if repository.read_repo(store) is not None:
            collect.retain(store, RUN, Keep(last=task.last)) or collect.collect(store, ())


def reader(task: Task, store: Store, journal: Journal) -> None:
    for _ in range(task.rounds):
        base = repository.find(store, RUN, "latest") if repository.read_repo(store) else None
        if base is None:
            continue
        try:
            assert load(store, base) == state_of(base.timeline, base.step), f"read {base}, which is not what was saved"
        except NotFoundError:  # it was removed meanwhile, and that was said
            journal.say("gone", base.timeline, base.step)


def tagger(task: Task, store: Store, journal: Journal) -> None:
    for step in [base.step for base in repository.visible(store, RUN)][-1:]:
        found = tags.tag(store, task.name, RUN, step)
        journal.say("tagged", found.timeline, found.step, found.attempt)


def main(about: str) -> int:
    """The whole life of a worker; its exit code: 0, 3 for an error that was said, 1 for one that must not be."""
    task = Task(**json.loads(about))
    journal, code = Journal(task.journal), 0
    try:
        with open_store(task.url) as store:
            {"trainer": trainer, "collector": collector, "reader": reader, "tagger": tagger}[task.kind](
                task, store, journal
            )
    except HeadraceError as error:
        code = 4 if error.exit_code == 4 else 3
        journal.say("failed", task.kind, type(error).__name__, str(error).replace("\n", " "))
    except BaseException:
        code = 1
        journal.say("broken", task.kind, traceback.format_exc().replace("\n", " | "))
    os._exit(code)


def start(task: Task) -> Child:
    crash = {"HEADRACE_CRASH": f"{task.crash}#{task.nth}", "HEADRACE_CRASH_MARK": task.mark} if task.crash else {}
    return nursery.start("tests.support.checkpoint_kills", json.dumps(asdict(task)), **crash)


def committed(journal: str) -> list[Base]:
    """What trainers were told is committed, oldest first."""
    return [Base(int(w[1]), int(w[2]), w[3]) for w in read_journal(journal) if w[0] == "committed"]
