"""Counters, gauges and histograms as Prometheus means them, without its client.

Purpose: every store counts what it is asked, also in the many processes whose counts nobody reads; Prometheus's client brings web
servers, and importing it takes longer than opening a dataset. `dataio.core.metrics` hands the numbers to it when someone asks.
Invariants: safe for threads. A counter never goes down. A value of labels is there from when it was first named, and one without
labels from the start, with 0.
Failure behaviour: `ValueError` for another number of labels than was declared.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar


class Value:
    """A number."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock, self.value = threading.Lock(), 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to it."""
        with self._lock:
            self.value += amount

    def set(self, value: float) -> None:
        """Replace it."""
        self.value = value


class Observations:
    """How many observations were at most as large as each of `bounds`, or larger than all, and their sum."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._lock, self._bounds = threading.Lock(), bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """One more."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def read(self) -> tuple[list[int], float]:
        """How many there are up to each bound, and in all; and their sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


Child = TypeVar("Child", Value, Observations)


class Family(Generic[Child]):
    """What is counted under one name, apart by the values of its labels."""

    def __init__(self, name: str, about: str, names: Sequence[str], make: Callable[[], Child]) -> None:
        self.name, self.about, self.names = name, about, tuple(names)
        self._make: Callable[[], Child] = make
        self._lock = threading.Lock()
        self._children: dict[tuple[str, ...], Child] = {}
        if not names:
            self.labels()

    def labels(self, *values: str) -> Child:
        """What is counted for these values of the labels."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.names):
                raise ValueError(f"{self.name} has the labels {self.names}, not {values}")
            with self._lock:
                child = self._children.setdefault(values, self._make())
        return child

    def children(self) -> Mapping[tuple[str, ...], Child]:
        """By values of the labels, as they are now."""
        with self._lock:
            return dict(self._children)


class Counter(Family[Value]):
    """Goes up."""

    def __init__(self, name: str, about: str, names: Sequence[str] = ()) -> None:
        super().__init__(name, about, names, Value)

    def inc(self, amount: float = 1.0) -> None:
        """As that of its one value."""
        self.labels().inc(amount)


class Gauge(Family[Value]):
    """Goes up and down."""

    def __init__(self, name: str, about: str, names: Sequence[str] = ()) -> None:
        super().__init__(name, about, names, Value)

    def set(self, value: float) -> None:
        """As that of its one value."""
        self.labels().set(value)


class Histogram(Family[Observations]):
    """Observations by how large they were."""

    def __init__(self, name: str, about: str, names: Sequence[str] = (), *, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        super().__init__(name, about, names, lambda: Observations(self.buckets))

    def observe(self, value: float) -> None:
        """As that of its one value."""
        self.labels().observe(value)
