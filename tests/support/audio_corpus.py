"""Recordings of every kind that the encoders on board can make, and some that are put together by hand.

Each is a rising tone over noise, so that no two instants sound alike.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame

SECONDS = 9


@dataclass(frozen=True)
class Kind:
    """How a recording is encoded. `changed` is what becomes of its bytes afterwards. `quick`: also among the few that are always
    tried. `exact` is how far samples may be from those of the whole file; decoders of some codecs add noise of their own."""

    name: str
    ext: str
    container: str
    codec: str
    rate: int = 44_100
    layout: str = "stereo"
    options: dict[str, str] = field(default_factory=dict)
    muxed: dict[str, str] = field(default_factory=dict)
    late: Fraction = Fraction(0)
    gap: bool = False
    tracks: int = 1
    picture: bool = False
    format: str = ""
    seconds: int = SECONDS
    changed: Callable[[bytes], bytes] | None = None
    quick: bool = False
    exact: float = 0.0
    refused: bool = False


def made(kind: Kind) -> bytes:
    """The file's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "recording")
        _encode(str(target), kind)
        data = target.read_bytes()
    return data if kind.changed is None else kind.changed(data)


def tone(kind: Kind, track: int = 0) -> np.ndarray:
    """int16 (samples,)"""
    time = np.arange(kind.seconds * kind.rate) / kind.rate
    rising = np.sin(2 * np.pi * (150 + 300 * track + 25 * time) * time) * (0.6 + 0.4 * np.sin(0.9 * time))
    noise = np.random.default_rng(track).normal(0, 0.03, len(time))
    return ((rising + noise) * 12_000).astype(np.int16)


def _encode(target: str, kind: Kind) -> None:
    with av.open(target, "w", format=kind.container, options=kind.muxed) as output:
        streams = [_stream(output, kind) for _ in range(kind.tracks)]
        picture: Any = output.add_stream("mjpeg", rate=1) if kind.picture else None
        if picture is not None:
            picture.width, picture.height, picture.pix_fmt = 32, 32, "yuvj420p"
            for number in range(kind.seconds):
                frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number, np.uint8))
                frame.pts, frame.time_base = number, Fraction(1)
                output.mux(picture.encode(frame.reformat(format="yuvj420p")))
        parts = [_packets(stream, kind, track) for track, stream in enumerate(streams)]
        waiting = sorted((p for some in parts for p in some), key=lambda p: float((p.dts or 0) * p.time_base))
        for packet in waiting:
            output.mux(packet)


def _stream(output: Any, kind: Kind) -> Any:
    stream = output.add_stream(kind.codec, rate=kind.rate, layout=kind.layout, options=dict(kind.options))
    stream.thread_count = 1
    if kind.format:
        stream.format = kind.format
    return stream


def _packets(stream: Any, kind: Kind, track: int) -> list[Any]:
    sound, found = tone(kind, track), []
    late = round(kind.late * kind.rate)
    resampler = av.AudioResampler(stream.format.name, kind.layout, kind.rate, stream.frame_size or 4096)
    for at in range(0, len(sound), kind.rate):
        part = np.stack([np.roll(sound[at : at + kind.rate], 5 * n) for n in range(len(stream.layout.channels))])
        frame = AudioFrame.from_ndarray(part, format="s16p", layout=kind.layout)
        frame.sample_rate, frame.pts, frame.time_base = kind.rate, at + late, Fraction(1, kind.rate)
        for one in resampler.resample(frame):
            found += stream.encode(one)
    for one in resampler.resample(None):
        found += stream.encode(one)
    found += stream.encode(None)
    if kind.gap:
        third, length = len(found) // 3, max(1, len(found) // 20)
        del found[third : third + length]
    return found


# --- what is made of the bytes afterwards


def boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    while at < end:
        size, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at : at + size]
        at += size


def box(kind: bytes, *parts: bytes) -> bytes:
    return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)


def with_moov(data: bytes, change: Callable[[list[tuple[bytes, bytes]]], list[bytes]]) -> bytes:
    """The file with other boxes inside `moov`, which comes last."""
    out = b""
    for kind, whole in boxes(data, 0, len(data)):
        out += box(b"moov", *change(list(boxes(whole, 8, len(whole))))) if kind == b"moov" else whole
    return out


def itunes_priming(data: bytes) -> bytes:
    """What iTunes says of an encoder's delay, in place of an edit list."""
    text = f" 00000000 {2112:08X} {460:08X} {SECONDS * 44_100:016X}" + " 00000000" * 8
    tag_boxes = [box(b"mean", bytes(4), b"com.apple.iTunes"), box(b"name", bytes(4), b"iTunSMPB")]
    tag_boxes.append(box(b"data", struct.pack(">II", 1, 0), text.encode()))
    handler = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    meta = box(b"udta", box(b"meta", bytes(4), handler, box(b"ilst", box(b"----", *tag_boxes))))
    return with_moov(data, lambda found: [*(whole for kind, whole in found if kind != b"udta"), meta])


def cover_first(data: bytes) -> bytes:
    """A cover picture that is listed before the tracks, which libav counts as the first stream."""
    jpeg = b"\xff\xd8\xff\xe0" + bytes(40) + b"\xff\xd9"
    cover = box(b"covr", box(b"data", struct.pack(">II", 13, 0), jpeg))
    handler = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    meta = box(b"udta", box(b"meta", bytes(4), handler, box(b"ilst", cover)))

    def change(found: list[tuple[bytes, bytes]]) -> list[bytes]:
        rest = [whole for kind, whole in found if kind not in (b"mvhd", b"udta")]
        return [dict(found)[b"mvhd"], meta, *rest]

    return with_moov(data, change)


def with_edits(*edits: tuple[int, int]) -> Callable[[bytes], bytes]:
    """Another list of edits: (ticks of the movie, from which tick of the media)."""

    def change(data: bytes) -> bytes:
        body = struct.pack(">II", 0, len(edits)) + b"".join(struct.pack(">IiI", *edit, 1 << 16) for edit in edits)
        edited = box(b"edts", box(b"elst", body))

        def of_track(whole: bytes) -> bytes:
            inner = [(kind, part) for kind, part in boxes(whole, 8, len(whole)) if kind != b"edts"]
            return box(b"trak", inner[0][1], edited, *(part for _, part in inner[1:]))

        return with_moov(data, lambda found: [of_track(whole) if kind == b"trak" else whole for kind, whole in found])

    return change


def riff(*more: tuple[bytes, bytes], first: bool = False) -> Callable[[bytes], bytes]:
    """WAV with further chunks behind the others, or before the samples."""

    def change(data: bytes) -> bytes:
        extra = b"".join(kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2) for kind, body in more)
        at = data.index(b"data") if first else len(data)
        out = data[:at] + extra + data[at:]
        return out[:4] + struct.pack("<I", len(out) - 8) + out[8:]

    return change


def cut_pages(data: bytes) -> bytes:
    """Ogg without the first pages of its sound, as a cut that keeps time stamps leaves it."""
    pages = [at for at in range(len(data)) if data.startswith(b"OggS\0", at)]
    sounding = [at for at in pages if int.from_bytes(data[at + 6 : at + 14], "little", signed=True) > 0]
    return data[: sounding[0]] + data[sounding[2] :]


def cut_frames(sign: bytes) -> Callable[[bytes], bytes]:
    """Without the first fifth of the sound, from a frame on."""
    return lambda data: data[: 200 if sign == b"" else data.index(sign)] + data[data.index(sign, len(data) // 5) :]


def tagged(data: bytes) -> bytes:
    """MP3 with ID3v2 in front of it, and ID3v1 behind."""
    body = b"TIT2" + struct.pack(">I2x", 5) + b"\0name"
    size = bytes(len(body) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + body + data + b"TAG" + bytes(125)


def chained(data: bytes) -> bytes:
    """Ogg, followed by another stream with another number."""
    other = bytearray(data)
    for at in [at for at in range(len(data)) if data.startswith(b"OggS\0", at)]:
        other[at + 14 : at + 18] = b"next"
    return data + bytes(other)


def unknown_length(data: bytes) -> bytes:
    """WAV as a pipe writes it."""
    at = data.index(b"data") + 4
    return data[:4] + b"\xff" * 4 + data[8:at] + b"\xff" * 4 + data[at + 4 :]


_VORBIS = {"strict": "experimental"}
_AAC = {"aac_pns": "0"}  # its noise depends on where decoding begins


def _wav() -> Iterator[Kind]:
    for codec in ("u8", "s16le", "s24le", "s32le", "f32le", "f64le", "s64le", "alaw", "mulaw"):
        quick = codec in ("s16le", "s64le")
        yield Kind(f"wav {codec}", "wav", "wav", f"pcm_{codec}", quick=quick)
    for rate, layout in ((8000, "mono"), (16_000, "stereo"), (48_000, "5.1"), (96_000, "mono"), (11_025, "stereo")):
        yield Kind(f"wav s16le {rate} {layout}", "wav", "wav", "pcm_s16le", rate, layout)
    for codec in ("adpcm_ima_wav", "adpcm_ms", "adpcm_yamaha", "adpcm_swf"):
        yield Kind(f"wav {codec}", "wav", "wav", codec, quick=codec in ("adpcm_ms", "adpcm_yamaha"))
        yield Kind(f"wav {codec} mono", "wav", "wav", codec, 22_050, "mono")
    yield Kind("wav g726", "wav", "wav", "adpcm_g726", 8000, "mono")
    yield Kind("wav g722", "wav", "wav", "g722", 16_000, "mono")
    yield Kind("wav mp2", "wav", "wav", "mp2", exact=4e-5)
    yield Kind("wav mp3", "wav", "wav", "libmp3lame")
    yield Kind("wav ac3", "wav", "wav", "ac3", exact=0.1)
    plain = Kind("wav", "wav", "wav", "pcm_s16le")
    second = (b"data", tone(plain)[:5000].tobytes())
    yield replace(plain, name="wav with two data chunks", changed=riff(second), quick=True)
    yield replace(plain, name="wav with a chunk of odd length first", changed=riff((b"LIST", b"INFOabc"), first=True))
    yield replace(plain, name="wav with a chunk behind", changed=riff((b"LIST", bytes(501))))
    yield replace(plain, name="wav with bytes behind", changed=lambda data: data + b"no chunk at all" * 40)
    yield replace(plain, name="wav of unknown length", changed=unknown_length)


def _flac() -> Iterator[Kind]:
    for block in (16, 192, 576, 4608, 65_535):
        yield Kind(f"flac {block}", "flac", "flac", "flac", options={"frame_size": str(block)}, quick=block > 65_000)
    for rate, layout in ((8000, "mono"), (16_000, "mono"), (48_000, "5.1"), (96_000, "stereo"), (22_050, "stereo")):
        yield Kind(f"flac {rate} {layout}", "flac", "flac", "flac", rate, layout)
    yield Kind("flac 24 bits", "flac", "flac", "flac", format="s32")
    yield Kind("flac long", "flac", "flac", "flac", seconds=40)
    yield Kind("flac cut", "flac", "flac", "flac", changed=cut_frames(b"\xff\xf8"))


def _mp3() -> Iterator[Kind]:
    for rate, layout in ((44_100, "stereo"), (48_000, "mono"), (22_050, "mono"), (16_000, "stereo"), (8000, "mono")):
        yield Kind(f"mp3 {rate} {layout}", "mp3", "mp3", "libmp3lame", rate, layout, quick=rate == 44_100)
        yield Kind(f"mp3 {rate} {layout} bare", "mp3", "mp3", "libmp3lame", rate, layout, muxed={"write_xing": "0"})
    yield Kind("mp3 variable", "mp3", "mp3", "libmp3lame", options={"q": "4", "flags": "+qscale"}, seconds=30)
    yield Kind("mp3 tagged", "mp3", "mp3", "libmp3lame", changed=tagged)
    yield Kind(
        "mp3 cut", "mp3", "mp3", "libmp3lame", muxed={"write_xing": "0"}, changed=lambda data: data[len(data) // 5 :]
    )


def _ogg() -> Iterator[Kind]:
    opus = Kind("ogg opus", "ogg", "ogg", "libopus", 48_000, exact=1e-5)
    yield replace(opus, quick=True)
    yield replace(opus, name="opus mono", ext="opus", layout="mono")
    for frame in ("2.5", "60"):
        yield replace(opus, name=f"ogg opus of {frame} ms", options={"frame_duration": frame})
    for page in ("20000", "200000", "5000000"):
        yield replace(opus, name=f"ogg opus, pages of {page} us", muxed={"page_duration": page}, seconds=30)
    yield replace(opus, name="ogg opus cut", changed=cut_pages, muxed={"page_duration": "200000"})
    yield replace(opus, name="ogg opus late", late=Fraction(5, 2))
    yield replace(opus, name="ogg opus with a gap", gap=True, muxed={"page_duration": "200000"})
    yield replace(opus, name="ogg opus of two tracks", tracks=2)
    vorbis = Kind("ogg vorbis", "ogg", "ogg", "vorbis", options=_VORBIS)
    yield vorbis
    for page in ("20000", "200000", "5000000"):
        yield replace(vorbis, name=f"ogg vorbis, pages of {page} us", muxed={"page_duration": page}, seconds=30)
    yield replace(vorbis, name="ogg vorbis cut", changed=cut_pages, muxed={"page_duration": "200000"}, quick=True)
    yield replace(vorbis, name="ogg vorbis late", late=Fraction(3), quick=True)
    yield replace(vorbis, name="ogg vorbis 22050", rate=22_050)
    flac = Kind("ogg flac", "ogg", "ogg", "flac", seconds=20)
    yield replace(flac, quick=True)
    yield replace(flac, name="ogg flac mono", rate=16_000, layout="mono")


def _mp4() -> Iterator[Kind]:
    aac = Kind("m4a aac", "m4a", "mp4", "aac", options=_AAC)
    yield aac
    for rate, layout in ((48_000, "mono"), (22_050, "stereo"), (8000, "mono"), (48_000, "5.1"), (96_000, "stereo")):
        yield replace(aac, name=f"m4a aac {rate} {layout}", rate=rate, layout=layout)
    yield replace(aac, name="m4a aac, tables first", muxed={"movflags": "faststart"})
    yield replace(aac, name="m4a aac, no edits", muxed={"use_editlist": "0"})
    priming = {"use_editlist": "0", "fflags": "+bitexact"}
    yield replace(aac, name="m4a aac, iTunSMPB", muxed=priming, changed=itunes_priming, quick=True)
    yield replace(aac, name="m4a aac, cover first", tracks=2, changed=cover_first, quick=True)
    yield replace(aac, name="m4a aac, two tracks", tracks=2)
    yield replace(aac, name="m4a aac, fragments", muxed={"movflags": "frag_keyframe+empty_moov"})
    yield replace(aac, name="m4a aac, late", late=Fraction(7, 3))
    yield replace(aac, name="m4a aac with a gap", gap=True)
    yield replace(aac, name="m4a aac, silence first", changed=with_edits((1500, -1), (8000, 1024)))
    yield replace(aac, name="m4a aac, cut", changed=with_edits((4000, 44_100)))
    yield replace(aac, name="m4a aac, two edits", changed=with_edits((2000, 0), (3000, 200_000)))
    yield replace(aac, name="mov aac", ext="mov", container="mov")
    yield replace(aac, name="mp4 aac with pictures", ext="mp4", picture=True)
    for codec in ("alac", "flac", "libmp3lame", "libopus", "ac3", "mp2"):
        rate = 48_000 if codec == "libopus" else 44_100
        noise = {"libopus": 1e-5, "ac3": 0.1, "mp2": 4e-5}.get(codec, 0.0)
        yield Kind(f"mp4 {codec}", "m4a", "mp4", codec, rate, exact=noise)
    for codec in (
        "pcm_s16le",
        "pcm_s16be",
        "pcm_s24be",
        "pcm_f32be",
        "pcm_u8",
        "adpcm_ima_qt",
        "pcm_alaw",
    ):
        yield Kind(f"mov {codec}", "mov", "mov", codec)
    yield Kind("3gp amr", "3gp", "3gp", "libopencore_amrnb", 8000, "mono")


def _matroska() -> Iterator[Kind]:
    for codec in (
        "aac",
        "alac",
        "flac",
        "libmp3lame",
        "libopus",
        "vorbis",
        "pcm_s16le",
        "pcm_f32le",
        "ac3",
        "eac3",
        "mp2",
    ):
        rate = 48_000 if codec == "libopus" else 44_100
        options = {"aac": _AAC, "vorbis": _VORBIS}.get(codec, {})
        noise = {"libopus": 1e-5, "ac3": 0.1, "eac3": 0.1, "mp2": 4e-5}.get(codec, 0.0)
        one = Kind(f"mkv {codec}", "mkv", "matroska", codec, rate, options=options, exact=noise)
        yield replace(one, quick=codec in ("vorbis", "flac"))
        yield replace(one, name=f"mkv {codec} late", late=Fraction(17, 8))
        yield replace(one, name=f"mkv {codec} with pictures", picture=True)
        if codec != "vorbis":
            yield replace(one, name=f"mkv {codec} with a gap", gap=True)
        # of the second one, libav's probing reaches the first packet with a time stamp, and libav counts back from it
        early = replace(one, late=Fraction(-8, 5), muxed={"avoid_negative_ts": "disabled"})
        yield replace(early, name=f"mkv {codec} early", picture=True, quick=codec in ("aac", "flac", "vorbis"))
        yield replace(early, name=f"mkv {codec} a little early", late=Fraction(-1, 20), quick=codec == "flac")
    yield Kind("mkv wavpack", "mkv", "matroska", "wavpack")
    yield Kind("mkv tta", "mkv", "matroska", "tta")
    yield Kind("mka two tracks", "mka", "matroska", "flac", tracks=2)
    yield Kind("webm opus", "webm", "webm", "libopus", 48_000, exact=1e-5)
    yield Kind("webm vorbis", "webm", "webm", "vorbis", options=_VORBIS)


def _avi() -> Iterator[Kind]:
    for codec in ("libmp3lame", "pcm_s16le", "adpcm_ms", "ac3", "mp2"):
        noise = {"ac3": 0.1, "mp2": 4e-5}.get(codec, 0.0)
        yield Kind(f"avi {codec}", "avi", "avi", codec, picture=True, exact=noise)


KINDS = {kind.name: kind for some in (_wav, _flac, _mp3, _ogg, _mp4, _matroska, _avi) for kind in some()}
