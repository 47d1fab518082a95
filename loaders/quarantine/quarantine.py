"""The quarantine of one loader: the samples that it skipped, why, and the shared list that it follows.

Purpose: one damaged sample costs itself and nothing else, and the log names it.

Invariants:
- Which samples are skipped is a pure function of the stored bytes and the order, never of timing. Every world size and
  every resumed run skips and substitutes the same samples. A shared list (`SharedList`) enters by its version.
- Wrong *bytes* (a checksum that does not match, a missing shard) mark the sample as known bad. It is skipped wherever
  it comes up again, and its number is part of the loader's state, so a later repair does not change a run that goes on.
- A *clip* that does not decode, or that needs a wrong piece of a file that is read in part, is skipped only there.
  Other clips of the same video may be whole, and this rank does not know what other ranks read of it.
- Nothing here keeps the loader alive.

Failure behaviour: `CorruptionError` once more than `limit` samples were skipped: then something larger is wrong. Each
sample is logged once. The store's errors pass through, except when a bad sample cannot be appended to the shared list:
that is logged once, and the sample is kept in the loader's state instead.
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
from headrace.loaders.validation import plain

_log = get_logger(__name__)


def skips_allowed(limit: float, samples: int) -> int:
    """How many samples may be refused: `limit` itself, or, below 1, that share of the `samples` of an epoch, at least
    one."""
    limit = plain("quarantine_limit", limit, float)
    if not 0 <= limit < math.inf or (limit >= 1 and limit != int(limit)):
        raise UsageError(f"quarantine_limit={limit!r} is neither a share nor a number", hint="use 0.01, or 100")
    return math.ceil(limit * samples) if 0 < limit < 1 else int(limit)


class Quarantine:
    """What one loader refused. Safe to share between threads.

    `newly` is told of each refused sample once, `keep` of each condemned one and its epoch: True if that remembers it
    from now on, so that states need not.
    """

    def __init__(
        self,
        limit: int,
        newly: Callable[[SkippedSample], None] = lambda _: None,
        keep: Callable[[SkippedSample, int], bool] | None = None,
    ) -> None:
        self._limit, self._newly, self._keep = limit, newly, keep
        self._lock = threading.Lock()
        self._condemned: dict[tuple[int, int], HeadraceError] = {}
        self._delivered: dict[tuple[int, int], SkippedSample] = {}
        self._loaded: frozenset[tuple[int, int]] = frozenset()
        self._kept = set[tuple[int, int]]()

    def condemn(self, place: SampleRef, error: HeadraceError) -> None:
        """Never read this place's sample again. Known at once, listed when the batch is delivered.

        What is kept is the error without its frames, which would keep the bytes that were read.
        """
        with self._lock:
            self._condemned.setdefault((place.source, place.sample.id), type(error)(error.message, hint=error.hint))

    def condemned(self, place: SampleRef) -> HeadraceError | None:
        """Why this place's sample is not read any more, or None."""
        known = place.asof.refuses(place) if place.asof is not None else None
        return known or self._condemned.get((place.source, place.sample.id))

    def deliver(self, refusals: Iterable[SkippedSample], epoch: int = 0) -> None:
        """Take in what was refused for a batch that the trainer now gets; `newly` is told of each sample once."""
        for refusal in refusals:
            metrics.quarantined_samples.labels(refusal.code).inc()
            which = (refusal.source, refusal.id)
            known = self._delivered.get(which)
            if known is None:
                where = f"{refusal.shard} at {refusal.offset}"
                _log.warning("sample %s (%s) is quarantined: %s", refusal.key, where, refusal.reason)
                self._newly(refusal)
            if known is None or (refusal.for_good and not known.for_good):
                self._delivered[which] = refusal
                if refusal.for_good and self._keep is not None and self._keep(refusal, epoch):
                    self._kept.add(which)
        if len(self._delivered) > self._limit:
            last = next(reversed(self._delivered.values()))
            raise CorruptionError(
                f"more than {self._limit} samples are damaged; the last one, {last.key}: {last.reason}",
                hint="check the dataset with `headrace verify`, or raise quarantine_limit",
            )

    @property
    def refusals(self) -> tuple[SkippedSample, ...]:
        """Every sample refused since the loader was made or its state loaded, once, in the order of the batches."""
        return tuple(self._delivered.values())

    def state(self) -> tuple[tuple[int, int], ...]:
        """Source and number of the samples that batches delivered so far condemned for good, and nobody else
        remembers."""
        found = {which for which, refusal in self._delivered.items() if refusal.for_good}
        return tuple(sorted((self._loaded | found) - self._kept))

    def load(self, condemned: Sequence[tuple[int, int]]) -> None:
        """Become what `state` returned."""
        known = dict[tuple[int, int], HeadraceError]()
        if condemned:  # the first error of a process takes a millisecond, which a run without one need not wait for
            reason = CorruptionError("its bytes were found to be wrong before this run was resumed")
            known = dict.fromkeys(condemned, reason)
        with self._lock:
            self._condemned = known
        self._delivered, self._loaded, self._kept = {}, frozenset(condemned), set()
