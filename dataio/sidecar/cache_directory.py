"""The daemon's cache directories: which daemon owns them, and how large the cache in each may be.

Invariant: only the daemon that holds the lock `<directory>/lock` keeps files for the next daemon. The kernel releases
the lock when the daemon dies.
Failure behaviour: when the lock cannot be created or is taken, the daemon uses the directory without keeping files, and
logs a warning. `AccessDeniedError` for a directory that other users may enter. A tier whose directory cannot be used is
left out with a warning; if no tier is left, `UsageError` lists each with its reason.
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
    """A private directory. `lock` is a descriptor, or None when no files may be kept."""

    path: Path
    lock: int | None

    @classmethod
    def claim(cls, path: Path, keep: bool) -> CacheDirectory:
        """Create the directory if it is absent. With `keep`, try to take the lock that allows keeping files."""
        private_directory(path)
        return cls(path, _take_lock(path) if keep else None)

    def budget(self, wanted_bytes: int, in_use: int = 0) -> int:
        """The smaller of `asked` and the room on the disk: nine tenths of the free space plus the cache's own files.

        `in_use` is the size of a running cache without the lock, whose files cannot be seen in the directory.
        """
        disk = os.statvfs(self.path)
        room = disk.f_bavail * disk.f_frsize // 10 * 9 + (in_use if self.lock is None else self._block_file_bytes())
        if room < wanted_bytes:
            _log.warning("the disk of %s has room for a cache of %s only", self.path, limits.format_bytes(room))
        return min(room, wanted_bytes)

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def _block_file_bytes(self) -> int:
        with os.scandir(self.path) as entries:
            block_files = (entry for entry in entries if entry.name.endswith(".blocks"))
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in block_files)


class CacheDirectories:
    """The usable tiers, fastest first."""

    def __init__(self, claimed: Sequence[tuple[CacheTier, CacheDirectory]] = ()) -> None:
        self._claimed = claimed

    @classmethod
    def claim(cls, tiers: Sequence[CacheTier], keep: bool) -> CacheDirectories:
        """Claim every usable tier; `UsageError` when there is none."""
        claimed, failures = list[tuple[CacheTier, CacheDirectory]](), list[str]()
        for tier in tiers:
            try:
                claimed.append((tier, CacheDirectory.claim(tier.path, keep)))
            except OSError as error:
                failures.append(f"{tier.path}: {error.strerror}")
        if not claimed:
            raise UsageError(
                f"no directory for the cache can be created: {', '.join(failures)}",
                hint="give --cache-dir a directory on a disk that can be written, such as local NVMe or a tmpfs",
            )
        for reason in failures:
            _log.warning("the cache does not use %s", reason)
        return cls(claimed)

    def places(self, cache_bytes: int, in_use: Sequence[int] = ()) -> list[TierDirectory]:
        """The tiers for the engine. A tier without its own size gets `cache_bytes`.

        `in_use`: the used bytes of each tier of a running engine.
        """
        return [
            TierDirectory(directory.path, directory.budget(tier.bytes or cache_bytes, used), directory.lock is not None)
            for (tier, directory), used in zip(self._claimed, in_use or [0] * len(self._claimed), strict=True)
        ]

    def close(self) -> None:
        for _, directory in self._claimed:
            directory.close()


def _take_lock(path: Path) -> int | None:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("no file in %s is kept for the next daemon: %s", path, error.strerror)
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        _log.warning("another daemon keeps its files in %s: no file of this daemon is kept for the next one", path)
        return None
    return lock
