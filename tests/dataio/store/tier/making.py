"""Stores and shelves for the tier's tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.dataio.core.limits import MIB
from headrace.dataio.store.contract import Store
from headrace.dataio.store.tier.record import Record
from headrace.dataio.store.tier.retention import Limits
from headrace.dataio.store.tier.shelf import Shelf
from headrace.dataio.store.wrapper import Wrapper

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


def shelf(path: Path, size: int = 512 * MIB, steps: int = 2) -> Shelf:
    return Shelf(path / "tier", Limits(size, steps))


def record(source: str, step: int, keys: Sequence[str], *, committed: float = 1.0, leans: Sequence[str] = ()) -> Record:
    return Record(
        source=source,
        run="run",
        timeline=1,
        step=step,
        attempt=f"A{step}",
        rank=0,
        world_size=1,
        own=tuple(keys),
        leans=tuple(leans),
        created=float(step),
        committed=committed,
    )


def is_pack(key: str) -> bool:
    return key.startswith("packs/")
