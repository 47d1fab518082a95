"""Frames of sound laid out by their stamps: samples of every kind, as floats."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
import pytest
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from headrace.dataio.core.errors import CorruptionError
from headrace.loaders.audio import frames as bounds
from headrace.loaders.audio.frames import collect_frames

SECONDS = 3


def noise(codec: str, rate: int, layout: str) -> bytes:
    target, channels = io.BytesIO(), {"mono": 1, "stereo": 2, "5.1": 6}[layout]
    samples = np.random.default_rng(1).integers(-20_000, 20_000, (1, SECONDS * rate * channels), np.int16)
    with av.open(target, "w", format="wav") as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        assert isinstance(stream, AudioStream)
        frame = AudioFrame.from_ndarray(samples, format="s16", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    return target.getvalue()


@pytest.mark.parametrize("codec", ["pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"])
@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1"])
def test_samples_of_every_kind_become_what_libav_makes_of_them(codec: str, layout: str) -> None:
    with av.open(io.BytesIO(noise(codec, 8000, layout)), "r") as file:
        frames = list(file.decode(audio=0))
    planar = AudioResampler(format="fltp", layout=frames[0].layout)
    expected = np.concatenate([one.to_ndarray() for frame in frames for one in planar.resample(frame)], axis=1)
    sound = collect_frames(frames, Fraction(1))  # more than was expected
    assert sound is not None
    found, covered = sound.placed(Fraction(0), Fraction(SECONDS), None)
    assert covered == SECONDS
    assert np.array_equal(found, expected)


def test_far_more_sound_than_its_stamps_have_room_for_is_refused() -> None:
    """All of it at one instant: a few bytes might be hours."""
    with av.open(io.BytesIO(noise("pcm_s16le", 48_000, "mono")), "r") as file:
        frames = list(file.decode(audio=0))
    given = 0

    def endless() -> Iterator[AudioFrame]:
        nonlocal given
        for frame in itertools.cycle(frames):
            frame.pts = 0
            given += frame.samples
            yield frame

    with pytest.raises(CorruptionError, match="far more sound"):
        collect_frames(endless(), Fraction(1))
    assert given < 8 * 48_000 + bounds.MOST_OF_WINDOW * (1 << 19)


def test_sound_that_changes_in_the_middle_is_refused() -> None:
    frames = list[AudioFrame]()
    for rate in (8000, 16_000):
        with av.open(io.BytesIO(noise("pcm_s16le", rate, "mono")), "r") as file:
            frames += file.decode(audio=0)
    with pytest.raises(CorruptionError, match="in the middle"):
        collect_frames(frames, Fraction(1))
