"""Clips decoded from an excerpt of a film's tables: the same pictures at the same stamps as when libav reads all of them."""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.clip import Clip, Wanted, choose
from headrace.loaders.decode import mp4_excerpt as excerpts
from headrace.loaders.decode import trim
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.mp4_excerpt import excerpt
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.trim import open_window
from tests.support import reference_decoder, video_corpus

pytestmark = pytest.mark.slow

FRAMES = 120
X264 = {"g": "12", "bf": "3", "x264-params": "b-pyramid=normal:scenecut=0"}
X265 = {"x265-params": "log-level=none:pools=1:keyint=12:min-keyint=12:bframes=3:open-gop=1"}
VFR = tuple(np.cumsum([4, 1, 9, 2, 2, 30, 4, 3, 1, 7] * (FRAMES // 10)).tolist())
KINDS = {
    "B-pyramid": video_corpus.Made("", "libx264", "mp4", options=X264),
    "tables first": video_corpus.Made("", "libx264", "mp4", options=X264, sound="aac", muxed={"movflags": "faststart"}),
    "MOV": video_corpus.Made("", "libx264", "mov", options=X264, sound="aac"),
    "open groups": video_corpus.Made(
        "", "libx264", "mp4", options=X264 | {"x264-params": "open-gop=1:b-pyramid=normal"}
    ),
    "HEVC with open groups": video_corpus.Made("", "libx265", "mp4", options=X265),
    "varying rate": video_corpus.Made("", "libx264", "mp4", stamps=VFR, options=X264),
    "late": video_corpus.Made("", "libx264", "mp4", stamps=[250 + 4 * n for n in range(FRAMES)], options=X264),
    "cut at its beginning": video_corpus.Made(
        "", "libx264", "mp4", stamps=[4 * n - 30 for n in range(FRAMES)], options=X264
    ),
    "negative delays": video_corpus.Made(
        "", "libx264", "mp4", options=X264, muxed={"movflags": "negative_cts_offsets"}
    ),
    "turned": video_corpus.Made("", "libx264", "mov", rotation=90, options=X264),
    "10 bits": video_corpus.Made("", "libx264", "mp4", "yuv420p10le", options=X264),
    "two videos": video_corpus.Made("", "libx264", "mp4", options=X264, second_video=True, sound="aac"),
    "only key frames": video_corpus.Made("", "mjpeg", "mov", "yuvj420p"),
    "VP9": video_corpus.Made("", "libvpx-vp9", "mp4", options={"deadline": "realtime", "cpu-used": "8", "g": "12"}),
}
NOT_PLAIN = {
    "fragments": video_corpus.Made("", "libx264", "mp4", options=X264, muxed={"movflags": "frag_keyframe+empty_moov"}),
    "Matroska": video_corpus.Made("", "libx264", "matroska", options=X264),
    "MPEG-4, whose packets may hold two frames": video_corpus.Made("", "mpeg4", "mp4", options={"g": "12", "bf": "2"}),
}


class IndexedVideo:
    """A file, and what the index says of it, also where key frames lie, as if it was long enough to be read in part."""

    def __init__(self, what: video_corpus.Made) -> None:
        self.data = video_corpus.make(dataclasses.replace(what, frames=FRAMES))
        self.ext = "mkv" if what.container == "matroska" else what.container
        info = probe(self.data, ext=self.ext).video
        assert info is not None
        with av.open(io.BytesIO(self.data), "r") as file:
            places = {packet.pts: packet.pos for packet in file.demux(file.streams[info.stream]) if packet.is_keyframe}
        self.info = replace(info, key_frames=tuple(replace(key, at=places.get(key.pts, -1)) for key in info.key_frames))

    def request(self, wanted: Wanted) -> Request:
        return Request(memoryview(self.data), self.info, wanted)

    def excerpt(self, wanted: Wanted, data: bytes | None = None, info: VideoInfo | None = None) -> Any:
        return excerpt(memoryview(data or self.data), info or self.info, wanted)


@pytest.fixture(autouse=True)
def _short_films_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excerpts, "FEW", 0)


@pytest.fixture(scope="module", params=list(KINDS))
def film(request: pytest.FixtureRequest) -> IndexedVideo:
    return IndexedVideo(KINDS[request.param])


@pytest.fixture(scope="module")
def pyramid() -> IndexedVideo:
    return IndexedVideo(KINDS["B-pyramid"])


def middle(film: IndexedVideo, clip: Clip | None = None) -> Wanted:
    """A clip that lies inside."""
    return choose(film.info, clip or Clip(4, 2, start="center"), 0, 0, 0, 0)


def windows(film: IndexedVideo, wanted: Wanted) -> Iterator[list[Any]]:
    """What is decoded of an excerpt, and what of the file."""
    taken = []
    for cut in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not cut:
                patch.setattr(trim, "pays", lambda info: False)
            else:
                patch.setattr(trim, "_read_window", None)  # of the whole file
            with open_window(film.request(wanted), trusting=True) as window:
                packets = [(p.pts, bytes(p), p.is_keyframe, p.is_discard, p.duration) for p in window.packets]
                taken = [packets, window.times, window.picks, window.stamped]
        yield taken


def decoded(film: IndexedVideo, wanted: Wanted, *, cut: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not cut:
            patch.setattr(trim, "pays", lambda info: False)
        return PyAVDecoder().decode([film.request(wanted)])[0]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, HeadraceError) or isinstance(other, HeadraceError):
        return str(one) == str(other)
    return bool(one.pts == other.pts and torch.equal(one.frames, other.frames))


@pytest.mark.parametrize("clip", [Clip(4, 3), Clip(5, fps=11.0)], ids=["by number", "by time"])
def test_an_excerpt_gives_the_packets_stamps_and_pictures_of_the_file(film: IndexedVideo, clip: Clip) -> None:
    taken = 0
    for number in range(12):
        wanted = choose(film.info, clip, 1, 0, 0, number)
        if film.excerpt(wanted) is not None:
            taken += 1
            of_excerpt, of_file = windows(film, wanted)
            assert of_excerpt == of_file
            assert isinstance(decoded(film, wanted, cut=True), Decoded)
        assert alike(decoded(film, wanted, cut=True), decoded(film, wanted, cut=False))
    assert taken >= 4


def test_pictures_are_those_of_plain_decoding(film: IndexedVideo) -> None:
    wanted = middle(film)
    assert film.excerpt(wanted) is not None
    found = decoded(film, wanted, cut=True)
    with av.open(io.BytesIO(film.data), "r") as file:
        stream = file.streams.video[film.info.stream]
        frames = {frame.pts: reference_decoder.bt601(frame) for frame in file.decode(stream) if frame.pts is not None}
    assert sorted(frames).index(found.pts[0]) == wanted.values[0]
    assert all(
        np.array_equal(picture, frames[pts]) for picture, pts in zip(found.frames.numpy(), found.pts, strict=True)
    )


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    group=st.integers(2, 20),
    between=st.integers(0, 4),
    params=st.sampled_from(
        ["b-pyramid=none", "b-pyramid=normal", "open-gop=1:b-pyramid=normal", "keyint=9:intra-refresh=1"]
    ),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    begin=st.integers(-60, 300),
    muxed=st.sampled_from(["", "faststart", "negative_cts_offsets", "use_metadata_tags"]),
    more=st.tuples(st.booleans(), st.sampled_from(["", "aac"]), st.sampled_from(["mp4", "mov"])),
    clip=st.builds(Clip, st.integers(1, 9), st.integers(1, 4))
    | st.builds(Clip, st.integers(1, 9), fps=st.floats(1, 60)),
)
def test_whatever_the_film_is_like_the_pictures_are_the_same(
    group: int, between: int, params: str, steps: list[int], begin: int, muxed: str, more: Any, clip: Clip
) -> None:
    stamps = tuple((begin + np.cumsum(np.resize(steps, FRAMES))).tolist())
    options = {"g": str(group), "bf": str(between), "x264-params": params, "preset": "veryfast"}
    two, sound, container = more
    film = IndexedVideo(
        video_corpus.Made(
            "",
            "libx264",
            container,
            width=32,
            height=32,
            stamps=stamps,
            options=options,
            second_video=two,
            sound=sound if begin >= 0 else "",
            muxed={"movflags": muxed} if muxed else {},
        )
    )
    for number in range(6):
        wanted = choose(film.info, clip, 2, 0, 0, number)
        assert alike(decoded(film, wanted, cut=True), decoded(film, wanted, cut=False))


# --- what is left to libav


@pytest.mark.parametrize("kind", list(NOT_PLAIN))
def test_what_is_not_plain_is_left_to_libav(kind: str) -> None:
    film = IndexedVideo(NOT_PLAIN[kind])
    wanted = middle(film)
    assert trim._excerpt(film.request(wanted)) is None
    assert isinstance(decoded(film, wanted, cut=True), Decoded)


def test_the_beginning_and_the_end_are_left_to_libav(pyramid: IndexedVideo) -> None:
    keys = pyramid.info.key_frames
    assert pyramid.excerpt(Wanted("index", (1, 2), keys[0])) is None
    assert pyramid.excerpt(Wanted("index", (FRAMES - 3, FRAMES - 2), keys[-1])) is None
    assert pyramid.excerpt(Wanted("index", (keys[1].index, keys[2].index - 1), keys[1])) is not None


def test_files_of_which_the_index_does_not_say_where_key_frames_lie_are_left_to_libav(pyramid: IndexedVideo) -> None:
    without = tuple(replace(key, at=-1) for key in pyramid.info.key_frames)
    wanted = middle(pyramid)
    wanted = replace(wanted, key=replace(wanted.key, at=-1))
    assert pyramid.excerpt(wanted, info=replace(pyramid.info, key_frames=without)) is None


@pytest.mark.parametrize("what", ["place", "pts", "index"])
def test_tables_of_which_the_index_says_something_else_are_left_to_libav(pyramid: IndexedVideo, what: str) -> None:
    wanted = middle(pyramid)
    assert pyramid.excerpt(wanted) is not None
    wrong: dict[str, Any] = {"place": lambda key: replace(key, at=key.at + 1)}
    wrong |= {"pts": lambda key: replace(key, pts=key.pts + 1), "index": lambda key: replace(key, index=key.index + 1)}
    keys = tuple(wrong[what](key) if key.index > wanted.key.index else key for key in pyramid.info.key_frames)
    assert pyramid.excerpt(wanted, info=replace(pyramid.info, key_frames=keys)) is None


def changed(data: bytes, kind: bytes, at: int, layout: str, *values: Any) -> bytes:
    """The file with other values `at` so many bytes behind the last box of this kind begins."""
    made = bytearray(data)
    struct.pack_into(layout, made, data.rindex(kind) + 4 + at, *values)
    return bytes(made)


@pytest.mark.parametrize("describing", [b"udta", b"meta"])
def test_a_cover_before_the_track_makes_its_number_another_one(pyramid: IndexedVideo, describing: bytes) -> None:
    wanted, data = middle(pyramid), pyramid.data
    at = data.rindex(b"moov") - 4
    (movie,) = struct.unpack_from(">I", data, at + 8)
    tracks = data[at + 8 + movie :]
    for inside, known in ((b"covr", False), (b"name", True)):
        more = struct.pack(">I4s", 24, describing) + struct.pack(">I4s", 16, inside) + bytes(8)
        length = struct.pack(">I4s", len(data) - at + len(more), b"moov")
        cover_first = data[:at] + length + data[at + 8 : at + 8 + movie] + more + tracks
        assert (pyramid.excerpt(wanted, cover_first) is not None) == known
        cover_last = data[:at] + length + data[at + 8 :] + more
        assert pyramid.excerpt(wanted, cover_last) is not None


@pytest.mark.parametrize(
    "change",
    {
        "encrypted": (b"avc1", -4, "4s", b"encv"),
        "played at double speed": (b"elst", 16, ">H", 2),
        "two descriptions": (b"stsd", 4, ">I", 2),
        "packets of one size": (b"stsz", 4, ">I", 7),
        "a packet without bytes": (b"stsz", 12 + 4 * 60, ">I", 0),
        "packets that end behind the file": (b"stsz", 12 + 4 * 60, ">I", 1 << 30),
        "more packets than sizes": (b"stts", 8, ">I", 1 << 20),
        "a table that says it is longer": (b"ctts", 4, ">I", 1 << 31),
        "a delay of days": (b"ctts", 12, ">I", 1 << 29),
        "no time": (b"stts", 12, ">I", 0),
        "another kind of packet": (b"stss", -4, "4s", b"stps"),
        "a table that comes twice": (b"stsc", -4, "4s", b"stts"),
        "as many flags as there are packets and one": (b"stco", -4, "4s", b"sdtp"),
        "shown later than the clip": (b"elst", 12, ">I", 1 << 20),
        "shown for a moment": (b"elst", 8, ">I", 1),
    }.items(),
    ids=lambda change: change[0],
)
def test_tables_that_are_not_plain_are_left_to_libav(pyramid: IndexedVideo, change: Any) -> None:
    wanted = middle(pyramid)
    assert pyramid.excerpt(wanted, changed(pyramid.data, *change[1])) is None


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_tables_give_an_error_or_the_requested_number_of_pictures(data: Any) -> None:
    film = _damaged()
    wanted = middle(film)
    spoilt = bytearray(film.data)
    begin = film.data.rindex(b"moov")
    for at in data.draw(st.lists(st.integers(begin, len(spoilt) - 1), min_size=1, max_size=4)):
        spoilt[at] = data.draw(st.integers(0, 255))
    made = film.excerpt(wanted, bytes(spoilt))
    assert made is None or len(made) < len(spoilt) + (1 << 16)
    found = PyAVDecoder().decode([replace(film.request(wanted), data=memoryview(bytes(spoilt)))])[0]
    assert isinstance(found, HeadraceError) or len(found.frames) == 4


_films = list[IndexedVideo]()


def _damaged() -> IndexedVideo:
    if not _films:
        _films.append(IndexedVideo(KINDS["B-pyramid"]))
    return _films[0]


def test_a_file_that_was_cut_off_is_refused_as_before(pyramid: IndexedVideo) -> None:
    wanted = middle(pyramid)
    cut = replace(pyramid.request(wanted), data=memoryview(pyramid.data)[:-100])
    with pytest.raises(CorruptionError, match="truncated"), open_window(cut, trusting=True):
        pass


def test_short_videos_are_left_to_libav(pyramid: IndexedVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trim._excerpt(pyramid.request(middle(pyramid))) is not None
    monkeypatch.setattr(excerpts, "FEW", FRAMES + 1)
    assert trim._excerpt(pyramid.request(middle(pyramid))) is None


def test_an_excerpt_reads_like_a_file_of_its_parts() -> None:
    made = excerpts.Excerpt(b"head", memoryview(b"film"), b"tail")
    whole = b"headfilmtail"
    assert len(made) == len(whole)
    for start in range(len(whole) + 2):
        for end in range(len(whole) + 3):
            assert bytes(made[start:end]) == whole[start:end]
