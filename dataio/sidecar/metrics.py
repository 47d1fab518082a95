"""The daemon's Prometheus metrics, collected on each scrape: jobs, saves, the cache, the local tier and its buddies.

Invariants: every metric's name contains its unit, and its label names are fixed. Label values are outcomes, reasons,
tiers, remembered runs, and jobs (at most 257 at a time), so their number is bounded.
Failure behaviour: a metric whose value is unknown, or whose component the daemon does not run, is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.dataio.sidecar.job_stats import JobStats, Totals
from headrace.dataio.sidecar.save_stats import SaveStats

_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("wall_seconds", "Seconds since the trainers of a job requested their first batch", lambda t: t.wall),
    ("wait_seconds", "Seconds in which a trainer waited for a batch", lambda t: t.wait),
    ("stall_seconds", "Seconds in which save() blocked a trainer", lambda t: t.stall),
    ("compute_seconds", "Seconds in which the trainers computed: wall minus wait and stall", lambda t: t.compute),
    ("steps", "Batches delivered to the trainers of a job", lambda t: t.steps),
    ("samples", "Samples delivered to the trainers of a job", lambda t: t.samples),
    ("saves", "Saves that the trainers of a job began", lambda t: t.saves),
)
_CACHE = (
    ("budget_bytes", "Maximum bytes of the cache"),
    ("in_flight_bytes", "Bytes that are being fetched"),
    ("waiting", "Requests that wait for bytes"),
    ("paused", "1 while the cache's disk cannot be written"),
)
_ROOM = (
    ("budget_bytes", "Maximum bytes of the arenas of staged checkpoints"),
    ("held_bytes", "Bytes of the arenas of staged checkpoints"),
    ("waiting_bytes", "Bytes of the arenas that wait for room"),
    ("waiting", "Staged checkpoints that wait for room"),
    ("queued", "Staged checkpoints that wait for their turn"),
    ("running", "Staged checkpoints that are being uploaded"),
    ("committing", "Staged checkpoints that wait for other ranks"),
    ("retrying", "Staged checkpoints that failed and are retried later"),
    ("retry_limit_seconds", "Maximum seconds from the first failure of a staged checkpoint to its last retry"),
)
_TIERS = (
    ("used_bytes", "Bytes in a tier of the cache; tier 0 is the fastest"),
    ("budget_bytes", "Maximum bytes of a tier of the cache"),
    ("paused", "1 while the disk of a tier of the cache cannot be written"),
)


Figures = tuple[Mapping[str, int | bool], Sequence[Mapping[str, object]]]
"""Statistics of the cache, and of each of its tiers."""


class JobMetrics(Collector):
    """Metrics of jobs, saves and the cache; part of the daemon's `StatusView`."""

    def __init__(
        self,
        job_stats: JobStats,
        saves: SaveStats,
        figures: Callable[[], Figures],
    ) -> None:
        self._job_stats, self._saves, self._figures = job_stats, saves, figures

    def collect(self) -> Iterable[Metric]:
        yield from self._of_jobs()
        yield from self._of_progress()
        yield from self._of_saves()
        yield from self._of_cache()

    def _of_jobs(self) -> Iterable[Metric]:
        totals = self._job_stats.totals()
        for name, help_line, value in _COUNTERS:
            counter = CounterMetricFamily(f"headrace_job_{name}", help_line, labels=["job"])
            for job, total in totals.items():
                counter.add_metric([job], value(total))
            yield counter
        read = CounterMetricFamily(
            "headrace_job_read_bytes",
            "Bytes delivered to trainers, from the cache or from the store",
            labels=["job", "source"],
        )
        for job, total in totals.items():
            from_store = min(total.waited, total.read)
            read.add_metric([job, "cache"], total.read - from_store)
            read.add_metric([job, "store"], from_store)
        yield read

    def _of_progress(self) -> Iterable[Metric]:
        trainers = GaugeMetricFamily("headrace_job_trainers", "Trainer processes of a job", labels=["job"])
        goodput = GaugeMetricFamily(
            "headrace_job_goodput_ratio", "Share of the last minute in which the trainers computed", labels=["job"]
        )
        step = GaugeMetricFamily("headrace_job_last_committed_step", "Newest committed step of a job", labels=["job"])
        when = GaugeMetricFamily(
            "headrace_job_last_commit_timestamp_seconds", "Unix time of the newest commit of a job", labels=["job"]
        )
        for line in self._job_stats.jobs(0.0):
            name = str(line["job"])
            _add(trainers, name, line["trainers"])
            _add(goodput, name, line["goodput"])
            _add(step, name, line["last_step"])
        for name, committed in self._job_stats.commits().items():
            when.add_metric([name], committed)
        yield from (trainers, goodput, step, when)

    def _of_saves(self) -> Iterable[Metric]:
        ended = CounterMetricFamily(
            "headrace_staged_saves", "Staged checkpoints that ended, by outcome", labels=["outcome"]
        )
        for outcome, number in self._saves.outcomes.items():
            ended.add_metric([outcome], number)
        yield ended
        in_flight = sum(save["state"] not in ("committed", "failed") for save in self._saves.listed())
        yield GaugeMetricFamily("headrace_staged_saves_in_flight", "Staged checkpoints that have not ended", in_flight)
        room = self._saves.room()
        for name, help_line in _ROOM:
            if name in room:
                yield GaugeMetricFamily(f"headrace_staged_{name}", help_line, room[name])
        yield CounterMetricFamily(
            "headrace_staged_retries", "Workers started after one that failed", room.get("retries", 0)
        )

    def _of_cache(self) -> Iterable[Metric]:
        cache, tiers = self._figures()
        if "fetched_bytes" in cache:
            yield CounterMetricFamily(
                "headrace_cache_fetched_bytes", "Bytes fetched from stores into the cache", int(cache["fetched_bytes"])
            )
        for name, help_line in _CACHE:
            if name in cache:
                yield GaugeMetricFamily(f"headrace_cache_{name}", help_line, int(cache[name]))
        if "reads_ready" in cache:
            reads = CounterMetricFamily(
                "headrace_cache_announced_reads",
                "Announced reads, by whether they were in the cache in time",
                labels=["outcome"],
            )
            for outcome in ("ready", "late"):
                reads.add_metric([outcome], int(cache[f"reads_{outcome}"]))
            yield reads
        yield from _of_tiers(tiers)


def _of_tiers(tiers: Sequence[Mapping[str, object]]) -> Iterable[Metric]:
    hits = CounterMetricFamily("headrace_cache_tier_hit_bytes", "Requested bytes that a tier had", labels=["tier"])
    for number, tier in enumerate(tiers):
        hits.add_metric([str(number)], float(str(tier["hit_bytes"])))
    yield hits
    for name, help_line in _TIERS:
        family = GaugeMetricFamily(f"headrace_cache_tier_{name}", help_line, labels=["tier"])
        for number, tier in enumerate(tiers):
            _add(family, str(number), tier[name])
        yield family


def _add(family: GaugeMetricFamily, job: str, value: object) -> None:
    if isinstance(value, int | float):
        family.add_metric([job], value)


class TierMetrics(Collector):
    """Metrics of the local tier and its buddies. `TierService` registers this collector while it runs."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        state = self._status()
        yield GaugeMetricFamily(
            "headrace_tier_budget_bytes", "Maximum bytes of the node's local tier", state["budget_bytes"]
        )
        yield GaugeMetricFamily(
            "headrace_tier_used_bytes", "Bytes held or reserved in the local tier", state["used_bytes"]
        )
        yield GaugeMetricFamily("headrace_tier_kept_steps", "Steps in the local tier, at most 16", len(state["kept"]))
        yield GaugeMetricFamily(
            "headrace_tier_unusable", "1 while the local tier cannot be used", bool(state["trouble"])
        )
        if state["buddy"] is not None:
            yield from _buddy(state["buddy"], state["recalled"])
        if state["guests"] is not None:
            yield from _guests(state["guests"])


def _buddy(buddy: Mapping[str, Any], recalled: Mapping[str, int]) -> Iterable[Metric]:
    yield GaugeMetricFamily("headrace_buddy_up", "1 while the buddy takes copies", not buddy["trouble"])
    yield GaugeMetricFamily(
        "headrace_buddy_waiting", "Records of steps that the buddy does not have yet", buddy["waiting"]
    )
    yield CounterMetricFamily("headrace_buddy_sent_bytes", "Bytes of objects sent to the buddy", buddy["sent_bytes"])
    copied = GaugeMetricFamily(
        "headrace_buddy_copy_timestamp_seconds",
        "Unix time of the newest step of a job that the buddy has",
        labels=["job"],
    )
    for copy in buddy["copies"]:
        copied.add_metric([copy["run"]], time.time() - copy["age_seconds"])
    yield copied
    outcomes = CounterMetricFamily(
        "headrace_buddy_recalls", "Objects requested from the buddy, by outcome", labels=["outcome"]
    )
    for outcome, number in recalled.items():
        outcomes.add_metric([outcome], number)
    yield outcomes


def _guests(guests: Mapping[str, Any]) -> Iterable[Metric]:
    yield GaugeMetricFamily("headrace_buddy_peers", "Connected buddies", guests["peers"])
    yield CounterMetricFamily(
        "headrace_buddy_received_bytes", "Bytes of objects received from buddies", guests["received_bytes"]
    )
    refused = CounterMetricFamily(
        "headrace_buddy_refused", "Peers that were disconnected, by reason", labels=["reason"]
    )
    for reason, number in guests["refused"].items():
        refused.add_metric([reason], number)
    yield refused
