"""Windows of long MP3s, decoded from a mark on: the same samples as decoding the file from its beginning."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import xxhash
from av.audio.frame import AudioFrame
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.shards.media.describe import with_head
from headrace.dataio.shards.media.messages import FileInfo
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.pieces import Hasher
from headrace.dataio.shards.sample import AudioInfo, Member, Pieces
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.fetch.partial_file import HeadCache, PartialFile, SentFile

pytestmark = pytest.mark.slow

KINDS: dict[str, tuple[int, str, int, dict[str, str]]] = {
    "constant": (44_100, "mono", 64_000, {}),
    "joint stereo": (48_000, "stereo", 128_000, {"joint_stereo": "1"}),
    "variable": (44_100, "mono", 0, {"q": "4"}),
    "of many bits": (44_100, "stereo", 320_000, {}),
    "of few bits": (16_000, "mono", 16_000, {}),
    "of the fewest": (8_000, "mono", 8_000, {}),
    "without a header": (44_100, "mono", 64_000, {"write_xing": "0"}),
}
SIZE = 4096


def encoded(rate: int, layout: str, bit_rate: int, options: dict[str, str], seconds: int = 60) -> bytes:
    """A tone that rises, louder and softer, so that frames borrow bytes from those before them; between tags."""
    time, target = np.arange(seconds * rate) / rate, io.BytesIO()
    tone = np.sin(2 * np.pi * (200 + 20 * time) * time) * (0.5 + 0.5 * np.sin(9 * time))
    sound = (12_000 * tone + np.random.default_rng(3).normal(0, 200 * (1 + np.sin(5 * time)), len(time))).astype(
        np.int16
    )
    muxed = {key: value for key, value in options.items() if key == "write_xing"}
    with av.open(target, "w", format="mp3", options=muxed) as output:
        coded = {key: value for key, value in options.items() if key not in muxed}
        stream: Any = output.add_stream("libmp3lame", rate=rate, layout=layout, options=coded)
        if bit_rate:
            stream.bit_rate = bit_rate
        output.metadata["title"] = "a tag" * 40
        for at in range(0, len(sound), rate):
            channels = 2 if layout == "stereo" else 1
            part = np.stack([np.roll(sound[at : at + rate], 7 * n) for n in range(channels)])
            frame = AudioFrame.from_ndarray(part, format="s16p", layout=layout)
            frame.sample_rate, frame.pts = rate, at
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return target.getvalue() + b"TAG" + bytes(125)


class LongMp3:
    """A file in a shard, of which parts are read."""

    def __init__(self, data: bytes, folder: Path) -> None:
        self.data, path = data, folder / "a.mp3"
        path.write_bytes(data)
        hasher = Hasher(SIZE)
        hasher.update(data)
        found = probe(path)
        fact = with_head(FileInfo("mp3", str(path), len(data), 0, 0, hasher.pieces()), found)
        assert found.audio is not None
        assert fact.pieces is not None
        self.info: AudioInfo = found.audio
        self.pieces: Pieces = fact.pieces
        self.read = 0

    def part(self, pieces: Pieces | None = None) -> PartialFile:
        member = Member("mp3", 0, len(self.data), xxhash.xxh3_64_intdigest(self.data), pieces or self.pieces)
        return PartialFile("shard", member, read=self._read, read_direct=self._read, heads=HeadCache(0))

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self.read += sum(length for _, length in ranges)
        return [memoryview(self.data)[offset : offset + length] for offset, length in ranges]


@pytest.fixture(scope="module", params=list(KINDS))
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LongMp3:
    return LongMp3(encoded(*KINDS[request.param]), tmp_path_factory.mktemp("mp3"))


def windows(recording: LongMp3, files: Sequence[Any], start: Fraction, seconds: float, from_first: bool = True) -> Any:
    """Without marks, libav reads all of a file that is there as a whole."""
    spec, info = AudioSpec(16_000, seconds=seconds), recording.info
    infos = [replace(info, marks=()) if isinstance(data, memoryview) else info for data in files]
    return [decode_audio(*both, start, spec, spec.samples(), from_first) for both in zip(files, infos, strict=True)]


def same(one: Any, other: Any) -> bool:
    return one[1] == other[1] and bool((one[0] == other[0]).all())


@given(start=st.integers(0, 61_000), seconds=st.sampled_from([0.1, 1.0, 7.5]), from_first=st.booleans())
@settings(max_examples=25, deadline=None)
def test_windows_are_those_of_the_whole_file(recording: LongMp3, start: int, seconds: float, from_first: bool) -> None:
    at, files = Fraction(start, 1000), [memoryview(recording.data), recording.part()]
    whole, part = windows(recording, files, at, seconds, from_first)
    assert same(whole, part)


def test_a_window_reads_its_part_of_the_file(recording: LongMp3) -> None:
    assert len(recording.pieces.marks) == -(-(len(recording.data) - 128) // SIZE) or recording.pieces.marks[0][0] > SIZE
    recording.read, spec = 0, AudioSpec(16_000)
    decode_audio(recording.part(), recording.info, Fraction(50), spec, 8_000, True)
    second = len(recording.data) / 60
    assert recording.read < 4 * SIZE + 128 * 1024 + 9 * second


def test_of_what_is_given_to_another_process_the_same_is_made(recording: LongMp3) -> None:
    file = recording.part()
    for number in range(-(-len(recording.data) // SIZE)):
        file.load(number)
    whole, given_ = windows(recording, [memoryview(recording.data), SentFile(file.sent_pieces())], Fraction(31), 2.0)
    assert same(whole, given_)


@pytest.mark.parametrize("off", [-3, 1, 200])
def test_where_no_frame_begins_at_the_mark_libav_looks_for_the_window(recording: LongMp3, off: int) -> None:
    wrong = replace(recording.pieces, marks=tuple((at + off, before) for at, before in recording.pieces.marks))
    whole, part = windows(recording, [memoryview(recording.data), recording.part(wrong)], Fraction(40), 1.0)
    assert same(whole, part)


def test_damage_before_the_window_is_not_its_own(recording: LongMp3) -> None:
    marks = recording.pieces.marks
    begins = next(n for n, (_, before) in enumerate(marks) if before > 20 * recording.info.sample_rate)
    data, at = bytearray(recording.data), marks[begins][0]
    data[at + 4 : at + 40] = b"\xff" * 36
    (hurt,) = windows(recording, [LongMp3.part(_with(recording, bytes(data)))], Fraction(55), 1.0)
    (whole,) = windows(recording, [memoryview(recording.data)], Fraction(55), 1.0)
    assert same(hurt, whole)


def _with(recording: LongMp3, data: bytes) -> LongMp3:
    """The same file with other bytes, and the digests of those."""
    other, hasher = object.__new__(LongMp3), Hasher(SIZE)
    hasher.update(data)
    found = hasher.pieces()
    assert found is not None
    other.data, other.info, other.read = data, recording.info, 0
    other.pieces = replace(recording.pieces, digests=found.digests)
    return other


def test_a_file_whose_frames_are_not_all_of_one_length_has_no_marks(tmp_path: Path) -> None:
    fine, coarse = (encoded(*KINDS[kind], seconds=20) for kind in ("constant", "of few bits"))
    with_both = LongMp3(fine + coarse, tmp_path)
    assert with_both.pieces.marks == ()
