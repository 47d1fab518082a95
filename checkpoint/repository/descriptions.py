"""Reads the descriptions of steps. The worker of rank 0 writes them (`saving.commit_worker`).

Invariant: a description that is returned has the digest that the step names.
Failure behaviour: `CorruptionError` for a damaged description. A missing one is None.
"""

from __future__ import annotations

from typing import Any

from headrace.checkpoint.format import description, names
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.store.base import Store

_READS = 3
"""The number of times that a description is fetched before it counts as damaged."""


def read(store: Store, run: str, digest: str) -> dict[str, Any] | None:
    """The description with this digest, by section; None if the digest is "" or the object is missing."""
    data = read_data(store, run, digest)
    return None if data is None else description.decode(data, digest, names.description(run, digest))


def read_data(store: Store, run: str, digest: str) -> bytes | None:
    """The stored bytes of the description with this digest; None if the digest is "" or the object is missing."""
    if not digest:
        return None
    key = names.description(run, digest)
    for reads_left in reversed(range(_READS)):
        try:
            data = store.get(key, max_bytes=description.MAX_BYTES)
            description.decode(data, digest, key)
            return data
        except NotFoundError:
            return None
        except CorruptionError:
            if not reads_left:
                raise
            store.invalidate(key)
    return None
