"""Measure one client in a process of its own: every cell of the sweep, closed loop.

`python -m headrace.bench.workloads.store_worker JSON` (an `Order`) prints one JSON object: throughput, latency
percentiles and CPU seconds of every cell, the histograms, and the errors. A cell runs `width` threads, each with one
request at a time, until the cell's seconds are over or its bytes are moved. Each thread makes at least two requests.
Measured requests begin when all threads have made one request that does not count.
Invariant: a latency is the time of the call alone. The whole process keeps its limits of seconds and bytes; cells
beyond them are reported as left out.
Failure behaviour: a failed request is counted, and its message is kept. A cell in which all requests fail has no
figures.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.bench.core.measure import Latencies, Meter, cpu_seconds
from headrace.bench.peers.object_stores import Operations, open_client
from headrace.bench.workloads.store_sweep import COUNT, READS, Cell, Sweep, key_of
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.redact import redact
from headrace.dataio.store.open import folder_of

LEAST = 2
_MESSAGES = 3


class Order(msgspec.Struct):
    """What to measure. `seconds` and `cell_bytes` bound a cell. `all_seconds` and `all_bytes` bound the process."""

    client: str
    url: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: float
    cell_bytes: int
    all_seconds: float
    all_bytes: int
    cold: bool = False


class _Tally:
    """The counts of one thread."""

    def __init__(self) -> None:
        self.latencies, self.moved, self.requests = Latencies(), 0, 0
        self.failures: list[str] = []
        self.began = self.ended = 0.0


def measure(order: Order) -> dict[str, object]:
    """Measure all figures of one client."""
    sweep = Sweep(order.operations, order.sizes, order.widths)
    figures: dict[str, object] = {}
    histograms: dict[str, list[tuple[float, int]]] = {}
    failures: list[str] = []
    skipped = 0
    began, moved = time.perf_counter(), 0
    with open_client(order.client, order.url, max(order.widths), sweep.largest) as operations:
        for cell in sweep.cells():
            if cell.operation not in operations:
                continue
            if time.perf_counter() - began > order.all_seconds or moved >= order.all_bytes:
                skipped += 1
                continue
            run = _Cell(cell, sweep, operations, order)
            run.go(min(order.cell_bytes, order.all_bytes - moved))
            moved += run.bytes
            figures |= run.figures()
            failures += run.failures
            if run.latencies.total:
                histograms[cell.name] = run.latencies.pairs()
    errors = [f"{len(failures)} requests failed: {' / '.join(failures[:_MESSAGES])}"] if failures else []
    left = {"skipped_cells": skipped} if skipped else {}
    return {**figures, **left, "peak_mib": Meter().read()["peak_mib"], "histograms": histograms, "errors": errors}


class _Cell:
    """One cell being measured."""

    def __init__(self, cell: Cell, sweep: Sweep, operations: Operations, order: Order) -> None:
        self.cell, self._sweep, self._call = cell, sweep, operations[cell.operation]
        self._seconds, self._prepare = order.seconds, _forget(order) if cell.operation in READS else _nothing
        self.latencies, self.bytes, self.failures = Latencies(), 0, list[str]()
        self._wall = self._cpu = 0.0

    def go(self, most_bytes: int) -> None:
        """Run the cell, and move at most about `most_bytes`."""
        requests = max(LEAST, most_bytes // max(1, self.cell.size) // self.cell.width)
        tallies = [_Tally() for _ in range(self.cell.width)]
        ready = threading.Barrier(self.cell.width + 1)
        threads = [
            threading.Thread(target=self._thread, args=(number, tally, requests, ready), daemon=True)
            for number, tally in enumerate(tallies)
        ]
        for thread in threads:
            thread.start()
        while ready.n_waiting < self.cell.width:
            time.sleep(1e-3)
        cpu = cpu_seconds()
        ready.wait()
        for thread in threads:
            thread.join()
        self._cpu = cpu_seconds() - cpu
        self._wall = max(tally.ended for tally in tallies) - min(tally.began for tally in tallies)
        self.latencies.merge(tally.latencies for tally in tallies)
        self.bytes = sum(tally.moved for tally in tallies)
        self.failures = [message for tally in tallies for message in tally.failures]

    def _thread(self, number: int, tally: _Tally, requests: int, ready: threading.Barrier) -> None:
        rng = random.Random(number)
        self._request(number, _Tally(), rng)
        ready.wait()
        tally.began = time.perf_counter()
        until = tally.began + self._seconds
        while tally.requests < requests and (time.perf_counter() < until or tally.requests < LEAST):
            self._request(number + tally.requests * self.cell.width, tally, rng)
        tally.ended = time.perf_counter()

    def _request(self, number: int, tally: _Tally, rng: random.Random) -> None:
        cell, key = self.cell, key_of(self.cell, number, self._sweep)
        offset = 0
        if cell.operation in ("range", "small"):
            offset = rng.randrange(self._sweep.largest // cell.size) * cell.size
            key = key_of(cell, rng.randrange(COUNT), self._sweep)
        self._prepare(key)
        began = time.perf_counter()
        tally.requests += 1
        try:
            moved = self._call(key, offset, cell.size)
        except Exception as error:
            tally.failures.append(redact(f"{cell.name}: {type(error).__name__}: {error}")[:300])
            return
        tally.latencies.add(time.perf_counter() - began)
        tally.moved += moved

    def figures(self) -> dict[str, float]:
        """Return throughput, percentiles and CPU, or no figures if no request succeeded."""
        if not self.latencies.total:
            return {}
        name = self.cell.name
        found = {name: self.bytes / self._wall / (1e6 if self.cell.size else 1)}
        for title, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            found[f"{name}_{title}"] = 1e3 * self.latencies.percentile(share)
        if self.cell.size:
            found[f"{name}_cpu"] = self._cpu / self.bytes * GIB
        return found


def _nothing(key: str) -> None:
    return


def _forget(order: Order) -> Callable[[str], None]:
    """Return a function that drops a file from the page cache before a read, or does nothing if reads are not cold."""
    if not order.cold or order.url.startswith("s3://"):
        return _nothing
    root = folder_of(order.url)

    def drop(key: str) -> None:
        fd = os.open(f"{root}/{key}", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    return drop


if __name__ == "__main__":
    print(json.dumps(measure(msgspec.json.decode(sys.argv[1], type=Order))))
