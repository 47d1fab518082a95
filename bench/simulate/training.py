"""A job that computes, saves, fails and comes back; its goodput by discrete events.

Goodput is the share of wall time whose work is in the model at the end: what was computed after the last durable
checkpoint is lost with an interruption, stalls and restarts are time without work. A save stalls the steps, then goes on
beside them; the next one begins only when it is in the store. With the sidecar, an interruption that leaves the node alive
(software) does not lose a save that was staged.
Invariant: deterministic for a seed; work plus loss plus every pause is the wall time. Failure behaviour: `ValueError` for
an interval that is not positive.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.bench.simulate.cluster import Cluster, Costs, daly


@dataclass
class Outcome:
    """Seconds of a run's wall time by what they were; `saves` durable ones, `interruptions` of them."""

    useful: float = 0.0
    lost: float = 0.0
    stalled: float = 0.0
    slowed: float = 0.0
    waiting: float = 0.0
    down: float = 0.0
    saves: int = 0
    interruptions: int = 0

    @property
    def wall(self) -> float:
        return self.useful + self.lost + self.stalled + self.slowed + self.waiting + self.down

    @property
    def goodput(self) -> float:
        return self.useful / self.wall


def simulate(cluster: Cluster, known: Costs, interval: float, *, wall: float, seed: int) -> Outcome:
    """Run until `wall` seconds have passed; a checkpoint after every `interval` seconds of computing."""
    if interval <= 0:
        raise ValueError("the interval between checkpoints is a positive number of seconds")
    rng, out = random.Random(seed), Outcome()
    run = _Run(cluster, known, interval, rng, out)
    while out.wall < wall:
        run.life(wall)
    return out


class _Run:
    """From one start of the job to its next interruption."""

    def __init__(self, cluster: Cluster, known: Costs, interval: float, rng: random.Random, out: Outcome) -> None:
        self._cluster, self._known, self._interval, self._rng, self._out = cluster, known, interval, rng, out

    def life(self, wall: float) -> None:
        """One life: cycles of computing and saving until the interruption, or the end of the run."""
        out, known = self._out, self._known
        left = min(self._rng.expovariate(1 / known.mtbf), wall - out.wall)
        interrupted = left < wall - out.wall
        kept, held, clock, durable_at = 0.0, 0.0, 0.0, 0.0
        # so that the last save is in the store when the next begins
        cycle = max(self._interval, known.durable - known.stall, known.upload)
        while True:
            slowed = min(known.slow_down, cycle)
            taken = cycle / (1 - known.data_stall) + slowed
            if clock + taken > left:
                self._interrupt(left - clock, kept, held, durable_at <= left, interrupted)
                return
            clock += taken
            out.waiting += taken - slowed - cycle
            out.slowed += slowed
            kept, held = kept + held, cycle
            if clock + known.stall > left:
                out.stalled += left - clock
                self._lose(kept, held, staged=False, interrupted=interrupted)
                return
            clock += known.stall
            out.stalled += known.stall
            out.saves += 1
            durable_at = clock + known.durable - known.stall

    def _interrupt(self, partial: float, kept: float, held: float, durable: bool, interrupted: bool) -> None:
        """In the middle of computing: what was computed since the last save is lost; the last save may be, too."""
        out, known = self._out, self._known
        work = partial * (1 - known.data_stall)
        out.waiting += partial - work
        if interrupted:
            out.lost += work
        else:
            out.useful += work
        self._lose(kept, held, staged=True, interrupted=interrupted, durable=durable)

    def _lose(self, kept: float, held: float, *, staged: bool, interrupted: bool, durable: bool = False) -> None:
        """`held` is the work whose save is staged but perhaps not durable."""
        out, known, cluster = self._out, self._known, self._cluster
        survives = not interrupted or durable
        if interrupted:
            out.interruptions += 1
            hardware = self._rng.random() < cluster.hardware_share
            survives = survives or (staged and known.soft_survives and not hardware)
            out.down += cluster.restart_seconds + known.restore
        out.useful += kept + (held if survives else 0.0)
        out.lost += 0.0 if survives else held


def best_interval(cluster: Cluster, known: Costs, *, wall: float, seeds: range) -> tuple[float, list[float]]:
    """The best of the intervals around Daly's, by the mean goodput over `seeds`; (seconds, goodput of each seed)."""
    start = max(daly(known.stall + known.slow_down, known.mtbf), 1.0)
    tried = {
        interval: [simulate(cluster, known, interval, wall=wall, seed=seed).goodput for seed in seeds]
        for interval in (start * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0))
    }
    best = max(tried, key=lambda interval: sum(tried[interval]))
    return best, tried[best]
