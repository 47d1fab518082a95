"""Samples that are counted by packets are as many as a decoder outputs, for every kind of file."""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
from av.audio.stream import AudioStream
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core import limits
from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media import probe as probing
from headrace.dataio.shards.media import streams
from headrace.dataio.shards.media.audio_counter import AudioCounter, after_skipping
from headrace.dataio.shards.media.probe import Probe, probe
from tests.support.audio_corpus import KINDS, Kind, made
from tests.support.written_media import MakeWav

MEDIA = ("action.wav", "action_xvid.avi", "nasa_h264_aac.mp4", "nasa_speech_44100.mp3", "pancake_h264.mkv")
QUICK = (
    *("m4a aac, two edits", "m4a aac, silence first", "m4a aac, iTunSMPB", "mkv aac early"),
    *("mp3 22050 mono bare", "mp3 tagged", "avi libmp3lame"),
    *("ogg opus", "ogg opus of 2.5 ms", "webm opus", "mov pcm_s24be", "wav s64le"),
)
_COUNTED = ("aac", "libmp3lame", "libopus", "pcm_")
KIND_PARAMS = [
    pytest.param(kind, id=name, marks=pytest.mark.soak)
    for name, kind in KINDS.items()
    if kind.codec.startswith(_COUNTED) and name not in QUICK
]


@pytest.fixture
def decoded_packets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the audio packets that are decoded, in order."""
    sizes, real = list[int](), AudioCounter._decode

    def spy(counter: AudioCounter, packet: Any, early: bool) -> None:
        sizes.append(packet.size)
        real(counter, packet, early)

    monkeypatch.setattr(AudioCounter, "_decode", spy)
    return sizes


def by_decoding(source: bytes | Path, ext: str) -> Probe:
    """What probing finds if it decodes all of the audio."""
    opened = io.BytesIO(source) if isinstance(source, bytes) else f"file:{source}"
    return probing._probe_streams(opened, ext, by_packets=False)


def assert_counted(source: bytes | Path, ext: str, decoded: list[int], at_most: int = 40) -> None:
    """Few packets are decoded, and everything is as if all of them were."""
    found = probe(source, ext=ext)
    assert 2 <= len(decoded) <= at_most
    assert found == by_decoding(source, ext)
    assert found.audio is not None
    assert found.audio.marks


@pytest.mark.parametrize("name", MEDIA)
def test_real_files_are_counted_as_they_decode(media: Path, name: str, decoded_packets: list[int]) -> None:
    assert_counted(media / name, name.rpartition(".")[2], decoded_packets)


@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_files_of_every_kind_are_counted_as_they_decode(kind: Kind) -> None:
    data = made(kind)
    assert probe(data, ext=kind.ext) == by_decoding(data, kind.ext)


@pytest.mark.parametrize("name", QUICK)
def test_few_packets_are_decoded(name: str, decoded_packets: list[int]) -> None:
    at_most = 120 if name == "mkv aac early" else 40  # the packets before time zero are decoded
    assert_counted(made(KINDS[name]), KINDS[name].ext, decoded_packets, at_most)


@pytest.mark.parametrize("name", ["mkv flac", "ogg vorbis", "mkv alac"])
def test_codecs_without_a_rule_are_decoded_to_their_end(name: str, decoded_packets: list[int]) -> None:
    found = probe(made(KINDS[name]), ext=KINDS[name].ext).audio
    assert found is not None
    assert len(decoded_packets) > found.samples / 70_000
    assert decoded_packets[-1] == 0, "the decoder is flushed"


# --- packets that contradict the rule

NOISE = b"\x5a\x17" * 2000


def remuxed(data: bytes, form: str, change: Callable[[int, bytes], bytes]) -> bytes:
    """The audio in a new container; `change` returns what becomes of the packet with this number."""
    target = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as old, av.open(target, "w", format=form) as new:
        stream: Any = new.add_stream_from_template(old.streams.audio[0])
        for number, packet in enumerate(p for p in old.demux(audio=0) if p.size):
            changed = av.Packet(change(number, bytes(packet)))
            changed.pts, changed.dts, changed.duration = packet.pts, packet.dts, packet.duration
            changed.time_base, changed.stream, changed.is_keyframe = packet.time_base, stream, True
            new.mux(changed)
    return target.getvalue()


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        pytest.param("mkv libmp3lame", lambda data: b"\0\0\0\0" + data[4:], id="mp3 without a header"),
        pytest.param("mkv libmp3lame", lambda data: data[:-9], id="mp3 that is cut off"),
        pytest.param("mkv libopus", lambda data: bytes([data[0] & 7 | 8]) + data[1:], id="opus of another mode"),
        pytest.param("mkv libopus", lambda data: data[:1], id="opus of one byte"),
        pytest.param("mkv aac", lambda data: data[:2], id="aac of two bytes"),
        pytest.param("mkv pcm_s16le", lambda data: data[:-1], id="pcm with half a value"),
    ],
)
def test_a_packet_that_does_not_say_its_length_leads_to_decoding_all(
    name: str, spoil: Callable[[bytes], bytes], decoded_packets: list[int]
) -> None:
    data = remuxed(made(KINDS[name]), "matroska", lambda n, packet: spoil(packet) if n == 90 else packet)
    found = probe(data, ext="mkv")
    assert len(decoded_packets) > 90
    assert found == by_decoding(data, "mkv")


def test_damage_at_the_start_is_found_and_such_audio_has_no_marks(decoded_packets: list[int]) -> None:
    data = remuxed(made(KINDS["mkv aac"]), "matroska", lambda n, packet: NOISE[: len(packet)] if n == 0 else packet)
    found = probe(data, ext="mkv")
    assert len(decoded_packets) > 90
    assert found.notes == ("1 audio packets cannot be decoded",)
    assert found.audio is not None
    assert not found.audio.marks


def test_audio_of_which_nothing_decodes_is_left_out() -> None:
    data = remuxed(made(KINDS["mkv aac"]), "matroska", lambda _, packet: NOISE[: len(packet)])
    with pytest.raises(Exception, match="no audio can be decoded"):
        probe(data, ext="mkv")


def test_the_limit_of_values_holds_for_packets_that_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch, decoded_packets: list[int]
) -> None:
    data = made(KINDS["ogg opus"])
    monkeypatch.setattr(limits, "AUDIO_VALUES", 200_000)
    with pytest.raises(UnsupportedError, match="more than 200000 samples"):
        probe(data, ext="ogg")
    assert len(decoded_packets) < 40


# --- skipped samples


@given(st.lists(st.integers(1, 5760), min_size=1, max_size=9), st.integers(0, 20_000), st.integers(0, 6000))
def test_samples_are_skipped_from_the_start_on_and_dropped_at_the_end(
    lengths: list[int], skip: int, padding: int
) -> None:
    """Compared with cutting a list of numbered samples."""
    samples = [(number, at) for number, length in enumerate(lengths) for at in range(length)][skip:]
    kept = [sum(owner == number for owner, _ in samples) for number in range(len(lengths))]
    kept[-1] -= padding if padding <= kept[-1] else 0
    found, left = [], skip
    for number, length in enumerate(lengths):
        shown, left = after_skipping(length, left, padding if number == len(lengths) - 1 else 0)
        found.append(shown)
    assert found == kept


# --- opening


def test_containers_that_describe_their_streams_are_opened_without_decoding(media: Path) -> None:
    for name, is_described in (("youtube_clip.mp4", True), ("testsrc2_vp9.webm", True), ("pancake_h264.mkv", False)):
        with streams.open_described(f"file:{media / name}") as container:
            assert (container.options.get("codec_whitelist") == "none") == is_described, name


def test_what_containers_say_is_what_libav_finds_by_decoding(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("arm_wrestling.mp4", "av1.mkv", "h265.mp4", "rotated_90.mov", "testsrc2_vp9.webm", "action.wav")
    described = [probe(media / name) for name in names]
    monkeypatch.setattr(probing, "open_described", streams.open_container)
    assert described == [probe(media / name) for name in names]


@pytest.mark.parametrize("silence", [0, 200_000])
@pytest.mark.parametrize("swapped", [False, True])
def test_dts_in_a_wav_file_is_found_behind_silence(silence: int, swapped: bool) -> None:
    data = bytearray(bytes(silence) + dts_frames(60))
    if swapped:
        data[0::2], data[1::2] = data[1::2], data[0::2]
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44_100)
        file.writeframes(bytes(data))
    with streams.open_described(target) as container:
        assert container.streams.audio[0].codec_context.codec.canonical_name == "dts"


def test_wav_is_opened_with_fewer_guesses(tmp_path: Path, make_wav: MakeWav) -> None:
    with streams.open_described(f"file:{make_wav(tmp_path / 'tone.wav')}") as container:
        assert container.options["max_probe_packets"] == "4"
        assert isinstance(container.streams[0], AudioStream)


def dts_frames(count: int, size: int = 2012) -> bytes:
    """Frames with a valid header of DTS (ETSI TS 102 114, 5.3.1) for 44.1 kHz, and noise as their content."""
    fields = ((0x7FFE8001, 32), (1, 1), (31, 5), (0, 1), (15, 7), (size - 1, 14), (9, 6), (8, 4), (15, 5), (0, 13))
    bits = "".join(f"{value:0{width}b}" for value, width in (*fields, (0, 3), (7, 4), (0, 5)))
    head, draw = int(bits.ljust(104, "0"), 2).to_bytes(13, "big"), random.Random(1)
    return b"".join(head + draw.randbytes(size - len(head)) for _ in range(count))


def test_the_start_of_the_audio_is_that_of_its_first_decoded_frame() -> None:
    data = made(KINDS["m4a aac, silence first"])
    with av.open(io.BytesIO(data), "r") as container:
        first = next(container.decode(audio=0))
    audio = probe(data, ext="m4a").audio
    assert audio is not None
    assert first.time_base is not None
    assert audio.start == (first.pts or 0) * Fraction(first.time_base)
