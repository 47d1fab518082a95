"""Windows of FLAC, from its first frame to its last, decoded from one packet that holds their frames."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.audio.frame import AudioFrame
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import AudioInfo, AudioMark
from headrace.loaders import AudioSpec
from headrace.loaders.audio import decode
from headrace.loaders.audio.excerpts import flac

SECONDS = 3
SECOND = Fraction(1), Fraction(2)


def samples(rate: int, channels: int, seconds: int = SECONDS) -> Any:
    return np.random.default_rng(1).integers(-20_000, 20_000, (seconds * rate, channels), np.int16)


def recording(rate: int, layout: str, kind: str = "s16", frame: int = 0) -> bytes:
    """Noise, which no frame of FLAC makes much shorter."""
    target, noise = io.BytesIO(), samples(rate, {"mono": 1, "stereo": 2, "5.1": 6}[layout])
    with av.open(target, "w", format="flac") as output:
        stream: Any = output.add_stream(
            "flac", rate=rate, layout=layout, options={"frame_size": str(frame)} if frame else {}
        )
        stream.format = kind
        wide = noise.astype(np.int32) << 16 if kind == "s32" else noise
        whole = AudioFrame.from_ndarray(wide.reshape(1, -1), format=kind, layout=layout)
        whole.sample_rate, whole.pts, whole.time_base = rate, 0, Fraction(1, rate)
        for packet in [*stream.encode(whole), *stream.encode(None)]:
            output.mux(packet)
    return target.getvalue()


def info_of(data: bytes) -> AudioInfo:
    audio = probe(data, ext="flac").audio
    assert audio is not None
    return audio


FILES = {
    (16_000, "mono", "s16", 0): recording(16_000, "mono"),
    (22_050, "stereo", "s16", 0): recording(22_050, "stereo"),
    (11_025, "mono", "s16", 1152): recording(11_025, "mono", "s16", 1152),
    (44_100, "stereo", "s32", 0): recording(44_100, "stereo", "s32"),
    (8_000, "5.1", "s16", 0): recording(8_000, "5.1"),
}


@given(
    which=st.sampled_from(sorted(FILES)),
    start=st.integers(0, 10 * SECONDS),
    by=st.integers(-10, 50),
    spec=st.builds(
        AudioSpec,
        st.sampled_from([8000, 16_000, 22_050]),
        st.sampled_from([1, 2]),
        downmix=st.sampled_from(["mix", "first"]),
    ),
    seconds=st.sampled_from([0.1, 1.0, 2.5, 6.0]),
)
@settings(deadline=None)
def test_windows_are_those_that_libav_finds_by_packets(
    which: tuple[int, str, str, int], start: int, by: int, spec: AudioSpec, seconds: float
) -> None:
    data, info = memoryview(FILES[which]), info_of(FILES[which])
    begin = Fraction(start, 10) + Fraction(by, info.sample_rate)
    asked = data, info, begin, spec, round(seconds * spec.sample_rate), True
    found, real = decode.decode_audio(*asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_decode_from_excerpt", lambda *_: None)
        expected, really = decode.decode_audio(*asked)
    assert np.array_equal(found, expected)
    assert real == really


@pytest.mark.parametrize("which", sorted(FILES))
@pytest.mark.parametrize("start", [Fraction(0), Fraction(1), Fraction(12, 5)])
def test_first_and_last_frames_are_decoded_at_once_too(
    which: tuple[int, str, str, int], start: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, info = FILES[which], info_of(FILES[which])
    monkeypatch.setattr(decode, "open_media", lambda _: pytest.fail("by packets"))
    spec = AudioSpec(info.sample_rate, info.channels if info.channels < 3 else 1, downmix="first")
    found, real = decode.decode_audio(memoryview(data), info, start, spec, 2 * info.sample_rate, True)
    first = int(start * info.sample_rate)
    expected = (
        samples(info.sample_rate, info.channels)[first : first + 2 * info.sample_rate, : spec.channels].T / 32_768
    )
    assert real == expected.shape[1]
    assert np.array_equal(found[:, :real], expected.astype(np.float32))
    assert not found[:, real:].any()


def test_files_that_are_not_as_the_index_says_are_left_to_libav() -> None:
    data = FILES[16_000, "mono", "s16", 0]
    info = info_of(data)
    assert flac.excerpt(memoryview(data), info, *SECOND) is not None
    for other in (replace(info, sample_rate=8000), replace(info, channels=2)):
        assert flac.excerpt(memoryview(data), other, *SECOND) is None, other
    assert flac.excerpt(memoryview(b"RIFF" + data[4:]), info, *SECOND) is None
    first = data.index(b"\xff\xf8")
    for cut in (0, 4, 20, first, first + 2, first + 100):
        assert flac.excerpt(memoryview(data[:cut]), info, *SECOND) is None, cut
    unknown = bytearray(data)
    unknown[21] &= 0xF0
    unknown[22:26] = bytes(4)  # how many samples there are
    assert flac.excerpt(memoryview(bytes(unknown)), info, *SECOND) is None


def test_a_file_whose_last_frames_are_missing_is_left_to_libav() -> None:
    data = FILES[16_000, "mono", "s16", 0]
    info, last = info_of(data), data.rindex(b"\xff\xf8")
    assert flac.excerpt(memoryview(data), info, Fraction(2), Fraction(3)) is not None
    assert flac.excerpt(memoryview(data[:last]), info, Fraction(2), Fraction(3)) is None


def test_a_last_frame_that_breaks_off_is_no_silence() -> None:
    """As much as is there comes out of both ways."""
    data = FILES[16_000, "mono", "s16", 0][:-500]
    info, spec = info_of(data), AudioSpec()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_decode_from_excerpt", lambda *_: None)
        expected = outcome(data, info, spec)
    assert outcome(data, info, spec) == expected


def outcome(data: bytes, info: AudioInfo, spec: AudioSpec) -> Any:
    try:
        sound, real = decode.decode_audio(memoryview(data), info, Fraction(2), spec, 16_000, True)
    except CorruptionError as error:
        return str(error)
    return sound.tobytes(), real


@pytest.mark.parametrize("start", [Fraction(1), Fraction(2)])
def test_damage_inside_the_window_is_an_error_and_not_silence(start: Fraction) -> None:
    whole = FILES[16_000, "mono", "s16", 0]
    info, broken = info_of(whole), bytearray(whole)
    middle = int(len(whole) * (start + Fraction(1, 2)) / SECONDS)
    for at in range(middle, middle + 4000):
        broken[at] ^= 0x5A
    with pytest.raises(CorruptionError):
        decode.decode_audio(memoryview(bytes(broken)), info, start, AudioSpec(), 16_000, True)


@pytest.mark.parametrize("first", [11_025, 30_870, 32_965])
def test_libav_finds_the_end_of_flac_too(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_decode_from_excerpt", lambda *_: None)
    data = FILES[11_025, "mono", "s16", 1152]
    whole, _ = decode.decode_audio(memoryview(data), info_of(data), Fraction(0), AudioSpec(11_025), 33_075, True)
    start = Fraction(first, 11_025)
    late, real = decode.decode_audio(memoryview(data), info_of(data), start, AudioSpec(11_025), 2000, True)
    assert real == min(2000, 33_075 - first)
    assert np.array_equal(late[:, :real], whole[:, first : first + real])


def test_what_only_looks_like_a_frame_is_none() -> None:
    """The first frame's header, and its number, copied into the middle of another frame's noise."""
    data = bytearray(FILES[16_000, "mono", "s16", 0])
    header = flac._header(memoryview(data))
    assert header is not None
    looked = flac._FrameSearch(memoryview(data), header)
    frames = [at for at, _ in looked.frames(header.end - 1)]
    place = (frames[2] + frames[3]) // 2
    other = bytearray(data[frames[5] : frames[5] + 16])
    other[2] ^= 0x01  # another rate
    other[5] = flac._crc8(bytes(other[:5]))
    data[place : place + 16] = other
    looked = flac._FrameSearch(memoryview(data), header)
    assert [at for at, _ in looked.frames(header.end - 1)] == frames


def bomb(count: int) -> bytes:
    """FLAC that says to last 400 hours, and is full of what looks like the first bytes of a frame."""
    rate, block = 48_000, struct.pack(">H", 4096)
    forged = (rate << 44 | 15 << 36 | (1 << 36) - 1).to_bytes(8, "big")
    info = (block * 2).ljust(10, b"\0") + forged
    frame = b"\xff\xf8\xc9\x08"
    first = frame + b"\0" + bytes([flac._crc8(frame + b"\0")])
    return b"fLaC\x80\0\0\x22" + info.ljust(34, b"\0") + first + frame * count


@pytest.mark.parametrize("marked", [True, False])
def test_a_file_full_of_what_looks_like_frames_is_a_bad_sample_before_long(
    marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, looked, real = bomb(1 << 20), 0, flac._frame_number

    def number(*args: Any) -> Any:
        nonlocal looked
        looked += 1
        return real(*args)

    monkeypatch.setattr(flac, "_frame_number", number)
    forged = AudioInfo("flac", 0, "flac", 48_000, 1, (1 << 36) - 1)
    if marked:
        forged = replace(forged, time_base=Fraction(1, 48_000), marks=(AudioMark(42, 0),))
    with pytest.raises(CorruptionError, match="look like a frame" if marked else "no audio can be decoded"):
        decode.decode_audio(memoryview(data), forged, Fraction(10**6), AudioSpec(seconds=1.0), 16_000, True)
    assert looked == (flac.MAX_CANDIDATES + 1 if marked else 0)
