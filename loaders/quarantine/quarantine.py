"""The quarantine of one loader: the samples that it skipped, and why.

Purpose: a damaged sample does not affect other samples, and the log names it.

Invariants:
- Which samples are skipped depends only on the stored bytes, the order and the version of a shared list, never on
  timing. Every world size and every resumed run skips and substitutes the same samples.
- If a sample's *bytes* are wrong (a wrong checksum, a missing shard), the sample is marked as known bad. It is skipped
  wherever it appears again. Its id is part of the loader's state, so a later repair does not change a resumed run.
- If only a *clip* cannot be decoded, or needs a wrong part of a file that is read in part, only that clip is skipped.
  Other clips of the same video may be intact, and this rank does not know which parts of it other ranks read.

Failure behaviour: `CorruptionError` if more than `limit` samples were skipped, since the cause is then not a single
sample. `UsageError` if the first samples, more than `limit` or `TRIES`, all lack the value of a field, or have one of
another kind. Each sample is logged once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

from headrace.dataio.core import metrics
from headrace.dataio.core.errors import CorruptionError, HeadraceError, MissingValueError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.quarantine.records import SkippedSample
from headrace.loaders.validation import checked

TRIES = 16
"""If the first samples, more than this, have no value that a field can use, the field is probably wrong."""
_log = get_logger(__name__)


def skips_allowed(limit: float, samples: int) -> int:
    """Return the number of samples that may be skipped.

    This is `limit` itself or, if `limit` is below 1, that fraction of the epoch's `samples`, rounded up. So any fraction
    above 0 allows at least one.
    """
    limit = checked("max_bad_samples", limit, float)
    if not 0 <= limit < math.inf or (limit >= 1 and limit != int(limit)):
        raise UsageError(f"max_bad_samples={limit!r} is neither a share nor a number", hint="use 0.01, or 100")
    return math.ceil(limit * samples) if 0 < limit < 1 else int(limit)


def misnamed_error(skipped: Sequence[SkippedSample]) -> UsageError | None:
    """The error if none of these samples has a value that a field can use. None for another cause, or no sample.

    Args:
        skipped: all samples that were tried. No other sample was found.
    """
    if not skipped or any(one.code != MissingValueError.code for one in skipped):
        return None
    first, plural = skipped[0], "s" if len(skipped) > 1 else ""
    return UsageError(
        f"the loader tried {len(skipped)} sample{plural}, and none has a value that the field can use; the first one, "
        f"{first.key!r}: {first.reason}",
        hint="correct the name or the dtype in the field",
    )


class Quarantine:
    """The samples that one loader skipped. Safe to share between threads.

    Args:
        limit: how many samples may be skipped.
        on_first: called once for each skipped sample.
        remember: called with each sample that has wrong bytes, and its epoch. It returns True if it stored the sample,
            so that states need not.
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
        self._found_good, self._tries = False, TRIES

    def mark_bad(self, ref: SampleRef, error: HeadraceError) -> None:
        """Mark the sample as known bad. It is not read again, and is listed when its batch is delivered.

        The error is stored without its traceback, which would keep the bytes that were read in memory.
        """
        with self._lock:
            self._known_bad.setdefault((ref.source, ref.sample.id), type(error)(error.message, hint=error.hint))

    def known_bad(self, ref: SampleRef) -> HeadraceError | None:
        """The error because of which this sample is not read any more, or None."""
        if ref.known_bad is not None and (listed := ref.known_bad.refuses(ref)) is not None:
            return listed
        return self._known_bad.get((ref.source, ref.sample.id))

    def deliver(self, skipped: Iterable[SkippedSample], epoch: int = 0, *, has_samples: bool = True) -> None:
        """Record the samples that were skipped for the batch that the trainer receives now.

        Args:
            skipped: these samples.
            epoch: epoch of the batch.
            has_samples: whether the batch has any sample.

        Raises:
            CorruptionError: more samples than the limit were skipped.
            UsageError: no sample so far has a value that a field can use, and they are more than the limit or `TRIES`.
        """
        self._found_good |= has_samples
        for sample in skipped:
            metrics.quarantined_samples.labels(sample.code).inc()
            key = (sample.source, sample.id)
            previous = self._delivered.get(key)
            if previous is None:
                _log.warning(
                    "sample %s (%s at %s) is quarantined: %s", sample.key, sample.shard, sample.offset, sample.reason
                )
                self._on_first(sample)
            if previous is None or (sample.permanent and not previous.permanent):
                self._delivered[key] = sample
                if sample.permanent and self._remember is not None and self._remember(sample, epoch):
                    self._remembered.add(key)
        has_tried_enough = not self._found_good and len(self._delivered) > min(self._limit, self._tries)
        if has_tried_enough and (misnamed := misnamed_error(self.skipped)) is not None:
            raise misnamed
        if len(self._delivered) > self._limit:
            last = next(reversed(self._delivered.values()))
            raise CorruptionError(
                f"more than {self._limit} samples are damaged; the last one, {last.key}: {last.reason}",
                hint="check the dataset with `headrace verify`, or raise max_bad_samples",
            )

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """Each sample skipped since the loader was created or its state was loaded, in the order of the batches."""
        return tuple(self._delivered.values())

    def state(self) -> tuple[tuple[int, int], ...]:
        """Source and id of each known bad sample of the delivered batches, except those that a shared list stores."""
        bad = {key for key, skipped in self._delivered.items() if skipped.permanent}
        return tuple(sorted((self._loaded | bad) - self._remembered))

    def load(self, state: Sequence[tuple[int, int]]) -> None:
        """Restore what `state` returned."""
        known_bad = dict[tuple[int, int], HeadraceError]()
        if state:  # creating the first error of a process takes a millisecond
            reason = CorruptionError("its bytes were found to be wrong before this run was resumed")
            known_bad = dict.fromkeys(state, reason)
        with self._lock:
            self._known_bad = known_bad
        self._delivered, self._loaded, self._remembered = {}, frozenset(state), set()
        self._tries = self._limit  # a resumed run must not end where the other run continued
