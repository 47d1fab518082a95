"""Files whose frames expand to gigabytes: damage, within bounded memory, also when the index says nothing of it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from dataio.shards.contract import KeyFrame, VideoInfo
from loaders.decode.contract import Request
from loaders.decode.pyav import PyAVDecoder
from tests.attacks import media as bombs
from tests.attacks import peak

INNOCENT = "tests.loaders.decode.test_bombs:decode_nothing"
DECODE = "tests.loaders.decode.test_bombs:decode"


def decode_nothing(_path: str) -> None:
    """What the imports alone take."""


def decode(path: str) -> None:
    """Decode the first frame, by an index that takes the file for a small clip."""
    from loaders.clip import Wanted

    codec = "mjpeg" if path.endswith("mkv") else "vp9"
    key = KeyFrame(0, 0)
    info = VideoInfo(
        ext=path[-4:].lstrip("."), stream=0, codec=codec, width=64, height=64, fps=Fraction(25), frames=1,
        time_base=Fraction(1, 1000), start_pts=0, duration_pts=40, pixel_format="yuv420p", rotation=0, key_frames=(key,),
    )  # fmt: skip
    result = PyAVDecoder().decode([Request(memoryview(Path(path).read_bytes()), info, Wanted("index", (0,), key))])[0]
    if isinstance(result, Exception):
        raise result


@pytest.mark.parametrize("name", ["bomb.mkv", "bomb.webm"])
def test_a_frame_of_16000_pixels_a_side_is_refused_before_it_is_made(tmp_path: Path, name: str) -> None:
    if name.endswith("mkv"):
        data = bombs.in_container("matroska", "mjpeg", [bombs.jpeg_bomb()])
    else:
        data = bombs.in_container("webm", "libvpx-vp9", [bombs.vp9_bomb()])
    (tmp_path / name).write_bytes(data)
    before = peak.run(INNOCENT, [tmp_path / name])
    outcome = peak.run(DECODE, [tmp_path / name])
    ((_, raised),) = outcome.raised.items()
    assert raised is not None
    assert raised[1] == "corruption"
    assert outcome.mib < before.mib + 100, "one decoded frame takes 384 MiB and more"
