"""Reading byte ranges of an index part.

Purpose: all readers of parts report missing bytes with the same errors.
Failure behaviour: `CorruptionError` if a part is missing or too short, because the version document names it.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.versions.documents import IndexPart
from headrace.dataio.store.base import Store


def name_of(store: Store, part: IndexPart) -> str:
    """The name of a part in errors."""
    return f"{store.location.url}: {part.key}"


def fill(store: Store, part: IndexPart, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Read from the part into each (offset, buffer)."""
    try:
        store.get_ranges_into(part.key, ranges)
    except NotFoundError as error:
        raise CorruptionError(f"{name_of(store, part)} is missing, though the dataset version names it") from error
    except RangeError as error:
        why = f"shorter than the dataset version says: {error.message}"
        raise CorruptionError(f"{name_of(store, part)}: {why}") from error
