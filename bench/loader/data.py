"""The clips that every loader reads: short ones, and long ones with few key frames, in tars and in litdata's own form.

Invariants: clips are a pure function of their number; all candidates of a run read the same bytes. Whatever form of them is
there is whole: each is made beside its place, and gets its name at the end.
Failure behaviour: none of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from bench.core import litdata

FPS = 25
DISTINCT = 12
"""So many clips are encoded; a dataset repeats them under other names."""


@dataclass(frozen=True)
class Kind:
    """H.264 clips of `seconds`, a key frame every `gop` frames; what a candidate delivers of them is `size` x `size`."""

    name: str
    seconds: int
    width: int
    height: int
    gop: int
    size: int


KINDS = {kind.name: kind for kind in (Kind("short", 4, 320, 240, 12, 112), Kind("long", 10, 640, 360, 60, 224))}


def make(kind: Kind, folder: Path, count: int, tell: Any) -> None:
    """Write `count` clips to `folder`/clips, unless they are there, and a dataset of them to `folder`/dataset."""
    from dataio import pack

    if not (folder / "clips").is_dir():
        with whole(folder / "clips") as clips:
            clips.mkdir()
            for number in range(count):
                path = clips / f"{number:05}.mp4"
                if number < DISTINCT:
                    tell(f"making {kind.name} clips", number / DISTINCT)
                    encode(path, kind, number)
                else:
                    os.link(clips / f"{number % DISTINCT:05}.mp4", path)
    with whole(folder / "dataset") as dataset:
        pack([str(folder / "clips")], str(dataset), shard_bytes=16 << 20).close()


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Where to make the folder `target`, which is there when the block has ended well; what a killed run left of it goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}.making")
    shutil.rmtree(made, ignore_errors=True)
    try:
        yield made
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def encode(path: Path, kind: Kind, number: int, codec: str = "libx264") -> None:
    """One clip: two patterns that move against each other, and a little noise."""
    import av

    options = {"g": str(kind.gop), "keyint_min": str(kind.gop), "threads": "1"}
    options |= (
        {"sc_threshold": "0", "preset": "veryfast"} if codec == "libx264" else {"deadline": "realtime", "cpu-used": "8"}
    )
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = kind.width, kind.height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, FPS)
        for index in range(kind.seconds * FPS):
            frame = av.VideoFrame.from_ndarray(_picture(kind, number, index), format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _picture(kind: Kind, number: int, index: int) -> np.ndarray:
    rng = np.random.default_rng(number * 1000 + index)
    y, x = np.mgrid[: kind.height, : kind.width].astype(np.float32)
    a, b = index / 7 + number, index / 11 - number
    planes = [np.sin(x / 17 + a) + np.cos(y / 23 - b), np.sin((x + y) / 31 + b), np.cos(x / 41 - y / 13 + a)]
    noise = rng.integers(-9, 10, (kind.height, kind.width, 1))
    return np.clip(127 + 60 * np.stack(planes, axis=-1) + noise, 0, 255).astype(np.uint8)


def to_litdata(folder: Path) -> None:
    """The clips' bytes in litdata's chunks."""
    paths = sorted(str(path) for path in (folder / "clips").iterdir())
    with whole(folder / "litdata") as made:
        litdata.optimize(_read, paths, made, "16MB")


def _read(path: str) -> dict[str, Any]:
    return {"mp4": Path(path).read_bytes()}


@functools.cache
def ffmpeg_libraries(folder: Path) -> Path:
    """A folder where torchcodec and SPDL find the FFmpeg that came with PyAV: the same build for all candidates."""
    import av

    target = folder / "ffmpeg"
    target.mkdir(exist_ok=True)
    for library in (Path(av.__file__).parents[1] / "av.libs").iterdir():
        plain = re.sub(r"-[0-9a-f]{8}(?=\.so)", "", library.name)
        plain = re.sub(r"(\.so\.\d+)[.\d]*$", r"\1", plain)
        for name in (library.name, plain):
            if not (target / name).exists():
                (target / name).symlink_to(library)
    return target
