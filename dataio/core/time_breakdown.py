"""The time breakdown of event logs: sums for each process and each span. It does no I/O.

Purpose: to compute each trainer's goodput after a run, without a daemon, and how long each span took in each process.

Invariants: memory does not grow with the number of events. At most `NAMES` names are counted separately. A trainer's
time runs from the start of its first wait for a batch, or save, to the end of its last one. The time between them
counts as computing.

Failure behaviour: names above the limit count as "others". A process that neither loaded nor saved has no goodput.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAMES = 256
OTHERS = "others"
WAIT, SAVE = "loader.wait", "save"


@dataclass(slots=True)
class Sum:
    """The spans of one name: their number, and their total and longest duration in microseconds."""

    count: int = 0
    total: int = 0
    longest: int = 0

    def add(self, count: int, total: int, longest: int) -> None:
        self.count, self.total, self.longest = self.count + count, self.total + total, max(self.longest, longest)

    def shown(self) -> dict[str, Any]:
        return {"count": self.count, "seconds": self.total / 1e6, "longest_seconds": self.longest / 1e6}


@dataclass(slots=True)
class Process:
    """The sums of one process. It trained from `first` to `last`, in microseconds of Unix time."""

    rank: int
    pid: int
    host: str
    spans: dict[str, Sum] = field(default_factory=dict)
    first: int | None = None
    last: int = 0

    def add(self, name: str, start: int, duration: int) -> None:
        if name not in self.spans and len(self.spans) >= NAMES:
            name = OTHERS
        self.spans.setdefault(name, Sum()).add(1, duration, duration)
        if name in (WAIT, SAVE):
            self.first = start if self.first is None else min(self.first, start)
            self.last = max(self.last, start + duration)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first wait or save to the end of the last; 0 if the process did not train."""
        return 0.0 if self.first is None else (self.last - self.first) / 1e6

    def share(self, name: str) -> float | None:
        """The share of `seconds` in spans of this name; None if `seconds` is 0."""
        return self.spans.get(name, Sum()).total / 1e6 / self.seconds if self.seconds else None

    @property
    def goodput(self) -> float | None:
        """The share of the process's time in which it waited neither for data nor for a save."""
        waited, saved = self.share(WAIT), self.share(SAVE)
        return None if waited is None or saved is None else max(0.0, 1 - waited - saved)

    def shown(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "host": self.host,
            "seconds": self.seconds,
            "data_wait": self.share(WAIT),
            "save_stall": self.share(SAVE),
            "goodput": self.goodput,
            "spans": {name: span_sum.shown() for name, span_sum in sorted(self.spans.items())},
        }


def trained(processes: list[Process]) -> list[Process]:
    """The processes that loaded or saved, by rank."""
    return sorted(
        (process for process in processes if process.seconds),
        key=lambda process: (process.rank, process.host, process.pid),
    )


def by_name(processes: list[Process]) -> dict[str, tuple[Sum, Process]]:
    """Return the sum over all processes for each name, largest first, and the process with the largest sum."""
    largest: dict[str, tuple[Sum, Process]] = {}
    for process in processes:
        for name, span_sum in process.spans.items():
            total, largest_process = largest.setdefault(name, (Sum(), process))
            total.add(span_sum.count, span_sum.total, span_sum.longest)
            if span_sum.total > largest_process.spans[name].total:
                largest[name] = (total, process)
    return dict(sorted(largest.items(), key=lambda item: -item[1][0].total))
