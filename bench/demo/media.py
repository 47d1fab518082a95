"""The clips that the demo trains on: real ones if there are any, otherwise generated ones.

Invariant: a generated clip is a pure function of its number. Generated clips are real files in several containers and
codecs. Their shapes move, so that the model can learn.
Failure behaviour: a `--media` folder without files is a `UsageError`.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from headrace.dataio.core.errors import UsageError

REAL_CLIPS = Path(__file__).resolve().parents[3] / "shared" / "media"
_KINDS = (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mkv", "libx264"), ("avi", "mjpeg"))
_FPS = 25


def find_clips(given: Path | None, scratch: Path) -> tuple[list[Path], str]:
    """Return the paths to pack, and a phrase that describes them."""
    if given is not None:
        if not given.is_dir() or not any(given.iterdir()):
            raise UsageError(f"{given} is not a folder with clips", hint="give --media a folder of video files")
        return [given], f"clips of {given}"
    if REAL_CLIPS.is_dir():
        return [REAL_CLIPS], "real clips next to the checkout"
    made = scratch / "clips"
    made.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        make_clip(made, number)
    return [made], "12 made clips (no folder of real ones here)"


def make_clip(folder: Path, number: int, *, seconds: int = 4, width: int = 192, height: int = 128) -> Path:
    """Write one clip of moving shapes. `number` decides the container and the codec."""
    suffix, codec = _KINDS[number % len(_KINDS)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"made_{number:02d}.{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=_FPS)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, _FPS)
        for index in range(seconds * _FPS):
            frame = av.VideoFrame.from_ndarray(_picture(number, index, width, height), format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def _picture(number: int, index: int, width: int, height: int) -> np.ndarray:
    """Frame `index` of clip `number`, (H, W, 3) uint8: a shaded disc circles over a slowly turning gradient."""
    rng = np.random.default_rng(number)
    tint, ground = rng.integers(60, 255, 3), rng.integers(0, 160, 3)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    turn = index / _FPS * (1 + number % 3)
    slope = 0.5 + 0.5 * np.cos(x / width * np.cos(turn / 2) * 4 + y / height * np.sin(turn / 2) * 4)
    centre_x, centre_y = width * (0.5 + 0.3 * np.cos(turn)), height * (0.5 + 0.3 * np.sin(turn))
    disc = np.clip(1.5 - np.hypot(x - centre_x, y - centre_y) / (height / 5), 0, 1)[..., None]
    picture = slope[..., None] * ground * (1 - disc) + disc * tint
    return np.ascontiguousarray(picture.astype(np.uint8))
