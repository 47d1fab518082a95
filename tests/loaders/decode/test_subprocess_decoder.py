"""Decoding in processes that may die: the same pixels, and a crash or a hang costs one clip."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from headrace.dataio import pack
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.core.programs import run_module
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import AudioInfo, VideoInfo
from headrace.loaders import AudioSpec, Clip, VideoLoader
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.clip import Wanted, choose
from headrace.loaders.config import LoaderConfig
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
from tests.support import crashing_decode_worker, video_corpus

pytestmark = pytest.mark.slow

CRASHING = run_module("tests.support.crashing_decode_worker")


@pytest.fixture(scope="module")
def clip() -> tuple[bytes, VideoInfo, AudioInfo]:
    """A clip with sound, made here."""
    data = video_corpus.make(video_corpus.ALL[0])
    found = probe(data, ext="mp4")
    assert found.video is not None
    assert found.audio is not None
    return data, found.video, found.audio


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SubprocessDecoder]:
    """Processes that die on some clips, with half a second for each."""
    monkeypatch.setenv("DOOMED_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    decoder = SubprocessDecoder(2, 1.0, CRASHING)
    yield decoder
    decoder.close()


def request(data: bytes, info: VideoInfo, first: int) -> Request:
    return Request(memoryview(data), info, Wanted("index", (first, first + 1), info.key_frames[first // 12]))


def test_pixels_samples_and_errors_are_those_of_the_same_process(clip: tuple[bytes, VideoInfo, AudioInfo]) -> None:
    data, video, audio = clip
    decoder = SubprocessDecoder(1)
    try:
        good = Request(memoryview(data), video, choose(video, Clip(5, 2), 0, 0, 0, 0))
        bad = Request(memoryview(data[: len(data) // 2]), video, good.wanted)
        here, there = PyAVDecoder().decode([good, bad]), decoder.decode([good, bad])
        assert isinstance(there[0], Decoded)
        assert isinstance(here[0], Decoded)
        assert (there[0].frames == here[0].frames).all()
        assert there[0].pts == here[0].pts
        assert str(there[1]) == str(here[1])
        assert type(there[1]) is type(here[1]) is CorruptionError
        window = (memoryview(data), audio, Fraction(1, 3), AudioSpec(8000, 2), 4000, True)
        (one, real), (other, also) = decode_audio(*window), decoder.decode_audio(*window)
        assert np.array_equal(one, other)
        assert real == also
    finally:
        decoder.close()


def test_a_segmentation_fault_costs_one_clip_and_one_process(
    clip: tuple[bytes, VideoInfo, AudioInfo], crashing: SubprocessDecoder, tmp_path: Path
) -> None:
    data, info, _ = clip
    before, crashed, after = crashing.decode(
        [request(data, info, first) for first in (0, crashing_decode_worker.CRASH, 20)]
    )
    assert isinstance(crashed, CorruptionError)
    assert signal.SIGSEGV.name in crashed.message
    assert isinstance(before, Decoded)
    assert isinstance(after, Decoded)
    assert (tmp_path / "mark").read_text().startswith("crash ")  # it did


def test_a_hang_ends_at_the_limit_and_its_process_is_gone(
    clip: tuple[bytes, VideoInfo, AudioInfo], crashing: SubprocessDecoder, tmp_path: Path
) -> None:
    data, info, _ = clip
    begun = time.monotonic()
    hung, after = crashing.decode([request(data, info, first) for first in (crashing_decode_worker.HANG, 3)])
    assert isinstance(hung, CorruptionError)
    assert "longer than 1 s" in hung.message
    assert time.monotonic() - begun < 120
    assert isinstance(after, Decoded)
    what, pid = (tmp_path / "mark").read_text().split()
    assert what == "hang"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_loader_survives_both_and_puts_the_clips_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashing: SubprocessDecoder
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for one in (video_corpus.ALL[0], video_corpus.ALL[7], video_corpus.ALL[8]):
        (folder / one.name).write_bytes(video_corpus.make(one))
    monkeypatch.setattr(LoaderConfig, "subprocess_decoder", lambda *_: crashing)
    with (
        pack([folder], tmp_path / "ds", workers=1) as packed,
        VideoLoader(
            packed, 3, clip=Clip(2, per_video=40, start="center"), size=(24, 32), shuffle=False, sidecar=None,
            num_threads=2, decode_in_subprocess=True, max_bad_samples=10,
        ) as loader,
    ):  # fmt: skip
        delivered = sum(len(batch["key"]) for batch in loader)
        assert delivered == 120
        reasons = " ".join(refusal.reason for refusal in loader.quarantine)
    assert {line.split()[0] for line in (tmp_path / "mark").read_text().splitlines()} == {"crash", "hang"}
    assert "SIGSEGV" in reasons or "longer than" in reasons


def test_processes_that_do_not_start_do_not_count_as_damage(clip: tuple[bytes, VideoInfo, AudioInfo]) -> None:
    data, info, _ = clip
    decoder = SubprocessDecoder(1, 5.0, run_module("tests.loaders.no_such_module"))
    (result,) = decoder.decode([request(data, info, 0)])
    decoder.close()
    assert isinstance(result, UnsupportedError)
    assert isinstance(result, HeadraceError)
    with pytest.raises(UsageError):
        SubprocessDecoder(1, 0.0)
