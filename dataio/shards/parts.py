"""Storing index parts.

Purpose: whoever makes samples hands them over in the order of their numbers and gets what the version document names.
Invariants: a part has at most `PART_ROWS` rows; its key holds a digest of its bytes, so equal rows give equal objects and
different ones never replace each other.
Failure behaviour: the store's errors pass through; parts stored by then are named by nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataio.shards import index
from dataio.shards.contract import Sample
from dataio.shards.versions import IndexPart
from dataio.store.contract import Store

PART_ROWS = 100_000


def store_parts(store: Store, samples: Sequence[Sample], first: int) -> list[IndexPart]:
    """Store `samples` as the parts number `first` and following, and describe them. No samples, no parts."""
    return [
        _store_part(store, samples[start : start + PART_ROWS], first + number)
        for number, start in enumerate(range(0, len(samples), PART_ROWS))
    ]


def _store_part(store: Store, samples: Sequence[Sample], number: int) -> IndexPart:
    data = index.write_part(samples)
    found = index.digest(data)
    key = f"index/{number:08}-{found[:16]}.parquet"
    store.put(key, data)
    return IndexPart(key=key, size=len(data), rows=len(samples), digest=found)
