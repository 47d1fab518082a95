"""Data that several benchmarks, the demo and tests share: clips, and tar shards of plain files.

The demo trains on real clips if there are any, otherwise on generated ones. Generated clips are video files in several
containers and codecs. They show moving shapes, so that the model has something to learn.

Invariants: the content of a generated clip depends only on its number. A sample of `tar_shards` has the bytes of its
files.

Failure behaviour: a `--media` folder without files is a `UsageError`. Errors of the file system are raised.
"""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB

REAL_CLIPS = Path(__file__).resolve().parents[3] / "shared" / "media"
_KINDS = (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mkv", "libx264"), ("avi", "mjpeg"))
_FPS = 25


def find_clips(media: Path | None, scratch: Path) -> tuple[list[Path], str]:
    """Return the paths to pack, and a phrase that describes them."""
    if media is not None:
        if not media.is_dir() or not any(media.iterdir()):
            raise UsageError(f"{media} is not a folder with clips", hint="give --media a folder of video files")
        return [media], f"clips of {media}"
    if REAL_CLIPS.is_dir():
        return [REAL_CLIPS], "real clips next to the checkout"
    folder = scratch / "clips"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        make_clip(folder, number)
    return [folder], "12 generated clips (no folder of real ones found)"


def make_clip(folder: Path, number: int, *, seconds: int = 4, width: int = 192, height: int = 128) -> Path:
    """Write one clip of moving shapes. `number` decides the container and the codec."""
    suffix, codec = _KINDS[number % len(_KINDS)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"made_{number:02d}.{suffix}"
    pictures = (_picture(number, index, width, height) for index in range(seconds * _FPS))
    write_video(path, codec, pictures, pixel_format="yuvj420p" if codec == "mjpeg" else "yuv420p")
    return path


def write_video(
    target: Path | IO[bytes],
    codec: str,
    pictures: Iterable[np.ndarray],
    *,
    pixel_format: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    container: str | None = None,
    rate: int = _FPS,
) -> None:
    """Encode pictures, (H, W, 3) uint8, as a video.

    Args:
        target: A path, or a file object together with `container`.
        codec: The name of FFmpeg's encoder.
        pictures: At least one.
        pixel_format: The pixel format to which the pictures are converted.
        options: Options of the encoder.
        container: The name of FFmpeg's muxer. Default: the one for the path's suffix.
        rate: The frames in a second.
    """
    import av

    place = str(target) if isinstance(target, Path) else target
    with av.open(place, "w", format=container) as file:
        stream: Any = None
        for index, picture in enumerate(pictures):
            if stream is None:
                stream = file.add_stream(codec, rate=rate, options=dict(options or {}))
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt, stream.codec_context.time_base = pixel_format, Fraction(1, rate)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = index
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def _picture(number: int, index: int, width: int, height: int) -> np.ndarray:
    """Draw frame `index` of clip `number`, (H, W, 3) uint8: a shaded disc that circles over a turning gradient."""
    rng = np.random.default_rng(number)
    tint, ground = rng.integers(60, 255, 3), rng.integers(0, 160, 3)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    turn = index / _FPS * (1 + number % 3)
    slope = 0.5 + 0.5 * np.cos(x / width * np.cos(turn / 2) * 4 + y / height * np.sin(turn / 2) * 4)
    centre_x, centre_y = width * (0.5 + 0.3 * np.cos(turn)), height * (0.5 + 0.3 * np.sin(turn))
    disc = np.clip(1.5 - np.hypot(x - centre_x, y - centre_y) / (height / 5), 0, 1)[..., None]
    picture = slope[..., None] * ground * (1 - disc) + disc * tint
    return np.ascontiguousarray(picture.astype(np.uint8))


# --- tars


SHARD_BYTES = 64 * MIB


def tar_shards(files: Path, folder: Path) -> str:
    """Put all of `files` into tars of about `SHARD_BYTES` in `folder`/shards, and index them.

    Returns:
        The path of the dataset, `folder`/dataset.
    """
    from headrace.dataio import index

    (folder / "shards").mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(_groups(sorted(files.iterdir()))):
        with tarfile.open(folder / "shards" / f"{number:06d}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            for path in members:
                tar.add(path, path.name)
    index([str(folder / "shards")], str(folder / "dataset"), strict=True).close()
    return str(folder / "dataset")


def _groups(paths: list[Path]) -> list[list[Path]]:
    """Split the files, in order, into one group for each shard. The files of a sample are in one group."""
    groups, size = list[list[Path]](), SHARD_BYTES
    for _, sample in itertools.groupby(paths, lambda path: path.name.partition(".")[0]):
        if size >= SHARD_BYTES:
            groups.append([])
            size = 0
        for path in sample:
            groups[-1].append(path)
            size += path.stat().st_size
    return groups
