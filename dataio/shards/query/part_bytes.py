"""Bytes of an index part.

Purpose: what is missing of a part is said in one way, whoever reads it.
Failure behaviour: `CorruptionError` for a part that is missing or too short, since the version says that it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.versions.documents import IndexPart
from headrace.dataio.store.base import Store


def name_of(store: Store, part: IndexPart) -> str:
    """What errors call a part."""
    return f"{store.location.url}: {part.key}"


def fill(store: Store, part: IndexPart, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Fill every (offset, buffer) from the part."""
    try:
        store.get_ranges_into(part.key, ranges)
    except NotFoundError as error:
        raise CorruptionError(f"{name_of(store, part)} is missing, though the dataset version names it") from error
    except RangeError as error:
        why = f"shorter than the dataset version says: {error.message}"
        raise CorruptionError(f"{name_of(store, part)}: {why}") from error
