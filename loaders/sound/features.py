"""Log-mel spectrograms: what is wanted. `headrace.loaders.sound.mel` computes them.

Purpose: the description, apart from what needs torch. Pure.
Invariant: equal descriptions give equal spectrograms.
Failure behaviour: `UsageError` for what cannot be computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from headrace.dataio.core.errors import UsageError
from headrace.loaders.validation import check_fields

MAX_FFT = 1 << 16
MAX_BANDS = 1024


@dataclass(frozen=True, slots=True)
class LogMel:
    """`bands` mel bands between `low` and `high` Hz (None: half the sample rate), from `n_fft` samples every `hop`
    samples."""

    bands: int = 80
    n_fft: int = 400
    hop: int = 160
    low: float = 0.0
    high: float | None = None
    scale: Literal["slaney", "htk"] = "slaney"
    log: Literal["natural", "decadic"] = "natural"
    floor: float = 1e-10

    def __post_init__(self) -> None:
        check_fields(self)
        if not (1 <= self.hop <= MAX_FFT and 2 <= self.n_fft <= MAX_FFT and 1 <= self.bands <= MAX_BANDS):
            raise UsageError(f"{self} is not possible", hint=f"hop and n_fft up to {MAX_FFT}, bands up to {MAX_BANDS}")
        if self.scale not in ("slaney", "htk") or self.log not in ("natural", "decadic") or not self.floor > 0:
            raise UsageError(f"{self} is not possible", hint="scale 'slaney' or 'htk', log 'natural' or 'decadic'")
        if not 0 <= self.low < math.inf or not (self.high is None or self.high > self.low):
            raise UsageError(f"no bands lie between {self.low} and {self.high} Hz", hint="0 is the lowest `low`")

    def frames(self, samples: Any) -> Any:
        """How many columns so many samples give; also of an array."""
        return 1 + samples // self.hop

    @property
    def silence(self) -> float:
        """What a column of no sound holds."""
        return math.log(self.floor) if self.log == "natural" else math.log10(self.floor)

    def check(self, sample_rate: int, samples: int) -> None:
        """`UsageError` when windows of `samples` at this rate cannot be transformed."""
        if samples <= self.n_fft // 2:
            raise UsageError(f"{samples} samples are too few for n_fft={self.n_fft}", hint="take longer windows")
        if self.low >= sample_rate / 2 or (self.high or 0) > sample_rate / 2:
            raise UsageError(f"sound of {sample_rate} Hz holds nothing above {sample_rate / 2} Hz", hint="lower `high`")
