"""Sound of Matroska from before time zero is left out: by the index, by windows, and by copies of the file."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.dataio import Recipe, pack
from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media.probe import Probe, probe
from headrace.dataio.shards.sample import AudioInfo, AudioMark
from headrace.loaders import AudioSpec
from headrace.loaders.audio.decode import decode_audio
from tests.support import video_corpus
from tests.support.audio_corpus import KINDS, Kind, made
from tests.support.reference_audio import F32, Whole, block_times, whole

EARLY = KINDS["mkv aac early"]


def described(kind: Kind) -> tuple[bytes, Probe, AudioInfo, Whole]:
    data = made(kind)
    found = probe(data, ext="mkv")
    assert found.audio is not None
    sound = whole(data, found.audio.stream)
    assert sound is not None
    return data, found, found.audio, sound


def off(data: bytes, info: AudioInfo, sound: Whole, at: int) -> float:
    """How far the window at sample `at` of the time line is from what the independent decoder has there."""
    spec = AudioSpec(sound.rate, 2, seconds=0.5)
    window, _ = decode_audio(memoryview(data), info, Fraction(at, sound.rate), spec, spec.samples())
    expected: F32 = sound.window(at - round(sound.first * sound.rate), spec.samples())
    return float(np.abs(window - expected).max())


def test_the_index_counts_what_lies_on_the_time_line() -> None:
    data, found, info, sound = described(EARLY)
    early = [at for at, time in block_times(data) if time < 0]
    assert len(early) > 60
    assert found.notes == (f"{len(early)} audio packets begin before time zero and are left out",)
    assert info.samples == sound.sound.shape[1]
    assert info.start == sound.first
    assert abs(sound.first) < Fraction(1, 40)  # the stamps of AAC are early by its delay
    assert info.marks[0].at == min(at for at, time in block_times(data) if time >= 0 and at > max(early))


@pytest.mark.parametrize("index", ["new", "without marks", "older", "of the first packet"])
def test_windows_have_no_sound_from_before_time_zero_whatever_the_index_says(index: str) -> None:
    data, _, info, sound = described(EARLY)
    first = AudioMark(min(at for at, time in block_times(data) if time < 0), 0)
    known = {
        "new": info,
        "without marks": msgspec.structs.replace(info, marks=()),
        "older": msgspec.structs.replace(info, marks=(), time_base=None, start_pts=0),
        "of the first packet": msgspec.structs.replace(info, marks=(first, *info.marks), start_pts=0),
    }[index]
    for at in range(0, 2 * sound.rate, sound.rate // 10):
        assert off(data, known, sound, at) == 0, at


@pytest.mark.parametrize("milliseconds", [1, 104, 105, 150, 320])
def test_a_single_packet_and_a_few_are_left_out_alike(milliseconds: int) -> None:
    """libav counts the times of a few back from the first time stamp, and those of many from zero."""
    kind = replace(KINDS["mkv flac early"], late=Fraction(-milliseconds, 1000), seconds=2, picture=False)
    data, _, info, sound = described(kind)
    assert info.start == sound.first >= 0
    assert any(time < 0 for _, time in block_times(data))
    for at in (0, 500, 1000, 1500, 5000, 30_000):
        assert off(data, info, sound, at) == 0, at


def test_sound_that_lies_before_time_zero_altogether_is_none() -> None:
    kind = replace(EARLY, late=Fraction(-3), seconds=1)
    found = probe(made(kind), ext="mkv")
    assert found.video is not None
    assert found.audio is None
    assert len(found.notes) == 1
    assert "before time zero" in found.notes[0]
    with pytest.raises(UnsupportedError, match=r"all of its audio begins before time zero; shift it"):
        probe(made(replace(kind, picture=False)), ext="mkv")


@pytest.mark.parametrize("recipe", [Recipe(container="mkv"), Recipe(container="mp4"), Recipe(codec="h264")])
def test_copies_have_the_sound_where_it_was(recipe: Recipe, tmp_path: Path) -> None:
    film = video_corpus.Made("", "libx264", "matroska", frames=100, options={"bf": "0", "g": "12"}, sound="flac")
    (tmp_path / "a.mkv").write_bytes(video_corpus.make(film, sound_late=Fraction(-3, 2)))
    data = (tmp_path / "a.mkv").read_bytes()
    assert sum(time < 0 for _, time in block_times(data)) > 10
    before = probe(data, ext="mkv").audio
    with pack(tmp_path / "a.mkv", tmp_path / "ds", recipe=recipe, workers=1) as dataset:
        (sample,) = dataset
        assert sample.audio is not None
        copied, after = dataset.read(sample, sample.audio.ext), sample.audio
    assert before is not None
    assert after.samples == before.samples
    spec = AudioSpec(before.sample_rate, seconds=0.3)
    for at in range(5):
        start = Fraction(at, 4)
        one, _ = decode_audio(memoryview(data), before, start, spec, spec.samples())
        two, _ = decode_audio(memoryview(copied), after, start, spec, spec.samples())
        shift = before.sample_rate // 1000 + 1  # both files may say times in milliseconds
        assert (
            min(
                np.abs(one[:, shift:-shift] - two[:, shift + n : two.shape[1] - shift + n]).max()
                for n in range(-shift, shift)
            )
            == 0
        )
