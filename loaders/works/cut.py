"""Which part of a picture is kept, and whether it is mirrored: drawn once for each clip.

Purpose: the geometry of a clip, from its place alone. Pure.
Invariants: all frames of a clip are cut alike. Equal places give equal cuts, on every rank and after every resume.
Failure behaviour: `UsageError` for what cannot be meant.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.dataio.core.errors import UsageError
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.validation import checked

_TOP, _LEFT, _FLIP = 22, 23, 24  # keep the keys apart from those of clip starts and of the order


class Cut(msgspec.Struct, frozen=True):
    """`crop="center"` keeps the middle of what covers the wanted size, "random" draws the place; `flip_prob` is how likely a
    clip is mirrored left to right."""

    crop: Literal["center", "random"] = "center"
    flip_prob: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("center", "random"):
            raise UsageError(f"crop={self.crop!r} is not known", hint="use 'center' or 'random'")
        if not 0 <= checked("flip_prob", self.flip_prob, float) <= 1:
            raise UsageError(f"flip_prob={self.flip_prob!r} is not a probability", hint="from 0 to 1")

    def at(self, ref: SampleRef) -> tuple[float, float]:
        """Where the crop lies between top and bottom, and between left and right: each in [0, 1]."""
        if self.crop == "center":
            return 0.5, 0.5
        return _uniform(ref, _TOP), _uniform(ref, _LEFT)

    def mirrored(self, ref: SampleRef) -> bool:
        """Whether this clip is."""
        return bool(self.flip_prob) and _uniform(ref, _FLIP) < self.flip_prob


def _uniform(ref: SampleRef, purpose: int) -> float:
    """A number in [0, 1), of 53 drawn bits."""
    return float(int(ref.key(purpose)[0]) >> 11) / float(1 << 53)
