"""Trainers, collectors, readers and taggers as processes that a test kills, without torch.

`Nursery` is one process that has everything imported and forks: so a fresh process costs milliseconds, and a thousand of them
minutes. A worker writes what it was told is true ("committed", "tagged") into a journal, one line with one write, *after* it
was told. The bytes of a step follow from its timeline and number, so that anybody can say what must be restored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import dataio.store.posix  # its crash points are declared when it is imported
from checkpoint.format.documents import Base
from checkpoint.lifecycle import collect, tags
from checkpoint.lifecycle.automatic import Retention
from checkpoint.lifecycle.keep import Keep
from checkpoint.repository import steps as repository
from checkpoint.repository.parent import Parent
from dataio.core import crashpoints
from dataio.core.errors import MillraceError, NotFoundError
from dataio.core.limits import KIB
from dataio.store.contract import Store
from dataio.store.open import open_store
from tests.checkpoint.making import RUN, begin, load, make, save

assert dataio.store.posix
ROOT = Path(__file__).parents[2]
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
    base, parent = repository.find(store, RUN, "latest"), Parent(store, life=LIFE)
    if base is not None:
        parent.hold(RUN, base)
        assert load(store, base) == state_of(base.timeline, base.step), f"restored {base}, which is not what was saved"
        parent.require()
    number, retention = begin(store, base), Retention(store, RUN, Keep(last=task.last))
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
        parent.let_go()
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


def _child(task: Task) -> None:
    """The whole life of a worker; its exit code: 0, 3 for an error that was said, 1 for one that must not be."""
    if task.crash:
        os.environ["MILLRACE_CRASH_MARK"] = task.mark
        crashpoints._declared[task.crash]._left = task.nth
    journal, code = Journal(task.journal), 0
    try:
        with open_store(task.url) as store:
            {"trainer": trainer, "collector": collector, "reader": reader, "tagger": tagger}[task.kind](
                task, store, journal
            )
    except MillraceError as error:
        code = 4 if error.exit_code == 4 else 3
        journal.say("failed", task.kind, type(error).__name__, str(error).replace("\n", " "))
    except BaseException:
        code = 1
        journal.say("broken", task.kind, traceback.format_exc().replace("\n", " | "))
    os._exit(code)


class Nursery:
    """Forks workers; `wait` gives a worker's exit code, or minus the signal that ended it."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.kills"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._ask({"hello": 1}) == 1
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def start(self, task: Task) -> int:
        return self._ask(asdict(task))

    def wait(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def _ask(self, what: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    """The nursery: commands as lines of JSON, answers as numbers."""
    import dataio.store.s3  # noqa: F401 - so that its children need not import it

    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        elif "hello" in asked:
            answer = 1
        else:
            answer = os.fork()
            if not answer:
                os.dup2(2, 1)
                _child(Task(**asked))
        print(answer, flush=True)


if __name__ == "__main__":
    main()


def committed(journal: str) -> list[Base]:
    """What trainers were told is committed, oldest first."""
    return [Base(int(w[1]), int(w[2]), w[3]) for w in read_journal(journal) if w[0] == "committed"]
