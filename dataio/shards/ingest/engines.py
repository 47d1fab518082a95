"""Engines pack the units of a plan, either in this process and its workers or on the machines of a Ray cluster.

Invariant: an engine packs and records every unit that it is given, in any order. The dataset does not depend on the
engine.
Failure behaviour: an unknown engine raises `UsageError`. An engine that is not installed raises `UnsupportedError`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.shards.ingest.journal import Journal
from headrace.dataio.shards.ingest.packing import pack_units
from headrace.dataio.shards.ingest.plan import Settings, Step, Unit
from headrace.dataio.shards.ingest.pool import ProbePool
from headrace.dataio.shards.ingest.remote import Remote
from headrace.dataio.shards.ingest.report import WorkerReport
from headrace.dataio.store.base import Store

Engine = Callable[[Store, Journal, Sequence[Unit], Settings, int | None, str, Step, Remote], Sequence[WorkerReport]]


def local(
    store: Store,
    journal: Journal,
    todo: Sequence[Unit],
    settings: Settings,
    workers: int | None,
    scratch: str,
    step: Step,
    remote: Remote,
) -> Sequence[WorkerReport]:
    """Pack on this machine; `workers` processes read the media."""
    started = time.monotonic()
    with ProbePool(workers, remote=remote) as pool:
        for _ in pack_units(store, journal, todo, settings, pool, scratch, step):
            pass
    groups = [group for unit in todo for group in unit.groups]
    size = sum(group.bytes for group in groups)
    return (WorkerReport(socket.gethostname(), len(groups), size, time.monotonic() - started),)


def named(name: str) -> Engine:
    """Return the engine with this name, "local" or "ray"."""
    if name == "local":
        return local
    if name == "ray":
        try:
            from headrace.dataio.shards.ingest import ray_engine
        except ImportError as error:
            raise UnsupportedError(
                f"the engine ray cannot be used: {error}", hint="pip install 'headrace[ray]'"
            ) from error
        engine: Engine = ray_engine.run
        return engine
    raise UsageError(f"there is no engine {name!r}", hint="engines are local and ray")
