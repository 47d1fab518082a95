"""What the daemon is told, as plain values. `settings` makes one of flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.dataio.cache.turns import JobLimits
from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar.tier.config import Address, TierConfig

RESTART = (
    "socket",
    "cache_dir",
    "keep_cache",
    "http_port",
    "running_jobs",
    "queued_jobs",
    "retry_seconds",
    "fetch_threads",
    "fetch_memory",
    "tier_dir",
    "tier_bytes",
    "tier_steps",
    "buddy",
    "buddy_listen",
    "buddy_names",
    "buddy_rate",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "commands",
)
"""What SIGHUP does not change."""


@dataclass(frozen=True, slots=True)
class CacheTier:
    """A directory of the cache, and the most that it holds; None for `cache_bytes`."""

    path: Path
    bytes: int | None = None

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class Config:
    """What the daemon is told. Bytes and seconds; `http_port` None means no status endpoint, 0 any free port. `cache_dir` is one
    directory or several tiers, the fast one first. The limits of jobs are for each of them, 0 for none; bandwidth is in bytes a
    second."""

    socket: Path
    cache_dir: Path | tuple[CacheTier, ...]
    cache_bytes: int = 20 * limits.GIB
    http_port: int | None = 0
    clients: int = 1024
    running_jobs: int = 2
    queued_jobs: int = 16
    arena_bytes: int = field(default_factory=lambda: limits.memory_bytes() // 4)
    lost_seconds: float = 60.0
    retry_seconds: float = 3600.0
    drain_seconds: float = 300.0
    fetch_threads: int = 16
    fetch_memory: int = 24 * limits.MIB
    keep_cache: bool = True
    job_connections: int = 0
    job_bytes_in_flight: int = 0
    job_bandwidth: int = 0
    tier_dir: Path | None = None
    tier_bytes: int = 8 * limits.GIB
    tier_steps: int = 2
    buddy: Address | None = None
    buddy_listen: Address | None = None
    buddy_names: tuple[str, ...] = ()
    buddy_rate: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def tier(self) -> TierConfig | None:
        """The local tier and its buddies; `UsageError` for buddies without one."""
        if self.tier_dir is None:
            if self.buddy is not None or self.buddy_listen is not None:
                raise UsageError(
                    "buddy and buddy_listen need tier_dir", hint="name a directory on a tmpfs or local disk"
                )
            return None
        return TierConfig(
            self.tier_dir,
            self.tier_bytes,
            self.tier_steps,
            self.buddy,
            self.buddy_listen,
            self.buddy_names,
            self.buddy_rate,
            self.tls_cert,
            self.tls_key,
            self.tls_ca,
        )

    @property
    def job_limits(self) -> JobLimits:
        return JobLimits(self.job_connections, self.job_bytes_in_flight, self.job_bandwidth)

    @property
    def tiers(self) -> tuple[CacheTier, ...]:
        """At least one."""
        return (CacheTier(self.cache_dir),) if isinstance(self.cache_dir, Path) else self.cache_dir
