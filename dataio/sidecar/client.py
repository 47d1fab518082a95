"""The sidecar's client API: `open_reader` for shards, `Sidecar.find(...).stage(...)` for saves.

Invariant: importing this module imports neither the protocol nor `socket`. `Sidecar` and `StagedJob` are imported on
first use.
Failure behaviour: without a daemon, `open_reader` returns a reader that reads inside the process, and logs this once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headrace.dataio.cache.readers.base import ShardReader, may_have_local_files, open_local_reader
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.sidecar.meters import LoaderMeter, SaveMeter
from headrace.dataio.sidecar.paths import chosen
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.dataio.sidecar.connection import Sidecar, SidecarName
    from headrace.dataio.sidecar.staged_jobs import StagedJob

__all__ = ["LoaderMeter", "SaveMeter", "Sidecar", "StagedJob", "open_reader"]

_LAZY = {"Sidecar": "connection", "StagedJob": "staged_jobs"}

_log = get_logger(__name__)


def __getattr__(name: str) -> object:
    """Import the modules of the connection only when they are used."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"headrace.dataio.sidecar.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_reader(store: Store, sidecar: SidecarName = "auto", meter: LoaderMeter | None = None) -> ShardReader:
    """Open a reader of `store`'s objects. It reads through the node's sidecar if one answers, else inside this process.

    The choice and its reason are logged once. When the sidecar dies, the reader continues without it, and uses it again
    when it is back. The bytes are the same.

    Args:
        store: The store that holds the shards.
        sidecar: "auto" (the default socket, or none if HEADRACE_SIDECAR=off), the path of a socket, or None for no
            sidecar.
        meter: Measures the loader that reads; its totals are reported to the sidecar.

    Returns:
        The reader. Its methods raise the store's errors.
    """
    if chosen(sidecar) is None:
        return open_local_reader(store)
    if not store.location.shareable:
        reason = "its options include secrets or a file system object, which are never sent to another process"
        warn_once(_log, f"{store.location.url} is not read through the sidecar: {reason}", "node")
        return open_local_reader(store)
    from headrace.dataio.sidecar.reader import SidecarReader

    return SidecarReader(store, sidecar, meter=meter)


def open_shard_reader(store: Store, sidecar: SidecarName = "auto", meter: LoaderMeter | None = None) -> ShardReader:
    """As `open_reader`, but local files are read directly, also if a sidecar answers.

    The kernel's page cache already shares local files between the processes of a node. The daemon would copy them into
    a second cache. It still gets the loader's figures.
    """
    reader = open_reader(store, sidecar, meter)
    if not may_have_local_files(store):
        return reader
    from headrace.dataio.cache.readers.local import DirectReader

    if isinstance(reader, DirectReader):
        return reader
    return DirectReader(store, reader, count=meter.read if meter is not None else None)
