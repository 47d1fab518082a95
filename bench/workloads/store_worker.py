"""Measures one client in its own process: every cell of the sweep, in a closed loop.

The result has throughput, latency percentiles and CPU seconds of every cell, the histograms, and the errors. A cell
runs `width` threads, each with one request at a time, until the cell's seconds are over or its bytes are transferred.
Each thread sends at least two requests. The measurement begins when all threads have completed one request, which does
not count.

Invariants: a latency is the time of the call alone. The whole process keeps its limits of seconds and bytes. Cells
beyond them are reported as skipped.

Failure behaviour: a failed request is counted, and its message is kept. A cell in which all requests fail has no
figures.
"""

from __future__ import annotations

import random
import threading
import time

import msgspec

from headrace.bench.core.measure import Latencies, Meter, cpu_seconds
from headrace.bench.peers.object_stores import Operation, open_client
from headrace.bench.workloads.store import COUNT, Cell, ClientJob, Sweep
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.redact import redact

LEAST = 2
_MESSAGES = 3


class _Tally:
    """The counts of one thread."""

    def __init__(self) -> None:
        self.latencies, self.moved, self.requests = Latencies(), 0, 0
        self.failures: list[str] = []
        self.began = self.ended = 0.0


def measure_in_process(job: dict[str, object]) -> dict[str, object]:
    """Measure a client, in its own process. `job` has the fields of a `ClientJob`."""
    return measure(msgspec.convert(job, ClientJob))


def measure(job: ClientJob) -> dict[str, object]:
    """Measure all figures of one client."""
    sweep = Sweep(job.operations, job.sizes, job.widths)
    figures: dict[str, object] = {}
    histograms: dict[str, list[tuple[float, int]]] = {}
    failures: list[str] = []
    skipped = 0
    began, moved = time.perf_counter(), 0
    with open_client(job.client, job.url, max(job.widths), sweep.largest) as operations:
        for cell in sweep.cells():
            if cell.operation not in operations:
                continue
            if time.perf_counter() - began > job.all_seconds or moved >= job.all_bytes:
                skipped += 1
                continue
            run = _Cell(cell=cell, sweep=sweep, call=operations[cell.operation], seconds=job.seconds)
            run.go(min(job.cell_bytes, job.all_bytes - moved))
            moved += run.bytes
            figures |= run.figures()
            failures += run.failures
            if run.latencies.total:
                histograms[cell.name] = run.latencies.pairs()
    errors = [f"{len(failures)} requests failed: {' / '.join(failures[:_MESSAGES])}"] if failures else []
    skipped_cells = {"skipped_cells": skipped} if skipped else {}
    return {
        **figures,
        **skipped_cells,
        "peak_mib": Meter().read()["peak_mib"],
        "histograms": histograms,
        "errors": errors,
    }


class _Cell:
    """A cell during its measurement."""

    def __init__(self, *, cell: Cell, sweep: Sweep, call: Operation, seconds: float) -> None:
        self.cell, self._sweep, self._call, self._seconds = cell, sweep, call, seconds
        self.latencies, self.bytes, self.failures = Latencies(), 0, list[str]()
        self._wall = self._cpu = 0.0

    def go(self, most_bytes: int) -> None:
        """Run the cell, and transfer at most about `most_bytes`."""
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
        cell, key = self.cell, self._sweep.key_of(self.cell, number)
        offset = 0
        if cell.operation in ("range", "small"):
            offset = rng.randrange(self._sweep.largest // cell.size) * cell.size
            key = self._sweep.key_of(cell, rng.randrange(COUNT))
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
        figures = {name: self.bytes / self._wall / (1e6 if self.cell.size else 1)}
        for title, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            figures[f"{name}_{title}"] = 1e3 * self.latencies.percentile(share)
        if self.cell.size:
            figures[f"{name}_cpu"] = self._cpu / self.bytes * GIB
        return figures
