"""The metrics that every process counts, in one registry. Names follow the conventions of Prometheus.

Invariant: every metric of the registry is declared in this file, with its unit in its name. Label values are from small
fixed sets (never a key, a URL or a step), so the number of time series is bounded.

Failure behaviour: counting never raises for a declared set of labels.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

store_requests = Counter(
    "headrace_store_requests", "Requests to a store", ["backend", "operation", "outcome"], registry=REGISTRY
)
store_seconds = Histogram(
    "headrace_store_seconds",
    "Duration of each attempt of a store operation; for listings, it includes the time of the caller",
    ["backend", "operation"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
store_bytes = Counter(
    "headrace_store_bytes", "Payload bytes to and from a store", ["backend", "direction"], registry=REGISTRY
)
cache_bytes = Counter(
    "headrace_cache_bytes", "Bytes requested from the node cache, by source", ["source"], registry=REGISTRY
)
cache_resident_bytes = Gauge("headrace_cache_resident_bytes", "Bytes that the node cache holds", registry=REGISTRY)
tier_read_bytes = Counter(
    "headrace_tier_read_bytes", "Bytes of checkpoints read, by source", ["source"], registry=REGISTRY
)
loader_samples = Counter("headrace_loader_samples", "Samples delivered", ["outcome"], registry=REGISTRY)
loader_wait_seconds = Histogram(
    "headrace_loader_wait_seconds", "Time for which a trainer waited for a batch", buckets=_SECONDS, registry=REGISTRY
)
quarantined_samples = Counter(
    "headrace_quarantined_samples", "Samples skipped, by reason code", ["reason"], registry=REGISTRY
)
checkpoint_bytes = Counter("headrace_checkpoint_bytes", "Bytes of saved state, by outcome", ["kind"], registry=REGISTRY)
checkpoint_saves = Counter("headrace_checkpoint_saves", "Saves by outcome", ["outcome"], registry=REGISTRY)
checkpoint_replicas_diverged = Counter(
    "headrace_checkpoint_replicas_diverged",
    "Tensors found in a save that should be the same on several ranks and are not",
    registry=REGISTRY,
)
checkpoint_stall_seconds = Histogram(
    "headrace_checkpoint_stall_seconds",
    "Time for which save() blocked the trainer",
    buckets=_SECONDS,
    registry=REGISTRY,
)
checkpoint_waited_seconds = Histogram(
    "headrace_checkpoint_waited_seconds",
    "Time for which the trainer waited after save() for the copy of its state",
    buckets=_SECONDS,
    registry=REGISTRY,
)
