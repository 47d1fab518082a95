"""Files as they are stored: read and checked, but not decoded.

Purpose: the processor of `FileLoader`.
Invariants: those of `headrace.loaders.interfaces`. The bytes of a sample are those of its files, in the requested
order.
Failure behaviour: none of its own. The sample reader has already reported damaged and missing files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.shards.sample import Files, Sample
from headrace.loaders.fetch.sample_reader import files
from headrace.loaders.interfaces import FetchedSample, Needs, ProcessedSample, SampleLayout, SampleRef

BYTES, SIZES = "bytes", "sizes"
_IN_PLACE = {BYTES: torch.empty(0, dtype=torch.uint8)}


class FileProcessor:
    """Returns "bytes", uint8 (n,), and "sizes", the number of bytes of each file."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = tuple(files)
        self._needs: Needs = dict.fromkeys(files)

    @property
    def layout(self) -> SampleLayout:
        return SampleLayout((BYTES,), {SIZES: torch.int64}, files_of=self._located)

    def needs(self, ref: SampleRef) -> Needs:
        return self._needs

    def cost(self, sample: Sample) -> int:
        return 0

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return [self._one(one) for one in loaded]

    def close(self) -> None:
        pass

    def _one(self, loaded: FetchedSample) -> ProcessedSample:
        if loaded.files is not None:
            sizes = [member.length for member in loaded.files.each]
            return ProcessedSample(loaded.ref.sample, _IN_PLACE, {SIZES: sizes}, in_place=True)
        views = [np.frombuffer(loaded.media[ext][:], np.uint8) for ext in self._files]
        tensor = torch.from_numpy(np.concatenate(views))
        return ProcessedSample(loaded.ref.sample, {BYTES: tensor}, {SIZES: [len(view) for view in views]})

    def _located(self, sample: Sample) -> Files:
        return files(sample, self._files)
