"""Windows of every kind of recording are those of an independent decoder that reads the whole file."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.shards.index import row_codec
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import AudioInfo, Sample
from headrace.loaders import AudioSpec
from headrace.loaders.audio import decode
from headrace.loaders.audio.decode import decode_audio
from tests.dataio.shards.index.test_pages import GOOD, rows
from tests.support.audio_corpus import KINDS, Kind, made
from tests.support.reference_audio import F32, Whole, whole

pytestmark = pytest.mark.slow

SECONDS = 0.7
QUICK = [pytest.param(kind, id=name) for name, kind in KINDS.items() if kind.quick]
ALL = [pytest.param(kind, id=name, marks=() if kind.quick else pytest.mark.soak) for name, kind in KINDS.items()]


def indexed(data: bytes, ext: str) -> AudioInfo:
    """What an index says of the file, after it was written and read."""
    found = probe(data, ext=ext).audio
    assert found is not None
    sample: Sample = rows().sample(msgspec.Raw(row_codec.encode_row(replace(GOOD, audio=found))), 0, 0)
    assert sample.audio == found
    return found


def starts(sound: Whole) -> Iterator[int]:
    """First samples of windows: the first ones, some anywhere, and the last ones."""
    drawn, length = random.Random(1), sound.sound.shape[1]
    yield from (0, 1, drawn.randrange(sound.rate))
    yield from (drawn.randrange(length) for _ in range(7))
    yield from (max(0, length - sound.rate // 2), max(0, length - 3))


def off(window: F32, sound: Whole, at: int) -> float:
    """How far the window is from what the independent decoder has there."""
    return float(np.abs(window - sound.window(at, window.shape[1])[: len(window)]).max())


def parts_off(window: F32, sound: Whole, at: int, shift: int) -> float:
    """The same of parts of the window, each of which may lie up to `shift` samples away; the part with the gap does not count."""
    parts = [(n, window[:, n : n + 2 * shift]) for n in range(0, window.shape[1], 2 * shift)]
    found = [min(off(part, sound, at + n + by) for by in range(-shift, shift + 1)) for n, part in parts]
    return sorted(found)[-2]


@pytest.mark.parametrize("kind", ALL)
def test_windows_are_those_of_an_independent_decoder(kind: Kind) -> None:
    data = made(kind)
    info = indexed(data, kind.ext)
    sound = whole(data, info.stream)
    assert sound is not None
    assert (info.start, info.sample_rate, info.channels) == (sound.first, sound.rate, len(sound.sound))
    spec = AudioSpec(sound.rate, min(2, info.channels), seconds=SECONDS, downmix="first")
    # behind a gap Matroska says in milliseconds where sound goes on
    shift = sound.rate // 1000 + 1 if kind.gap and kind.container == "matroska" else 0
    for at in starts(sound):
        for begin, from_first in ((Fraction(0), True), (sound.first, False)):
            start = Fraction(at, sound.rate) + begin
            window, _ = decode_audio(memoryview(data), info, start, spec, spec.samples(), from_first)
            found = off(window, sound, at)
            if shift and found > kind.exact:
                found = parts_off(window, sound, at, shift)
            assert found <= kind.exact, (at, from_first)


@pytest.mark.parametrize("kind", QUICK)
def test_windows_by_an_older_index_are_the_same(kind: Kind) -> None:
    """It does not say when the sound begins, nor where its packets lie."""
    data = made(kind)
    info = indexed(data, kind.ext)
    sound = whole(data, info.stream)
    assert sound is not None
    older = replace(info, time_base=None, start_pts=0, marks=())
    spec = AudioSpec(sound.rate, min(2, info.channels), seconds=SECONDS, downmix="first")
    for at in (0, sound.rate, 5 * sound.rate + 7):
        window, _ = decode_audio(memoryview(data), older, Fraction(at, sound.rate), spec, spec.samples(), True)
        assert off(window, sound, at) <= max(kind.exact, 1e-6), at


EXCERPTS = ["wav s16le", "flac 4608", "mp3 44100 stereo", "ogg vorbis", "m4a aac", "m4a aac, cover first"]


@pytest.mark.parametrize("name", EXCERPTS)
@pytest.mark.parametrize("wrong", ["at", "pts"])
def test_a_mark_that_is_elsewhere_leaves_the_file_to_libav(
    name: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, taken, real = KINDS[name], list[bool](), decode._decode_from_excerpt

    def at_once(*args: Any) -> Any:
        found = real(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(decode, "_decode_from_excerpt", at_once)
    data = made(kind)
    info = indexed(data, kind.ext)
    sound = whole(data, info.stream)
    assert sound is not None
    assert info.time_base is not None
    by = 1 if wrong == "at" else round(1 / info.time_base)
    kept = 1 if kind.codec == "libmp3lame" else 0  # MP3 itself does not say when a frame sounds: the first mark does
    moved = tuple(replace(m, **{wrong: getattr(m, wrong) + by * (n >= kept)}) for n, m in enumerate(info.marks))
    spec = AudioSpec(sound.rate, 1, seconds=SECONDS, downmix="first")
    for known, excerpted in ((info, True), (replace(info, marks=moved), False), (replace(info, marks=()), False)):
        taken.clear()
        window, _ = decode_audio(memoryview(data), known, Fraction(4), spec, spec.samples(), True)
        assert any(taken) == excerpted
        assert off(window, sound, 4 * sound.rate) <= 1e-6


CHECKED = [
    "flac 4608",
    pytest.param("flac 16", marks=pytest.mark.soak),
    "ogg vorbis",
    "ogg opus",
    "ogg flac",
    "mkv flac",
    "mkv wavpack",
    "mp4 flac",
    "wav ac3",
]


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 12))])
def test_damage_from_before_packing_is_an_error_and_never_other_sound(name: str, seed: int) -> None:
    """In formats that have checksums: one bit is wrong in a file before it is indexed."""
    kind = KINDS[name]
    data, draw = made(kind), random.Random(seed)
    info = indexed(data, kind.ext)
    sound, hurt = whole(data, info.stream), bytearray(data)
    assert sound is not None
    hurt[draw.randrange(len(data) // 3, 2 * len(data) // 3)] ^= 1 << draw.randrange(8)
    info, errors = indexed(bytes(hurt), kind.ext), 0
    spec = AudioSpec(sound.rate, 2, seconds=1.0, downmix="first")
    for second in range(kind.seconds - 1):
        try:
            window, _ = decode_audio(memoryview(hurt), info, Fraction(second), spec, sound.rate, True)
        except HeadraceError:
            errors += 1
        else:
            assert off(window, sound, second * sound.rate) <= kind.exact, second
    assert 0 < errors < kind.seconds - 1


@pytest.mark.parametrize("name", ["m4a aac", "mkv aac"])
def test_a_damaged_packet_that_the_index_does_not_find_is_an_error_of_the_windows_that_need_it(name: str) -> None:
    """AAC has no checksums, and the index counts its packets without decoding them."""
    kind = KINDS[name]
    data = bytearray(made(kind))
    sound = whole(bytes(data), 0)
    assert sound is not None
    with av.open(io.BytesIO(bytes(data)), "r") as container:
        at, packet = next((p.pos, bytes(p)) for n, p in enumerate(container.demux(audio=0)) if n == 200)
    assert at is not None
    begin = data.index(packet, at)
    data[begin : begin + len(packet)] = (b"\x5a\x17" * len(packet))[: len(packet)]
    info, errors = indexed(bytes(data), kind.ext), list[int]()
    assert info.marks
    spec = AudioSpec(sound.rate, 2, seconds=1.0, downmix="first")
    for second in range(kind.seconds - 1):
        try:
            window, _ = decode_audio(memoryview(data), info, Fraction(second), spec, sound.rate, True)
        except HeadraceError:
            errors.append(second)
        else:
            assert off(window, sound, second * sound.rate) <= 1e-5, second
    assert 4 in errors  # the packet lies there
    assert len(errors) <= 2


def test_far_more_packets_than_their_stamps_have_room_for_are_refused() -> None:
    """Matroska with 40,000 packets at one instant."""
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as output:
        stream: Any = output.add_stream("pcm_s16le", rate=8000, layout="mono")
        for pts in (0, 1000, *([1200] * 40_000), 2000):
            packet = av.Packet(bytes(2))
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, pts, pts, Fraction(1, 1000)
            output.mux(packet)
    data = target.getvalue()
    spec = AudioSpec(8000, 1, seconds=0.5)
    with pytest.raises(CorruptionError, match="far more packets"):
        decode_audio(memoryview(data), indexed(data, "mkv"), Fraction(1), spec, spec.samples(), True)
