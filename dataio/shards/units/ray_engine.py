"""Runs the units of a plan on the machines of a Ray cluster.

Purpose: each Ray actor runs one unit at a time. It has its own runner with one worker, and can run on any machine.

Invariants:

* Actors open the stores by their locations, so every machine must reach the stores of the inputs, of the results and of
  the journal.
* Credentials come from the environment of each machine. They are never sent.
* Units, settings and results are sent as msgpack. An actor writes the record of its unit itself.
* At most `_UNITS_PER_ACTOR` units are in flight for each actor.
* If an actor or its machine fails, Ray restarts the actor, and the actor runs its unit again, at most `_RESTARTS`
  times.

Failure behaviour: a store that was opened with secrets raises `UnsupportedError`. The caller raises an error in an
actor as the same error. An actor that fails repeatedly raises `TransientError`. The records of finished units remain,
and the next run continues after them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads this at import

import ray
import ray.exceptions

from headrace.dataio.core import errors
from headrace.dataio.core.errors import HeadraceError, TransientError, UsageError
from headrace.dataio.shards.units.engine import (
    R,
    Step,
    Task,
    U,
    UnitRunner,
    WorkerReport,
    check_shareable,
    write_record,
)
from headrace.dataio.shards.units.journal import Done, Journal, Record, StoredJournal, Unit
from headrace.dataio.store.base import Location
from headrace.dataio.store.open import open_location

_UNITS_PER_ACTOR = 2
_RESTARTS = 3


class _UnitResult(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's result. If the unit failed, `code`, `message` and `hint` are those of the error."""

    worker: str
    number: int
    done: Done = Done()
    seconds: float = 0.0
    code: str = ""
    message: str = ""
    hint: str = ""


class _JournalAddress(msgspec.Struct, frozen=True):
    """The place of a journal."""

    location: Location
    folder: str


class _UnitActor:
    """The Ray actor, which runs units on a machine of the cluster."""

    def __init__(
        self,
        opener: Callable[[bytes], AbstractContextManager[UnitRunner[Any, Any]]],
        settings: bytes,
        journal: bytes,
        types: tuple[type[Unit], type[Record]],
    ) -> None:
        address = msgspec.msgpack.decode(journal, type=_JournalAddress)
        self._journal = StoredJournal(open_location(address.location), address.folder, types[1])
        self._decode_unit = msgspec.msgpack.Decoder(types[0]).decode
        self._opened = opener(settings)  # held: a context that is dropped closes what it opened
        self._runner = self._opened.__enter__()
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def run(self, encoded: bytes) -> bytes:
        """Run one unit and record it."""
        started, unit = time.monotonic(), self._decode_unit(encoded)
        try:
            ((_, record),) = self._runner.run(iter([unit]), _no_progress)
            write_record(self._journal, unit.number, record)
        except HeadraceError as error:
            return _encode(
                _UnitResult(
                    worker=self._name, number=unit.number, code=error.code, message=error.message, hint=error.hint
                )
            )
        return _encode(
            _UnitResult(worker=self._name, number=unit.number, done=record.done, seconds=time.monotonic() - started)
        )


def _no_progress(done: Done) -> None:
    pass


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_UnitResult).decode


def run(
    task: Task[U, R],
    journal: Journal[R],
    units: Sequence[U],
    *,
    workers: int | None,
    step: Step,
    recorded: Callable[[int], None],
) -> Sequence[WorkerReport]:
    """Run the units on the cluster that the process is connected to, or else on the one that `RAY_ADDRESS` names.

    Without a cluster, run them on this machine. `workers` is the number of actors.
    """
    if not isinstance(journal, StoredJournal):
        raise UsageError(
            f"{task.verb} on a Ray cluster needs a journal that every machine can write",
            hint="name a folder for it: --journal URL (in Python: journal=)",
        )
    check_shareable(journal.store.location)
    remote = task.remote()
    address = _JournalAddress(journal.store.location, journal.folder)
    with _connected(workers):
        count = min(len(units), int(_cluster_cores()) if workers is None else workers)
        actor_class = ray.remote(num_cpus=1, max_restarts=_RESTARTS, max_task_retries=_RESTARTS)(_UnitActor)
        actors = [
            actor_class.remote(
                remote.opener, remote.settings, msgspec.msgpack.encode(address), (task.unit, journal.record_type)
            )
            for _ in range(count)
        ]
        results = list(_results(task.verb, actors, units, step, recorded))
    names = sorted({item.worker for item in results})
    return [_worker_report([item for item in results if item.worker == name]) for name in names]


def _worker_report(items: list[_UnitResult]) -> WorkerReport:
    groups, size = sum(item.done.items for item in items), sum(item.done.bytes for item in items)
    return WorkerReport(items[0].worker, groups, size, sum(item.seconds for item in items))


@contextmanager
def _connected(workers: int | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    local: dict[str, Any] = {
        "num_cpus": os.cpu_count() if workers is None else workers,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    ray.init(
        **({} if os.environ.get("RAY_ADDRESS") else local),
        log_to_driver=False,
        configure_logging=False,
        namespace="headrace",
    )
    try:
        yield
    finally:
        ray.shutdown()


def _results(
    verb: str, actors: list[Any], units: Sequence[Unit], step: Step, recorded: Callable[[int], None]
) -> Iterator[_UnitResult]:
    waiting = iter(units)
    in_flight: dict[Any, Any] = {}
    for actor in [actor for _ in range(_UNITS_PER_ACTOR) for actor in actors]:
        _send(actor, waiting, in_flight)
    while in_flight:
        (ready, *_), _ = ray.wait(list(in_flight), num_returns=1)
        actor = in_flight.pop(ready)
        try:
            result = _decode(ray.get(ready))
        except ray.exceptions.RayError as error:
            raise TransientError(
                f"the Ray cluster lost a worker of {verb}: {type(error).__name__}",
                hint=f"{verb} again; it continues from here",
            ) from error
        if result.code:
            raise _error_of(result)
        step(result.done)
        recorded(result.number)
        _send(actor, waiting, in_flight)
        yield result


def _send(actor: Any, waiting: Iterator[Unit], in_flight: dict[Any, Any]) -> None:
    unit = next(waiting, None)
    if unit is not None:
        in_flight[actor.run.remote(msgspec.msgpack.encode(unit))] = actor


def _error_of(result: _UnitResult) -> HeadraceError:
    error_types = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HeadraceError)]
    error_type = next((error_type for error_type in error_types if error_type.code == result.code), HeadraceError)
    return error_type(result.message, hint=result.hint)


def _cluster_cores() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # ray has no types here
    return resources.get("CPU", 1)
