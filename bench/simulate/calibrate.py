"""What was measured on one machine, taken over into the model.

Invariant: pure; only medians of our own candidate are taken, and each is said. What a file does not hold stays as it was.
Failure behaviour: a file from which nothing can be taken says so.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from headrace.bench.core.results import Part, Run
from headrace.bench.simulate.cluster import Cluster, Job


def calibrated(run: Run, cluster: Cluster, work: Job) -> tuple[Cluster, Job, list[str]]:
    """A node's best read from a store (`store`), its disk (`llm-checkpoint`), copies to the host (the drill's `staging`)."""
    notes: list[str] = []
    for part in run.parts:
        if part.name in ("store", "directory"):
            cluster = _store(part, cluster, notes)
        elif part.name == "llm-checkpoint":
            cluster = _disk(part, cluster, notes)
        elif part.name == "staging" and "cuda" in str(part.settings.get("device")):
            cluster, work = _staging(part, cluster, work, notes)
    return cluster, work, notes or ["nothing in it that the model can take over"]


def _store(part: Part, cluster: Cluster, notes: list[str]) -> Cluster:
    ours = next(iter(part.candidates.values())).metrics if part.candidates else {}
    rates = [
        statistics.median(ours[name])
        for name, metric in part.metrics.items()
        if metric.quantity == "throughput" and metric.axes.get("operation") == "get" and ours.get(name)
    ]
    if not rates:
        return cluster
    notes.append(f"a node reads {max(rates):.3g} MB/s at most")
    return replace(cluster, nic_rate=max(rates) * 1e6)


def _disk(part: Part, cluster: Cluster, notes: list[str]) -> Cluster:
    ours = part.candidates["headrace"].metrics if "headrace" in part.candidates else {}
    if not ours.get("write") or not ours.get("read"):
        return cluster
    write, read = statistics.median(ours["write"]), statistics.median(ours["read"])
    notes.append(f"the local tier writes {write:.3g} and reads {read:.3g} GB/s")
    return replace(cluster, tier_write=write * 1e9, tier_read=read * 1e9)


def _staging(part: Part, cluster: Cluster, work: Job, notes: list[str]) -> tuple[Cluster, Job]:
    rates = [
        statistics.median(found.metrics["rate"]) for found in part.candidates.values() if found.metrics.get("rate")
    ]
    shares = [value for found in part.candidates.values() for value in found.metrics.get("share", [])]
    if rates:
        cluster = replace(cluster, d2h_rate=max(rates) * 1e9)
        notes.append(f"device to host {max(rates):.3g} GB/s")
    if shares:
        work = replace(work, stage_efficiency=statistics.median(shares) / 100)
        notes.append(f"save copies at {statistics.median(shares):.3g} % of that")
    return cluster, work
