"""What the loaders' tests share: real clips, variants of them encoded here, and a packed dataset."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.fetch import sample_reader
from tests.support import long_media, reference_decoder, video_corpus
from tests.support.shared_folder import shared_folder

Reencode = Callable[..., bytes]
FAST_VPX = {"deadline": "realtime", "cpu-used": "8"}


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    """So that torch's own threads do not fight the decode threads for two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _refusals_are_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the records of tests out of the user's own list."""
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(tmp_path / "refusals"))


@pytest.fixture(autouse=True)
def _wrong_bytes_are_read_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader waits a quarter of a second before the third read of wrong bytes. Tests of damage need not."""
    monkeypatch.setattr(sample_reader, "LATER", 0.005)


@pytest.fixture(scope="session")
def info_of() -> Callable[[bytes, str], VideoInfo]:
    """What the index would say of these bytes."""

    def info(data: bytes, ext: str) -> VideoInfo:
        video = probe(data, ext=ext).video
        assert video is not None
        return video

    return info


@pytest.fixture(scope="session")
def reencode() -> Reencode:
    """Real frames in another codec and container; `stamps` are their times in units of 1/100 s.

    What lies before zero is cut off by an edit list where the container has them.
    """

    def encode(
        source: Path,
        codec: str,
        container: str,
        *,
        frames: int = 36,
        pixel_format: str = "yuv420p",
        options: dict[str, str] | None = None,
        stamps: Sequence[int] | None = None,
        gop: int = 12,
    ) -> bytes:
        target = io.BytesIO()
        stamps = stamps or [4 * n for n in range(frames)]
        if options is None and codec.startswith("libvpx"):
            options = FAST_VPX
        keep = {"avoid_negative_ts": "disabled"}
        with av.open(source) as input_, av.open(target, "w", format=container, container_options=keep) as output:
            origin = input_.streams.video[0]
            stream: Any = output.add_stream(codec, rate=25, options=options or {})
            stream.width, stream.height, stream.pix_fmt = origin.width // 2 * 2, origin.height // 2 * 2, pixel_format
            stream.time_base = stream.codec_context.time_base = Fraction(1, 100)
            stream.gop_size = gop
            for stamp, frame in zip(stamps, input_.decode(origin), strict=False):
                frame = frame.reformat(width=stream.width, height=stream.height, format=pixel_format)
                frame.pts, frame.time_base = stamp, Fraction(1, 100)
                output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
        return target.getvalue()

    return encode


@pytest.fixture(scope="session")
def reference() -> Callable[..., tuple[list[np.ndarray], list[int]]]:
    """Frames decoded from the beginning by plain PyAV, independent of the code under test: RGB arrays and time stamps."""

    def decode(data: bytes, stream: int, most: int = 10_000) -> tuple[list[np.ndarray], list[int]]:
        images, stamps = [], []
        with av.open(io.BytesIO(data), "r") as container:
            video: Any = container.streams[stream]
            for frame in container.decode(video):
                stamps.append(frame.pts)
                images.append(reference_decoder.bt601(frame))
                if len(images) == most:
                    break
        return images, stamps

    return decode


@pytest.fixture(scope="session")
def small_clips(tmp_path_factory: pytest.TempPathFactory, media: Path, reencode: Reencode) -> Path:
    """A folder of eight clips that decode quickly: real ones, and short variants, so that every decoder has work."""
    return shared_folder(tmp_path_factory, "clips", lambda folder: _write_small_clips(folder, media, reencode))


def _write_small_clips(folder: Path, media: Path, reencode: Reencode) -> None:
    for name in ("pancake_h264.mkv", "h265.mp4", "av1.mkv", "rotated_90.mov"):
        (folder / name).symlink_to(media / name)
    for name, source, codec, container, pixel_format in (
        ("vp8.webm", "arm_wrestling.mp4", "libvpx", "webm", "yuv420p"),
        ("mjpeg.mkv", "pancake_h264.mkv", "mjpeg", "matroska", "yuvj420p"),
        ("h264.mp4", "nasa_h264_aac.mp4", "libx264", "mp4", "yuv420p"),
        ("mpeg4.avi", "nasa_h264_aac.mp4", "mpeg4", "avi", "yuv420p"),
    ):
        (folder / name).write_bytes(reencode(media / source, codec, container, pixel_format=pixel_format))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> Iterator[Dataset]:
    """The eight clips, packed."""

    def make(folder: Path) -> None:
        pack([small_clips], folder / "ds", shard_bytes=1 << 18, workers=1).close()

    with Dataset(shared_folder(tmp_path_factory, "dataset", make) / "ds") as packed:
        yield packed


@pytest.fixture(scope="session")
def made_dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Eight clips that are made here, wide, tall and square, half of them with sound; for checkouts without real ones too."""
    with Dataset(shared_folder(tmp_path_factory, "made-dataset", _make_dataset) / "ds") as packed:
        yield packed


def _make_dataset(folder: Path) -> None:
    (clips := folder / "clips").mkdir()
    sizes = [(64, 48), (48, 64), (64, 64), (80, 48), (48, 80), (64, 36), (36, 64), (48, 48)]
    for number, (width, height) in enumerate(sizes):
        codec, container, sound = (("libx264", "mp4", "aac"), ("mjpeg", "matroska", ""))[number % 2]
        pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        clip = video_corpus.Made(
            "", codec, container, pixel_format, width, height, 30 + number, options={"g": "12"}, sound=sound
        )
        (clips / f"clip{number}.{'mkv' if number % 2 else 'mp4'}").write_bytes(video_corpus.make(clip))
    pack([clips], folder / "ds", shard_bytes=1 << 16, workers=1).close()


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of films, `ds`."""
    return shared_folder(tmp_path_factory, "films", _make_films)


def _make_films(folder: Path) -> None:
    (folder / "clips").mkdir()
    data = long_media.film()
    for name, options in long_media.FILMS.items():
        long_media.copied(data, name, options, folder / "clips")
        (folder / "clips" / name).rename(folder / "clips" / f"{name.replace('.', '-')}.{name.rpartition('.')[2]}")
    pack([folder / "clips"], folder / "ds", workers=1).close()


@pytest.fixture(scope="session")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of long recordings, `ds`."""
    return shared_folder(tmp_path_factory, "sounds", _make_sounds)


def _make_sounds(folder: Path) -> None:
    (folder / "clips").mkdir()
    for name, codec in long_media.SOUNDS.items():
        long_media.recorded(folder / "clips" / f"{codec}-{name}", codec)
    pack([folder / "clips"], folder / "ds", workers=1).close()
