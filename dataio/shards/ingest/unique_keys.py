"""Finds samples of the same key in two tars, in bounded memory.

Invariant: memory holds 8 bytes for each of the first `MAX_HASHES` keys. With more keys, DuckDB compares all of them at
the end, on disk.

Failure behaviour: equal keys raise `UsageError`, which names both tars. Two keys with one hash count as equal. Without
DuckDB, the first key above `MAX_HASHES` raises `MissingExtraError`.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.ingest.tar_scanner import SourceShard

MAX_HASHES = 1 << 24
"""With more samples, repeated keys are found on disk at the end. DuckDB finds them in 512 MiB of memory."""


class UniqueKeys:
    """Finds equal keys in two shards.

    It holds the 8-byte hashes of the first `MAX_HASHES` keys, and checks whenever the number of samples has doubled.
    With more keys, `check_stored` checks all of them at the end, on disk.
    """

    def __init__(self, shards: Sequence[SourceShard]) -> None:
        self._shards = shards
        self._hashes, self._ends = array.array("Q"), list[tuple[int, int]]()
        self._next_check = 2
        self.holds_all = True
        """Whether `check` knows all keys that were added."""

    def add(self, shard: int, keys: Sequence[str]) -> None:
        if len(self._hashes) + len(keys) > MAX_HASHES:
            if self.holds_all:
                from headrace.dataio.shards.query.conditions import import_duckdb

                import_duckdb()  # `check_stored` needs it, and hours may pass until then
            self.holds_all = False
            return
        self._hashes.extend(xxhash.xxh3_64_intdigest(key.encode()) for key in keys)
        self._ends.append((len(self._hashes), shard))
        if len(self._ends) > 1 and len(self._hashes) >= self._next_check:
            self.check()
            self._next_check = 2 * len(self._hashes)

    def check(self) -> None:
        """Raise `UsageError` if the hashes of two keys are equal."""
        hashes = np.frombuffer(self._hashes, np.uint64) if self._hashes else np.empty(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        equal = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if len(equal):
            first, second = (self._shard_of(int(order[equal[0] + i])) for i in (0, 1))
            raise self._error(first, second)

    def check_stored(self, tables: Callable[[], Iterable[Any]]) -> None:
        """Raise `UsageError` if two rows of `tables`, which have the columns "key" and "shard", have the same key."""
        from headrace.dataio.shards.query.tables import repeated_keys  # imports Arrow

        if not (keys := repeated_keys(tables())):
            return
        by_key = {shard.key: shard for shard in self._shards}
        holders = list[SourceShard]()
        for table in tables():
            rows = zip(table["key"].to_pylist(), table["shard"].to_pylist(), strict=True)
            holders += [by_key[shard] for key, shard in rows if key == keys[0]]
        raise self._error(*holders[:2])

    def _error(self, first: SourceShard, second: SourceShard) -> UsageError:
        return UsageError(
            f"{first.url} and {second.url} hold samples of the same key",
            hint="keys='shard' (--keys shard) puts the shard's path in front of every key",
        )

    def _shard_of(self, position: int) -> SourceShard:
        return self._shards[next(shard for end, shard in self._ends if position < end)]
