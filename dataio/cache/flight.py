"""A fetch on its way, and what became of it.

Invariant: of several attempts at one, the first that has all of it in the file counts (`passing`).
Failure behaviour: none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.dataio.cache.blocks import BlockFile
from headrace.dataio.cache.events import Fetch
from headrace.dataio.cache.passing import Part
from headrace.dataio.store.base import Store

Landed = tuple[Fetch, BaseException | None, int]
"""A fetch that is over, its error, and the bytes from the store."""


@dataclass(slots=True, eq=False)
class Flight:
    """A fetch for a job, asked for `within` a span. `here` are the files that have some of its bytes; `wanted()` whether
    somebody waits for it."""

    fetch: Fetch
    file: BlockFile
    store: Store
    key: str
    here: Sequence[BlockFile]
    wanted: Callable[[], bool]
    job: str = ""
    within: str = ""
    attempts: int = 1
    done: bool = False
    since: float = 0.0
    part: Part = field(init=False)

    def __post_init__(self) -> None:
        self.part = Part(self.file, self.fetch.block, self.fetch.offset)

    @property
    def plain(self) -> bool:
        """Whether all of it comes from the store, and is asked for the first time."""
        return self.attempts == 1 and not self.fetch.here and not self.fetch.adopted

    @property
    def cost(self) -> int:
        """Bytes that the store is asked for, as far as can be known: none where an earlier daemon left them."""
        return 0 if self.fetch.adopted else self.fetch.length - sum(size for _, _, size in self.fetch.here)
