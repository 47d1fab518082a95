"""A corpus of films made here, of every kind that the encoders on board make, against plain decoding of the whole file.

Each film is cut into clips from its first frame to its last, by number, and looked at by time; pixels and time stamps have to be
those of plain decoding, to the bit. A few films are in the quick part; `pytest -m soak` has all, those of Debian's ffmpeg too.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from headrace.dataio.core.errors import UnsupportedError
from headrace.loaders.clip import Clip, choose
from headrace.loaders.decode import mp4_excerpt
from headrace.loaders.decode.base import Decoded
from tests.support import video_corpus
from tests.support.reference_video import ReferenceVideo

FRAMES = 36
_X265 = "log-level=none:pools=1:scenecut=0"
CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "h264": ("libx264", "yuv420p", {"x264-params": "keyint=12:bframes=0:scenecut=0"}),
    "h264 B-pyramid": (
        "libx264",
        "yuv420p",
        {"x264-params": "keyint=12:bframes=3:b-pyramid=normal:b-adapt=0:scenecut=0"},
    ),
    "h264 open": (
        "libx264",
        "yuv420p",
        {"x264-params": "keyint=9:open-gop=1:bframes=3:b-pyramid=normal:ref=5:scenecut=0"},
    ),
    "h264 intra refresh": ("libx264", "yuv420p", {"x264-params": "keyint=9:intra-refresh=1:bframes=2"}),
    "h264 interlaced": ("libx264", "yuv420p", {"x264-params": "keyint=9:tff=1:bframes=2:scenecut=0"}),
    "h264 slices": ("libx264", "yuv420p", {"x264-params": "keyint=9:slices=3:bframes=2:cabac=0"}),
    "h264 10 bits": ("libx264", "yuv420p10le", {"x264-params": "keyint=12:bframes=2"}),
    "h264 only I": ("libx264", "yuv420p", {"x264-params": "keyint=1"}),
    "hevc": ("libx265", "yuv420p", {"x265-params": f"{_X265}:keyint=12:bframes=3:hash=1"}),
    "hevc open": ("libx265", "yuv420p", {"x265-params": f"{_X265}:keyint=12:min-keyint=12:open-gop=1:bframes=4"}),
    "hevc layers": ("libx265", "yuv420p", {"x265-params": f"{_X265}:keyint=18:temporal-layers=3:bframes=3"}),
    "hevc intra refresh": ("libx265", "yuv420p", {"x265-params": f"{_X265}:keyint=12:intra-refresh=1:bframes=0"}),
    "vp8": ("libvpx", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "g": "12"}),
    "vp8 hidden": ("libvpx", "yuv420p", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "8"}),
    "vp9": ("libvpx-vp9", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "g": "12"}),
    "vp9 hidden": ("libvpx-vp9", "yuv420p", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "5"}),
    "av1": ("libsvtav1", "yuv420p", {"preset": "12", "g": "12", "svtav1-params": "lp=1"}),
    "mpeg4": ("mpeg4", "yuv420p", {"g": "12"}),
    "mpeg4 B": ("mpeg4", "yuv420p", {"g": "12", "bf": "2"}),
    "mjpeg": ("mjpeg", "yuvj420p", {}),
    "ffv1": ("ffv1", "yuv420p", {"g": "6"}),
    "prores": ("prores_ks", "yuv422p10le", {}),
}
CONTAINERS = {
    "mp4": {},
    "mov": {},
    "matroska": {},
    "webm": {},
    "avi": {},
    "fragments": {"movflags": "frag_keyframe+empty_moov"},
}
_VARYING = tuple(np.cumsum([4, 1, 9, 2, 2, 30, 4, 3, 1, 7] * 4).tolist()[:FRAMES])
TIMES = {
    "even": (),
    "varying": _VARYING,
    "late": tuple(250 + 4 * n for n in range(FRAMES)),
    "cut": tuple(4 * n - 30 for n in range(FRAMES)),
}
QUICK = [
    ("h264 B-pyramid", "mp4", "varying", 0),
    ("h264 open", "matroska", "late", 0),
    ("h264 open", "mp4", "cut", 90),
    ("h264 intra refresh", "mp4", "even", 0),
    ("h264 intra refresh", "matroska", "cut", 0),
    ("h264 interlaced", "mp4", "even", 0),
    ("h264", "avi", "even", 0),
    ("hevc open", "mp4", "cut", 0),
    ("hevc layers", "matroska", "even", 0),
    ("vp9 hidden", "webm", "even", 0),
    ("vp8 hidden", "matroska", "late", 0),
    ("mpeg4 B", "avi", "even", 0),
    ("mpeg4 B", "mp4", "even", 0),
    ("ffv1", "matroska", "varying", 0),
]


def all_kinds() -> Iterator[tuple[str, str, str, int]]:
    """Every codec in every container at every kind of times, and turned ones."""
    for codec, container, times in itertools.product(CODECS, CONTAINERS, TIMES):
        if times != "even" and (container == "avi" or codec.startswith("mpeg4")):  # which have none of their own
            continue
        yield codec, container, times, 0
        if times == "even" and container in ("mp4", "mov"):
            yield codec, container, times, 90


def film(codec: str, container: str, times: str, rotation: int) -> ReferenceVideo:
    """A skip where the encoder or the muxer does not make such a file."""
    name, pixels, options = CODECS[codec]
    real, muxed = ("mp4", CONTAINERS[container]) if container == "fragments" else (container, {})
    kind = video_corpus.Made("", name, real, pixels, frames=FRAMES, options=options, rotation=rotation, muxed=muxed)
    try:
        data = video_corpus.make(dataclasses.replace(kind, stamps=TIMES[times]))
    except (ValueError, OSError, LookupError, av.FFmpegError) as error:
        pytest.skip(f"cannot be made here: {error}")
    return ReferenceVideo(data, {"matroska": "mkv"}.get(real, real))


def check(film: ReferenceVideo) -> None:
    """All frames by number, and some by time; frames without stamps may be refused."""
    unstamped = film.times.count(film.times[0]) > 1
    assert film.info.frames == len(film.images)
    for number in range(film.info.frames // 3):
        wanted = choose(film.info, Clip(3, start="every"), 0, 0, 0, number)
        found = film.decode(wanted)
        if unstamped and isinstance(found, UnsupportedError):
            continue
        assert isinstance(found, Decoded), found
        assert (found.frames.numpy() == np.stack([film.images[value] for value in wanted.values])).all(), number
    if not unstamped and film.times == sorted(film.times):
        film.check([Clip(3, fps=11.0), Clip(2, 5)], film.placed())


@pytest.mark.parametrize("kind", QUICK, ids=lambda kind: " ".join(map(str, kind)))
def test_a_film_is_what_plain_decoding_gives(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp4_excerpt, "FEW", 0)
    check(film(*kind))


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(all_kinds()), ids=lambda kind: " ".join(map(str, kind)))
def test_every_film_is_what_plain_decoding_gives(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp4_excerpt, "FEW", 0)
    check(film(*kind))


FFMPEG = {
    "xvid packed.avi": "-c:v libxvid -bf 2 -g 12",
    "xvid.mp4": "-c:v libxvid -bf 2 -g 12",
    "skipped.avi": "-c:v mpeg4 -bf 0 -g 12 -mpv_flags +skip_rd -mbd rd -b:v 20k -skip_threshold 1000000000 -skip_factor 100000",
    "interlaced fields.mp4": "-c:v libx264 -flags +ildct+ilme -x264-params tff=1:keyint=12:open-gop=1:bframes=3",
    "aom.mkv": "-c:v libaom-av1 -cpu-used 8 -g 12 -lag-in-frames 12",
    "svt.mp4": "-c:v libsvtav1 -preset 12 -g 12",
    "no B of mkv.mkv": "-c:v libx264 -bf 0 -g 12 -bsf:v h264_metadata=aud=insert",
    "trimmed.mp4": "-ss 0.3 -c:v libx264 -bf 3 -g 12",
    "drop.mp4": "-vf select='not(eq(mod(n\\,7)\\,3))' -fps_mode vfr -c:v libx264 -g 12",
    "huffyuv.avi": "-c:v ffvhuff",
    "dnxhr.mov": "-c:v dnxhd -profile:v dnxhr_lb -pix_fmt yuv422p -s 256x128",
    "vfw.mkv": "-c:v libxvid -bf 2 -g 12 -allow_raw_vfw 1",
}


@pytest.mark.soak
@pytest.mark.parametrize("name", list(FFMPEG))
def test_films_of_ffmpeg_are_what_plain_decoding_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which("ffmpeg")
    if program is None:
        pytest.skip("no ffmpeg here")
    path = tmp_path / name
    source = ["-f", "lavfi", "-i", "testsrc2=s=64x48:r=25:d=2,noise=alls=8:allf=t"]
    command = [program, "-v", "error", *source, *FFMPEG[name].replace("'", "").split(), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"cannot be made here: {done.stderr[-200:]}")
    monkeypatch.setattr(mp4_excerpt, "FEW", 0)
    check(ReferenceVideo(path.read_bytes(), path.suffix[1:]))
