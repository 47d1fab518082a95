"""The quarantine of one loader: the samples that it skipped, and why.

Purpose: one damaged sample costs itself and nothing else, and the log names it.

Invariants:
- Which samples are skipped is a pure function of the stored bytes and the order, never of timing. Every world size and
  every resumed run skips and substitutes the same samples. A shared list enters by its version.
- Wrong *bytes* (a checksum that does not match, a missing shard) mark the sample as known bad. It is skipped wherever
  it comes up again, and its number is part of the loader's state, so a later repair does not change a run that goes on.
- A *clip* that does not decode, or that needs a wrong piece of a file that is read in part, is skipped only there.
  Other clips of the same video may be whole, and this rank does not know what other ranks read of it.

Failure behaviour: `CorruptionError` once more than `limit` samples were skipped: then something larger is wrong. Each
sample is logged once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

from headrace.dataio.core import metrics
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.quarantine.records import SkippedSample
from headrace.loaders.validation import checked

_log = get_logger(__name__)


def skips_allowed(limit: float, samples: int) -> int:
    """How many samples may be skipped: `limit` itself or, if it is below 1, that share of the epoch's `samples`, at
    least one."""
    limit = checked("max_bad_samples", limit, float)
    if not 0 <= limit < math.inf or (limit >= 1 and limit != int(limit)):
        raise UsageError(f"max_bad_samples={limit!r} is neither a share nor a number", hint="use 0.01, or 100")
    return math.ceil(limit * samples) if 0 < limit < 1 else int(limit)


class Quarantine:
    """The samples that one loader skipped. Safe to share between threads.

    Args:
        limit: how many samples may be skipped.
        on_first: called once for each skipped sample.
        remember: called for each sample with wrong bytes, and its epoch. It returns True if it remembers the sample
            from now on, so that states need not.
    """

    def __init__(
        self,
        limit: int,
        on_first: Callable[[SkippedSample], None] = lambda _: None,
        remember: Callable[[SkippedSample, int], bool] | None = None,
    ) -> None:
        self._limit, self._on_first, self._remember = limit, on_first, remember
        self._lock = threading.Lock()
        self._known_bad: dict[tuple[int, int], HeadraceError] = {}
        self._delivered: dict[tuple[int, int], SkippedSample] = {}
        self._loaded: frozenset[tuple[int, int]] = frozenset()
        self._remembered = set[tuple[int, int]]()

    def mark_bad(self, ref: SampleRef, error: HeadraceError) -> None:
        """Never read this sample again. It is skipped at once, and listed when its batch is delivered.

        The error is kept without its frames, which would keep the bytes that were read.
        """
        with self._lock:
            self._known_bad.setdefault((ref.source, ref.sample.id), type(error)(error.message, hint=error.hint))

    def known_bad(self, ref: SampleRef) -> HeadraceError | None:
        """Why this sample is not read any more, or None."""
        if ref.known_bad is not None and (listed := ref.known_bad.refuses(ref)) is not None:
            return listed
        return self._known_bad.get((ref.source, ref.sample.id))

    def deliver(self, skipped: Iterable[SkippedSample], epoch: int = 0) -> None:
        """Count the samples that were skipped for a batch that the trainer receives now."""
        for one in skipped:
            metrics.quarantined_samples.labels(one.code).inc()
            which = (one.source, one.id)
            before = self._delivered.get(which)
            if before is None:
                _log.warning("sample %s (%s at %s) is quarantined: %s", one.key, one.shard, one.offset, one.reason)
                self._on_first(one)
            if before is None or (one.permanent and not before.permanent):
                self._delivered[which] = one
                if one.permanent and self._remember is not None and self._remember(one, epoch):
                    self._remembered.add(which)
        if len(self._delivered) > self._limit:
            last = next(reversed(self._delivered.values()))
            raise CorruptionError(
                f"more than {self._limit} samples are damaged; the last one, {last.key}: {last.reason}",
                hint="check the dataset with `headrace verify`, or raise max_bad_samples",
            )

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """Every sample skipped since the loader was made or its state was loaded, once, in the order of the batches."""
        return tuple(self._delivered.values())

    def state(self) -> tuple[tuple[int, int], ...]:
        """Source and number of the known bad samples of delivered batches that no shared list remembers."""
        found = {which for which, skipped in self._delivered.items() if skipped.permanent}
        return tuple(sorted((self._loaded | found) - self._remembered))

    def load(self, state: Sequence[tuple[int, int]]) -> None:
        """Restore what `state` returned."""
        known = dict[tuple[int, int], HeadraceError]()
        if state:  # the first error of a process takes a millisecond to make
            reason = CorruptionError("its bytes were found to be wrong before this run was resumed")
            known = dict.fromkeys(state, reason)
        with self._lock:
            self._known_bad = known
        self._delivered, self._loaded, self._remembered = {}, frozenset(state), set()
