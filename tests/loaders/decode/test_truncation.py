"""Made clips of every container, cut at 24 places: the right frames or an error, never stale ones, and the culprit is named."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.shards.media.probe import probe
from headrace.loaders.audio.decode import decode_audio
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.registry import open_decoder
from tests.support import video_corpus

CUTS = 24
DIFFERENT = [one for one in video_corpus.ALL if "-" not in one.name]
"""One of each codec and container."""


@pytest.mark.parametrize("one", DIFFERENT, ids=lambda one: one.name)
def test_a_truncated_file_gives_the_right_frames_or_an_error_next_to_a_whole_one(one: video_corpus.Made) -> None:
    data = video_corpus.make(one)
    info = probe(data, ext=one.name.rsplit(".")[-1]).video
    assert info is not None
    last = info.frames - 1
    late = Wanted(
        "index", (last - 2, last - 1, last), max(info.key_frames, key=lambda key: (key.index <= last - 2, key.index))
    )
    decoder = open_decoder()
    (right,) = decoder.decode([Request(memoryview(data), info, late)])
    assert isinstance(right, Decoded)
    refused = 0
    for cut in np.linspace(1, len(data) - 1, CUTS).astype(int):
        # a whole clip of another place goes first through the same decoder: what is stale would be its frames
        early = Request(memoryview(data), info, Wanted("index", (0, 1, 2), info.key_frames[0]))
        before, found = decoder.decode([early, Request(memoryview(data[:cut]), info, late)])
        assert isinstance(before, Decoded)
        if isinstance(found, HeadraceError):
            refused += 1
        else:
            assert (found.frames == right.frames).all()
    decoder.close()
    assert refused >= CUTS - 3


def test_a_truncated_recording_gives_the_right_samples_or_counted_silence_or_an_error() -> None:
    for one in (one for one in video_corpus.ALL if one.sound):
        data = video_corpus.make(one)
        info = probe(data, ext=one.name.rsplit(".")[-1]).audio
        assert info is not None
        window = (info, Fraction(1, 2), AudioSpec(48_000), 9600)
        right, real = decode_audio(memoryview(data), *window)
        assert real == 9600
        refused = 0
        for cut in np.linspace(1, len(data) - 1, CUTS).astype(int):
            try:
                found, there = decode_audio(memoryview(data[:cut]), *window)
            except HeadraceError:
                refused += 1
                continue
            assert np.abs(found[:, : max(0, there - 960)] - right[:, : max(0, there - 960)]).max(initial=0) < 1e-3
            assert not found[:, there:].any()
        assert refused > 0


@pytest.mark.parametrize(
    ("found", "instead"), [(b"Lavf", b"\xe4\xf6\xfc!"), (b"avc1", b"\0\0\0\0")], ids=["a title in Latin-1", "no codec"]
)
def test_what_libav_cannot_say_of_a_file_is_no_error_or_one_of_ours(found: bytes, instead: bytes) -> None:
    data = video_corpus.make(next(one for one in video_corpus.ALL if one.name == "h264.mp4"))
    info = probe(data, ext="mp4").video
    assert info is not None
    request = Request(memoryview(data.replace(found, instead)), info, Wanted("index", (1, 2), info.key_frames[0]))
    assert found in data
    (outcome,) = open_decoder().decode([request])
    assert isinstance(outcome, CorruptionError if found == b"avc1" else Decoded)
