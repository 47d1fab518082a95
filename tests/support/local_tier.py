"""Stores and shelves for the tier's tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record, TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.wrappers import Wrapper

T = TypeVar("T")


class Counting(Wrapper):
    """Counts what reaches the store; `before` may do something first."""

    def __init__(self, inner: Store, before: Callable[[str, str], None] = lambda _operation, _key: None) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self.before = before

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        self.calls.append((operation, key))
        self.before(operation, key)
        return work()

    def count(self, operation: str) -> int:
        return Counter(name for name, _ in self.calls)[operation]


def local_tier(path: Path, size: int = 512 * MIB, steps: int = 2) -> LocalTier:
    return LocalTier(path / "tier", TierLimits(size, steps))


def record(
    source: str, step: int, keys: Sequence[str], *, committed: float = 1.0, references: Sequence[str] = ()
) -> Record:
    return Record(
        source=source,
        run="run",
        timeline=1,
        step=step,
        attempt=f"A{step}",
        rank=0,
        world_size=1,
        own=tuple(keys),
        references=tuple(references),
        created=float(step),
        committed=committed,
    )


def is_pack(key: str) -> bool:
    return key.startswith("packs/")
