"""The contents of the status page: jobs, saves, rates, charts, and the latest warnings and errors.

Invariants: `status` fits into one message of the socket. `history` may be longer, and is served over HTTP only. Chart
points are recorded while the daemon is busy and when the status is requested. The points in between are filled in,
because nothing changed. All state belongs to the loop's thread, except log records. At most `KEPT_MESSAGES` different
log messages are kept, cut to `MESSAGE_CHARS` characters; repeated messages are counted. The loggers remove secrets
before this module gets a message.
Failure behaviour: if there are too many messages, the oldest ones are dropped. `CapacityError` if a status does not fit
into a message even with empty lists.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.metrics import REGISTRY
from headrace.dataio.sidecar.job_stats import (
    POINT_SECONDS,
    POINTS,
    WINDOW_POINTS,
    JobStats,
    Totals,
    rates,
    slept,
)
from headrace.dataio.sidecar.metrics import Figures, JobMetrics
from headrace.dataio.sidecar.save_stats import SaveStats

_Point = tuple[float, int, Totals]


class StatusView(Collector):
    """The status page's data. `figures()` returns the cache's statistics.

    Between `start` and `close`, it collects log messages and serves the metrics.
    """

    def __init__(self, figures: Callable[[], Figures], clock: Callable[[], float] = time.monotonic) -> None:
        self._figures, self._clock = figures, clock
        self.job_stats = JobStats(clock)
        self.saves = SaveStats(self.job_stats.commit)
        self._recent = RecentMessages()
        self._points: deque[_Point] = deque(maxlen=POINTS)
        self._metrics = JobMetrics(self.job_stats, self.saves, figures)

    def start(self) -> None:
        logging.getLogger("headrace").addHandler(self._recent)
        REGISTRY.register(self)

    def close(self) -> None:
        logging.getLogger("headrace").removeHandler(self._recent)
        REGISTRY.unregister(self)

    def tick(self) -> bool:
        """Record a chart point; returns whether anything has changed since the last one."""
        self.job_stats.tick()
        now, fetched, delivered = self._clock(), int(self._figures()[0]["fetched_bytes"]), self._delivered()
        changed = bool(self._points) and self._points[-1][1:] != (fetched, delivered)
        if self._points and not changed:
            self._points.extend((missing_time, fetched, delivered) for missing_time in slept(self._points[-1][0], now))
        self._points.append((now, fetched, delivered))
        return changed

    def describe(self) -> Iterable[Metric]:
        """Return nothing. Otherwise registering this collector would call `collect` before there is a cache."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The current metrics."""
        self._catch_up()
        return self._metrics.collect()

    def status(self, now: float) -> dict[str, object]:
        """The current figures of jobs and saves, and the latest messages. `now` is Unix time."""
        self._catch_up()
        recent = list(self._points)[-WINDOW_POINTS // 6 - 1 :]
        return {
            "window_seconds": WINDOW_POINTS * POINT_SECONDS,
            "rates": _rates(recent[0], recent[-1]) if len(recent) > 1 else {},
            "training": self.job_stats.jobs(now),
            "training_jobs": self.job_stats.known,
            "saves": self.saves.listed(),
            "errors": self._recent.latest(now),
        }

    def history(self) -> dict[str, object]:
        """The chart points of the node and of each job."""
        self._catch_up()
        now, points = self._clock(), list(self._points)
        node = [
            {"age": round(now - points[i][0], 1), **_rates(points[max(0, i - 5)], points[i])}
            for i in range(1, len(points))
        ]
        return {"point_seconds": POINT_SECONDS, "node": node, "jobs": self.job_stats.history()}

    def _catch_up(self) -> None:
        """Fill in the missing chart points, if none was recorded for a while."""
        if self._points and self._clock() - self._points[-1][0] > 1.5 * POINT_SECONDS:
            self.tick()

    def _delivered(self) -> Totals:
        return sum(self.job_stats.totals().values(), Totals())


def fitting(status: dict[str, object], most: int) -> str:
    """`status` as JSON of at most `most` bytes; the longest lists are cut if necessary."""
    lists = list(_lists(status))
    while len(text := json.dumps(status, ensure_ascii=False)) * 4 > most and len(text.encode()) > most:
        longest = max(lists, key=lambda found: len(json.dumps(found)), default=[])
        if not longest:
            raise CapacityError("the status does not fit into a message")
        del longest[len(longest) // 2 :]
    return text


def _lists(value: object) -> Iterator[list[object]]:
    if isinstance(value, list):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _lists(inner)


def _rates(earlier: _Point, later: _Point) -> dict[str, float | None]:
    seconds = later[0] - earlier[0]
    job_rates = rates(later[2] - earlier[2], seconds)
    fetched = max(later[1] - earlier[1], 0) / seconds if seconds > 0 else 0.0
    names = ("cache_bytes_per_second", "store_bytes_per_second", "hit_ratio")
    return {**{name: job_rates[name] for name in names}, "fetched_bytes_per_second": round(fetched)}


KEPT_MESSAGES, MESSAGE_CHARS = 20, 400


@dataclass(slots=True)
class _LogMessage:
    level: str
    when: float
    times: int = 1


class RecentMessages(logging.Handler):
    """A log handler that keeps the latest warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: OrderedDict[str, _LogMessage] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        text = text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
        repeated = self._messages.pop(text, None)
        self._messages[text] = _LogMessage(
            record.levelname.lower(), record.created, repeated.times + 1 if repeated else 1
        )
        while len(self._messages) > KEPT_MESSAGES:
            self._messages.popitem(last=False)

    def latest(self, now: float) -> list[dict[str, object]]:
        """The messages, newest first. `age_seconds` is relative to `now`, which is Unix time."""
        self.acquire()
        try:
            return [
                {
                    "text": text,
                    "level": message.level,
                    "age_seconds": round(now - message.when, 1),
                    "times": message.times,
                }
                for text, message in reversed(self._messages.items())
            ]
        finally:
            self.release()
