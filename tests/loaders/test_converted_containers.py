"""What lies in containers that loaders do not read goes through them once `pack` has copied it: the original's frames, and
its sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.dataio import Recipe, pack
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioLoader, Clip, VideoLoader, Window
from tests.support import reference_decoder, video_corpus
from tests.support.video_corpus import Made

pytestmark = pytest.mark.slow

WRAP = (1 << 33) / 90_000
"""Seconds after which the times of a transport stream begin again."""
B_FRAMES = {"bf": "2", "g": "12"}
ALL = [
    Made("h264.ts", "libx264", "mpegts", options=B_FRAMES, sound="aac"),
    Made("later.ts", "libx264", "mpegts", options=B_FRAMES, stamps=[99_000 + 4 * n for n in range(40)]),
    Made("open.m2ts", "libx264", "mpegts", options=B_FRAMES | {"x264-params": "open-gop=1"}),
    Made("h265.mts", "libx265", "mpegts", options={"x265-params": "log-level=none:pools=1:keyint=12"}),
    Made("mpeg2.ts", "mpeg2video", "mpegts", options=B_FRAMES, sound="mp2"),
    Made("mpeg2.mpg", "mpeg2video", "mpeg", options=B_FRAMES, sound="mp2"),
    Made("h264.flv", "libx264", "flv", options=B_FRAMES, sound="aac"),
]
NAMES = [one.name for one in ALL]
ROUND = [4 * n + int(WRAP * 25 - 20) * 4 for n in range(40)]


@pytest.fixture(scope="module", params=["mp4", "mkv"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dataset, Path]]:
    folder = tmp_path_factory.mktemp("others")
    wrapping = Made("wrapping.ts", "libx264", "mpegts", options=B_FRAMES, stamps=ROUND)
    for one in [*ALL, wrapping]:
        (folder / one.name.replace(".", "-")).with_suffix(Path(one.name).suffix).write_bytes(video_corpus.make(one))
    with pack([folder], folder / "ds", recipe=Recipe(container=request.param), workers=1) as dataset:
        assert dataset.report is not None
        assert dataset.report.skipped == ()
        yield dataset, folder


def original(folder: Path, name: str) -> tuple[str, bytes]:
    key = name.replace(".", "-")
    return key, (folder / key).with_suffix(Path(name).suffix).read_bytes()


@pytest.mark.parametrize("name", [*NAMES, "wrapping.ts"])
def test_every_frame_is_that_of_the_original(packed: tuple[Dataset, Path], name: str) -> None:
    dataset, folder = packed
    key, data = original(folder, name)
    images, times = reference_decoder.frames(data)
    assert len(images) == 40
    info = dataset.find(key).video
    assert info is not None
    assert (info.frames, len(info.key_frames) >= 4) == (40, True)
    assert 0 <= info.start_pts * info.time_base < 1.5  # wherever the original began
    one = dataset.where(f"key = '{key}'")
    with VideoLoader(one, 1, clip=Clip(4, start="every"), shuffle=False, sidecar=None, num_threads=1) as loader:
        clips = [(batch["video"][0].numpy(), float(batch["clip"][0])) for batch in loader]
        assert not loader.quarantine
    assert len(clips) == 10
    for number, (clip, begins) in enumerate(clips):
        assert np.array_equal(clip, np.stack(images[4 * number : 4 * number + 4]).transpose(0, 3, 1, 2))
        assert abs(begins - clips[0][1] - float(times[4 * number] - times[0])) < 0.003


def test_a_wrapping_time_did_wrap() -> None:
    """Or it was not tried."""
    assert ROUND[0] / 100 < WRAP < ROUND[-1] / 100


@pytest.mark.parametrize("name", [one.name for one in ALL if one.sound])
def test_sound_is_that_of_the_original(packed: tuple[Dataset, Path], name: str) -> None:
    dataset, folder = packed
    key, data = original(folder, name)
    info = dataset.find(key).audio
    assert info is not None
    whole, rate = reference_decoder.sound(data, 1, 1.0)
    one = dataset.where(f"key = '{key}'")
    options = {"sample_rate": rate, "shuffle": False, "sidecar": None, "num_threads": 1}
    with AudioLoader(one, 1, window=Window(0.5, start="every"), **options) as loader:  # type: ignore[arg-type]
        delivered = np.concatenate(
            [batch["audio"][0].numpy() for _, batch in zip(range(2), loader, strict=False)], axis=1
        )
    assert np.abs(delivered - whole[:, : delivered.shape[1]]).max() < 1e-3
