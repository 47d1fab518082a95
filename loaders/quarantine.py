"""Samples that were refused while training, and why.

Purpose: one damaged sample costs itself and nothing else; nobody has to guess which it was.

Invariants: what is refused is a pure function of the stored bytes and the order, never of timing, so every world size and every
resumed run refuses and substitutes the same. Wrong *bytes* (a checksum that does not match, a missing shard) condemn
the sample wherever it comes up again: its number is part of the loader's state, so a later repair does not change a run that goes
on. A *clip* that does not decode is refused in that one place; other clips of the same video may be whole.
Failure behaviour: `CorruptionError` when more than `limit` samples were refused: then something larger is wrong. Each sample is
logged once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataio.core import metrics
from dataio.core.errors import CorruptionError, MillraceError
from dataio.core.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused sample: its number, its key, where its bytes lie, why. `code` is that of the error.

    `for_good` tells wrong bytes from a clip that does not decode.
    """

    id: int
    key: str
    shard: str
    offset: int
    code: str
    reason: str
    for_good: bool


class Quarantine:
    """What one loader refused. Safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._condemned: dict[int, MillraceError] = {}
        self._delivered: dict[int, Refusal] = {}
        self._loaded: frozenset[int] = frozenset()

    def condemn(self, number: int, error: MillraceError) -> None:
        """Never read this sample again. Known at once, listed when the batch is delivered."""
        with self._lock:
            self._condemned.setdefault(number, error)

    def condemned(self, number: int) -> MillraceError | None:
        """Why this sample is not read any more, or None."""
        return self._condemned.get(number)

    def deliver(self, refusals: Iterable[Refusal]) -> None:
        """Take in what was refused for a batch that the trainer now gets."""
        for refusal in refusals:
            metrics.quarantined_samples.labels(refusal.code).inc()
            known = self._delivered.get(refusal.id)
            if known is None:
                where = f"{refusal.shard} at {refusal.offset}"
                _log.warning("sample %s (%s) is left out: %s", refusal.key, where, refusal.reason)
            if known is None or (refusal.for_good and not known.for_good):
                self._delivered[refusal.id] = refusal
        if len(self._delivered) > self._limit:
            last = next(reversed(self._delivered.values()))
            raise CorruptionError(
                f"more than {self._limit} samples are damaged; the last one, {last.key}: {last.reason}",
                hint="check the dataset with `millrace verify`, or raise quarantine_limit",
            )

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Every sample refused since the loader was made or its state loaded, once, in the order of the batches."""
        return tuple(self._delivered.values())

    def state(self) -> tuple[int, ...]:
        """The numbers of samples that batches delivered so far condemned for good."""
        return tuple(sorted(self._loaded | {number for number, r in self._delivered.items() if r.for_good}))

    def load(self, condemned: Sequence[int]) -> None:
        """Become what `state` returned."""
        reason = CorruptionError("its bytes were found to be wrong before this run was resumed")
        with self._lock:
            self._condemned = dict.fromkeys(condemned, reason)
        self._delivered, self._loaded = {}, frozenset(condemned)
