"""What the daemon is told, as plain values. `settings` makes one of flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataio.core import limits

RESTART = (
    "socket",
    "cache_dir",
    "keep_cache",
    "http_port",
    "running_jobs",
    "queued_jobs",
    "fetch_threads",
    "commands",
)
"""What SIGHUP does not change."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the daemon is told. Bytes and seconds; `http_port` None means no status endpoint, 0 any free port."""

    socket: Path
    cache_dir: Path
    cache_bytes: int = 20 * limits.GIB
    http_port: int | None = 0
    clients: int = 1024
    running_jobs: int = 2
    queued_jobs: int = 16
    drain_seconds: float = 300.0
    fetch_threads: int = 16
    keep_cache: bool = True
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
