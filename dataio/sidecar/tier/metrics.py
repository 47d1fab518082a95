"""The metrics of the tier and its buddies, gathered from `Tier.status` when somebody scrapes.

Invariant: labels are outcomes, reasons, and the runs that are remembered: bounded sets. Failure behaviour: a part that the
daemon does not have (no buddy, nobody let in) is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class TierMetrics(Collector):
    """Registered by the tier while it is open."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        state = self._status()
        yield GaugeMetricFamily("headrace_tier_budget_bytes", "What the node's tier may hold", state["budget_bytes"])
        yield GaugeMetricFamily("headrace_tier_used_bytes", "What it holds, and what is reserved", state["used_bytes"])
        yield GaugeMetricFamily("headrace_tier_kept_steps", "Steps in the node's tier, at most 16", len(state["kept"]))
        yield GaugeMetricFamily("headrace_tier_unusable", "1 while the tier cannot be used", bool(state["trouble"]))
        if state["buddy"] is not None:
            yield from _buddy(state["buddy"], state["recalled"])
        if state["guests"] is not None:
            yield from _guests(state["guests"])


def _buddy(buddy: Mapping[str, Any], recalled: Mapping[str, int]) -> Iterable[Metric]:
    yield GaugeMetricFamily("headrace_buddy_up", "1 while the buddy takes copies", not buddy["trouble"])
    yield GaugeMetricFamily("headrace_buddy_waiting", "Records of steps that it does not have yet", buddy["waiting"])
    yield CounterMetricFamily("headrace_buddy_sent_bytes", "Bytes of objects sent to it", buddy["sent_bytes"])
    copied = GaugeMetricFamily(
        "headrace_buddy_copy_timestamp_seconds", "When the newest step that it has was kept, Unix time", labels=["job"]
    )
    for copy in buddy["copies"]:
        copied.add_metric([copy["run"]], time.time() - copy["age_seconds"])
    yield copied
    outcomes = CounterMetricFamily("headrace_buddy_recalls", "Objects asked of it", labels=["outcome"])
    for outcome, number in recalled.items():
        outcomes.add_metric([outcome], number)
    yield outcomes


def _guests(guests: Mapping[str, Any]) -> Iterable[Metric]:
    yield GaugeMetricFamily("headrace_buddy_peers", "Buddies that are connected", guests["peers"])
    yield CounterMetricFamily("headrace_buddy_received_bytes", "Bytes of objects taken in", guests["received_bytes"])
    refused = CounterMetricFamily("headrace_buddy_refused", "Peers that were hung up on", labels=["reason"])
    for reason, number in guests["refused"].items():
        refused.add_metric([reason], number)
    yield refused
