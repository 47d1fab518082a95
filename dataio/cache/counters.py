"""Counts the bytes that readers of one cache engine requested, and how many of them were present.

Invariant: the counts of an engine are exact; the process's metrics follow after at most `REPORT_EVERY_READS` reads,
because updating a metric costs more than counting. The caller holds the engine's lock.
Failure behaviour: it raises no errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dataio.cache.disks import TierDirectory
from headrace.dataio.core import metrics

REPORT_EVERY_READS = 64
_CACHE_BYTES = {source: metrics.cache_bytes.labels(source) for source in ("bypass", "cache", "store")}


class ReadCounters:
    """The counters of an engine with `tiers` tiers.

    - `totals`: bytes fetched, requested and found; announced reads that were ready or late
    - `tier_hits`: bytes found in each tier
    """

    def __init__(self, tiers: int) -> None:
        self.totals = {"fetched_bytes": 0, "asked_bytes": 0, "hit_bytes": 0, "reads_ready": 0, "reads_late": 0}
        self.tier_hits = [0] * tiers
        self._unreported = dict.fromkeys(_CACHE_BYTES, 0)
        self._reads = 0

    def add(self, size: int, *, present: bool, bypassed: bool, announced: bool) -> None:
        """Count a read of `size` bytes. `announced`: it belongs to a stream that announces its reads."""
        self._unreported["bypass" if bypassed else "cache" if present else "store"] += size
        self._reads += 1
        if self._reads >= REPORT_EVERY_READS:
            self.report()
        self.totals["asked_bytes"] += size
        self.totals["hit_bytes"] += size if present else 0
        if announced:
            self.totals["reads_ready" if present else "reads_late"] += 1

    def hit(self, tier: int | None, size: int) -> None:
        """Count bytes that were found in a tier; `tier` is None if the file was dropped meanwhile."""
        if tier is not None:
            self.tier_hits[tier] += size

    def tier_stats(
        self, tiers: Sequence[TierDirectory], usage: Sequence[tuple[int, int, bool]]
    ) -> list[dict[str, object]]:
        """The status of each tier. `usage` are (budget, used bytes, whether the disk can be written) of each."""
        return [
            {
                "directory": str(tier.path),
                "budget_bytes": budget,
                "used_bytes": used,
                "hit_bytes": hits,
                "paused": not usable,
            }
            for tier, hits, (budget, used, usable) in zip(tiers, self.tier_hits, usage, strict=True)
        ]

    def report(self) -> None:
        """Add the counts to the process's metrics."""
        self._reads = 0
        for source, size in self._unreported.items():
            if size:
                _CACHE_BYTES[source].inc(size)
                self._unreported[source] = 0
