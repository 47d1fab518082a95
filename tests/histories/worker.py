"""One process of a history: a trainer, reader, tagger or collector that uses the public interface and keeps a journal.

It is forked from the nursery, so that a thousand of them cost minutes. Every line of the journal is written before or after the
call that it tells of, so that the driver may kill the process anywhere.
"""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import headrace.checkpoint.saver
import headrace.dataio.store.posix
import headrace.dataio.store.s3
from headrace.checkpoint import Checkpointer, Handle, Keep
from headrace.checkpoint.repository import collect, tags
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.errors import ConflictError, HeadraceError, NotFoundError
from headrace.dataio.store.open import open_store
from tests.histories.oracle import Journal
from tests.support import nursery
from tests.support.nursery import Child

assert headrace.dataio.store.posix, headrace.dataio.store.s3  # their crash points are declared when they are imported
LEASE_SECONDS = 6.0
"""So short that what the dead left is collected while the history goes on."""
BROKEN, FAILED = 1, 3


@dataclass(frozen=True)
class Task:
    """`kind`: trainer, reader, tagger or collector. `start`: "latest", a step, or None for a new run. `crash`: a named point
    at which the process kills itself the `nth` time."""

    kind: str
    name: str
    url: str
    journal: str
    run: str
    node: str = ""
    socket: str = ""
    seed: int = 0
    start: str | int | None = "latest"
    base: str = ""
    """The run that a new run is forked from."""
    steps: int = 3
    keep: int = 0
    compression: str = "none"
    lazy: bool = False
    overlap: bool = False
    pause: float = 0.0
    crash: str = ""
    nth: int = 1
    mark: str = ""


def contents(nonce: int, step: int) -> dict[str, bytes]:
    """The tensors of one save: a part that never changes, one that changes every third step, and one that no other save has."""
    new, slow, old = (np.random.default_rng(seed) for seed in ((nonce,), (1, step // 3), (0,)))
    return {
        "frozen": old.bytes(80 << 10),
        "slow": slow.bytes(70 << 10),
        "weights": new.bytes((90 << 10) + 52),
        "nonce": np.int64(nonce).tobytes(),
    }


def nonce_of(tensors: dict[str, bytes], step: int) -> int | None:
    """The save that these bytes are of; None for those of no save."""
    nonce = int(np.frombuffer(tensors["nonce"], np.int64)[0])
    return nonce if nonce > 0 and contents(nonce, step) == tensors else None


def state_of(nonce: int, step: int) -> dict[str, Any]:
    made = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in contents(nonce, step).items()}
    return {**made, "step": step}


def restored(state: dict[str, Any], step: int) -> int:
    """The nonce of what was restored; the process ends if it is nothing that was saved."""
    tensors = {name: bytes(value.numpy()) for name, value in state.items() if name != "step"}
    nonce = nonce_of(tensors, step)
    assert state["step"] == step, f"step {step} was restored, and its state says {state['step']}"
    assert nonce is not None, f"step {step} is nothing that was saved"
    return nonce


class Trainer:
    """Restores, and then saves step after step. What fails is written down, and the next step is saved."""

    def __init__(self, task: Task, journal: Journal) -> None:
        self._task, self._journal, self._draw = task, journal, random.Random(task.seed)
        self._pending: tuple[int, Handle] | None = None
        self._parent: int | None = None
        self._step = 0

    def run(self) -> None:
        task = self._task
        headrace.checkpoint.saver.DEFAULT_LIFE = LEASE_SECONDS  # type: ignore[attr-defined]
        if task.keep:
            self._journal.say("policy", run=task.run, last=task.keep)
        with Checkpointer(
            task.url,
            run=task.run,
            sidecar=task.socket or None,
            compression=task.compression,
            keep=Keep(last=task.keep) if task.keep else None,
            staging="lazy" if task.lazy else "eager",
            timeout=60,
        ) as checkpointer:
            self._begin(checkpointer)
            for _ in range(task.steps):
                self._save(checkpointer)
                time.sleep(task.pause)
            self._fetch()

    def _begin(self, checkpointer: Checkpointer) -> None:
        task, state = self._task, state_of(1, 0)
        step = None
        if task.base:
            step = checkpointer.restore(state, run=task.base)
        elif task.start is not None:
            step = checkpointer.restore(state, step=task.start)
        if step is not None:
            self._parent, self._step = restored(state, step), step
        asked = task.start if not task.base else None
        self._journal.say("restored", trainer=task.name, run=task.run, asked=asked, step=step, nonce=self._parent)

    def _save(self, checkpointer: Checkpointer) -> None:
        nonce, step = self._draw.getrandbits(62) + 1, self._step + 1
        about = {"nonce": nonce, "run": self._task.run, "step": step, "trainer": self._task.name}
        self._journal.say("saving", **about, parent=self._parent, node=self._task.node)
        self._parent, self._step = nonce, step
        try:
            handle = checkpointer.save(step, state_of(nonce, step))
            self._fetch()
            self._pending = (nonce, handle)
            if self._task.socket:
                handle.staged(60)
                if handle.committed_by == "sidecar":
                    self._journal.say("staged", nonce=nonce, attempt=handle.attempt)
            if not self._task.overlap:
                self._fetch()
        except ConflictError:
            raise
        except HeadraceError as error:
            self._failed(nonce, error)

    def _fetch(self) -> None:
        if self._pending is None:
            return
        nonce, handle = self._pending
        self._pending = None
        try:
            result = handle.result(90)
            self._journal.say(
                "committed",
                nonce=nonce,
                timeline=result.timeline,
                attempt=result.attempt,
                committed_by=result.committed_by,
            )
        except HeadraceError as error:
            self._failed(nonce, error)
            if isinstance(error, ConflictError):
                raise

    def _failed(self, nonce: int, error: HeadraceError) -> None:
        self._journal.say("failed", nonce=nonce, code=error.code, message=str(error)[:300])


def read_steps(task: Task, journal: Journal) -> None:
    """Restores older and newer steps to look at them, as an evaluation does: nothing may change by it."""
    draw = random.Random(task.seed)
    for _ in range(task.steps):
        with Checkpointer(task.url, run=task.run, sidecar=task.socket or None) as checkpointer:
            steps = checkpointer.steps()
            if not steps:
                continue
            choices: list[int | str] = [*steps, "latest"]
            chosen, state = draw.choice(choices), state_of(1, 0)
            try:
                step = checkpointer.restore(state, step=chosen)
            except NotFoundError:  # a policy removed it meanwhile
                journal.say("gone", run=task.run, step=chosen)
                continue
            assert step is not None
            journal.say("read", run=task.run, step=step, nonce=restored(state, step))


def give_tag(task: Task, journal: Journal) -> None:
    """Moves a tag to the newest step or an older one."""
    draw = random.Random(task.seed)
    with open_store(task.url) as store, Checkpointer(store, run=task.run, sidecar=None) as checkpointer:
        steps = checkpointer.steps()
        if not steps:
            return
        step, state = draw.choice(steps), state_of(1, 0)
        if checkpointer.restore(state, step=step) is None:
            return
        nonce = restored(state, step)
        journal.say("tagging", name=task.name, nonce=nonce)
        found = tags.tag(store, task.name, task.run, step, move=True)
        again = repository.find(store, task.run, f"tag:{task.name}")
        assert again is not None
        assert again.attempt == found.attempt, f"tag {task.name} was given to {found} and names {again}"
        journal.say("tagged", name=task.name, nonce=nonce)


def remove(task: Task, journal: Journal) -> None:
    with open_store(task.url) as store:
        for _ in range(task.steps):
            if repository.read_repo(store) is None:
                return
            if task.keep:
                journal.say("policy", run=task.run, last=task.keep)
                collect.retain(store, task.run, Keep(last=task.keep))
            collect.collect(store, ())


WORK = {"reader": read_steps, "tagger": give_tag, "collector": remove}


def main(about: str) -> int:
    """The whole life of a process; its exit code: 0, 3 for an error that the interface promises, 1 for one that must not be."""
    task = Task(**json.loads(about))
    journal, code = Journal(task.journal), 0
    torch.set_num_threads(1)
    try:
        if task.kind == "trainer":
            Trainer(task, journal).run()
        else:
            WORK[task.kind](task, journal)
    except HeadraceError as error:
        damage = error.exit_code == 4
        code = BROKEN if damage else FAILED
        event = "broken" if damage else "error"
        journal.say(event, process=task.name, kind=task.kind, code=error.code, message=str(error)[:500])
    except BaseException:
        code = BROKEN
        journal.say("broken", process=task.name, kind=task.kind, message=traceback.format_exc()[-3000:])
    os._exit(code)


def start(task: Task, environment: dict[str, str]) -> Child:
    crash = {"HEADRACE_CRASH": f"{task.crash}#{task.nth}", "HEADRACE_CRASH_MARK": task.mark} if task.crash else {}
    return nursery.start("tests.histories.worker", json.dumps(asdict(task)), **environment, **crash)
