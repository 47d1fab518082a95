"""Runs the units of a plan: on this machine, or on the machines of a Ray cluster.

Purpose: `pack`, `index`, `verify` and the statistics of `info` divide their work into numbered units. `run_units` runs
the units that the journal has no record of, and records each one.

Invariants:

* A unit depends only on the plan. Any process may run the units in any order, and run a unit again. The result does not
  depend on the engine or on the number of workers.
* A unit is recorded after everything that its record names was stored.
* The local engine runs up to `UnitRunner.threads` units at once, and the Ray engine up to two for each actor. Memory
  is that of these units.
* The Ray engine tries a unit again after its actor or its machine failed, at most three times.

Failure behaviour: the first error of a unit stops the run and is raised. The records of finished units remain, so the
same call continues after them. An unknown engine raises `UsageError`. An engine that is not installed raises
`UnsupportedError`. A store that other machines cannot open raises `UnsupportedError` with the Ray engine.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace.dataio.core import crashpoints
from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.shards.units.journal import Done, Journal, Record, Unit
from headrace.dataio.store.base import Location

_crash_after_unit = crashpoints.declare("units.recorded", "a unit is finished and recorded, and the run is not over")


Step = Callable[[Done], None]
"""A callback that receives the work that was finished since the last call."""


U = TypeVar("U", bound=Unit)
R = TypeVar("R", bound=Record)


class UnitRunner(ABC, Generic[U, R]):
    """Runs units of one plan in this process."""

    threads = 1
    """The number of threads that may call `run` at the same time."""

    @abstractmethod
    def run(self, units: Iterator[U], step: Step) -> Iterator[tuple[U, R]]:
        """Run units in order, and yield each with its record. `step` receives the finished work."""

    def stop(self) -> None:
        """Let the calls of `run` in other threads end soon. They may raise any error."""


@dataclass(frozen=True, slots=True)
class RemoteTask(Generic[U, R]):
    """A task that another machine can open.

    `opener` is a function of a module. It receives `settings` (msgpack) and returns the runner.
    """

    opener: Callable[[bytes], AbstractContextManager[UnitRunner[U, R]]]
    settings: bytes


@dataclass(frozen=True, slots=True)
class Task(Generic[U, R]):
    """The work of a plan.

    Attributes:
        verb: the name of the work in error messages, such as "pack".
        unit: the type of the units, a msgspec Struct.
        opener: opens the runner in this process, with this number of workers (None: the default).
        remote: describes the task for other machines. It raises `UnsupportedError` if they cannot run it.
    """

    verb: str
    unit: type[U]
    opener: Callable[[int | None], AbstractContextManager[UnitRunner[U, R]]]
    remote: Callable[[], RemoteTask[U, R]]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The work of one worker: the number of inputs, their bytes, and its working time in seconds.

    For `pack`, an input is a group of files. For `index`, it is a shard.
    """

    name: str
    groups: int
    bytes: int
    seconds: float


class RunReport(NamedTuple):
    """The result of `run_units`. `resumed` counts the units that had a record already."""

    resumed: int
    workers: tuple[WorkerReport, ...]


class Engine(Protocol):
    """Runs and records units, and calls `recorded` with the number of each."""

    def __call__(
        self,
        task: Task[U, R],
        journal: Journal[R],
        units: Sequence[U],
        *,
        workers: int | None,
        step: Step,
        recorded: Callable[[int], None],
    ) -> Sequence[WorkerReport]: ...


def run_units(
    task: Task[U, R],
    journal: Journal[R],
    units: Sequence[U],
    *,
    engine: Engine,
    workers: int | None,
    step: Step,
    recorded: Callable[[int], None] = lambda _: None,
    reuse: Callable[[R], bool] = lambda _: True,
) -> RunReport:
    """Run the units that the journal has no record of, and record them. Run a unit again if `reuse` rejects its record.

    `step` receives the finished work, including that of recorded units. `recorded` is called with the number of each
    unit that has a record, in any order, by one thread at a time.
    """
    pending, resumed, done = [], 0, journal.done()
    for unit in units:
        record = journal.read(unit.number) if unit.number in done else None
        if record is None or not reuse(record):
            pending.append(unit)
        else:
            resumed += 1
            step(record.done)
            recorded(unit.number)
    if not pending:
        return RunReport(resumed, ())
    return RunReport(resumed, tuple(engine(task, journal, pending, workers=workers, step=step, recorded=recorded)))


def run_local(
    task: Task[U, R],
    journal: Journal[R],
    units: Sequence[U],
    *,
    workers: int | None,
    step: Step,
    recorded: Callable[[int], None],
) -> Sequence[WorkerReport]:
    """Run the units on this machine. The task decides what `workers` counts."""
    started = time.monotonic()
    total = Done()
    with task.opener(workers) as runner:
        for number, record in _recorded_units(runner, journal, units, step):
            total = total.plus(record.done)
            recorded(number)
    return (WorkerReport(socket.gethostname(), total.items, total.bytes, time.monotonic() - started),)


def write_record(journal: Journal[R], number: int, record: R) -> None:
    """Record a finished unit."""
    journal.write(number, record)
    _crash_after_unit()


def _recorded_units(
    runner: UnitRunner[U, R],
    journal: Journal[R],
    units: Sequence[U],
    step: Step,
) -> Iterator[tuple[int, R]]:
    """Run and record the units, in `runner.threads` threads, and yield each number with its record."""
    count = min(runner.threads, len(units))
    if count < 2:
        for unit, record in runner.run(iter(units), step):
            write_record(journal, unit.number, record)
            yield unit.number, record
        return
    shared = _SharedUnits(units, step)

    def run_one(unit: U) -> tuple[int, R]:
        ((_, record),) = runner.run(iter([unit]), shared.step)
        write_record(journal, unit.number, record)
        return unit.number, record

    with ThreadPoolExecutor(count, "units") as threads:
        try:
            waiting = {threads.submit(run_one, unit) for unit in shared.take(2 * count)}
            while waiting:
                future = next(as_completed(waiting))
                waiting.discard(future)
                yield future.result()
                waiting |= {threads.submit(run_one, unit) for unit in shared.take(1)}
        except BaseException:
            shared.stopped = True
            for future in waiting:
                future.cancel()
            runner.stop()
            raise


class _SharedUnits(Generic[U]):
    """The units that wait for a thread, and the callback that all threads share."""

    def __init__(self, units: Iterable[U], step: Step) -> None:
        self._units, self._step = iter(units), step
        self._lock = threading.Lock()
        self.stopped = False

    def take(self, count: int) -> list[U]:
        return list(itertools.islice(self._units, count))

    def step(self, done: Done) -> None:
        if self.stopped:
            raise CancelledError
        with self._lock:
            self._step(done)


def find_engine(name: str) -> Engine:
    """Return the engine with this name, "local" or "ray"."""
    if name == "local":
        return run_local
    if name == "ray":
        try:
            from headrace.dataio.shards.units import ray_engine
        except ImportError as error:
            raise UnsupportedError(
                f"the engine ray cannot be used: {error}", hint="pip install 'headrace[ray]'"
            ) from error
        return ray_engine.run
    raise UsageError(f"there is no engine {name!r}", hint="the engines are local and ray")


def check_shareable(*locations: Location) -> None:
    """Raise `UnsupportedError` unless other machines can open the stores at these locations."""
    for location in locations:
        if not location.shareable:
            raise UnsupportedError(
                f"{location.url} was opened with secrets in its options, so other machines cannot open it",
                hint="give credentials by environment variables or profiles on every machine",
            )
