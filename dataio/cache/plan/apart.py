"""Which reads go by themselves, although there is room for their blocks, and which of these blocks are kept all the same.

Purpose: of a film of an hour a clip reads its head and some hundred kilobytes far behind it, and what lies around them may not be
read for many epochs; of a shard of small samples everything is. Nobody says which it is, but one read of a film shows it: it
leaves out blocks between its ranges, and one sample of a shard does not. (Not every read does: loaders hold heads.)
Invariants: a read goes by itself once a read of its store has left out `HOLE` blocks and more, and if it is less than half of its
blocks. Once as many bytes of a block were read so as it has, it is worth keeping: so a store sends at most about twice what it
would if it were known how often each block will be read, and what all clips of a film read, such as its head, is kept at last.
At most `KNOWN` blocks and `STORES` stores are counted, and what was counted first is forgotten first. Sans-I/O.
Failure behaviour: none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headrace.dataio.cache.events import ObjectId, Ranges
from headrace.dataio.cache.plan.files import blocks_of

HOLE = 2
KNOWN, STORES = 1 << 14, 1 << 10


class Apart:
    """What is known of the reads of all stores."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._with_holes: OrderedDict[str, None] = OrderedDict()
        self._counted: OrderedDict[tuple[ObjectId, int], int] = OrderedDict()

    def read(self, obj: ObjectId, ranges: Ranges) -> None:
        """Somebody reads this now: all of it belongs to one sample."""
        if obj.source not in self._with_holes and self._has_hole(ranges):
            self._with_holes[obj.source] = None
            if len(self._with_holes) > STORES:
                self._with_holes.popitem(last=False)

    def takes(self, obj: ObjectId, ranges: Ranges) -> bool:
        """Whether these ranges had better come without the rest of their blocks."""
        if obj.source not in self._with_holes:
            return False
        size = len(blocks_of(ranges, self._block_bytes)) * self._block_bytes
        return 2 * sum(length for _, length in ranges) <= size

    def took(self, obj: ObjectId, ranges: Ranges) -> Iterator[int]:
        """They go so; the blocks that are worth keeping now."""
        for offset, length in ranges:
            for block in blocks_of(((offset, length),), self._block_bytes):
                first = block * self._block_bytes
                size = min(first + self._block_bytes, offset + length) - max(first, offset)
                counted = self._counted.pop((obj, block), 0) + size
                if counted >= self._block_bytes:
                    yield block
                else:
                    self._counted[obj, block] = counted
        while len(self._counted) > KNOWN:
            self._counted.popitem(last=False)

    def _has_hole(self, ranges: Ranges) -> bool:
        if len(ranges) < 2:
            return False
        first, end = min(offset for offset, _ in ranges), max(offset + length for offset, length in ranges)
        return end - first - sum(length for _, length in ranges) >= HOLE * self._block_bytes
