"""Short FLAC by libsndfile, and what both ways share: the same samples as libav's, to the bit."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dataio.core.errors import CorruptionError
from dataio.shards.contract import AudioInfo
from dataio.shards.media.probe import probe
from loaders import AudioSpec
from loaders.sound import decode, flac, resample
from loaders.sound.layout import heard

SECONDS = 3


def noise(container: str, codec: str, rate: int, layout: str) -> bytes:
    target, channels = io.BytesIO(), {"mono": 1, "stereo": 2, "5.1": 6}[layout]
    samples = np.random.default_rng(1).integers(-20_000, 20_000, (1, SECONDS * rate * channels), np.int16)
    with av.open(target, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        frame = AudioFrame.from_ndarray(samples, format="s16", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    return target.getvalue()


def info_of(data: bytes, ext: str) -> AudioInfo:
    audio = probe(data, ext=ext).audio
    assert audio is not None
    return audio


FILES = {
    (rate, layout): noise("flac", "flac", rate, layout)
    for rate, layout in ((16_000, "mono"), (22_050, "stereo"), (11_025, "mono"))
}


@given(
    which=st.sampled_from(sorted(FILES)),
    start=st.integers(0, 10 * SECONDS + 5),
    by=st.integers(0, 50),
    spec=st.builds(AudioSpec, st.sampled_from([8000, 16_000, 22_050]), st.sampled_from([1, 2])),
    seconds=st.sampled_from([0.1, 1.0, 2.5]),
)
def test_windows_of_short_flac_are_those_that_libav_decodes(
    which: tuple[int, str], start: int, by: int, spec: AudioSpec, seconds: float
) -> None:
    data = memoryview(FILES[which])
    info = info_of(FILES[which], "flac")
    asked = (
        data,
        info,
        Fraction(start, 10) + Fraction(by, info.sample_rate),
        spec,
        round(seconds * spec.sample_rate),
        True,
    )
    found, real = decode.decode_audio(*asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "read_flac", lambda *_: None)
        expected, really = decode.decode_audio(*asked)
    assert flac.read_flac(data, info, Fraction(start, 10), Fraction(1)) is not None
    assert np.array_equal(found, expected)
    assert real == really


def test_files_that_are_not_as_the_index_says_are_left_to_libav(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(FILES[16_000, "mono"])
    info = info_of(bytes(data), "flac")
    window = Fraction(0), Fraction(1)
    assert flac.read_flac(data, info, *window) is not None
    for other in (
        replace(info, samples=info.samples - 1),
        replace(info, sample_rate=8000),
        replace(info, channels=2),
        replace(info, channels=6),
        replace(info, codec="vorbis"),
        replace(info, ext="mkv"),
    ):
        assert flac.read_flac(data, other, *window) is None, other
    assert flac.read_flac(memoryview(bytes(data)[:-2000]), info, Fraction(2), Fraction(1)) is None
    assert flac.read_flac(memoryview(noise("wav", "pcm_s16le", 16_000, "mono")), info, *window) is None
    monkeypatch.setattr(flac, "MOST_BYTES", len(data) - 1)
    assert flac.read_flac(data, info, *window) is None


def test_damage_inside_the_window_is_an_error_and_not_silence() -> None:
    whole = FILES[16_000, "mono"]
    info = info_of(whole, "flac")
    broken = bytearray(whole)
    for at in range(len(whole) // 2, len(whole) // 2 + 4000):
        broken[at] ^= 0x5A
    assert flac.read_flac(memoryview(whole), info, Fraction(1), Fraction(1)) is not None
    with pytest.raises(CorruptionError):
        decode.decode_audio(memoryview(bytes(broken)), info, Fraction(1), AudioSpec(), 16_000, True)


@pytest.mark.parametrize("codec", ["pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"])
@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1"])
def test_samples_of_every_kind_become_what_libav_makes_of_them(codec: str, layout: str) -> None:
    with av.open(io.BytesIO(noise("wav", codec, 8000, layout))) as file:
        frames = list(file.decode(audio=0))
    planar = AudioResampler(format="fltp", layout=frames[0].layout)
    expected = np.concatenate([one.to_ndarray() for frame in frames for one in planar.resample(frame)], axis=1)
    sound = heard(frames, Fraction(1))  # more than was expected
    assert sound is not None
    found, covered = sound.placed(Fraction(0), Fraction(SECONDS), None)
    assert covered == SECONDS
    assert np.array_equal(found, expected)


def test_sound_that_changes_in_the_middle_is_refused() -> None:
    frames = list[AudioFrame]()
    for rate in (8000, 16_000):
        with av.open(io.BytesIO(noise("wav", "pcm_s16le", rate, "mono"))) as file:
            frames += file.decode(audio=0)
    with pytest.raises(CorruptionError, match="in the middle"):
        heard(frames, Fraction(1))


def test_resampling_does_not_depend_on_how_much_is_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(2).standard_normal((2, 100_000), np.float32)
    whole = resample.resampled(source, 44_100, "stereo", AudioSpec())
    for count in (1 << 20, 4097):
        monkeypatch.setattr(resample, "AT_ONCE", count)
        monkeypatch.setattr(resample, "_LONGEST", 3 * count + 1)
        assert np.array_equal(whole, resample.resampled(source, 44_100, "stereo", AudioSpec()))
    assert resample.resampled(source, 16_000, "stereo", AudioSpec(channels=2)) is source


@pytest.mark.parametrize("spec", [AudioSpec(), AudioSpec(44_100, 2), AudioSpec(8000, 2), AudioSpec(policy="first")])
def test_samples_of_16_bits_give_what_their_floats_would(spec: AudioSpec) -> None:
    source = np.random.default_rng(3).integers(-32_768, 32_767, (2, 50_000), np.int16)
    floats = source.astype(np.float32) / 32_768
    found = resample.resampled(source, 44_100, "stereo", spec)
    assert found.dtype == np.float32
    assert np.array_equal(found, resample.resampled(floats, 44_100, "stereo", spec))


@pytest.mark.parametrize("first", [11_025, 30_870, 32_965])
def test_libav_finds_the_end_of_flac_too(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "read_flac", lambda *_: None)
    data = FILES[11_025, "mono"]
    whole, _ = decode.decode_audio(
        memoryview(data), info_of(data, "flac"), Fraction(0), AudioSpec(11_025), 33_075, True
    )
    start = Fraction(first, 11_025)
    late, real = decode.decode_audio(memoryview(data), info_of(data, "flac"), start, AudioSpec(11_025), 2000, True)
    assert real == min(2000, 33_075 - first)
    assert np.array_equal(late[:, :real], whole[:, first : first + real])
