"""What the daemon shows of itself beyond its own state: jobs, saves, rates, errors; one object for the server to keep.

Invariant: `status` is small enough for one message of the socket; only `history` is long, and goes over HTTP alone. All on the
loop's thread, but for log records.
Failure behaviour: none; showing never disturbs serving.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from dataio.core.errors import CapacityError
from dataio.core.metrics import REGISTRY
from dataio.sidecar.board import POINT_SECONDS, POINTS, WINDOW_POINTS, Board, Totals, rates
from dataio.sidecar.exposition import JobMetrics
from dataio.sidecar.recent import Recent
from dataio.sidecar.saves import Saves

_Point = tuple[float, int, Totals]


class View:
    """Between `start` and `close` it listens to the log and answers for the metrics."""

    def __init__(self) -> None:
        self.board = Board(time.monotonic)
        self.saves = Saves(self.board.commit)
        self._recent = Recent()
        self._cache: Mapping[str, int | bool] = {}
        self._tiers: Sequence[Mapping[str, object]] = ()
        self._points: deque[_Point] = deque(maxlen=POINTS)
        self._metrics = JobMetrics(self.board, self.saves, lambda: self._cache, lambda: self._tiers)

    def start(self) -> None:
        logging.getLogger("millrace").addHandler(self._recent)
        REGISTRY.register(self._metrics)

    def close(self) -> None:
        logging.getLogger("millrace").removeHandler(self._recent)
        REGISTRY.unregister(self._metrics)

    def tick(self, cache: Mapping[str, int | bool], tiers: Sequence[Mapping[str, object]] = ()) -> None:
        """Every `POINT_SECONDS`, with the figures of the cache and of its tiers."""
        self._cache, self._tiers = cache, tiers
        self.board.tick()
        self._points.append((time.monotonic(), int(cache["fetched_bytes"]), self._delivered()))

    def status(self, now: float) -> dict[str, object]:
        """`now` is Unix time."""
        recent = list(self._points)[-WINDOW_POINTS // 6 - 1 :]
        return {
            "window_seconds": WINDOW_POINTS * POINT_SECONDS,
            "rates": _rates(recent[0], recent[-1]) if len(recent) > 1 else {},
            "training": self.board.jobs(now),
            "saves": self.saves.listed(),
            "errors": self._recent.latest(now),
        }

    def history(self) -> dict[str, object]:
        """The charts: of the node, and of each job."""
        now, points = time.monotonic(), list(self._points)
        node = [
            {"age": round(now - points[i][0], 1), **_rates(points[max(0, i - 5)], points[i])}
            for i in range(1, len(points))
        ]
        return {"point_seconds": POINT_SECONDS, "node": node, "jobs": self.board.history()}

    def _delivered(self) -> Totals:
        return sum(self.board.totals().values(), Totals())


def fitting(status: dict[str, object], most: int) -> str:
    """`status` as JSON of at most `most` bytes: its longest lists lose their ends where they must."""
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


def _rates(before: _Point, after: _Point) -> dict[str, float | None]:
    seconds = after[0] - before[0]
    own = rates(after[2] - before[2], seconds)
    fetched = max(after[1] - before[1], 0) / seconds if seconds > 0 else 0.0
    kept = ("cache_bytes_per_second", "store_bytes_per_second", "hit_ratio")
    return {**{name: own[name] for name in kept}, "fetched_bytes_per_second": round(fetched)}
