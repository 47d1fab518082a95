"""What was counted, as Prometheus's client exposes it.

Invariant: a registry shows what is counted at the moment at which it is asked.
Failure behaviour: none of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dataio.core.counting import Counter, Gauge, Histogram


class Counted(Collector):
    """These metrics."""

    def __init__(self, families: Sequence[Counter | Gauge | Histogram]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield _histogram(family) if isinstance(family, Histogram) else _numbers(family)


def registry_of(families: Sequence[Counter | Gauge | Histogram]) -> CollectorRegistry:
    """A registry of these metrics, to which others can be added."""
    registry = CollectorRegistry()
    registry.register(Counted(families))
    return registry


def _numbers(family: Counter | Gauge) -> Metric:
    kind = CounterMetricFamily if isinstance(family, Counter) else GaugeMetricFamily
    metric = kind(family.name, family.about, labels=family.names)
    for values, child in family.children().items():
        metric.add_metric(values, child.value)
    return metric


def _histogram(family: Histogram) -> Metric:
    metric = HistogramMetricFamily(family.name, family.about, labels=family.names)
    bounds = [*map(floatToGoString, family.buckets), "+Inf"]
    for values, child in family.children().items():
        counts, total = child.read()
        metric.add_metric(values, list(zip(bounds, counts, strict=True)), total)
    return metric
