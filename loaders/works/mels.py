"""Spectrograms in place of sound: a wrapper around any work whose samples have "audio".

Purpose: features are made once for clips and for windows, of all samples together that were worked on together.
Invariants: what comes out is a function of the sound alone. By the rule of `mels`, a GPU's spectrograms are made there by DALI.
Failure behaviour: that of the work inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError
from headrace.loaders.decode.dali import gpu_count
from headrace.loaders.interfaces import FetchedSample, ProcessedSample, Processor, SampleLayout
from headrace.loaders.sound.dali_mel import DaliMel
from headrace.loaders.sound.features import LogMel
from headrace.loaders.sound.mel import log_mel
from headrace.loaders.sound.spec import AudioSpec
from headrace.loaders.works.added import Around

Make = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class WithMels(Around):
    """ "mel" in place of "audio"."""

    def __init__(self, inner: Processor, make: Make, close: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self._make, self._close = make, close

    @property
    def layout(self) -> SampleLayout:
        inner = self._inner.layout
        return replace(inner, tensors=tuple("mel" if name == "audio" else name for name in inner.tensors))

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        done = self._inner.process(loaded)
        mels = iter(self._make([one.tensors["audio"] for one in done if isinstance(one, ProcessedSample)]))
        return [_instead(one, next(mels)) if isinstance(one, ProcessedSample) else one for one in done]

    def close(self) -> None:
        self._inner.close()
        self._close()


def mels(inner: Processor, spec: AudioSpec, device: torch.device) -> Processor:
    """`inner` with the features that `spec` wants: on a GPU by DALI where it is installed, else by the decoding thread."""
    if not isinstance(spec.features, LogMel):
        return inner
    what, rate = spec.features, spec.sample_rate
    if device.type == "cuda" and gpu_count() > (device.index or 0):
        graph = DaliMel(what, rate, device.index or 0)
        return WithMels(inner, graph, graph.close)
    return WithMels(inner, lambda sounds: [log_mel(sound, rate, what) for sound in sounds])


def _instead(one: ProcessedSample, mel: torch.Tensor) -> ProcessedSample:
    return replace(
        one, tensors={("mel" if n == "audio" else n): mel if n == "audio" else t for n, t in one.tensors.items()}
    )
