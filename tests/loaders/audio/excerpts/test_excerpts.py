"""Windows decoded from a small file that was cut out of a recording: the same samples as by libav's own seeking."""

from __future__ import annotations

import io
import struct
import tempfile
from fractions import Fraction
from pathlib import Path
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
from headrace.dataio.shards.sample import AudioInfo
from headrace.loaders.audio import decode
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.audio.excerpts import flac, ogg
from headrace.loaders.audio.excerpts import mp4 as mp4_excerpt
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.decode import mp4

pytestmark = pytest.mark.slow

SECONDS = 20
KINDS: dict[str, tuple[str, str, int, str, dict[str, str]]] = {
    "AAC": ("mp4", "aac", 44_100, "stereo", {}),
    "AAC with tables first": ("mp4", "aac", 22_050, "mono", {"movflags": "faststart"}),
    "AAC in MOV": ("mov", "aac", 48_000, "5.1", {"aac_pns": "0"}),  # whose noise depends on where one begins
    "ALAC": ("mp4", "alac", 44_100, "stereo", {}),
    "FLAC in MP4": ("mp4", "flac", 16_000, "mono", {}),
    "Opus": ("ogg", "libopus", 48_000, "stereo", {}),
    "Opus on large pages": ("ogg", "libopus", 48_000, "mono", {"page_duration": "4000000"}),
    "Vorbis": ("ogg", "vorbis", 44_100, "stereo", {"strict": "experimental"}),
    "FLAC": ("flac", "flac", 44_100, "stereo", {}),
    "FLAC of one channel": ("flac", "flac", 8_000, "mono", {}),
    "MP3": ("mp3", "libmp3lame", 44_100, "stereo", {}),
    "MP3 of half the rate, without a header": ("mp3", "libmp3lame", 22_050, "mono", {"write_xing": "0"}),
    "WAV": ("wav", "pcm_s16le", 44_100, "stereo", {}),
    "WAV of 24 bits": ("wav", "pcm_s24le", 48_000, "mono", {}),
    "WAV of floats": ("wav", "pcm_f32le", 16_000, "stereo", {}),
    "WAV of 8 bits": ("wav", "pcm_u8", 8_000, "mono", {}),
}
EXT = {"mp4": "m4a", "mov": "mov", "ogg": "ogg", "flac": "flac", "wav": "wav", "mp3": "mp3"}


def recording(kind: str, seconds: int = SECONDS) -> bytes:
    """A tone that rises, over noise, louder and softer, so that packets differ in length."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "recording")
        _encode(target, kind, seconds)
        return target.read_bytes()


def _encode(target: Path, kind: str, seconds: int) -> None:
    container, codec, rate, layout, options = KINDS[kind]
    time = np.arange(seconds * rate) / rate
    tone = np.sin(2 * np.pi * (200 + 30 * time) * time) * (0.5 + 0.5 * np.sin(0.9 * time))
    noise = np.random.default_rng(3).normal(0, 0.02, len(time)) * (1 + np.sin(0.7 * time))
    sound = ((tone + noise) * 12_000).astype(np.int16)
    muxed = {key: value for key, value in options.items() if key in ("movflags", "page_duration", "write_xing")}
    coded = {key: value for key, value in options.items() if key not in muxed}
    with av.open(str(target), "w", format=container, options=muxed) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout=layout, options=coded)
        stream.thread_count = 1
        resampler = av.AudioResampler(stream.format.name, layout, rate, stream.frame_size or 4096)
        for at in range(0, len(sound), rate):
            part = np.stack([np.roll(sound[at : at + rate], 7 * n) for n in range(len(stream.layout.channels))])
            frame = AudioFrame.from_ndarray(part, format="s16p", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
            for one in resampler.resample(frame):
                output.mux(stream.encode(one))
        for one in resampler.resample(None):
            output.mux(stream.encode(one))
        output.mux(stream.encode(None))


class Recording:
    """A file, what the index says of it, and all its sound."""

    def __init__(self, data: bytes, ext: str) -> None:
        audio = probe(data, ext=ext).audio
        assert audio is not None
        self.data, self.info = data, audio


@pytest.fixture(scope="module", params=list(KINDS))
def file(request: pytest.FixtureRequest) -> Recording:
    return Recording(recording(request.param), EXT[KINDS[request.param][0]])


class ExcerptCounter:
    """Counts windows that were decoded from an excerpt, and can leave that out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.taken, self.open, real = 0, True, decode._decode_from_excerpt

        def at_once(*args: Any) -> Any:
            made = real(*args) if self.open else None
            self.taken += made is not None
            return made

        patch.setattr(decode, "_decode_from_excerpt", at_once)


@pytest.fixture(scope="module")
def excerpts_used() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield ExcerptCounter(patch)


def both(
    excerpts_used: ExcerptCounter, file: Recording, start: Fraction, spec: AudioSpec, from_first: bool = True
) -> list[Any]:
    made = []
    for excerpts_used.open in (True, False):
        made.append(decode_audio(memoryview(file.data), file.info, start, spec, spec.samples(), from_first))
    return made


@given(
    start=st.integers(0, 44_100 * SECONDS),
    spec=st.builds(
        AudioSpec,
        st.sampled_from([16_000, 44_100]),
        st.sampled_from([1, 2]),
        st.sampled_from([0.05, 1.0, 6.5]),
        st.sampled_from(["mix", "first"]),
    ),
    from_first=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_windows_are_those_of_the_whole_file(
    excerpts_used: ExcerptCounter, file: Recording, start: int, spec: AudioSpec, from_first: bool
) -> None:
    (one, real), (other, as_real) = both(excerpts_used, file, Fraction(start, 44_100), spec, from_first)
    assert real == as_real
    # Opus comes to rest within its warm-up, of which there may be more here; the others give the same to the bit
    assert np.abs(one - other).max() <= (1e-5 if file.info.codec == "opus" else 0)


def test_all_windows_but_those_at_the_ends_are_decoded_so(excerpts_used: ExcerptCounter, file: Recording) -> None:
    excerpts_used.open, excerpts_used.taken, spec = True, 0, AudioSpec(16_000, seconds=2.0)
    for start in range(6, SECONDS - 6):
        decode_audio(memoryview(file.data), file.info, Fraction(start), spec, spec.samples(), True)
    assert excerpts_used.taken == SECONDS - 12


def test_what_sounds_is_where_it_was(excerpts_used: ExcerptCounter, file: Recording) -> None:
    """Beside all of the file, decoded from its beginning by PyAV alone."""
    with av.open(io.BytesIO(file.data), "r") as container:
        stream = container.streams.audio[0]
        frames = [frame for frame in container.decode(stream) if frame.pts is not None]
        first = int((frames[0].pts or 0) * (stream.time_base or 0) * file.info.sample_rate)
        width = 1 if frames[0].format.is_planar else file.info.channels
        whole = np.concatenate([frame.to_ndarray().reshape(-1, frame.samples * width)[:1] for frame in frames], axis=1)
    silence, one = {"u8": (128, 128), "s16": (0, 1 << 15), "s32": (0, 1 << 31)}.get(
        frames[0].format.packed.name, (0, 1)
    )
    whole = (whole[0, ::width] - float(silence)) / one
    spec, excerpts_used.open, excerpts_used.taken = (
        AudioSpec(file.info.sample_rate, seconds=1.0, downmix="first"),
        True,
        0,
    )
    for start in (8, 13):
        sound, real = decode_audio(memoryview(file.data), file.info, Fraction(start), spec, spec.samples())
        at = start * file.info.sample_rate - first
        assert real == spec.samples()
        assert np.abs(sound[0] - whole[at : at + real]).max() < 1e-5
    assert excerpts_used.taken == 2


# --- what is not plain


def test_a_damaged_packet_is_reported_as_without_excerpts(excerpts_used: ExcerptCounter) -> None:
    data = bytearray(recording("AAC"))
    info = Recording(bytes(data), "m4a").info
    table = mp4_excerpt.track(memoryview(data), info, info.marks)
    assert table is not None
    packet = int(12 * 44_100 / 1024)
    ((at, size),) = mp4_excerpt._byte_ranges(table, packet, packet + 1)
    data[at : at + size] = b"\xff" * size
    file, errors = Recording(bytes(data), "m4a"), list[str]()
    for excerpts_used.open in (True, False):
        with pytest.raises(CorruptionError) as caught:
            decode_audio(memoryview(file.data), file.info, Fraction(11), AudioSpec(seconds=2.0), 32_000, True)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("damaged", [True, False])
def test_a_page_that_is_missing_or_damaged_is_an_error_and_no_silence(
    excerpts_used: ExcerptCounter, damaged: bool
) -> None:
    data, info = recording("Opus"), Recording(recording("Opus"), "ogg").info
    serial = ogg._read_page(memoryview(data), 0).serial  # type: ignore[union-attr]
    pages = [page.at for page in ogg._pages_until(memoryview(data), 0, serial, 1 << 40, 0)]
    gone = next(number for number, at in enumerate(pages) if ogg._read_page(memoryview(data), at).samples > 12 * 48_000)  # type: ignore[union-attr]
    changed = bytearray(data) if damaged else bytearray(data[: pages[gone]] + data[pages[gone + 1] :])
    if damaged:
        changed[(pages[gone] + pages[gone + 1]) // 2] ^= 1
    for known in (info, Recording(bytes(changed), "ogg").info, replace(info, time_base=None, start_pts=0, marks=())):
        for excerpts_used.open in (True, False):
            with pytest.raises(CorruptionError, match="page of Ogg"):
                decode_audio(memoryview(changed), known, Fraction(11), AudioSpec(seconds=3.0), 48_000, True)
    sound, real = decode_audio(memoryview(changed), info, Fraction(4), AudioSpec(seconds=1.0), 16_000, True)
    assert real == 16_000
    assert np.abs(sound).max() > 0.01


def _with_edits(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    """The same MP4 with another list of edits: (ticks of the movie, from which tick of the media)."""
    at = data.index(b"elst") - 4
    assert data.index(b"moov") > data.index(b"mdat")
    box = struct.pack(">4sII", b"elst", 0, len(edits)) + b"".join(struct.pack(">IiI", *e, 1 << 16) for e in edits)
    more = struct.pack(">I", 4 + len(box)) + box
    grown = len(more) - struct.unpack_from(">I", data, at)[0]
    made = bytearray(data[:at] + more + data[at + len(more) - grown :])
    for kind in (b"edts", b"trak", b"moov"):
        place = made.rindex(kind, 0, at + 8) - 4
        struct.pack_into(">I", made, place, struct.unpack_from(">I", made, place)[0] + grown)
    return bytes(made)


@pytest.mark.parametrize(
    ("edits", "plain"),
    [
        ([(30_000, 0)], True),
        ([(30_000, 2112)], True),
        ([(1500, -1), (30_000, 1024)], True),
        ([(5000, 0), (5000, 300_000)], False),
        ([(1000, -1), (5000, 0), (5000, 300_000)], False),
    ],
)
def test_edits_of_mp4_are_kept(excerpts_used: ExcerptCounter, edits: list[tuple[int, int]], plain: bool) -> None:
    file = Recording(_with_edits(recording("AAC"), edits), "m4a")
    for from_first in (True, False):
        excerpts_used.taken = 0
        (one, real), (other, as_real) = both(excerpts_used, file, Fraction(7), AudioSpec(seconds=1.5), from_first)
        assert excerpts_used.taken == plain
        assert real == as_real
        assert (one == other).all()


def _box(kind: bytes, *parts: bytes) -> bytes:
    return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)


def _of_two_tracks(cover_first: bool) -> bytes:
    """An M4A of two sounds, 300 Hz and 1,300 Hz, with a cover picture, which is described before the tracks or behind them."""
    target, time = io.BytesIO(), np.arange(44_100 * SECONDS) / 44_100
    with av.open(target, "w", format="mp4") as output:
        streams: list[Any] = [output.add_stream("aac", rate=44_100, layout="mono") for _ in range(2)]
        for stream, pitch in zip(streams, (300, 1_300), strict=True):
            tone = (np.sin(2 * np.pi * pitch * time) * 12_000).astype(np.int16)[None]
            for at in range(0, tone.shape[1], 1024):
                frame = AudioFrame.from_ndarray(tone[:, at : at + 1024], format="s16", layout="mono")
                frame.sample_rate, frame.pts, frame.time_base = 44_100, at, Fraction(1, 44_100)
                output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
    data = target.getvalue()
    at = data.rindex(b"moov") - 4
    picture = struct.pack(">II", 14, 0) + b"\x89PNG\r\n\x1a\n" + bytes(64)
    handler = _box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    cover = _box(b"udta", _box(b"meta", bytes(4), handler, _box(b"ilst", _box(b"covr", _box(b"data", picture)))))
    (length,) = struct.unpack_from(">I", data, at + 8)
    header, tracks = data[at + 8 : at + 8 + length], data[at + 8 + length : data.rindex(b"udta") - 4]
    return data[:at] + _box(b"moov", header, *((cover, tracks) if cover_first else (tracks, cover)))


@pytest.mark.parametrize("cover_first", [True, False])
def test_a_cover_before_the_tracks_does_not_lead_to_another_tracks_sound(
    excerpts_used: ExcerptCounter, cover_first: bool
) -> None:
    file = Recording(_of_two_tracks(cover_first), "m4a")
    assert file.info.stream == cover_first  # libav makes a stream of the cover where it meets it
    excerpts_used.taken, spec = 0, AudioSpec(44_100, seconds=1.0)
    for sound, _ in both(excerpts_used, file, Fraction(9), spec):
        assert int(np.argmax(np.abs(np.fft.rfft(sound[0])))) == 300
    assert excerpts_used.taken == 1  # the track is the one in which the marked packets lie


def test_tables_that_name_the_same_bytes_often_make_no_large_excerpt() -> None:
    data = bytearray(recording("AAC"))
    chunks = data.rindex(b"stco")
    (count,) = struct.unpack_from(">I", data, chunks + 8)
    sizes = data.rindex(b"stsz")
    (packets,) = struct.unpack_from(">I", data, sizes + 12)
    large = len(data) // 64
    struct.pack_into(f">{packets}I", data, sizes + 16, *([large] * packets))
    struct.pack_into(f">{count}I", data, chunks + 12, *([40] * count))
    moov = mp4.find(memoryview(data))
    assert moov is not None
    known = mp4_excerpt._track(moov, dict(mp4.inside(moov))[b"trak"])
    assert known is not None
    stretches = list(mp4_excerpt._byte_ranges(known, 100, 600))
    assert sum(size for _, size in stretches) > 4 * len(data)
    assert mp4_excerpt._excerpt(memoryview(data), known, Fraction(3), Fraction(12)) is None


def test_sound_among_pictures_in_mp4_is_decoded_so(excerpts_used: ExcerptCounter) -> None:
    target = io.BytesIO()
    with av.open(io.BytesIO(recording("AAC")), "r") as source, av.open(target, "w", format="mp4") as output:
        video: Any = output.add_stream("libx264", rate=10)
        video.width, video.height = 64, 48
        sound = output.add_stream_from_template(source.streams.audio[0])
        packets = [packet for packet in source.demux(source.streams.audio[0]) if packet.size]
        for number in range(10 * SECONDS):
            output.mux(video.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), number % 256, np.uint8))))
            for packet in packets[: round(44_100 / 1024 / 10) + 1]:
                packet.stream = sound
                output.mux(packet)
                packets.pop(0)
        output.mux(video.encode(None))
    file = Recording(target.getvalue(), "mp4")
    assert file.info.stream == 1
    excerpts_used.taken = 0
    (one, real), (other, as_real) = both(excerpts_used, file, Fraction(12), AudioSpec(seconds=4.0), False)
    assert excerpts_used.taken == 1
    assert real == as_real
    assert (one == other).all()


def test_fragments_and_pcm_are_left_to_libav() -> None:
    with av.open(io.BytesIO(recording("AAC")), "r") as source:
        for options, ext in (({"movflags": "frag_keyframe+empty_moov"}, "m4a"),):
            target = io.BytesIO()
            with av.open(target, "w", format="mp4", options=options) as output:
                copy = output.add_stream_from_template(source.streams.audio[0])
                for packet in source.demux(source.streams.audio[0]):
                    if packet.size:
                        packet.stream = copy
                        output.mux(packet)
            file = Recording(target.getvalue(), ext)
            assert mp4_excerpt.track(memoryview(file.data), file.info, file.info.marks) is None


@given(at=st.integers(0, 1 << 30), value=st.binary(min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_whatever_the_tables_of_mp4_say_nothing_else_is_raised(at: int, value: bytes) -> None:
    data = bytearray(M4A)
    table = data.index(b"moov") + 4
    place = table + at % (len(data) - table - len(value))
    data[place : place + len(value)] = value
    known = mp4_excerpt.track(memoryview(data), M4A_INFO, M4A_INFO.marks)
    if known is not None:
        found = mp4_excerpt.excerpt(memoryview(data), M4A_INFO, Fraction(3), Fraction(5))
        assert found is None or sum(len(part) for part in found.parts) < 2 * len(data)


M4A = recording("AAC", 10)
M4A_INFO: AudioInfo = Recording(M4A, "m4a").info


@pytest.mark.parametrize("kind", ["Opus", "FLAC"])
@given(at=st.integers(0, 1 << 30), value=st.binary(min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_whatever_pages_and_frames_say_nothing_else_is_raised(kind: str, at: int, value: bytes) -> None:
    file = RECORDINGS[kind]
    data = bytearray(file.data)
    data[at % len(data) : at % len(data) + len(value)] = value
    span = Fraction(4), Fraction(6)
    found = (
        ogg.excerpt(memoryview(data), file.info, *span)
        if kind == "Opus"
        else flac.excerpt(memoryview(data), file.info, *span)
    )
    assert found is None or sum(len(part) for part in found.parts) < 2 * len(data)


RECORDINGS = {kind: Recording(recording(kind, 10), EXT[KINDS[kind][0]]) for kind in ("Opus", "FLAC")}
