"""A store some of whose objects are known to be so large, since somebody has written it down.

Purpose: a cache wants to know an object's size before it fetches a part of it. Of a dataset's shards the version says it, and a
request for each costs a round trip before the first of its bytes.
Invariants: everything else is the store's own. Nobody is asked whether the object is there and what it was written, so this is
for those who read one version and keep nothing when they end.
Failure behaviour: none of its own; an object that is missing, or shorter, shows when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.wrappers import Wrapper


class Sized(Wrapper):
    """`inner`, with the sizes that `say` says, which is called once they are wanted."""

    def __init__(self, inner: Store, say: Callable[[], Mapping[str, int]]) -> None:
        super().__init__(inner)
        self._say = say

    def stat(self, key: str) -> ObjectInfo:
        size = self._sizes.get(key)
        return self.inner.stat(key) if size is None else ObjectInfo(key, size, 0.0)

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        self.inner.get_pieces(key, offset, buffer, take)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return self._say()
