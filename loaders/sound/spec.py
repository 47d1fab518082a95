"""Which sound a trainer wants: at what rate, in how many channels, how long, and as what.

Purpose: the description; `decode` and `mel` do it. Pure.
Invariant: two equal descriptions give samples of equal number, shape and values.
Failure behaviour: `UsageError` for what cannot be meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from headrace.dataio.core.errors import UsageError
from headrace.loaders.clip import Clip
from headrace.loaders.sound.features import LogMel
from headrace.loaders.validation import check_fields

LAYOUTS = {1: "mono", 2: "stereo"}
MAX_SAMPLES = 1 << 27
Features = Literal["waveform"] | LogMel


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """Sound at `sample_rate` Hz in `channels` (1 or 2), for `seconds` from the clip's first frame.

    `seconds=None` is the clip's own length, frames / fps, which exists only for clips spaced by `fps`. `policy="mix"` mixes
    other numbers of channels as FFmpeg does; "first" takes the first channels as they are, and the last one again where there
    are too few. `features=LogMel(...)` gives log-mel spectrograms in place of samples.
    """

    sample_rate: int = 16_000
    channels: int = 1
    seconds: float | None = None
    policy: Literal["mix", "first"] = "mix"
    features: Features = "waveform"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1_000 <= self.sample_rate <= 384_000 or self.channels not in LAYOUTS:
            raise UsageError(f"{self} is not possible", hint="1000 to 384000 Hz, 1 or 2 channels")
        if self.seconds is not None and not 0 < self.seconds * self.sample_rate <= MAX_SAMPLES:
            raise UsageError(
                f"{self.seconds} seconds of sound cannot be asked for",
                hint=f"more than 0, and at most {MAX_SAMPLES} samples",
            )
        if self.policy not in ("mix", "first") or not (
            self.features == "waveform" or isinstance(self.features, LogMel)
        ):
            raise UsageError(f"{self} is not known", hint="policy 'mix' or 'first', features 'waveform' or LogMel(...)")

    def samples(self, clip: Clip | None = None) -> int:
        """Samples a channel: seconds times rate, rounded half to even."""
        if self.seconds is not None:
            count = max(1, round(Fraction(self.seconds) * self.sample_rate))
        elif clip is not None and clip.fps is not None:
            count = max(1, round(Fraction(clip.frames) / Fraction(clip.fps) * self.sample_rate))
        else:
            raise UsageError(
                "the length of the sound is open: clips spaced by stride last as long as each video's frame rate says",
                hint="give AudioSpec(seconds=...), or space the clip by fps",
            )
        if isinstance(self.features, LogMel):
            self.features.check(self.sample_rate, count)
        return count
