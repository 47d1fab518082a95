"""Where decoding begins, and which frames packets show, in streams of which the container says something else."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.packet import Packet
from msgspec.structs import replace

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media import bitstream
from headrace.dataio.shards.sample import KeyFrame
from headrace.loaders.clip import Clip, choose
from headrace.loaders.decode import trim
from headrace.loaders.decode.base import Decoded, Request
from tests.support import video_corpus
from tests.support.reference_video import ReferenceVideo

INTRA_REFRESH = {"x264-params": "intra-refresh=1:keyint=12:bframes=0:scenecut=0"}
OPEN_GROUPS = {"x264-params": "open-gop=1:keyint=12:bframes=3:b-pyramid=normal:scenecut=0"}
X265 = "log-level=none:pools=1:keyint=20:min-keyint=20:bframes=3:temporal-layers=2:scenecut=0"


CLIPS = [Clip(3, 2), Clip(4, fps=13.0)]


def rewritten(data: bytes, container: str, change: Callable[[int, bytes], bytes]) -> bytes:
    """The file with other payloads of its packets."""
    target = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(target, "w", format=container) as output:
        stream = source.streams.video[0]
        copy = output.add_stream_from_template(stream)
        for number, packet in enumerate(packet for packet in source.demux(stream) if packet.size):
            other: Any = Packet(change(number, bytes(packet)))
            other.pts, other.dts, other.duration = packet.pts, packet.dts, packet.duration
            other.time_base, other.is_keyframe, other.stream = packet.time_base, packet.is_keyframe, copy
            output.mux(other)
    return target.getvalue()


def marked(data: bytes) -> list[int]:
    """The numbers of the frames that the container marks as key frames; frames are stored as they are shown."""
    with av.open(io.BytesIO(data), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    return [number for number, packet in enumerate(packets) if packet.is_keyframe]


# --- points of recovery


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_intra_refresh_is_decoded_from_an_instantaneous_refresh_also_by_an_older_index(container: str) -> None:
    film = ReferenceVideo(
        video_corpus.make(video_corpus.Made("", "libx264", container, frames=60, options=INTRA_REFRESH)), container[:3]
    )
    points = marked(film.data)
    assert len(points) > 3
    assert [key.index for key in film.info.key_frames] == [0]
    assert any("begin" in note for note in film.notes)
    film.check(CLIPS)
    step = film.info.duration_pts // film.info.frames
    older = replace(film.info, key_frames=tuple(KeyFrame(step * number, number) for number in points))
    if container == "mp4":  # whose stamps are exact multiples
        film.check(CLIPS, older)
        late = choose(older, Clip(2, start="center"), 0, 0, 0, 0)
        assert late.key.index > 0
        with pytest.raises(trim.NoStartError), trim.open_window(Request(memoryview(film.data), older, late)):
            pass


def test_open_groups_begin_at_their_recovery_points() -> None:
    film = ReferenceVideo(
        video_corpus.make(video_corpus.Made("", "libx264", "mp4", frames=60, options=OPEN_GROUPS)), "mp4"
    )
    assert [key.index for key in film.info.key_frames] == [0, *sorted(key.index for key in film.info.key_frames[1:])]
    assert len(film.info.key_frames) >= 4
    assert not film.notes
    film.check(CLIPS)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_stream_without_any_clean_start_is_decoded_from_its_first_packet(container: str) -> None:
    whole = video_corpus.make(video_corpus.Made("", "libx264", "mp4", frames=60, options=INTRA_REFRESH))
    target = io.BytesIO()
    with av.open(io.BytesIO(whole), "r") as source, av.open(target, "w", format=container) as output:
        copy = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size and packet.pts is not None and packet.pts * packet.time_base > 0.1:
                packet.stream = copy
                output.mux(packet)
    film = ReferenceVideo(target.getvalue(), container[:3])
    assert 0 < film.info.frames < 60
    for number in range(6):
        wanted = choose(film.info, Clip(3, 2), 3, 0, 0, number)
        found = film.decode(wanted)
        if isinstance(found, Decoded):
            expected = np.stack([film.images[value] for value in wanted.values])
            assert (found.frames.numpy() == expected).all()


@pytest.mark.parametrize(
    ("codec", "options", "clean"),
    [
        ("libx264", {"g": "12"}, True),
        ("libx264", OPEN_GROUPS, True),
        ("libx264", {"x264-params": OPEN_GROUPS["x264-params"] + ":tff=1"}, True),
        ("libx264", INTRA_REFRESH, False),
        ("libx265", {"x265-params": "log-level=none:pools=1:keyint=12"}, True),
        ("libx265", {"x265-params": "log-level=none:pools=1:keyint=12:open-gop=1:bframes=3"}, True),
    ],
)
def test_what_a_packet_says_of_itself_does_not_depend_on_how_its_units_are_parted(
    codec: str, options: dict[str, str], clean: bool
) -> None:
    data = video_corpus.make(video_corpus.Made("", codec, "mp4", frames=40, options=options))
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        name, units = stream.codec_context.codec.canonical_name, 4
        assert bitstream.length_size(name, stream.codec_context.extradata) == units
        packets = [packet for packet in container.demux(stream) if packet.size]
    keys = [packet.is_keyframe for packet in packets]
    found = [bitstream.is_random_access(name, memoryview(packet), units) for packet in packets]
    assert found == (keys if clean else [True] + [False] * (len(keys) - 1))
    for packet, one in zip(packets, found, strict=True):
        assert bitstream.is_random_access(name, memoryview(_by_start_codes(bytes(packet))), 0) == one
    for wrong in (b"", b"\0", b"\0\0\0\1", b"\xff" * 9, bytes(40)):
        assert not bitstream.is_random_access(name, memoryview(wrong), units)
        assert not bitstream.is_random_access(name, memoryview(wrong), 0)


def test_of_a_picture_in_two_fields_the_first_says_whether_decoding_may_begin() -> None:
    data = video_corpus.make(video_corpus.Made("", "libx264", "mp4", frames=40, options=OPEN_GROUPS))
    with av.open(io.BytesIO(data), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    at = next(number for number, packet in enumerate(packets) if packet.is_keyframe and number)
    key, predicted = bytes(packets[at]), bytes(packets[at + 1])
    assert bitstream.is_random_access("h264", memoryview(key), 4)
    assert bitstream.is_random_access("h264", memoryview(key + predicted), 4)
    assert bitstream.is_random_access("h264", memoryview(_by_start_codes(key + predicted)), 0)
    assert not bitstream.is_random_access("h264", memoryview(predicted + key), 4)
    later_slice = bytes([0, 0, 0, 3, 0x41, 0b01000110, 0x80])  # of macroblock 1 on, predicted: of the same field
    assert not bitstream.is_random_access("h264", memoryview(key + later_slice), 4)


def _by_start_codes(packet: bytes) -> bytes:
    made, at = b"", 0
    while at < len(packet):
        size = int.from_bytes(packet[at : at + 4], "big")
        made += b"\0\0\0\1" + packet[at + 4 : at + 4 + size]
        at += 4 + size
    return made


# --- packets that show no frame


def not_coded(number: int, packet: bytes) -> bytes:
    """Some predicted pictures as "not coded": the one before stays."""
    at = packet.find(b"\0\0\1\xb6")
    if packet[at + 4] >> 6 != 1 or number % 10 not in (3, 4, 5) or number < 12:
        return packet
    bits, coded = f"{int.from_bytes(packet[at + 4 : at + 12], 'big'):064b}", 2
    while bits[coded] == "1":
        coded += 1
    coded += 1 + 1 + 5 + 1  # of a clock of 25 ticks
    assert bits[coded] == "1"
    made = bits[:coded] + "0" + "0" + "1" * (-(coded + 2) % 8)
    return packet[: at + 4] + int(made, 2).to_bytes(len(made) // 8, "big")


@pytest.mark.parametrize("container", ["avi", "mp4", "matroska"])
def test_pictures_that_are_not_coded_take_no_frames_number_and_no_frames_time(container: str) -> None:
    kind = video_corpus.Made("", "mpeg4", container, frames=60, options={"g": "24", "bf": "0"})
    data = rewritten(video_corpus.make(kind), container, not_coded)
    film = ReferenceVideo(data, container[:3])
    assert len(film.images) < 60 - 3  # some are not coded
    film.check(CLIPS)


def test_pictures_between_others_of_which_one_is_not_coded_are_refused() -> None:
    kind = video_corpus.Made("", "mpeg4", "matroska", frames=60, options={"g": "24", "bf": "2"})
    film = ReferenceVideo(rewritten(video_corpus.make(kind), "matroska", not_coded), "mkv")
    assert film.times != sorted(film.times)  # libav puts them out in another order
    assert isinstance(film.decode(choose(film.info, Clip(2, start="center"), 0, 0, 0, 0)), UnsupportedError)


def test_packed_pictures_keep_their_times(media: Any) -> None:
    data = (media / "action_xvid.avi").read_bytes()
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        packets = [memoryview(packet) for packet in container.demux(stream) if packet.size]
        shown = list(bitstream.mpeg4_shown(stream.codec_context.extradata, packets))
    assert any(len(packet) < 10 for packet in packets)  # those that only fill the place of a packed one
    assert all(shown)


# --- frames before the first key frame


def test_frames_of_matroska_from_before_time_zero_have_no_stamps_and_are_refused_alone() -> None:
    stamps = [4 * number - 130 for number in range(60)]
    data = video_corpus.make(
        video_corpus.Made("", "libx264", "matroska", frames=60, stamps=stamps, options={"g": "12", "bf": "2"})
    )
    film = ReferenceVideo(data, "mkv")
    unstamped = film.times.count(Fraction(0))  # as plain decoding takes those without
    assert unstamped > 12
    assert film.info.key_frames[0].index > 0
    found = [film.decode(choose(film.info, Clip(2, start="every"), 0, 0, 0, number)) for number in range(30)]
    for number, one in enumerate(found):
        if 2 * number < unstamped:
            assert isinstance(one, UnsupportedError)
        else:
            assert isinstance(one, Decoded), one
            assert (one.frames.numpy() == np.stack(film.images[2 * number : 2 * number + 2])).all()
    by_time = [film.decode(choose(film.info, Clip(2, fps=25.0, start="every"), 0, 0, 0, number)) for number in range(9)]
    assert all(isinstance(one, Decoded) for one in by_time)


# --- layers


def unreferred(number: int, packet: bytes) -> bytes:
    """Pictures of the lowest layer to which only pictures of a higher one refer, marked so."""
    made, at = bytearray(packet), 0
    while at < len(packet):
        kind = packet[at + 4] >> 1 & 63
        if kind == 1 and (packet[at + 5] & 7) == 1 and number in unreferred.__dict__["numbers"]:
            made[at + 4] &= 0x81
        at += 4 + int.from_bytes(packet[at : at + 4], "big")
    return bytes(made)


def test_pictures_of_hevc_that_only_a_higher_layer_needs_are_decoded() -> None:
    data = video_corpus.make(video_corpus.Made("", "libx265", "mp4", frames=60, options={"x265-params": X265}))
    with av.open(io.BytesIO(data), "r") as container:
        layers = [bitstream.temporal_layer(memoryview(p), 4) for p in container.demux(video=0) if p.size]
    assert {layer for layer, _ in layers} == {0, 1}
    # a picture of the lowest layer, in decoding order between one of it and one of the higher: a B-frame that only those refer to
    unreferred.__dict__["numbers"] = {
        n
        for n in range(1, len(layers) - 1)
        if (layers[n - 1][0], layers[n][0], layers[n + 1][0]) == (0, 0, 1) and layers[n][1]
    }
    assert len(unreferred.__dict__["numbers"]) > 4
    film = ReferenceVideo(rewritten(data, "mp4", unreferred), "mp4")
    with av.open(io.BytesIO(film.data), "r") as container:
        changed = [bitstream.temporal_layer(memoryview(p), 4) for p in container.demux(video=0) if p.size]
    assert (0, False) in changed
    film.check([Clip(2, 3), Clip(1)], count=20)
