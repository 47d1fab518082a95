"""Packs the units of a plan on the machines of a Ray cluster.

Purpose: each Ray actor packs one unit at a time. It has its own media worker and can run on any machine.

Invariants:

* Actors open the store and the files by the caller's names, so both must be reachable from every machine.
* Credentials come from the environment of each machine. They are never sent.
* Units, settings and results are sent as msgpack.
* At most `_UNITS_PER_ACTOR` units are in flight for each actor.
* If an actor or its machine fails, Ray restarts the actor, and the actor packs its unit again.

Failure behaviour: a store that was opened with secrets raises `UnsupportedError`. The caller raises an error in an
actor as the same error. An actor that fails repeatedly raises `TransientError`. The records of finished units remain,
and the next pack continues after them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads this at import

import ray
import ray.exceptions

from headrace.dataio.core import errors
from headrace.dataio.core.errors import HeadraceError, TransientError, UnsupportedError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.shards.ingest.plan import Journal, Settings, Step, Unit, decode_unit, encode_unit
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.report import WorkerReport
from headrace.dataio.shards.ingest.source_stores import SourceStores
from headrace.dataio.shards.ingest.unit_packer import pack_units
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

_UNITS_PER_ACTOR = 2
_RESTARTS = 3


class _UnitResult(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's result. If packing failed, `code`, `message` and `hint` are those of the error."""

    worker: str
    groups: int = 0
    bytes: int = 0
    skipped: int = 0
    seconds: float = 0.0
    code: str = ""
    message: str = ""
    hint: str = ""


class _PackActor:
    """The Ray actor, which packs units on a machine of the cluster."""

    def __init__(self, *, url: str, options: dict[str, Any], plan: str, settings: bytes) -> None:
        self._store = open_store(url, storage_options=options)
        self._journal = Journal(self._store, plan)
        self._settings = msgspec.msgpack.decode(settings, type=Settings)
        self._pool = ProbePool(1, stores=SourceStores())
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def pack(self, unit: bytes) -> bytes:
        """Pack one unit and record it."""
        started = time.monotonic()
        try:
            with scratch_folder("headrace-pack-") as scratch:
                results = pack_units(
                    self._store, self._journal, [decode_unit(unit)], self._settings, self._pool, scratch, _no_progress
                )
                ((_, packed),) = results
        except HeadraceError as error:
            return _encode(_UnitResult(worker=self._name, code=error.code, message=error.message, hint=error.hint))
        done = _UnitResult(
            worker=self._name,
            groups=packed.groups,
            bytes=packed.bytes,
            skipped=len(packed.skipped),
            seconds=time.monotonic() - started,
        )
        return _encode(done)


def _no_progress(groups: int, size: int, skipped: int) -> None:
    pass


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_UnitResult).decode


def run(
    store: Store,
    journal: Journal,
    units: Sequence[Unit],
    settings: Settings,
    workers: int | None,
    scratch: str,
    step: Step,
    stores: SourceStores,
) -> Sequence[WorkerReport]:
    """Pack on the cluster that the process is connected to, or else on the cluster that `RAY_ADDRESS` names.

    Without a cluster, pack on this machine.
    """
    location = store.location
    if not location.shareable or stores.options:
        raise UnsupportedError(
            "a store that was opened with secrets in its options, or sources with options, cannot be opened on other machines",
            hint="give credentials by environment variables or profiles on every machine",
        )
    with _connected(workers):
        count = min(len(units), int(_cluster_cores()) if workers is None else workers)
        actor_class = ray.remote(num_cpus=1, max_restarts=_RESTARTS, max_task_retries=_RESTARTS)(_PackActor)
        arguments = {
            "url": location.url,
            "options": dict(location.options),
            "plan": journal.plan,
            "settings": msgspec.msgpack.encode(settings),
        }
        actors = [actor_class.remote(**arguments) for _ in range(count)]
        done = list(_results(actors, units, step))
    names = sorted({item.worker for item in done})
    return [_worker_report([item for item in done if item.worker == name]) for name in names]


def _worker_report(items: list[_UnitResult]) -> WorkerReport:
    groups, size = sum(item.groups for item in items), sum(item.bytes for item in items)
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


def _results(actors: list[Any], units: Sequence[Unit], step: Step) -> Iterator[_UnitResult]:
    waiting = iter(units)
    in_flight: dict[Any, Any] = {}
    for actor in [actor for _ in range(_UNITS_PER_ACTOR) for actor in actors]:
        _send(actor, waiting, in_flight)
    while in_flight:
        (ready, *_), _ = ray.wait(list(in_flight), num_returns=1)
        actor = in_flight.pop(ready)
        try:
            done = _decode(ray.get(ready))
        except ray.exceptions.RayError as error:
            raise TransientError(
                f"the Ray cluster lost a packing worker: {type(error).__name__}",
                hint="pack again; it continues from here",
            ) from error
        if done.code:
            raise _error_of(done)
        step(done.groups, done.bytes, done.skipped)
        _send(actor, waiting, in_flight)
        yield done


def _send(actor: Any, waiting: Iterator[Unit], in_flight: dict[Any, Any]) -> None:
    unit = next(waiting, None)
    if unit is not None:
        in_flight[actor.pack.remote(encode_unit(unit))] = actor


def _error_of(done: _UnitResult) -> HeadraceError:
    error_types = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HeadraceError)]
    error_type = next((error_type for error_type in error_types if error_type.code == done.code), HeadraceError)
    return error_type(done.message, hint=done.hint)


def _cluster_cores() -> float:
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # ray has no types here
    return found.get("CPU", 1)
