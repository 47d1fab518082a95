"""Storing samples as index parts.

Purpose: a packer or indexer adds samples in the order of their numbers, and gets the parts' entries for the version
document.
Invariants: a part has at most `PART_ROWS` rows, and is stored once the weight of its rows reaches `PART_WEIGHT`. So a
part is never larger than what readers accept (`documents.PART_BYTES`), and writing it takes no more memory than that.
The key of a part holds a digest of its bytes. So equal rows give equal objects, and different rows never replace each
other.
Failure behaviour: the store's errors pass through. No version document names the parts that were stored before the
error.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.dataio.core import limits
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.index.digests import digest
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions.documents import IndexPart
from headrace.dataio.store.base import Store

PART_ROWS = 50_000
PART_WEIGHT = 32 * limits.MIB
"""The approximate size of a part's rows before compression, in bytes. 50,000 clips have fewer, 1,000 films have
more."""
FIELD_NAMES = 256
"""The most promoted fields that are recorded for a part. The first ones in order of their names are recorded."""


class PartWriter:
    """Stores samples as parts, numbered from `first`. The caller adds samples in the order of their numbers."""

    def __init__(self, store: Store, first: int) -> None:
        self._store, self._first = store, first
        self._rows, self._weight = list[Sample](), 0
        self._stored = list[IndexPart]()

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples, and store each part that becomes full."""
        for sample in samples:
            self._rows.append(sample)
            self._weight += _weight(sample)
            if len(self._rows) >= PART_ROWS or self._weight >= PART_WEIGHT:
                self._store_part()

    def close(self) -> list[IndexPart]:
        """Store the remaining samples and return all parts. Without samples, there are no parts."""
        if self._rows:
            self._store_part()
        return self._stored

    def _store_part(self) -> None:
        rows, self._rows, self._weight = self._rows, [], 0
        size = sum(member.length for sample in rows for member in sample.members)
        number = self._first + len(self._stored)
        self._stored.append(store_part(self._store, number, index.write_part(rows), len(rows), size, field_types(rows)))


def store_parts(store: Store, samples: Iterable[Sample], first: int) -> list[IndexPart]:
    """Store `samples` as parts, numbered from `first`, and return the parts."""
    writer = PartWriter(store, first)
    writer.add(samples)
    return writer.close()


def _weight(sample: Sample) -> int:
    key_frames = 0 if sample.video is None else len(sample.video.key_frames)
    pieces = sum(len(m.pieces.digests) + 16 * len(m.pieces.marks) for m in sample.members if m.pieces is not None)
    fields = sum(len(name) + len(str(value)) for name, value in sample.fields.items())
    return 256 + 24 * key_frames + 64 * len(sample.members) + pieces + len(sample.text or "") + fields


def store_part(store: Store, number: int, part: index.Part, rows: int, size: int, fields: dict[str, str]) -> IndexPart:
    """Store a part and return its entry for the version document. `size` is the total bytes of its samples' members."""
    whole = digest(part.data)
    key = f"index/{number:08}-{whole[:16]}.parquet"
    store.put(key, part.data)
    return IndexPart(
        key=key,
        size=len(part.data),
        rows=rows,
        bytes=size,
        digest=whole,
        footer=part.footer,
        footer_digest=digest(part.data[-part.footer :]),
        pages=part.section,
        fields=fields,
        only=index.only(part.data),
        files=part.files,
    )


def field_types(samples: Iterable[Sample]) -> dict[str, str]:
    """The types of the promoted fields, by name. Fields that are always null are left out."""
    types = dict[str, str]()
    for sample in samples:
        for name, value in sample.fields.items():
            if value is not None:
                kind = _type_of(value)
                types[name] = join_types(types.get(name, kind), kind)
    return {name: types[name] for name in sorted(types)[:FIELD_NAMES]}


def join_types(one: str, other: str) -> str:
    """The type that can hold values of both types."""
    if one == other:
        return one
    return "number" if {one, other} == {"integer", "number"} else "mixed"


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "number"
    return "number" if isinstance(value, float) else "text"
