"""The metrics that Millrace counts, in one registry, by Prometheus conventions.

Purpose: `REGISTRY` is Prometheus's, for who wants to expose them; its client is imported then, and not where things are only
counted.
Invariant: every metric is declared in this file with its unit in its name, and label values come from small fixed sets
(never a key, a URL or a step), so that the number of series is bounded.
Failure behaviour: counting never raises for a declared label set.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dataio.core.counting import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    REGISTRY: CollectorRegistry

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

store_requests = Counter("millrace_store_requests", "Requests to a store", ["backend", "operation", "outcome"])
store_seconds = Histogram(
    "millrace_store_seconds",
    "Time that an operation of a store took, each try by itself; a listing's with that of its reader",
    ["backend", "operation"],
    buckets=_SECONDS,
)
store_bytes = Counter("millrace_store_bytes", "Payload bytes to and from a store", ["backend", "direction"])
cache_bytes = Counter("millrace_cache_bytes", "Bytes asked of the node cache, by where they came from", ["source"])
cache_resident_bytes = Gauge("millrace_cache_resident_bytes", "Bytes that the node cache holds")
tier_read_bytes = Counter("millrace_tier_read_bytes", "Bytes of checkpoints read, by where they were", ["source"])
loader_samples = Counter("millrace_loader_samples", "Samples delivered", ["outcome"])
loader_wait_seconds = Histogram("millrace_loader_wait_seconds", "Time a trainer waited for a batch", buckets=_SECONDS)
quarantined_samples = Counter("millrace_quarantined_samples", "Samples refused, by reason code", ["reason"])
checkpoint_bytes = Counter("millrace_checkpoint_bytes", "Bytes of state saved, by what became of them", ["kind"])
checkpoint_saves = Counter("millrace_checkpoint_saves", "Saves by outcome", ["outcome"])
checkpoint_replicas_diverged = Counter(
    "millrace_checkpoint_replicas_diverged",
    "Tensors found in a save that should be the same on several ranks and are not",
)
checkpoint_stall_seconds = Histogram(
    "millrace_checkpoint_stall_seconds", "Time save() held the trainer", buckets=_SECONDS
)
checkpoint_waited_seconds = Histogram(
    "millrace_checkpoint_waited_seconds",
    "Time the trainer was held after save() by what was still being copied",
    buckets=_SECONDS,
)

_making = threading.Lock()


def __getattr__(name: str) -> object:
    if name != "REGISTRY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dataio.core.exposed import registry_of

    with _making:  # all have the same one
        here = globals()
        if name not in here:
            here[name] = registry_of([one for one in here.values() if isinstance(one, (Counter, Gauge, Histogram))])
        return here[name]
