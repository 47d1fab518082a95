"""A directory whose raw chunks go into device memory by cuFile.

Invariant: a `GdsStore` is the store that it wraps; only the bytes of raw chunks take another way.
Failure behaviour: `direct_for` never raises: where cuFile cannot be used it is None, and one line of the log says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from headrace.checkpoint.gds.file import CUFILE, FILE, Direct, directory_of
from headrace.checkpoint.gds.probe import probe
from headrace.checkpoint.gds.restoring import Place, StraightReading
from headrace.checkpoint.restoring.restore import Reading
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Store
from headrace.dataio.store.wrappers import Wrapper

_log = get_logger(__name__)


def direct_for(store: Store, wanted: bool | Direct) -> Direct | None:
    """What moves bytes between the store and device memory; None: nothing does. True means cuFile, if it works there."""
    if not wanted:
        return None
    url = store.location.url
    if not url.startswith(FILE):
        warn_once(_log, f"GPUDirect Storage: not available, {url} is no directory; copies go through host memory")
        return None
    if isinstance(wanted, Direct):
        return wanted
    verdict = probe(_existing(directory_of(store)))
    if not verdict.available:
        warn_once(_log, str(verdict))
        return None
    _log.info("%s", verdict)
    return CUFILE


class GdsStore(Wrapper):
    """`inner`, a directory, with `direct`. `straight`: bytes that were read by it."""

    def __init__(self, inner: Store, direct: Direct) -> None:
        super().__init__(inner)
        self._direct, self.straight = direct, 0

    def read_straight(self, reading: Reading, chunks: Iterable[Place]) -> list[Place]:
        """See `restore.ReadsStraight`."""
        work = StraightReading(reading, self._direct, self.inner, directory_of(self.inner))
        rest = work.read(chunks)
        self.straight += work.straight
        return rest


def _existing(path: str) -> str:
    """The directory, or the nearest one above it that is there: a store makes its own at the first write."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
