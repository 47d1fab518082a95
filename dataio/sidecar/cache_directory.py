"""The daemon's cache directories: whose they are, and how large the cache in each may be.

Invariant: files are kept for the next daemon only by the one that holds `<directory>/lock`; the kernel drops it with
its holder.
Failure behaviour: a directory where no lock can be had or made is used without keeping anything, which is said once;
`AccessDeniedError` for a directory that others may enter. Of several tiers one that is not there is left out, with a
warning; where none is left, `UsageError` names each and why.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.dataio.cache.disks import TierDirectory
from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.files import private_directory
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.settings import CacheTier

_log = get_logger(__name__)


@dataclass(slots=True)
class CacheDirectory:
    """A private directory. `lock` is a descriptor, or None where nothing may be kept."""

    path: Path
    lock: int | None

    @classmethod
    def claim(cls, path: Path, keep: bool) -> CacheDirectory:
        """Make it when absent; become the one that keeps files in it, if that is wanted and possible."""
        private_directory(path)
        return cls(path, _lock(path) if keep else None)

    def budget(self, asked: int) -> int:
        """What was asked for, or most of what the disk has for it when that is less."""
        disk = os.statvfs(self.path)
        room = disk.f_bavail * disk.f_frsize // 10 * 9 + self._kept_bytes()
        if room < asked:
            _log.warning("the disk of %s has room for a cache of %s only", self.path, limits.format_bytes(room))
        return min(room, asked)

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def _kept_bytes(self) -> int:
        if self.lock is None:
            return 0
        return sum(path.lstat().st_blocks * 512 for path in self.path.glob("*.blocks"))


class CacheDirectories:
    """The tiers that can be used, the fast one first."""

    def __init__(self, claimed: Sequence[tuple[CacheTier, CacheDirectory]] = ()) -> None:
        self._claimed = claimed

    @classmethod
    def claim(cls, tiers: Sequence[CacheTier], keep: bool) -> CacheDirectories:
        """All of them; `UsageError` when not one can be made."""
        found, trouble = list[tuple[CacheTier, CacheDirectory]](), list[str]()
        for tier in tiers:
            try:
                found.append((tier, CacheDirectory.claim(tier.path, keep)))
            except OSError as error:
                trouble.append(f"{tier.path}: {error.strerror}")
        if not found:
            raise UsageError(
                f"no directory for the cache can be made: {', '.join(trouble)}",
                hint="give --cache-dir a directory on a disk that can be written, such as local NVMe or a tmpfs",
            )
        for reason in trouble:
            _log.warning("the cache does without %s", reason)
        return cls(found)

    def places(self, cache_bytes: int) -> list[TierDirectory]:
        """For the engine; `cache_bytes` for the tiers that name no bytes of their own."""
        return [
            TierDirectory(directory.path, directory.budget(tier.bytes or cache_bytes), directory.lock is not None)
            for tier, directory in self._claimed
        ]

    def close(self) -> None:
        for _, directory in self._claimed:
            directory.close()


def _lock(path: Path) -> int | None:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("nothing in %s will outlive this daemon: %s", path, error.strerror)
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        _log.warning("another daemon keeps its files in %s: nothing of this one will outlive it", path)
        return None
    return lock
