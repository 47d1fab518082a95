"""Scaling and cropping as arithmetic on a picture's two sides: which source pixels the result needs.

Purpose: pixels that a crop discards are not converted or scaled, and skipping them changes no other pixel.
Invariants: pure; imports no torch, so that the decoding subprocess starts quickly.
Failure behaviour: none; the loader has checked all sizes.
"""

from __future__ import annotations

import math

import msgspec

_SHIFT = 1 / 16
"""Pixels by which the "fast" conversion may move a side of the picture, so that a part begins at a whole pixel."""


class Fit(msgspec.Struct, frozen=True):
    """Pictures are scaled to cover `size` (height, width), cropped, and optionally mirrored left to right.

    `at` is the position of the crop between top and bottom, and between left and right: 0 to 1 each.
    """

    size: tuple[int, int]
    antialias: bool = True
    at: tuple[float, float] = (0.5, 0.5)
    mirror: bool = False


class Axis(msgspec.Struct, frozen=True):
    """One side of a picture. `source` pixels are scaled to `scaled` pixels, and `kept` of these are kept from `first`
    on."""

    source: int
    scaled: int
    first: int
    kept: int

    @property
    def step(self) -> float:
        """Source pixels per pixel of the result."""
        return self.source / self.scaled

    def needed(self, antialias: bool = True) -> tuple[int, int]:
        """Begin and end of the source pixels that bilinear filtering reads for the kept pixels."""
        reach = max(1.0, self.step) if antialias else 1.0
        begin = math.floor(self.step * (self.first + 0.5) - reach) - 1
        end = math.ceil(self.step * (self.first + self.kept - 0.5) + reach) + 1
        return max(0, begin), min(self.source, end)

    def factor(self, end: int) -> float | None:
        """A scale factor whose inverse equals `step` to the last bit, and which scales the first `end` pixels to enough
        pixels.

        None if there is no such factor, or if the number of pixels would stay the same, because torch then skips
        scaling.
        """
        guess = self.scaled / self.source
        for factor in (guess, math.nextafter(guess, 0), math.nextafter(guess, 2 * guess)):
            made = math.floor(end * factor)
            if 1 / factor == self.step and made >= self.first + self.kept and (made != end or factor == 1):
                return factor
        return None

    def window(self) -> tuple[int, int, int, int]:
        """A part of the source that can be scaled alone: its begin and length, and the begin and length of the scaled
        part.

        It begins and ends at even pixels (or at the picture's end), to within `_SHIFT`. It extends far enough around
        the kept pixels that its edges do not affect them.
        """
        margin = math.ceil((max(1.0, self.step) + 4) / self.step)
        first = next(j for j in range(max(0, self.first - margin), -1, -1) if self._is_even(j))
        last = next(
            j for j in range(self.first + self.kept + margin, self.scaled + 1) if self._is_even(j) or j == self.scaled
        ) if self.first + self.kept + margin < self.scaled else self.scaled  # fmt: skip
        begin = 2 * round(self.step * first / 2)
        end = self.source if last == self.scaled else 2 * round(self.step * last / 2)
        return begin, end - begin, first, last - first

    def _is_even(self, place: int) -> bool:
        at = self.step * place
        return abs(at - 2 * round(at / 2)) <= _SHIFT


def axes(height: int, width: int, fit: Fit) -> tuple[Axis, Axis]:
    """The vertical and the horizontal axis for pictures of this size."""
    high, wide = covering(height, width, fit.size)
    down = Axis(height, high, offset(high - fit.size[0], fit.at[0]), fit.size[0])
    return down, Axis(width, wide, offset(wide - fit.size[1], fit.at[1]), fit.size[1])


def covering(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of the same aspect ratio, rounded, that covers `size`."""
    if size[0] * width >= size[1] * height:  # the height determines the scale
        return size[0], max(size[1], round(width * size[0] / height))
    return max(size[0], round(height * size[1] / width)), size[1]


def offset(room: int, at: float) -> int:
    """The crop's offset. The centre's offset is rounded down; other positions are spread over 0 … room."""
    return room // 2 if at == 0.5 else min(room, int(at * (room + 1)))
