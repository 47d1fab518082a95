"""The sound of a clip: the right instant, the exact length, zeros where there is nothing."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import AudioInfo
from headrace.loaders import AudioSpec, Clip
from headrace.loaders.audio.decode import decode_audio

RATE = 8000


def ramp(container: str, codec: str, seconds: float = 3.0, rate: int = RATE) -> bytes:
    """Sound whose every sample tells its place: a slow ramp from -0.5 to 0.5."""
    target = io.BytesIO()
    count = round(seconds * rate)
    samples = np.linspace(-0.5, 0.5, count, dtype=np.float32)
    with av.open(target, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        assert isinstance(stream, AudioStream)
        for at in range(0, count, 1000):
            piece = (samples[None, at : at + 1000] * 32767).astype(np.int16)
            frame = AudioFrame.from_ndarray(piece, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return target.getvalue()


def info_of(data: bytes, ext: str) -> AudioInfo:
    audio = probe(data, ext=ext).audio
    assert audio is not None
    return audio


@pytest.mark.parametrize(("container", "codec"), [("wav", "pcm_s16le"), ("flac", "flac"), ("matroska", "flac")])
@pytest.mark.parametrize("start", [Fraction(0), Fraction(1, 3), Fraction(17, 10)])
def test_sound_begins_at_the_very_sample_of_the_instant(container: str, codec: str, start: Fraction) -> None:
    data = ramp(container, codec)
    sound, real = decode_audio(memoryview(data), info_of(data, container), start, AudioSpec(RATE), 4000)
    first = round(start * RATE)
    expected = np.linspace(-0.5, 0.5, 3 * RATE, dtype=np.float32)[first : first + 4000]
    assert sound.shape == (1, 4000)
    assert real == 4000
    assert np.abs(sound[0] - expected).max() < (2e-4 if container == "matroska" else 1e-4)


@pytest.mark.parametrize("start", [Fraction(0), Fraction(1, 3), Fraction(17, 10), Fraction(29, 10)])
def test_stamps_in_milliseconds_leave_no_sample_out_and_repeat_none(start: Fraction) -> None:
    """A frame of 4,608 samples at 44.1 kHz takes 104.49 ms, which Matroska rounds."""
    noise = np.random.default_rng(1).integers(-20_000, 20_000, (1, 4 * 44_100), np.int16)
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as output:
        stream = output.add_stream("flac", rate=44_100, layout="mono")
        frame = AudioFrame.from_ndarray(noise, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 44_100, 0, Fraction(1, 44_100)
        for piece in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(piece)
    data = target.getvalue()
    spec = AudioSpec(44_100)
    sound, real = decode_audio(memoryview(data), info_of(data, "mkv"), start, spec, 44_100, from_first=True)
    first = round(start * 44_100)
    assert real == 44_100
    assert np.array_equal(sound[0], noise[0, first : first + 44_100].astype(np.float32) / 32_768)


@pytest.mark.parametrize("rate", [4000, 16000, 11025])
def test_resampling_keeps_instant_and_length(rate: int) -> None:
    data = ramp("wav", "pcm_s16le")
    sound, real = decode_audio(memoryview(data), info_of(data, "wav"), Fraction(1), AudioSpec(rate), rate // 2)
    assert sound.shape == (1, rate // 2)
    assert real == rate // 2
    expected = -0.5 + (1 + np.arange(rate // 2) / rate) / 3
    assert np.abs(sound[0] - expected).max() < 1e-3


def test_zeros_follow_the_end_of_the_audio_and_their_number_is_returned() -> None:
    data = ramp("wav", "pcm_s16le")
    sound, real = decode_audio(memoryview(data), info_of(data, "wav"), Fraction(5, 2), AudioSpec(RATE), RATE)
    assert real == RATE // 2
    assert (sound[0, real:] == 0).all()
    assert np.abs(sound[0, : real - 100]).min() > 0.3
    silent, nothing = decode_audio(memoryview(data), info_of(data, "wav"), Fraction(9), AudioSpec(RATE), RATE)
    assert nothing == 0
    assert not silent.any()


@pytest.mark.parametrize("name", ["nasa_h264_aac.mp4", "pancake_h264.mkv", "nasa_speech_44100.mp3", "action_xvid.avi"])
def test_sound_from_the_middle_equals_that_of_decoding_from_the_start(name: str, media: Path) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    spec = AudioSpec(info.sample_rate, min(2, info.channels))
    offset = Fraction(2)
    middle, real = decode_audio(memoryview(data), info, offset, spec, info.sample_rate)
    whole, _ = decode_audio(memoryview(data), info, Fraction(0), spec, 3 * info.sample_rate)
    assert real == info.sample_rate
    late = whole[:, 2 * info.sample_rate :]
    assert np.abs(late).max() > 0.001  # there is something to hear
    assert np.abs(middle - late).max() < 2e-3


def test_equal_requests_give_equal_samples(media: Path) -> None:
    data = (media / "nasa_h264_aac.mp4").read_bytes()
    info = info_of(data, "mp4")
    one, two = (decode_audio(memoryview(data), info, Fraction(5, 3), AudioSpec(), 9000)[0] for _ in range(2))
    assert (one == two).all()


def test_a_stream_that_is_no_sound_is_an_error(media: Path) -> None:
    data = (media / "nasa_h264_aac.mp4").read_bytes()
    wrong = AudioInfo("mp4", 0, "aac", 8000, 1, 100)
    with pytest.raises(CorruptionError):
        decode_audio(memoryview(data), wrong, Fraction(0), AudioSpec(), 100)


def test_the_length_is_rounded_as_documented_and_must_be_known() -> None:
    assert AudioSpec(16000, seconds=0.5).samples(Clip()) == 8000
    assert AudioSpec(44100).samples(Clip(16, fps=30)) == 23520
    assert AudioSpec(1000, seconds=0.0625).samples(Clip()) == 62  # halves to even
    with pytest.raises(UsageError, match="seconds"):
        AudioSpec().samples(Clip(16, 2))


@pytest.mark.parametrize("wrong", [{"sample_rate": 10}, {"channels": 6}, {"seconds": 0.0}, {"seconds": 1e9}])
def test_impossible_sound_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        AudioSpec(**wrong)  # type: ignore[arg-type]
