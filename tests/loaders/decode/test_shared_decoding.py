"""Clips of one video that begin at one key frame are decoded together, to the bits of decoding each by itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.dataio import pack
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders import Clip, VideoLoader
from headrace.loaders.clip import choose
from headrace.loaders.decode import pyav, trim
from headrace.loaders.decode.base import Decoded, Fit, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.processors import video
from tests.support import video_corpus

NAMES = ("h264.mp4", "h264-vfr.mkv", "h265.mp4", "vp9.webm", "mpeg4.avi")
CLIPS = [Clip(4, stride=2), Clip(3, fps=17.0), Clip(90)]
"""By number, by time, and one that is longer than the video, whose last frame is held."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a container was opened to decode a clip."""
    count: Counter[str] = Counter()
    inside = trim.open_window

    def counted(*args: Any, **kwargs: Any) -> Any:
        count["windows"] += 1
        return inside(*args, **kwargs)

    monkeypatch.setattr(pyav, "open_window", counted)
    return count


@pytest.mark.parametrize("one", [one for one in video_corpus.ALL if one.name in NAMES], ids=lambda one: one.name)
def test_clips_decoded_together_equal_clips_decoded_alone(one: video_corpus.Made, opened: Counter[str]) -> None:
    data = memoryview(video_corpus.make(one))
    info = probe(bytes(data), ext=one.name.rsplit(".")[-1]).video
    assert info is not None
    for color, fit in (("bt601", None), ("bt601", Fit((24, 32))), ("fast", Fit((24, 32)))):
        requests = [
            Request(data, info, choose(info, clip, 0, 0, 0, number), color=color, fit=fit)  # type: ignore[arg-type]
            for clip in CLIPS
            for number in range(6)
        ]
        decoder = PyAVDecoder()
        alone = [decoder.decode([request])[0] for request in requests]
        opened.clear()
        together = decoder.decode(requests)
        begins = {(request.wanted.by, request.wanted.key) for request in requests}
        assert opened["windows"] == len(begins) < len(requests)
        for a, b in zip(alone, together, strict=True):
            assert isinstance(a, Decoded)
            assert isinstance(b, Decoded)
            assert a.pts == b.pts
            assert torch.equal(a.frames, b.frames)


def test_damage_further_on_costs_only_the_clips_that_reach_it(opened: Counter[str]) -> None:
    one = video_corpus.Made("long.mkv", "libx264", "matroska", frames=60, options={"g": "60"})
    data = video_corpus.make(one)
    info = probe(data, ext="mkv").video
    assert info is not None
    garbled = bytearray(data)
    garbled[int(len(data) * 0.8) : int(len(data) * 0.8) + 400] = bytes(400)
    requests = [_at(memoryview(garbled), info, first) for first in (0, 4, 56)]
    early, second, late = PyAVDecoder().decode(requests)
    assert isinstance(late, CorruptionError)
    assert opened["windows"] > 1
    whole = PyAVDecoder().decode([_at(memoryview(data), info, first) for first in (0, 4)])
    for found, right in zip((early, second), whole, strict=True):
        assert isinstance(found, Decoded)
        assert isinstance(right, Decoded)
        assert torch.equal(found.frames, right.frames)


def _at(data: memoryview, info: VideoInfo, first: int) -> Request:
    wanted = choose(info, Clip(3), 0, 0, 0, 0)
    return Request(data, info, type(wanted)("index", tuple(range(first, first + 3)), info.key_frames[0]))


@pytest.mark.parametrize("start", ["random", "every"])
def test_a_loader_decodes_what_its_clips_have_in_common_once(
    start: Any, made_dataset: Dataset, opened: Counter[str]
) -> None:
    parts = {} if start == "every" else {"per_video": 5}

    def made_of(alike: bool) -> tuple[list[np.ndarray], int]:
        clip = Clip(4, start=start, **parts)
        opened.clear()
        with VideoLoader(
            made_dataset, 10, clip=clip, size=(24, 32), shuffle=False, drop_last=False, num_threads=1
        ) as loader:
            if not alike:
                loader._delivery = replace(loader._delivery, group_slots=None)
            found = [batch["video"].numpy().copy() for batch in loader]
        return found, opened["windows"]

    (together, fewer), (alone, more) = made_of(True), made_of(False)
    assert fewer < more
    for a, b in zip(together, alone, strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("transformed", [False, True])
def test_light_clips_of_a_batch_are_decoded_in_a_go_up_to_a_bound_unless_more_is_done_with_them(
    transformed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clips").mkdir()
    sides = {"heavy": 256, "light": 160}
    monkeypatch.setattr(video, "LIGHT", 1 << 17)
    assert 2 * 256**2 > video.LIGHT // 2 >= 2 * 160**2 > video.LIGHT // 3
    for name, side in sides.items():
        data = video_corpus.make(
            video_corpus.Made(f"{name}.mkv", "libx264", "matroska", frames=4, width=side, height=side)
        )
        for number in range(3):
            (tmp_path / "clips" / f"{name}{number}.mkv").write_bytes(data)
    pack([tmp_path / "clips"], tmp_path / "ds", workers=1).close()
    done = list[list[int]]()
    do = video.ClipProcessor.process

    def watched(self: video.ClipProcessor, loaded: Any) -> Any:
        done.append([one.ref.sample.video.width for one in loaded])
        return do(self, loaded)

    monkeypatch.setattr(video.ClipProcessor, "process", watched)
    how: dict[str, Any] = {"transform": lambda tensors, _: tensors} if transformed else {}
    with VideoLoader(
        tmp_path / "ds", 6, clip=Clip(2), size=(24, 24), evaluate=True, num_threads=1, prefetch_batches=1, **how
    ) as loader:
        (batch,) = loader
    assert batch["video"].shape == (6, 2, 3, 24, 24)
    light = [[160]] * 3 if transformed else [[160], [160, 160]]
    assert sorted(done) == [*light, [256], [256], [256]]
