"""Storing index parts.

Purpose: whoever makes samples hands them over in the order of their numbers and gets what the version document names.
Invariants: a part has at most `PART_ROWS` rows; its key holds a digest of its bytes, so equal rows give equal objects and
different ones never replace each other.
Failure behaviour: the store's errors pass through; parts stored by then are named by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataio.shards.contract import Sample
from dataio.shards.index import rows as index
from dataio.shards.index.digests import digest
from dataio.shards.versions.documents import IndexPart
from dataio.store.contract import Store

PART_ROWS = 100_000
FIELD_NAMES = 256
"""So many names of promoted fields are recorded of a part, the first ones by name."""


def store_parts(store: Store, samples: Sequence[Sample], first: int) -> list[IndexPart]:
    """Store `samples` as the parts number `first` and following, and describe them. No samples, no parts."""
    made = list[IndexPart]()
    for number, start in enumerate(range(0, len(samples), PART_ROWS), first):
        rows = samples[start : start + PART_ROWS]
        size = sum(member.length for sample in rows for member in sample.members)
        made.append(store_part(store, number, index.write_part(rows), len(rows), size, field_types(rows)))
    return made


def store_part(store: Store, number: int, part: index.Part, rows: int, size: int, fields: dict[str, str]) -> IndexPart:
    """Store a part, and how a version names it; `size` is that of its samples' members."""
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
    """The types of the promoted fields by name; fields that are always null have none."""
    types = dict[str, str]()
    for sample in samples:
        for name, value in sample.fields.items():
            if value is not None:
                kind = _type_of(value)
                types[name] = join_types(types.get(name, kind), kind)
    return {name: types[name] for name in sorted(types)[:FIELD_NAMES]}


def join_types(one: str, other: str) -> str:
    """The type that holds values of both."""
    if one == other:
        return one
    return "number" if {one, other} == {"integer", "number"} else "mixed"


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "number"
    return "number" if isinstance(value, float) else "text"
