"""Images for the loader benchmarks: JPEGs of the sizes that datasets of photographs have.

Invariant: an image is a pure function of its number.
Failure behaviour: Pillow's exceptions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DISTINCT = 96
"""The number of images that are encoded. A dataset repeats them under other names."""
QUALITY = 90


@dataclass(frozen=True)
class Stills:
    """JPEGs with sides between two lengths. A candidate delivers them as `size` x `size`."""

    name: str
    shortest: int
    longest: int
    size: int
    shard_bytes: int = 64 << 20
    per_file: int = 1
    sought: bool = False
    """Whether readers seek in the files. Images are short, so readers read them whole."""
    batch: int = 64
    buffer: int = 1024
    default: int = 4_800

    @property
    def folder(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an image that a candidate delivers."""
        return 3, self.size, self.size

    @property
    def dtype(self) -> str:
        return "uint8"

    def sides(self, number: int) -> tuple[int, int]:
        """Height and width of image `number`."""
        room = self.longest - self.shortest + 1
        return self.shortest + 7919 * number % room, self.shortest + 6271 * number % room

    def described(self, files: int) -> str:
        """One line that describes an epoch."""
        return f"{files} JPEGs of {self.shortest} to {self.longest} pixels a side; to {self.size}²"


KINDS = {kind.name: kind for kind in (Stills("pictures", 360, 640, 224),)}


def write(kind: Stills, folder: Path, count: int, tell: Callable[..., None]) -> None:
    """Write `count` images, of which only the first `DISTINCT` are encoded."""
    from PIL import Image

    for number in range(count):
        path = folder / f"{number:05}.jpg"
        if number < DISTINCT:
            tell(f"making {kind.name}", number / DISTINCT)
            Image.fromarray(_pixels(*kind.sides(number), number)).save(path, quality=QUALITY)
        else:
            os.link(folder / f"{number % DISTINCT:05}.jpg", path)


def _pixels(height: int, width: int, number: int) -> np.ndarray:
    """Draw waves, edges and a little noise."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    canvas = np.full((height, width, 3), 127, np.float32)
    for _ in range(12):
        waves = np.sin(x * rng.uniform(-0.3, 0.3) + y * rng.uniform(-0.3, 0.3) + rng.uniform(0, 6))
        inside = (np.abs(x - rng.uniform(0, width)) < rng.uniform(20, width)) & (y > rng.uniform(0, height))
        canvas += rng.uniform(-30, 30, 3).astype(np.float32) * np.where(inside, 1, waves)[..., None]
    return np.clip(canvas + rng.normal(0, 5, (height, width, 1)), 0, 255).astype(np.uint8)
