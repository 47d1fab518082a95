"""Resampling: from one rate and layout to another, stretch after stretch through what a thread keeps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import av.error
import numpy as np
import numpy.typing as npt
import pytest
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loaders import AudioSpec
from headrace.loaders.audio import resample

RATES = [8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 44_056]
F32 = npt.NDArray[np.float32]


def alone(made: Callable[[], F32]) -> F32:
    """In a thread that has resampled nothing before."""
    found: list[F32] = []
    thread = threading.Thread(target=lambda: found.append(made()))
    thread.start()
    thread.join()
    return found[0]


def noise(seed: int, channels: int, samples: int) -> F32:
    return np.random.default_rng(seed).standard_normal((channels, samples), np.float32)


def by_ffmpeg(source: F32, rate: int, layout: str, spec: AudioSpec) -> F32:
    """With silence around it, by PyAV's own resampler."""
    padding = rate  # so many samples become a whole number
    whole = AudioFrame.from_ndarray(np.pad(source, ((0, 0), (padding, padding))), format="fltp", layout=layout)
    whole.sample_rate = rate
    resampler = AudioResampler("fltp", {1: "mono", 2: "stereo"}[spec.channels], spec.sample_rate)
    parts = [frame.to_ndarray() for frame in [*resampler.resample(whole), *resampler.resample(None)]]
    made = round(Fraction(source.shape[1] * spec.sample_rate, rate))
    return np.concatenate(parts, axis=1, dtype=np.float32)[:, spec.sample_rate :][:, :made]


def test_resampling_does_not_depend_on_how_much_is_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = noise(2, 2, 100_000)
    whole = resample.resampled(source, 44_100, "stereo", AudioSpec())
    for count in (1 << 20, 4097):
        monkeypatch.setattr(resample, "AT_ONCE", count)
        monkeypatch.setattr(resample, "_LONGEST", 3 * count + 1)
        again = alone(lambda: resample.resampled(source, 44_100, "stereo", AudioSpec()))
        assert np.array_equal(whole, again)
    assert resample.resampled(source, 16_000, "stereo", AudioSpec(channels=2)) is source


@settings(max_examples=40)
@given(
    st.sampled_from(RATES),
    st.sampled_from(RATES),
    st.sampled_from([("mono", 1), ("stereo", 2), ("5.1", 6)]),
    st.sampled_from([1, 2]),
    st.lists(st.integers(1, 30_000), min_size=1, max_size=4),
)
def test_each_stretch_is_what_ffmpeg_makes_of_it_between_silence_whatever_came_before(
    rate: int, wanted: int, layout: tuple[str, int], channels: int, lengths: list[int]
) -> None:
    spec = AudioSpec(wanted, channels)
    for number, samples in enumerate([*lengths, *lengths]):
        source = noise(number, layout[1], samples)
        made = resample.resampled(source, rate, layout[0], spec)
        assert made.dtype == np.float32
        assert np.array_equal(made, by_ffmpeg(source, rate, layout[0], spec))


def test_the_samples_of_one_stretch_do_not_leak_into_the_next() -> None:
    spec, quiet = AudioSpec(), np.zeros((1, 20_000), np.float32)
    loud = np.full((1, 20_000), np.inf, np.float32)
    loud[:, ::3] = np.nan
    assert not np.isfinite(resample.resampled(loud, 48_000, "mono", spec)).all()
    assert not resample.resampled(quiet, 48_000, "mono", spec).any()


def test_a_thread_keeps_so_many_resamplers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = resample._ThreadCache()
    monkeypatch.setattr(resample, "_CACHE", cache)
    made: list[int] = []

    class CountingResampler(resample._Resampler):
        def __init__(self, kind: Any, pieces: int) -> None:
            made.append(kind.rate)
            super().__init__(kind, pieces)

    monkeypatch.setattr(resample, "_Resampler", CountingResampler)
    rates = [8_000 + 1_000 * number for number in range(resample.MAX_KEPT)]
    for rate in [*rates, *rates, 44_100, *rates[1:], rates[0]]:
        resample.resampled(noise(1, 1, 500), rate, "mono", AudioSpec(48_000))
        assert len(cache._resamplers) <= resample.MAX_KEPT
    assert made == [*rates, 44_100, rates[0]]


def test_a_resampler_that_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AudioSpec()
    source = noise(3, 1, 5_000)
    expected = resample.resampled(source, 44_100, "mono", spec)
    resamplers = resample._CACHE._resamplers
    before = next(reversed(resamplers.values()))
    wrong = AudioFrame.from_ndarray(noise(3, 2, 5_000), format="fltp", layout="stereo")
    with pytest.raises(av.error.FFmpegError):
        resample._CACHE.resampled(resample._Kind("fltp", "mono", 44_100, "mono", 16_000), 5_000, [wrong])
    assert before not in resamplers.values()
    assert np.array_equal(expected, resample.resampled(source, 44_100, "mono", spec))


@pytest.mark.parametrize("name", ["u8", "u8p", "s16", "s16p", "s32", "s32p", "flt", "dblp"])
def test_a_decoders_frame_is_resampled_as_it_is(name: str) -> None:
    values = noise(4, 2, 30_000) / 8
    scale: dict[str, tuple[Any, float, int]] = {
        "u8": (np.uint8, 1 << 7, 1 << 7),
        "s16": (np.int16, 1 << 15, 0),
        "s32": (np.int32, 1 << 31, 0),
        "flt": (np.float32, 1, 0),
        "dbl": (np.float64, 1, 0),
    }
    kind, one, zero = scale[name.rstrip("p")]
    held = (np.clip(values.astype(np.float64), -0.9, 0.9) * one + zero).astype(kind)
    floats = ((held.astype(np.float64) - zero) / one).astype(np.float32)
    shaped = held if name.endswith("p") else held.T.reshape(1, -1)
    for _ in range(2):
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(shaped), format=name, layout="stereo")
        frame.sample_rate = 44_100
        made = resample.resampled_frame(frame, AudioSpec())
        expected = resample.resampled(floats, 44_100, "stereo", AudioSpec())
        assert made.shape == expected.shape
        assert np.allclose(made, expected, atol=1e-6)
        assert math.isclose(float(np.abs(made).max()), float(np.abs(expected).max()), rel_tol=1e-4)
