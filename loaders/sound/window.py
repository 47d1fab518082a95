"""Which stretch of a recording: chosen by the sample, from what the index says of it.

Purpose: turn (what the index says of a sound, what the trainer wants, a place) into an instant. Pure.
Invariants: those of `headrace.loaders.clip`: the choice is a function of its arguments alone. Instants count from the sound's
first sample. A recording shorter than the window is played from its beginning.
Failure behaviour: `UsageError` for an impossible `Window`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.contract import AudioInfo
from headrace.loaders.clip import Counts, Start, Values, check_start, first_of
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.validation import check_fields

MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Window:
    """`seconds` of sound; `per_sample` windows of each recording.

    `start="random"` draws the first sample uniformly from those where the whole window fits, anew for every epoch, sample and
    window. `start="center"` takes the middle window, or the middles of `per_sample` equal parts. `start="every"` cuts each
    recording into windows that follow each other without a gap, as many as fit whole, at least one. `jitter` moves "center"
    and "every" windows by up to so many seconds either way, drawn anew each time.
    """

    seconds: float = 2.0
    start: Start = "random"
    per_sample: int = 1
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.seconds <= MAX_SECONDS or self.per_sample < 1 or self.jitter > MAX_SECONDS:
            raise UsageError(f"{self} is not a window", hint="seconds and per_sample are positive, at most a day")
        check_start(self.start, self.per_sample, self.jitter)


def counts(window: Window, seconds: Values) -> int | Counts:
    """How many windows each recording has, whose durations these are; one number where all have as many."""
    if window.start != "every":
        return window.per_sample
    return np.maximum(1, np.floor(seconds / window.seconds + 1e-9)).astype(np.int64)


def begin(info: AudioInfo, window: Window, ref: SampleRef) -> Fraction:
    """Seconds from the sound's first sample to the window's, a whole number of the source's samples."""
    span = Fraction(window.seconds) * info.sample_rate
    target = max(0, int(info.samples - span))
    where = (ref.seed, ref.epoch, ref.sample.id, ref.number, ref.attempt)
    jitter = round(Fraction(window.jitter) * info.sample_rate)
    return Fraction(first_of(window.start, target, span, window.per_sample, jitter, where), info.sample_rate)
