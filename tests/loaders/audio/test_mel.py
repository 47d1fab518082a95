"""Log-mel spectrograms against the same formulas in double precision, written independently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.sample import Sample
from headrace.loaders import AudioSpec, LogMel
from headrace.loaders.audio.mel import MAX_CHANNELS, DaliMel, log_mel
from headrace.loaders.interfaces import FetchedSample, ProcessedSample, Processor, SampleLayout, SampleRef
from headrace.loaders.processors.wrappers import mels

RATE = 16_000


def slow(sound: np.ndarray, what: LogMel) -> np.ndarray:
    """float64 (bands, frames), by a discrete Fourier transform written out, and triangles drawn point by point."""
    n = what.n_fft
    padded = np.pad(sound.astype(np.float64), n // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / n)
    frames = np.stack([padded[at : at + n] * window for at in range(0, len(padded) - n + 1, what.hop_length)])
    k = np.arange(n // 2 + 1)[:, None] * np.arange(n)[None]
    spectrum = frames @ np.exp(-2j * np.pi * k / n).T
    power = np.abs(spectrum) ** 2
    high = what.f_max or RATE / 2

    def mel(hz: float) -> float:
        if what.scale == "htk":
            return 2595 * math.log10(1 + hz / 700)
        return 3 * hz / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)

    grid = np.linspace(mel(what.f_min), mel(high), what.n_mels + 2)
    hz = [_inverse(mel, m, high) for m in grid]
    bins = np.arange(n // 2 + 1) * RATE / n
    bank = np.zeros((what.n_mels, len(bins)))
    for band in range(what.n_mels):
        left, peak, right = hz[band : band + 3]
        for number, f in enumerate(bins):
            if left < f < right:
                bank[band, number] = (f - left) / (peak - left) if f <= peak else (right - f) / (right - peak)
        if what.scale == "slaney":
            bank[band] *= 2 / (right - left)
    result = np.maximum(bank @ power.T, what.floor)
    return np.log(result) if what.log == "natural" else np.log10(result)


def _inverse(mel: Any, wanted: float, high: float) -> float:
    """By bisection, so that no formula is shared with what is tested."""
    low, top = 0.0, high * 1.01
    for _ in range(200):
        middle = (low + top) / 2
        low, top = (middle, top) if mel(middle) < wanted else (low, middle)
    return low


EACH = pytest.mark.parametrize(
    "what",
    [
        LogMel(),
        LogMel(n_mels=40, n_fft=512, hop_length=128, scale="htk", log="decadic"),
        LogMel(n_mels=23, f_min=60.0, f_max=7600.0, floor=1e-5),
    ],
)


def sweep(seconds: float = 1.0) -> np.ndarray:
    """A rising tone and noise: float32 (S,)."""
    time = np.arange(round(seconds * RATE)) / RATE
    noise = np.random.default_rng(7).standard_normal(len(time))
    return (0.3 * np.sin(2 * np.pi * (100 + 2000 * time) * time) + 0.05 * noise).astype(np.float32)


def difference(one: torch.Tensor, other: torch.Tensor, what: LogMel) -> float:
    """How far two spectrograms differ where the power is at least 1e-6 of the largest."""
    power = other.exp() if what.log == "natural" else 10**other
    loud = power >= 1e-6 * power.max()
    return float((one - other)[loud].abs().max())


@EACH
def test_log_mel_is_within_its_stated_tolerance(what: LogMel) -> None:
    sound = sweep()
    found = log_mel(torch.from_numpy(sound[None]), RATE, what)[0].numpy()
    expected = slow(sound, what)
    assert found.shape == expected.shape == (what.n_mels, what.frames(RATE))
    power = np.exp(expected) if what.log == "natural" else 10**expected
    loud = power >= 1e-6 * power.max()
    assert loud.mean() > 0.9
    assert np.abs(found - expected)[loud].max() < 1e-3


def test_silence_is_the_floor() -> None:
    what = LogMel(floor=1e-8)
    assert torch.allclose(log_mel(torch.zeros(2, 4000), RATE, what), torch.tensor(math.log(1e-8)))


@pytest.mark.parametrize(
    "wrong", [{"hop_length": 0}, {"n_fft": 1}, {"n_mels": 5000}, {"f_min": 9.0, "f_max": 8.0}, {"scale": "bark"}]
)
def test_impossible_spectrograms_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        LogMel(**wrong)


def test_spectrograms_that_the_sound_cannot_fill_are_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="nothing above"):
        AudioSpec(8000, seconds=1.0, features=LogMel(f_max=8000.0)).samples()
    with pytest.raises(UsageError, match="too few"):
        AudioSpec(16000, seconds=0.01, features=LogMel()).samples()


@pytest.fixture
def several() -> list[torch.Tensor]:
    """Sounds of other lengths and channels, more channels than one run of a graph takes."""
    stereo = torch.from_numpy(np.stack([sweep(), sweep()[::-1].copy()]))
    return [stereo, torch.zeros(1, 3000), *(torch.from_numpy(sweep(0.1 + n / 100))[None] for n in range(MAX_CHANNELS))]


@EACH
def test_dalis_graph_is_within_the_stated_tolerance_on_the_cpu(what: LogMel, several: list[torch.Tensor]) -> None:
    graph = DaliMel(what, RATE)
    for _ in range(2):  # the second time by the graph that is there
        for found, sound in zip(graph(several), several, strict=True):
            expected = log_mel(sound, RATE, what)
            assert found.shape == expected.shape
            assert found.dtype == torch.float32
            assert difference(found, expected, what) < 1e-3
    graph.close()


def test_dalis_graph_is_not_there_without_the_gpu_that_is_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="no GPU number 99"):
        DaliMel(LogMel(), RATE, 99)


def test_spectrograms_stand_in_the_place_of_sound_for_clips_and_windows_alike() -> None:
    sample = Sample(0, "a", "s", (), 1.0)
    ref = FetchedSample(SampleRef(0, 0, sample), {})

    class FixedAudio:
        layout = SampleLayout(("video", "audio"), {"clip": torch.float64})

        def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
            sound = torch.from_numpy(sweep())[None]
            whole = ProcessedSample(sample, {"video": torch.zeros(1), "audio": sound}, {"clip": 0.5})
            return [whole, CorruptionError("bad"), replace(whole, tensors={**whole.tensors, "audio": sound * 0})]

    work = mels(cast(Processor, FixedAudio()), AudioSpec(RATE, seconds=1.0, features=LogMel()), torch.device("cpu"))
    assert work.layout.tensors == ("video", "mel")
    first, bad, last = work.process([ref] * 3)
    assert isinstance(bad, CorruptionError)
    assert isinstance(first, ProcessedSample)
    assert isinstance(last, ProcessedSample)
    assert list(first.tensors) == ["video", "mel"]
    assert first.values == {"clip": 0.5}
    assert torch.equal(first.tensors["mel"], log_mel(torch.from_numpy(sweep())[None], RATE, LogMel()))
    assert torch.all(last.tensors["mel"] == math.log(1e-10))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@EACH
def test_on_a_gpu_it_is_within_the_same_tolerance(what: LogMel, several: list[torch.Tensor]) -> None:
    graph = DaliMel(what, RATE, 0)
    for found, sound in zip(graph(several), several, strict=True):
        assert found.is_cuda
        assert difference(found.cpu(), log_mel(sound, RATE, what), what) < 1e-3
        assert difference(log_mel(sound.cuda(), RATE, what).cpu(), log_mel(sound, RATE, what), what) < 1e-3
