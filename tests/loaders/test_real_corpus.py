"""Every file, through the loaders, gives what plain PyAV gives; the damaged one is put aside."""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from headrace.dataio import pack
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioLoader, Clip, VideoLoader, Window
from tests.support import reference_decoder, video_corpus
from tests.support.pictures import picture
from tests.support.shared_folder import shared_folder

pytestmark = pytest.mark.slow

MOST = 72
REAL_VIDEO = [
    "action_xvid",
    "arm_wrestling",
    "av1",
    "h265",
    "nasa_h264_aac",
    "pancake_h264",
    "rotated_90",
    "testsrc2_vp9",
    "youtube_clip",
]
REAL_SOUND = [
    "action",
    "action_xvid",
    "nasa_h264_aac",
    "nasa_speech_44100",
    "pancake_h264",
    "sine_mono_s16",
    "youtube_clip",
]


@pytest.fixture(scope="session")
def real(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Every real file, packed."""
    made = shared_folder(tmp_path_factory, "real", lambda folder: pack([media], folder / "ds", workers=1).close())
    with Dataset(made / "ds") as packed:
        yield packed


@pytest.fixture(scope="session")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Every made clip, packed."""
    with Dataset(shared_folder(tmp_path_factory, "made-here", _make_clips) / "ds") as packed:
        yield packed


def _make_clips(folder: Path) -> None:
    (clips := folder / "clips").mkdir()
    for one in video_corpus.ALL:
        (clips / one.name).write_bytes(video_corpus.make(one))
    pack([clips], folder / "ds", workers=1).close()


def one_of(dataset: Dataset, key: str) -> tuple[Dataset, bytes]:
    """A view of this sample alone, and the bytes that its media has."""
    sample = dataset.find(key)
    info = sample.video or sample.audio
    assert info is not None
    return dataset.where(f"key = '{key}'"), dataset.read(sample, info.ext)


def check_video(dataset: Dataset, key: str, most: int = MOST) -> None:
    """Clips end to end by number, and clips by time, against plain decoding."""
    alone, data = one_of(dataset, key)
    images, times = reference_decoder.frames(data, most)
    options: dict[str, Any] = {"shuffle": False, "size": None, "sidecar": None, "num_threads": 2}
    stride = 2 if len(images) >= 6 else 1
    span = 3 * stride
    with VideoLoader(alone, 1, clip=Clip(3, stride, start="every"), **options) as loader:
        seen = 0
        for number, batch in zip(range(len(images) // span), loader, strict=False):
            expected = np.stack(images[span * number : span * (number + 1) : stride]).transpose(0, 3, 1, 2)
            assert torch.equal(batch["video"][0], torch.from_numpy(expected))
            seen += 1
        assert seen == len(images) // span > 0
        assert not loader.quarantine
    if "avi" not in str(alone.sample(0).video):  # where packed B-frames carry their neighbours' stamps
        check_times(alone, images, times, options)


def check_times(alone: Dataset, images: list[np.ndarray], times: list[Any], options: dict[str, Any]) -> None:
    """The frame shown at each instant is the last that has begun."""
    fps = 7 if times[-1] - times[0] > 1 else 40
    with VideoLoader(alone, 1, clip=Clip(3, fps=fps, start="every"), **options) as loader:
        seen = 0
        for number, batch in enumerate(loader):
            instants = [times[0] + Fraction(3 * number + n, fps) for n in range(3)]
            if instants[-1] > times[-1]:
                break
            base = alone.sample(0).video.time_base  # type: ignore[union-attr]
            shown = [max(n for n, time in enumerate(times) if time <= instant + base / 1000) for instant in instants]
            near = [max(n for n, time in enumerate(times) if time <= instant - base) for instant in instants[1:]]
            expected = [images[n].transpose(2, 0, 1) for n in shown]
            for slot, frame in enumerate(batch["video"][0]):
                either = [expected[slot]] + ([images[near[slot - 1]].transpose(2, 0, 1)] if slot else [])
                assert any((frame.numpy() == one).all() for one in either)
            seen += 1
        assert seen


def check_sound(dataset: Dataset, key: str, tolerance: float) -> None:
    """Windows end to end at the file's own rate, against plain decoding."""
    alone, _ = one_of(dataset, key)
    info = alone.sample(0).audio
    assert info is not None
    seconds = min(6.0, info.samples / info.sample_rate)
    whole, rate = reference_decoder.sound(dataset.read(dataset.find(key), info.ext), info.stream, seconds)
    assert (rate, len(whole)) == (info.sample_rate, info.channels)
    channels = min(2, info.channels)
    with AudioLoader(
        alone, 1, window=Window(0.5, start="every"), sample_rate=rate, channels=channels, shuffle=False, sidecar=None
    ) as loader:
        loudest = 0.0
        for number, batch in zip(range(int(seconds / 0.5)), loader, strict=False):
            first = round(number * 0.5 * rate)
            expected = whole[:channels, first : first + batch["audio"].shape[2]]
            assert batch["audio_samples"].item() == expected.shape[1]
            assert np.abs(batch["audio"][0].numpy()[:, : expected.shape[1]] - expected).max() < tolerance
            loudest = max(loudest, float(np.abs(expected).max()))
        assert number >= 1
        assert loudest > 0.001


@pytest.mark.parametrize("key", REAL_VIDEO)
def test_frames_of_every_real_file_are_those_of_plain_decoding(key: str, real: Dataset) -> None:
    check_video(real, key, 12 if key == "youtube_clip" else MOST)


@pytest.mark.parametrize("key", REAL_SOUND)
def test_sound_of_every_real_file_is_that_of_plain_decoding(key: str, real: Dataset) -> None:
    check_sound(real, key, 5e-3)


def test_every_real_file_was_tried_and_the_corrupted_one_is_put_aside(real: Dataset) -> None:
    with_video = {sample.key for sample in real if sample.video}
    assert with_video == {*REAL_VIDEO, "corrupted"}
    assert {sample.key for sample in real if sample.audio} == set(REAL_SOUND)
    sample = real.find("corrupted")
    clip = Clip(16, start="center")
    with VideoLoader(real, len(with_video), clip=clip, size=(32, 32), shuffle=False, sidecar=None) as loader:
        (batch,) = loader
        assert "corrupted" not in batch["key"]
        (refusal,) = loader.quarantine
        member = sample.member("mp4")
        assert (refusal.key, refusal.shard, refusal.offset) == ("corrupted", sample.shard, member.offset)
        assert refusal.code == "corruption"
        assert refusal.dataset == real.url


@pytest.mark.parametrize("one", video_corpus.ALL, ids=lambda one: one.name)
def test_frames_of_every_made_file_are_those_of_plain_decoding(one: video_corpus.Made, made_here: Dataset) -> None:
    sample = made_here.find(one.name.rsplit(".")[0])
    assert sample.video is not None
    assert (sample.video.width, sample.video.height) == (one.width, one.height)  # of two streams, the larger
    assert sample.video.rotation % 180 == one.rotation % 180
    check_video(made_here, sample.key)


@pytest.mark.parametrize("one", [one for one in video_corpus.ALL if one.sound], ids=lambda one: one.name)
def test_sound_of_every_made_file_is_that_of_plain_decoding(one: video_corpus.Made, made_here: Dataset) -> None:
    check_sound(made_here, one.name.rsplit(".")[0], 5e-3)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_pictures_next_to_videos_are_clips_of_one_frame(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"a.{kind}").write_bytes(picture(kind))
    (folder / "b.mp4").write_bytes(video_corpus.make(video_corpus.ALL[0]))
    options: dict[str, Any] = {"shuffle": False, "sidecar": None}
    with pack([folder], tmp_path / "ds", workers=1) as packed:
        with VideoLoader(packed, 2, clip=Clip(1, start="center"), **options) as loader:
            (batch,) = loader
            assert batch["key"] == ["a", "b"]
            assert batch["clip"][0] == 0
            with av.open(io.BytesIO(picture(kind)), "r") as container:
                expected = reference_decoder.bt601(next(container.decode(video=0)))
            if kind == "jpg":
                expected = np.array(Image.open(io.BytesIO(picture(kind))))
            assert torch.equal(batch["video"][0, 0], torch.from_numpy(expected.transpose(2, 0, 1)))
            assert "a picture" in loader.explain(0)
            assert f"decoder: {'libjpeg-turbo' if kind == 'jpg' else 'pyav'}" in loader.explain(0)
        with VideoLoader(packed, 1, clip=Clip(2), **options) as loader:
            assert [batch["key"] for batch in loader] == [["b"]]  # a still is no clip of several frames
        with pytest.raises(UsageError, match="no sample with a video") as caught:
            VideoLoader(packed.where("key = 'a'"), 1, clip=Clip(2), **options)
        assert "Clip(frames=1)" in caught.value.hint
