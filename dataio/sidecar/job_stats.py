"""Statistics of the node's training jobs. Sans-I/O.

Purpose: goodput, data wait and save stall of each job over the last minute, and over the last ten minutes for the
charts.
Invariants: totals only grow, even if reports are lost, repeated or reordered. A process counts once, however many
loaders and checkpointers it has. Jobs, processes, sources (loaders and checkpointers) and history are bounded
(docs/design/0003).
Failure behaviour: above the bound, a further job takes the place of the one that ended first. While no job has ended, it
is counted as "other". A further process or source is not counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from headrace.dataio.sidecar import protocol as m

JOBS, PROCESSES, DEPARTED, SOURCES = 256, 2048, 256, 64
"""Maximum numbers of jobs, of connected and of disconnected processes, and of sources of one process."""
CHARTS = 32
"""Maximum number of jobs whose history is returned, since one has some 75 kB of it. Those with most trainers."""
OTHER = "other"
POINT_SECONDS = 2.0
POINTS = 300
WINDOW_POINTS = 30
"""The window of a job's figures: one minute."""
SMOOTH_POINTS = 5
"""The window of one chart point: ten seconds."""
FORGET_SECONDS = 600.0
"""How long a job without a connected process is remembered."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a job's processes.

    `wall`, `wait` and `stall` are in seconds. `read` counts delivered bytes. `waited` counts requested bytes that were not
    in the cache yet.
    """

    wall: float = 0.0
    wait: float = 0.0
    stall: float = 0.0
    steps: int = 0
    samples: int = 0
    read: int = 0
    waited: int = 0
    saves: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: Totals) -> Totals:
        return Totals(*(max(getattr(self, name) - getattr(other, name), 0) for name in _NAMES))

    @property
    def compute(self) -> float:
        """Seconds in which a trainer neither waited for data nor was stalled by a save."""
        return max(self.wall - self.wait - self.stall, 0.0)

    @property
    def goodput(self) -> float | None:
        """The share of wall time that was spent computing; None if no loader ran."""
        return self.compute / self.wall if self.wall > 0 else None


_NAMES = tuple(f.name for f in fields(Totals))


@dataclass(slots=True)
class _Source:
    """One loader or checkpointer: its last report, and when it began."""

    report: m.Report
    began: float
    last_report: float


@dataclass(slots=True)
class _Process:
    job: str
    connections: set[int] = field(default_factory=set)
    sources: dict[int, _Source] = field(default_factory=dict)
    waited: int = 0

    def totals(self) -> Totals:
        loaders = [s for s in self.sources.values() if s.report.wall > 0]
        wall = max((s.last_report for s in loaders), default=0.0) - min((s.began for s in loaders), default=0.0)
        reports = [s.report for s in self.sources.values()]
        return Totals(
            wall,
            sum(r.wait for r in reports),
            sum(r.stall for r in reports),
            sum(r.steps for r in reports),
            sum(r.samples for r in reports),
            sum(r.read for r in reports),
            self.waited,
            sum(r.saves for r in reports),
        )


@dataclass(slots=True)
class _Job:
    ended: Totals = field(default_factory=Totals)
    points: deque[tuple[float, Totals]] = field(default_factory=lambda: deque(maxlen=POINTS))
    step: int | None = None
    committed: float = 0.0
    seen: float = 0.0


class JobStats:
    """Collects the clients' reports for the status page and the metrics. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._early_bytes: OrderedDict[int, int] = OrderedDict()
        self._departed: OrderedDict[int, _Process] = OrderedDict()
        self._jobs: dict[str, _Job] = {}

    # events

    def report(self, connection: int, process: int, report: m.Report) -> None:
        """A report of `process` arrived on this connection."""
        known_process = self._processes.get(process) or self._add_process(process, report)
        if known_process is None:
            return
        known_process.connections.add(connection)
        if report.run:
            self._rename(known_process, plain(report.run))
        self._keep_report(known_process, report)
        if report.step is not None:
            self.commit(known_process.job, report.step, report.committed)
        self._job(known_process.job).seen = self._clock()

    def waited(self, process: int, size: int) -> None:
        """`process` requested `size` bytes that were not in the cache yet."""
        if process in self._processes:
            self._processes[process].waited += size
        else:  # it has not reported yet
            self._early_bytes[process] = self._early_bytes.get(process, 0) + size
            if len(self._early_bytes) > PROCESSES:
                self._early_bytes.popitem(last=False)

    def job_of(self, process: int) -> str | None:
        """The job of a process, once it has reported."""
        known_process = self._processes.get(process)
        return known_process.job if known_process else None

    def commit(self, run: str, step: int, committed: float) -> None:
        """A step of `run` was committed at the Unix time `committed`."""
        job = self._job(self._admit_name(plain(run)))
        job.seen = self._clock()
        if committed > job.committed:
            job.step, job.committed = step, committed

    def ended(self, connection: int, process: int) -> None:
        """The connection has ended. After its last one, a process only counts in its job's totals."""
        known_process = self._processes.get(process)
        if known_process is None:
            return
        known_process.connections.discard(connection)
        if not known_process.connections:
            self._departed[process] = self._processes.pop(process)
            self._job(known_process.job).ended += known_process.totals()
            if len(self._departed) > DEPARTED:
                self._departed.popitem(last=False)

    def tick(self) -> None:
        """Add a point to every job's history. Missing points since the last one are filled in if nothing has changed.

        Called every `POINT_SECONDS`, or later while the daemon is idle.
        """
        now, sums = self._clock(), self._sums()
        busy = {process.job for process in self._processes.values()}
        for name, job in list(self._jobs.items()):
            if name in busy:
                job.seen = now
            elif now - job.seen > FORGET_SECONDS:
                del self._jobs[name]
                continue
            if job.points:
                last_time, last_totals = job.points[-1]
                if last_totals == sums[name]:
                    sums[name] = last_totals  # one object for all points of an idle job
                job.points.extend(
                    (missing_time, last_totals) for missing_time in slept(last_time, now) if last_totals == sums[name]
                )
            job.points.append((now, sums[name]))

    # queries

    def jobs(self, now: float) -> list[dict[str, object]]:
        """The status page's figures of each job; `now` is Unix time."""
        sums, processes = self._sums(), self._by_job()
        return [
            self._describe(name, job, processes.get(name, ()), sums[name], now)
            for name, job in sorted(self._jobs.items())
        ]

    def totals(self) -> dict[str, Totals]:
        """Totals of each job, since the daemon first saw it."""
        return self._sums()

    def commits(self) -> dict[str, float]:
        """The Unix time at which each job's newest step was committed."""
        return {name: job.committed for name, job in self._jobs.items() if job.step is not None}

    def history(self) -> dict[str, list[dict[str, object]]]:
        """The chart points of each job, oldest first: `age` in seconds, and the rates of the ten seconds before."""
        now, processes = self._clock(), self._by_job()
        largest = sorted(self._jobs, key=lambda name: (-len(processes.get(name, ())), name))[:CHARTS]
        return {name: list(_points(list(self._jobs[name].points), now)) for name in sorted(largest)}

    @property
    def known(self) -> int:
        """Number of jobs. Those that are counted as "other" are one."""
        return len(self._jobs)

    # internal

    def _by_job(self) -> dict[str, list[_Process]]:
        """The connected processes of each job."""
        processes: dict[str, list[_Process]] = {}
        for process in self._processes.values():
            processes.setdefault(process.job, []).append(process)
        return processes

    def _describe(
        self, name: str, job: _Job, processes: Sequence[_Process], total: Totals, now: float
    ) -> dict[str, object]:
        idle = [s.report.idle for p in processes for s in p.sources.values() if s.report.wall > 0]
        window_start = job.points[-min(len(job.points), WINDOW_POINTS)] if job.points else (self._clock(), total)
        return {
            "job": name,
            "trainers": len(processes),
            **rates(total - window_start[1], self._clock() - window_start[0]),
            "goodput_since_start": _rounded(total.goodput),
            "idle_seconds": round(min(idle), 1) if idle else None,
            "steps": total.steps,
            "samples": total.samples,
            "saves": total.saves,
            "last_step": job.step,
            "last_commit_age_seconds": round(max(now - job.committed, 0.0), 1) if job.step is not None else None,
        }

    def _sums(self) -> dict[str, Totals]:
        sums = {name: job.ended for name, job in self._jobs.items()}
        for process in self._processes.values():
            sums[process.job] = sums.get(process.job, Totals()) + process.totals()
        return sums

    def _keep_report(self, process: _Process, report: m.Report) -> None:
        now, source = self._clock(), process.sources.get(report.source)
        if source is not None:
            source.report, source.last_report = (
                _newer(source.report, report),
                now if report.wall else source.last_report,
            )
        elif len(process.sources) < SOURCES:
            process.sources[report.source] = _Source(report, now - report.wall, now)

    def _add_process(self, process: int, report: m.Report) -> _Process | None:
        if len(self._processes) >= PROCESSES:
            return None
        departed = self._departed.pop(process, None)
        if departed is not None and report.source in departed.sources:  # it reconnected
            job = self._job(departed.job)
            job.ended -= departed.totals()
            added = departed
        else:
            added = _Process(self._admit_name(plain(report.run or report.group)))
        added.waited += self._early_bytes.pop(process, 0)
        self._processes[process] = added
        return added

    def _rename(self, process: _Process, run: str) -> None:
        """Give the process's job the name of its run, which replaces that of its process group.

        The run gets the group's history if no other process is in the group.
        """
        old_name, new_name = process.job, self._admit_name(run)
        if old_name == new_name:
            return
        process.job = new_name
        shared = any(p.job == old_name for p in self._processes.values())
        old_job = self._jobs.get(old_name)
        if old_job is not None and not shared and old_job.ended == Totals() and old_name != OTHER:
            renamed = self._job(new_name)
            if not renamed.points:
                renamed.points = old_job.points
            del self._jobs[old_name]

    def _admit_name(self, name: str) -> str:
        if name not in self._jobs and len(self._jobs) >= JOBS:
            busy = {process.job for process in self._processes.values()}
            removable = [candidate for candidate in self._jobs if candidate not in busy and candidate != OTHER]
            if not removable:
                return OTHER
            del self._jobs[min(removable, key=lambda candidate: self._jobs[candidate].seen)]
        return name

    def _job(self, name: str) -> _Job:
        return self._jobs.setdefault(name, _Job(seen=self._clock()))


def rates(totals: Totals, seconds: float) -> dict[str, float | None]:
    """Rates over `seconds`; None for a rate that is undefined."""
    from_store = min(totals.waited, totals.read)
    return {
        "goodput": _rounded(totals.goodput),
        "samples_per_second": _rounded(totals.samples / seconds) if seconds > 0 else None,
        "steps_per_second": _rounded(totals.steps / seconds) if seconds > 0 else None,
        "cache_bytes_per_second": round((totals.read - from_store) / seconds) if seconds > 0 else None,
        "store_bytes_per_second": round(from_store / seconds) if seconds > 0 else None,
        "hit_ratio": _rounded(1 - from_store / totals.read) if totals.read else None,
        "wait_ms_per_step": _rounded(1000 * totals.wait / totals.steps) if totals.steps else None,
        "stall_ms_per_step": _rounded(1000 * totals.stall / totals.steps) if totals.steps else None,
        "compute_ms_per_step": _rounded(1000 * totals.compute / totals.steps) if totals.steps else None,
    }


def slept(last: float, now: float) -> list[float]:
    """The times of the missing chart points between the last one and `now`, at most `POINTS`."""
    missing = min(round((now - last) / POINT_SECONDS) - 1, POINTS)
    return [now - POINT_SECONDS * number for number in range(missing, 0, -1)]


def plain(name: str) -> str:
    """The name as a metric label: printable, at most 64 characters, never empty."""
    return "".join(c for c in name if c.isprintable())[:64] or OTHER


def _points(points: list[tuple[float, Totals]], now: float) -> Iterable[dict[str, object]]:
    for i, (at, total) in enumerate(points[1:], 1):
        window_start, earlier = points[max(0, i - SMOOTH_POINTS)]
        yield {"age": round(now - at, 1), **rates(total - earlier, at - window_start)}


def _newer(old: m.Report, new: m.Report) -> m.Report:
    """The later of two reports of one source: totals never shrink."""
    return new if (new.wall, new.stall, new.steps, new.saves) >= (old.wall, old.stall, old.steps, old.saves) else old


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
