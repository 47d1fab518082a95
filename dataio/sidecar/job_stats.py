"""Statistics of the node's training jobs and of its staged checkpoints. Sans-I/O.

Purpose: goodput, data wait and save stall of each job over the last minute, and over the last ten minutes for the
charts; and the progress of every staged checkpoint.
Invariants: totals only grow, even if reports are lost, repeated or reordered. A process counts once, however many
loaders and checkpointers it has. Jobs, processes, sources (loaders and checkpointers) and history are bounded
(docs/design/0003). At most `KEPT` ended saves are remembered; a save in flight is remembered until it ends.
Failure behaviour: above the bound, a further job takes the place of the one that ended first. While no job has ended, it
is counted as "other". A further process or source is not counted.
If the result of a save names no run or no step, the save counts, but no step is recorded as committed.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        own = [s.report for s in self.sources.values()]
        return Totals(
            wall,
            sum(r.wait for r in own),
            sum(r.stall for r in own),
            sum(r.steps for r in own),
            sum(r.samples for r in own),
            sum(r.read for r in own),
            self.waited,
            sum(r.saves for r in own),
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
        self._early: OrderedDict[int, int] = OrderedDict()
        self._departed: OrderedDict[int, _Process] = OrderedDict()
        self._jobs: dict[str, _Job] = {}

    # events

    def report(self, connection: int, process: int, report: m.Report) -> None:
        """A report of `process` arrived on this connection."""
        found = self._processes.get(process) or self._new(process, report)
        if found is None:
            return
        found.connections.add(connection)
        if report.run:
            self._rename(found, plain(report.run))
        self._keep(found, report)
        if report.step is not None:
            self.commit(found.job, report.step, report.committed)
        self._job(found.job).seen = self._clock()

    def waited(self, process: int, size: int) -> None:
        """`process` requested `size` bytes that were not in the cache yet."""
        if process in self._processes:
            self._processes[process].waited += size
        else:  # it has not reported yet
            self._early[process] = self._early.get(process, 0) + size
            if len(self._early) > PROCESSES:
                self._early.popitem(last=False)

    def job_of(self, process: int) -> str | None:
        """The job of a process, once it has reported."""
        found = self._processes.get(process)
        return found.job if found else None

    def commit(self, run: str, step: int, committed: float) -> None:
        """A step of `run` was committed at the Unix time `committed`."""
        job = self._job(self._name(plain(run)))
        job.seen = self._clock()
        if committed > job.committed:
            job.step, job.committed = step, committed

    def ended(self, connection: int, process: int) -> None:
        """The connection has ended. After its last one, a process only counts in its job's totals."""
        found = self._processes.get(process)
        if found is None:
            return
        found.connections.discard(connection)
        if not found.connections:
            self._departed[process] = self._processes.pop(process)
            self._job(found.job).ended += found.totals()
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
                last, before = job.points[-1]
                if before == sums[name]:
                    sums[name] = before  # one object for all points of an idle job
                job.points.extend((then, before) for then in slept(last, now) if before == sums[name])
            job.points.append((now, sums[name]))

    # queries

    def jobs(self, now: float) -> list[dict[str, object]]:
        """The status page's figures of each job; `now` is Unix time."""
        sums, own = self._sums(), self._by_job()
        return [
            self._describe(name, job, own.get(name, ()), sums[name], now) for name, job in sorted(self._jobs.items())
        ]

    def totals(self) -> dict[str, Totals]:
        """Totals of each job, since the daemon first saw it."""
        return self._sums()

    def commits(self) -> dict[str, float]:
        """The Unix time at which each job's newest step was committed."""
        return {name: job.committed for name, job in self._jobs.items() if job.step is not None}

    def history(self) -> dict[str, list[dict[str, object]]]:
        """The chart points of each job, oldest first: `age` in seconds, and the rates of the ten seconds before."""
        now, own = self._clock(), self._by_job()
        largest = sorted(self._jobs, key=lambda name: (-len(own.get(name, ())), name))[:CHARTS]
        return {name: list(_points(list(self._jobs[name].points), now)) for name in sorted(largest)}

    @property
    def known(self) -> int:
        """Number of jobs. Those that are counted as "other" are one."""
        return len(self._jobs)

    # internal

    def _by_job(self) -> dict[str, list[_Process]]:
        """The connected processes of each job."""
        found: dict[str, list[_Process]] = {}
        for process in self._processes.values():
            found.setdefault(process.job, []).append(process)
        return found

    def _describe(self, name: str, job: _Job, own: Sequence[_Process], total: Totals, now: float) -> dict[str, object]:
        idle = [s.report.idle for p in own for s in p.sources.values() if s.report.wall > 0]
        past = job.points[-min(len(job.points), WINDOW_POINTS)] if job.points else (self._clock(), total)
        return {
            "job": name,
            "trainers": len(own),
            **rates(total - past[1], self._clock() - past[0]),
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

    def _keep(self, process: _Process, report: m.Report) -> None:
        now, known = self._clock(), process.sources.get(report.source)
        if known is not None:
            known.report, known.last_report = _newer(known.report, report), now if report.wall else known.last_report
        elif len(process.sources) < SOURCES:
            process.sources[report.source] = _Source(report, now - report.wall, now)

    def _new(self, process: int, report: m.Report) -> _Process | None:
        if len(self._processes) >= PROCESSES:
            return None
        old_job = self._departed.pop(process, None)
        if old_job is not None and report.source in old_job.sources:  # it reconnected
            job = self._job(old_job.job)
            job.ended -= old_job.totals()
            found = old_job
        else:
            found = _Process(self._name(plain(report.run or report.group)))
        found.waited += self._early.pop(process, 0)
        self._processes[process] = found
        return found

    def _rename(self, process: _Process, run: str) -> None:
        """Give the process's job the name of its run, which replaces that of its process group.

        The run gets the group's history if no other process is in the group.
        """
        old, new = process.job, self._name(run)
        if old == new:
            return
        process.job = new
        others = any(p.job == old for p in self._processes.values())
        old_job = self._jobs.get(old)
        if old_job is not None and not others and old_job.ended == Totals() and old != OTHER:
            renamed = self._job(new)
            if not renamed.points:
                renamed.points = old_job.points
            del self._jobs[old]

    def _name(self, name: str) -> str:
        if name not in self._jobs and len(self._jobs) >= JOBS:
            busy = {process.job for process in self._processes.values()}
            ended = [old for old in self._jobs if old not in busy and old != OTHER]
            if not ended:
                return OTHER
            del self._jobs[min(ended, key=lambda old: self._jobs[old].seen)]
        return name

    def _job(self, name: str) -> _Job:
        return self._jobs.setdefault(name, _Job(seen=self._clock()))


def rates(done: Totals, seconds: float) -> dict[str, float | None]:
    """Rates over `seconds`; None for a rate that is undefined."""
    late = min(done.waited, done.read)
    return {
        "goodput": _rounded(done.goodput),
        "samples_per_second": _rounded(done.samples / seconds) if seconds > 0 else None,
        "steps_per_second": _rounded(done.steps / seconds) if seconds > 0 else None,
        "cache_bytes_per_second": round((done.read - late) / seconds) if seconds > 0 else None,
        "store_bytes_per_second": round(late / seconds) if seconds > 0 else None,
        "hit_ratio": _rounded(1 - late / done.read) if done.read else None,
        "wait_ms_per_step": _rounded(1000 * done.wait / done.steps) if done.steps else None,
        "stall_ms_per_step": _rounded(1000 * done.stall / done.steps) if done.steps else None,
        "compute_ms_per_step": _rounded(1000 * done.compute / done.steps) if done.steps else None,
    }


def slept(last: float, now: float) -> list[float]:
    """The times of the missing chart points between the last one and `now`, at most `POINTS`."""
    missing = min(round((now - last) / POINT_SECONDS) - 1, POINTS)
    return [now - POINT_SECONDS * number for number in range(missing, 0, -1)]


def plain(name: str) -> str:
    """The name as a metric label: printable, at most 64 characters, never empty."""
    return "".join(c for c in name if c.isprintable())[:64] or OTHER


def _points(points: list[tuple[float, Totals]], now: float) -> Iterable[dict[str, object]]:
    for i, (when, total) in enumerate(points[1:], 1):
        begun, before = points[max(0, i - SMOOTH_POINTS)]
        yield {"age": round(now - when, 1), **rates(total - before, when - begun)}


def _newer(old: m.Report, new: m.Report) -> m.Report:
    """The later of two reports of one source: totals never shrink."""
    return new if (new.wall, new.stall, new.steps, new.saves) >= (old.wall, old.stall, old.steps, old.saves) else old


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


KEPT = 16
LISTED = 32


@dataclass(slots=True)
class _Save:
    about: str
    accepted: float
    done: int = 0
    total: int = 0
    released: bool = False
    ended: float | None = None
    error: str | None = None
    phase: Callable[[], str] = lambda: "running"
    trouble: Callable[[], str] = lambda: ""


class SaveStats:
    """The staged checkpoints. Calls `committed(run, step, when)` for every step that a job has committed."""

    def __init__(self, committed: Callable[[str, int, float], None], clock: Callable[[], float] = time.time) -> None:
        self._committed, self._clock = committed, clock
        self._saves: OrderedDict[str, _Save] = OrderedDict()
        self.outcomes = {"committed": 0, "failed": 0}
        self.room: Callable[[], Mapping[str, float]] = dict
        """Returns the counts of the job service (`JobService.room`)."""

    def listener(
        self,
        token: str,
        about: str,
        phase: Callable[[], str] = lambda: "running",
        trouble: Callable[[], str] = lambda: "",
    ) -> Callable[[m.JobEvent], None]:
        """Add a save; returns the listener for its events.

        `phase` returns its job's state. `trouble` returns why the job is retried, or an empty string.
        """
        name = "".join(c for c in about if c.isprintable())
        self._saves[token] = save = _Save(name, self._clock(), phase=phase, trouble=trouble)
        return lambda event: self._on_event(save, event)

    def listed(self) -> list[dict[str, object]]:
        """The saves in flight, then those that ended; both newest first, at most `LISTED`."""
        for token in [token for token, save in self._saves.items() if save.ended is None and save.phase() == "gone"]:
            del self._saves[token]
        order = sorted(self._saves.values(), key=lambda save: (save.ended is not None, -save.accepted))
        return [self._describe(save) for save in order[:LISTED]]

    def _on_event(self, save: _Save, event: m.JobEvent) -> None:
        match event:
            case m.Progress(_, done, total):
                save.done, save.total = done, total
            case m.Released():
                save.released = True
            case m.JobFailed(_, _, message):
                save.error = message[:300]
                self._end(save, "failed")
            case m.Done(_, result):
                self._end(save, "committed")
                self._report_commit(result)

    def _end(self, save: _Save, outcome: str) -> None:
        save.ended = self._clock()
        self.outcomes[outcome] += 1
        ended = [token for token, other in self._saves.items() if other.ended is not None]
        for token in ended[:-KEPT]:
            del self._saves[token]

    def _report_commit(self, result: str) -> None:
        fields = json.loads(result)
        run, step, when = fields.get("run"), fields.get("step"), fields.get("committed")
        good = isinstance(run, str) and isinstance(step, int) and isinstance(when, int | float)
        if good and step >= 0 and math.isfinite(when):
            self._committed(run, step, when)

    def _describe(self, save: _Save) -> dict[str, object]:
        until = save.ended if save.ended is not None else self._clock()
        return {
            "about": save.about or "a checkpoint",
            "state": _state(save),
            "done": save.done,
            "total": save.total,
            "seconds": round(until - save.accepted, 1),
            "age_seconds": round(self._clock() - until, 1),
            "error": save.error or (save.trouble()[:300] if save.ended is None else "") or None,
        }


def _state(save: _Save) -> str:
    if save.ended is not None:
        return "failed" if save.error else "committed"
    if (phase := save.phase()) in ("waiting", "lost", "retrying"):
        return phase
    if phase in ("taken", "queued"):
        return "queued"
    return "committing" if save.released else "sending"
