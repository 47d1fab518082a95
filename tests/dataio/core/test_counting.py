"""What is counted, and what Prometheus's client makes of it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import generate_latest

from dataio.core.counting import Counter, Gauge, Histogram
from dataio.core.exposed import registry_of


def test_prometheus_reads_counters_gauges_and_histograms_as_they_are_now() -> None:
    asked = Counter("asked", "Questions", ["who"])
    held, took = Gauge("held_bytes", "Bytes"), Histogram("took_seconds", "Time", buckets=(0.1, 1.0))
    registry = registry_of([asked, held, took])
    asked.labels("a").inc()
    asked.labels("a").inc(2)
    asked.labels("b")
    held.set(7)
    for seconds in (0.05, 0.1, 0.5, 3.0):
        took.observe(seconds)
    assert generate_latest(registry).decode().splitlines() == [
        "# HELP asked_total Questions",
        "# TYPE asked_total counter",
        'asked_total{who="a"} 3.0',
        'asked_total{who="b"} 0.0',
        "# HELP held_bytes Bytes",
        "# TYPE held_bytes gauge",
        "held_bytes 7.0",
        "# HELP took_seconds Time",
        "# TYPE took_seconds histogram",
        'took_seconds_bucket{le="0.1"} 2.0',
        'took_seconds_bucket{le="1.0"} 3.0',
        'took_seconds_bucket{le="+Inf"} 4.0',
        "took_seconds_count 4.0",
        "took_seconds_sum 3.65",
    ]


def test_what_has_no_labels_is_there_before_it_is_counted() -> None:
    registry = registry_of([Counter("saves", "Saves"), Histogram("stall_seconds", "Time", buckets=(1.0,))])
    assert registry.get_sample_value("saves_total") == 0
    assert registry.get_sample_value("stall_seconds_count") == 0


def test_threads_lose_no_count() -> None:
    counter, histogram = Counter("asked", "Questions", ["who"]), Histogram("took", "Time", ["who"], buckets=(1.0,))

    def count(number: int) -> None:
        for _ in range(1000):
            counter.labels(f"{number % 2}").inc()
            histogram.labels("all").observe(number % 3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    assert [child.value for child in counter.children().values()] == [4000, 4000]
    assert histogram.labels("all").read() == ([6000, 8000], 7000)


def test_labels_are_as_many_as_were_declared() -> None:
    with pytest.raises(ValueError, match="asked"):
        Counter("asked", "Questions", ["who"]).labels()


def test_counting_does_not_import_prometheus_and_asking_does() -> None:
    code = """
import sys
from dataio.core import metrics
metrics.store_requests.labels("posix", "get", "ok").inc()
assert not any(name.startswith("prometheus_client") for name in sys.modules)
from dataio.core.metrics import REGISTRY
assert metrics.REGISTRY is REGISTRY
labels = {"backend": "posix", "operation": "get", "outcome": "ok"}
assert REGISTRY.get_sample_value("millrace_store_requests_total", labels) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
