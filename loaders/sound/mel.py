"""Log-mel spectrograms, computed where the samples are: the CPU's threads, or a GPU.

Purpose: the features that speech and music models read, made once for every loader.
Invariants: the short-time Fourier transform is centred (reflected at both ends) with a periodic Hann window; mel bands
are triangles on Slaney's scale with Slaney's area norm (Slaney 1998, Auditory Toolbox) or on HTK's scale without norm;
powers are summed, floored at `floor`, and taken as natural or decadic logarithms. Against the same formulas in double
precision the result differs by less than 1e-3 wherever the power is at least 1e-6 of the clip's largest; on a GPU
likewise.
Failure behaviour: none of its own; `LogMel` was checked.
"""

from __future__ import annotations

import functools
import math

import torch

from headrace.loaders.sound.features import LogMel

_LINEAR_HZ, _BREAK_HZ, _LOG_STEP = 200 / 3, 1000.0, math.log(6.4) / 27  # Slaney's scale: linear, then logarithmic


def log_mel(sound: torch.Tensor, sample_rate: int, what: LogMel) -> torch.Tensor:
    """float32 (C, S) to float32 (C, bands, 1 + S // hop), on the same device."""
    window = torch.hann_window(what.n_fft, device=sound.device)
    spectrum = torch.stft(sound, what.n_fft, what.hop, window=window, center=True, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    mel = (_bands(what, sample_rate).to(sound.device) @ power).clamp_(min=what.floor)
    return mel.log_() if what.log == "natural" else mel.log10_()


@functools.lru_cache(maxsize=16)
def _bands(what: LogMel, sample_rate: int) -> torch.Tensor:
    """The triangles: float32 (bands, n_fft // 2 + 1)."""
    high = sample_rate / 2 if what.high is None else what.high
    ends = torch.tensor([_to_mel(what.low, what.scale), _to_mel(high, what.scale)], dtype=torch.float64)
    steps = torch.linspace(float(ends[0]), float(ends[1]), what.bands + 2, dtype=torch.float64)
    edges = torch.tensor([_to_hz(float(mel), what.scale) for mel in steps], dtype=torch.float64)
    bins = torch.linspace(0, sample_rate / 2, what.n_fft // 2 + 1, dtype=torch.float64)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)).clamp_(min=0)
    if what.scale == "slaney":
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
