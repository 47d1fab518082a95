"""Opens the stores of a dataset and its copy, and reads the version document, on any machine that runs `verify` units.

Invariant: locations hold no secrets. Each machine opens the stores with its own credentials.
Failure behaviour: a store that other machines cannot open raises `UnsupportedError`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from headrace.dataio.shards.units.engine import check_shareable
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.workers.worker_pool import worker_count
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_location

_MAX_THREADS = 8


class VersionStores(msgspec.Struct, frozen=True):
    """The locations of a dataset (with its mounts) and of its copy, and the number of the version."""

    store: Location
    copy: Location | None
    version: int


def stores_of(store: Store, copy: Store | None, document: versions.VersionDocument) -> VersionStores:
    """Return the locations for another machine."""
    stores = VersionStores(store.location, None if copy is None else copy.location, document.version)
    check_shareable(*(at for at in (stores.store, stores.copy) if at is not None))
    return stores


@contextlib.contextmanager
def open_stores(stores: VersionStores) -> Iterator[tuple[Store, Store | None, versions.VersionDocument]]:
    """Open the stores, and read the version document."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_location(stores.store))
        copy = None if stores.copy is None else stack.enter_context(open_location(stores.copy))
        yield store, copy, history.load(store, stores.version)[0]


def local_threads(workers: int | None) -> int:
    """Return the number of objects to read at once on this machine."""
    return worker_count(workers, min(_MAX_THREADS, os.cpu_count() or 1))
