"""Log-mel spectrograms: by torch on the samples' device, or by DALI for a whole batch on a GPU.

Purpose: compute the features that speech and music models use.

Invariants:
- The short-time Fourier transform is centred (reflected at both ends) with a periodic Hann window.
- Mel bands are triangles on Slaney's scale with Slaney's area norm (Slaney 1998, Auditory Toolbox), or on HTK's scale
  without a norm. Powers are summed, clamped to at least `floor`, and converted to natural or base-10 logarithms.
- The result differs from the same formulas in double precision by less than 1e-3 wherever the power is at least 1e-6 of
  the clip's largest. DALI's results differ from those of `log_mel` by less than that, too. Tests check DALI on the CPU
  everywhere, and on the GPU if there is one.
- Every channel has a number that passes through the graph, so results cannot be mixed up.

Failure behaviour: the constructor of `DaliMel` raises `UnsupportedError` without DALI or without the GPU. DALI's other
errors are raised unchanged, since no audio can cause them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import UnsupportedError
from headrace.loaders.audio.spec import LogMel
from headrace.loaders.decode.dali import copied, dali_installed, gpu_count

_LINEAR_HZ, _BREAK_HZ, _LOG_STEP = 200 / 3, 1000.0, math.log(6.4) / 27  # Slaney's scale: linear, then logarithmic


def log_mel(sound: torch.Tensor, sample_rate: int, settings: LogMel) -> torch.Tensor:
    """float32 (C, S) to float32 (C, n_mels, 1 + S // hop_length), on the same device."""
    window = torch.hann_window(settings.n_fft, device=sound.device)
    spectrum = torch.stft(sound, settings.n_fft, settings.hop_length, window=window, center=True, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    mel = (_bands(settings, sample_rate).to(sound.device) @ power).clamp_(min=settings.floor)
    return mel.log_() if settings.log == "natural" else mel.log10_()


@functools.lru_cache(maxsize=16)
def _bands(settings: LogMel, sample_rate: int) -> torch.Tensor:
    """The triangular filters: float32 (n_mels, n_fft // 2 + 1)."""
    high = sample_rate / 2 if settings.f_max is None else settings.f_max
    ends = torch.tensor([_to_mel(settings.f_min, settings.scale), _to_mel(high, settings.scale)], dtype=torch.float64)
    steps = torch.linspace(float(ends[0]), float(ends[1]), settings.n_mels + 2, dtype=torch.float64)
    edges = torch.tensor([_to_hz(float(mel), settings.scale) for mel in steps], dtype=torch.float64)
    bins = torch.linspace(0, sample_rate / 2, settings.n_fft // 2 + 1, dtype=torch.float64)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)).clamp_(min=0)
    if settings.scale == "slaney":
        triangles *= 2 / (right - left)
    return triangles.float()


def _to_mel(hz: float, scale: str) -> float:
    if scale == "htk":
        return 2595 * math.log10(1 + hz / 700)
    return hz / _LINEAR_HZ if hz < _BREAK_HZ else _BREAK_HZ / _LINEAR_HZ + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _to_hz(mel: float, scale: str) -> float:
    if scale == "htk":
        return float(700 * (10 ** (mel / 2595) - 1))
    knee = _BREAK_HZ / _LINEAR_HZ
    return mel * _LINEAR_HZ if mel < knee else _BREAK_HZ * math.exp(_LOG_STEP * (mel - knee))


MAX_CHANNELS = 64
"""Number of channels that one run of a graph transforms. More channels take several runs."""


class DaliMel:
    """Spectrograms on the GPU `device_id`, or on the CPU if it is None. Safe to share between threads.

    Each graph is used by one thread at a time.
    """

    def __init__(self, settings: LogMel, sample_rate: int, device_id: int | None = None) -> None:
        if not dali_installed():
            raise UnsupportedError("DALI is not installed", hint="pip install 'headrace[dali]' (Linux only)")
        if device_id is not None and device_id >= gpu_count():
            raise UnsupportedError(f"DALI sees no GPU number {device_id}", hint="use device='cpu'")
        self._settings, self._rate, self._device_id = settings, sample_rate, device_id
        self._idle: list[_Graph] = []
        self._lock = threading.Lock()

    def __call__(self, sounds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Transform float32 (C, S) on the CPU to float32 (C, n_mels, 1 + S // hop_length) on the graph's device."""
        channels = [channel for sound in sounds for channel in sound]
        rows = list[torch.Tensor]()
        for start in range(0, len(channels), MAX_CHANNELS):
            rows += self._run(channels[start : start + MAX_CHANNELS])
        remaining = iter(rows)
        return [torch.stack(list(itertools.islice(remaining, len(sound)))) for sound in sounds]

    def close(self) -> None:
        with self._lock:
            self._idle.clear()

    def _run(self, channels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._lock:
            graph = self._idle.pop() if self._idle else None
        graph = graph or _Graph(self._settings, self._rate, self._device_id)
        rows = graph.run(channels)  # if it raises, the graph is not used again
        with self._lock:
            self._idle.append(graph)
        return rows


class _Graph:
    """A built DALI pipeline. Not safe to share between threads."""

    def __init__(self, settings: LogMel, sample_rate: int, device_id: int | None) -> None:
        dali, fn, types = (importlib.import_module(f"nvidia.dali{name}") for name in ("", ".fn", ".types"))
        high = sample_rate / 2 if settings.f_max is None else settings.f_max
        unit = math.log(10) if settings.log == "natural" else 1.0  # the logarithm of a factor of ten in power

        @dali.pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=MAX_CHANNELS, num_threads=1, device_id=device_id, exec_dynamic=True, prefetch_queue_depth=1
        )
        def mels() -> tuple[Any, Any]:
            sound = fn.external_source(name="sound", dtype=types.FLOAT, ndim=1)
            number = fn.external_source(name="number", dtype=types.INT64, ndim=1)
            power = fn.spectrogram(
                sound if device_id is None else sound.gpu(),
                nfft=settings.n_fft,
                window_length=settings.n_fft,
                window_step=settings.hop_length,
                # DALI's default window is shifted by half a sample
                window_fn=torch.hann_window(settings.n_fft).tolist(),
                center_windows=True,
                reflect_padding=True,
                power=2,
            )
            bands = fn.mel_filter_bank(
                power,
                nfilter=settings.n_mels,
                sample_rate=float(sample_rate),
                freq_low=settings.f_min,
                freq_high=high,
                mel_formula=settings.scale,
                normalize=settings.scale == "slaney",
            )
            logs = fn.to_decibels(bands, multiplier=unit, reference=1.0, cutoff_db=unit * math.log10(settings.floor))
            return logs, number

        self._pipe = mels()
        self._pipe.build()
        self._numbers = itertools.count()

    def run(self, channels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        numbers = list(itertools.islice(self._numbers, len(channels)))
        self._pipe.feed_input("sound", [channel.numpy() for channel in channels])
        self._pipe.feed_input("number", [np.array([number], np.int64) for number in numbers])
        logs, returned = self._pipe.run()
        if [int(np.asarray(returned[n])[0]) for n in range(len(returned))] != numbers:
            raise RuntimeError("DALI returned the spectrograms of another run")
        return copied(logs)
