"""Decoding a part of a file leaves no memory behind: a long training decodes some hundred million clips."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.media import probe as probing
from headrace.dataio.shards.media.probe import probe
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.clip import Clip, choose
from headrace.loaders.decode import trim
from headrace.loaders.decode.base import Decoded, Fit, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from tests.support import video_corpus

pytestmark = pytest.mark.slow

PACKET = 60
"""Bytes: fewer than a packet of libav, which takes 149."""
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def in_use() -> int:
    """Bytes that libraries have from malloc."""
    gc.collect()
    about = ctypes.CDLL("libc.so.6").mallinfo2
    about.restype = _Info
    return int(about().uordblks)


def grown(work: Callable[[], object], allowed: float = 0.0, times: int = 300) -> float:
    """Bytes that each call leaves behind, in a window of `times` calls. Other threads of this process allocate too, so this
    is the least of up to four windows. A leak shows in every window: the first one within `allowed` decides."""
    for _ in range(20):
        work()
    found = []
    for _ in range(4):
        before = in_use()
        for _ in range(times):
            work()
        found.append((in_use() - before) / times)
        if found[-1] < allowed:
            break
    return min(found)


def test_memory_that_is_left_is_seen() -> None:
    kept = list[ctypes.Array[ctypes.c_char]]()
    assert (
        grown(lambda: kept.append(ctypes.create_string_buffer(100_000)), times=50) > 50_000
    )  # others may free some meanwhile


@pytest.mark.parametrize("name", ["h264.mp4", "h264-vfr.mkv"])
def test_a_clip_that_ends_before_its_video_leaves_nothing(name: str) -> None:
    data = video_corpus.make(next(one for one in video_corpus.ALL if one.name == name))
    info = probe(data, ext=name.rsplit(".")[-1]).video
    assert info is not None
    decoder = PyAVDecoder()
    request = Request(memoryview(data), info, choose(info, Clip(1), 0, 0, 0, 0), color="bt601", fit=Fit((16, 16)))
    assert isinstance(decoder.decode([request])[0], Decoded)
    assert grown(lambda: decoder.decode([request]), PACKET) < PACKET


def test_sound_that_ends_before_its_recording_leaves_nothing() -> None:
    data = video_corpus.make(next(one for one in video_corpus.ALL if one.name == "h264.mp4"))
    info = probe(data, ext="mp4").audio
    assert info is not None
    spec = AudioSpec(8000, seconds=0.1)
    assert grown(lambda: decode_audio(memoryview(data), info, Fraction(0), spec, 800), PACKET) < PACKET


def test_counting_frames_that_ends_with_an_error_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video_corpus.make(next(one for one in video_corpus.ALL if one.name == "h264.mp4"))
    info = probe(data, ext="mp4").video
    assert info is not None
    request = Request(memoryview(data), info, choose(info, Clip(1), 0, 0, 0, 0), "bt601", Fit((16, 16)))
    calls = itertools.count(1)

    def cancel_at_third() -> None:
        if next(calls) % 3 == 0:
            raise CorruptionError("cancelled")

    def work() -> None:
        with pytest.raises(CorruptionError, match="cancelled"):
            trim._decoded_times(request)

    monkeypatch.setattr(trim, "check_cancelled", cancel_at_third)
    assert grown(work, PACKET) < PACKET


def test_probing_that_ends_with_an_error_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video_corpus.make(next(one for one in video_corpus.ALL if one.name == "h264.mp4"))
    monkeypatch.setattr(limits, "VIDEO_FRAMES", 5)
    monkeypatch.setattr(probing, "check_video", lambda _: None)

    def work() -> None:
        with pytest.raises(UnsupportedError, match="more than 5 frames"):
            probe(data, ext="mp4")

    assert grown(work, PACKET) < PACKET
