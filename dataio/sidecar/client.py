"""What loaders and checkpoints use of the sidecar: `open_reader` for shards, `Sidecar.find(...).stage(...)` for saves."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headrace.dataio.cache.readers.base import ShardReader, open_local_reader
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.sidecar.meters import LoaderMeter, SaveMeter
from headrace.dataio.sidecar.paths import chosen
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.dataio.sidecar.connection import Sidecar, SidecarName, Staged

__all__ = ["LoaderMeter", "SaveMeter", "Sidecar", "Staged", "open_reader"]

_log = get_logger(__name__)


def __getattr__(name: str) -> object:
    """With all that it takes to speak to a daemon, for those who do."""
    if name in ("Sidecar", "Staged"):
        return getattr(importlib.import_module("headrace.dataio.sidecar.connection"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_reader(store: Store, sidecar: SidecarName = "auto", meter: LoaderMeter | None = None) -> ShardReader:
    """A reader of `store`'s objects: through the node's sidecar while one answers, else by a cache inside this process.

    `sidecar` is "auto" (the default socket, or none where HEADRACE_SIDECAR=off), a socket's path, or None for never. Which it
    is, and why, is logged once. The sidecar is told what `meter` says. A sidecar that dies is done without, and used again when
    it is back; the bytes are the same.
    """
    if chosen(sidecar) is None:
        return open_local_reader(store)
    if not store.location.shareable:
        why = "it was opened with secrets or other options that never leave this process"
        warn_once(_log, f"{store.location.url} is not read through the sidecar: {why}")
        return open_local_reader(store)
    from headrace.dataio.sidecar.reader import SidecarReader

    return SidecarReader(store, sidecar, meter=meter)
