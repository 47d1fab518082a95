"""Log-mel spectrograms by a graph of DALI, on a GPU or on the CPU.

Purpose: on a GPU the spectrograms of a batch in one run; on the CPU the same graph, by which the tests compare it.
Invariants: the formulas are those of `headrace.loaders.sound.mel`, from whose results these differ by less than 1e-3
wherever the power
is at least 1e-6 of the sound's largest; the tests see that of the CPU graph everywhere, and of the GPU's where there is one. What
comes out of a run is what went in: a number goes through the graph with each channel.
Failure behaviour: `UnsupportedError` at construction without DALI or without the GPU; DALI's own errors pass through, since no
sound can be at fault.
"""

from __future__ import annotations

import importlib
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import UnsupportedError
from headrace.loaders.decode.dali import copied, dali_installed, gpu_count
from headrace.loaders.sound.features import LogMel

MAX_CHANNELS = 64
"""Channels that one run transforms; more are several runs."""


class DaliMel:
    """Spectrograms on `device_id` (None: the CPU). Safe to share between threads: graphs are lent to one at a time."""

    def __init__(self, what: LogMel, sample_rate: int, device_id: int | None = None) -> None:
        if not dali_installed():
            raise UnsupportedError("DALI is not installed", hint="pip install nvidia-dali-cuda130 (Linux only)")
        if device_id is not None and device_id >= gpu_count():
            raise UnsupportedError(f"DALI sees no GPU number {device_id}", hint="use device='cpu'")
        self._what, self._rate, self._device_id = what, sample_rate, device_id
        self._idle: list[_Graph] = []
        self._lock = threading.Lock()

    def __call__(self, sounds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each float32 (C, S) on the CPU to float32 (C, bands, 1 + S // hop) on the graph's device."""
        channels = [channel for sound in sounds for channel in sound]
        rows = list[torch.Tensor]()
        for start in range(0, len(channels), MAX_CHANNELS):
            rows += self._run(channels[start : start + MAX_CHANNELS])
        left = iter(rows)
        return [torch.stack(list(itertools.islice(left, len(sound)))) for sound in sounds]

    def close(self) -> None:
        with self._lock:
            self._idle.clear()

    def _run(self, channels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._lock:
            graph = self._idle.pop() if self._idle else None
        graph = graph or _Graph(self._what, self._rate, self._device_id)
        rows = graph.run(channels)  # when it raises, the graph is not used again
        with self._lock:
            self._idle.append(graph)
        return rows


class _Graph:
    """A built pipeline; one thread at a time."""

    def __init__(self, what: LogMel, sample_rate: int, device_id: int | None) -> None:
        dali, fn, types = (importlib.import_module(f"nvidia.dali{name}") for name in ("", ".fn", ".types"))
        high = sample_rate / 2 if what.high is None else what.high
        unit = math.log(10) if what.log == "natural" else 1.0  # what a factor of ten in power is

        @dali.pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=MAX_CHANNELS, num_threads=1, device_id=device_id, exec_dynamic=True, prefetch_queue_depth=1
        )
        def mels() -> tuple[Any, Any]:
            sound = fn.external_source(name="sound", dtype=types.FLOAT, ndim=1)
            number = fn.external_source(name="number", dtype=types.INT64, ndim=1)
            power = fn.spectrogram(
                sound if device_id is None else sound.gpu(),
                nfft=what.n_fft,
                window_length=what.n_fft,
                window_step=what.hop,
                window_fn=torch.hann_window(what.n_fft).tolist(),  # DALI's own is half a sample off
                center_windows=True,
                reflect_padding=True,
                power=2,
            )
            bands = fn.mel_filter_bank(
                power,
                nfilter=what.bands,
                sample_rate=float(sample_rate),
                freq_low=what.low,
                freq_high=high,
                mel_formula=what.scale,
                normalize=what.scale == "slaney",
            )
            logs = fn.to_decibels(bands, multiplier=unit, reference=1.0, cutoff_db=unit * math.log10(what.floor))
            return logs, number

        self._pipe = mels()
        self._pipe.build()
        self._numbers = itertools.count()

    def run(self, channels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        numbers = list(itertools.islice(self._numbers, len(channels)))
        self._pipe.feed_input("sound", [channel.numpy() for channel in channels])
        self._pipe.feed_input("number", [np.array([number], np.int64) for number in numbers])
        logs, came = self._pipe.run()
        if [int(np.asarray(came[n])[0]) for n in range(len(came))] != numbers:
            raise RuntimeError("DALI returned the spectrograms of another run")
        return copied(logs)
