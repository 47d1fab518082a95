"""Files as they are stored: read, checked, and left as they are.

Purpose: the `Work` behind `FileLoader`.
Invariants: those of `loaders.contract`; the bytes of a sample are those of its files, in the order in which they were asked for.
Failure behaviour: none of its own: what is damaged or missing was found when it was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dataio.core.errors import MillraceError
from dataio.shards.contract import Sample
from loaders.contract import Finished, Layout, Loaded

BYTES, SIZES = "bytes", "sizes"


class FileWork:
    """Gives "bytes", uint8 (n,), and "sizes", how many of them each file has."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)

    @property
    def layout(self) -> Layout:
        return Layout((BYTES,), {SIZES: torch.int64}, joined=self._bytes)

    def members(self, sample: Sample) -> list[str]:
        return self._files

    def cost(self, sample: Sample) -> int:
        return 0

    def do(self, loaded: Sequence[Loaded]) -> list[Finished | MillraceError]:
        return [self._one(one) for one in loaded]

    def close(self) -> None:
        pass

    def _one(self, loaded: Loaded) -> Finished:
        sizes, joined = self._sizes(loaded.place.sample), loaded.joined
        if joined is None:
            views = [np.frombuffer(loaded.members[ext], np.uint8) for ext in self._files]
            room = None if loaded.room is None else loaded.room((sum(sizes),))
            joined = np.concatenate(views, out=room)
        return Finished(loaded.place.sample, {BYTES: torch.from_numpy(joined)}, {SIZES: sizes})

    def _bytes(self, sample: Sample) -> int:
        return sum(self._sizes(sample))

    def _sizes(self, sample: Sample) -> list[int]:
        return [member.length for ext in self._files for member in sample.members if member.ext == ext]
