"""Media bombs: refused when packed and when indexed, and damage when they take the place of what was indexed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from headrace.dataio import index
from headrace.dataio.core.errors import CorruptionError
from tests.attacks import media as bombs
from tests.attacks import peak

pytestmark = pytest.mark.slow

MIB = 350
"""A worker that only imports takes about 150 MiB; one decoded frame of the bombs would take 384 MB more."""


def files(folder: Path) -> dict[str, tuple[str, str]]:
    """Every bomb as a file: name → (code, words)."""
    jpeg, vp9 = bombs.jpeg_bomb(), bombs.vp9_bomb()
    pixels = "67108864 pixels"
    made = {
        "jpeg.mkv": (bombs.in_container("matroska", "mjpeg", [jpeg]), "corruption", pixels),
        "jpeg.avi": (bombs.in_container("avi", "mjpeg", [jpeg] * 2), "corruption", pixels),
        "jpeg_declared.mkv": (
            bombs.declared(bombs.in_container("matroska", "mjpeg", [jpeg], 4096)),
            "unsupported",  # before a decoder is opened
            pixels,
        ),
        "vp9.webm": (bombs.in_container("webm", "libvpx-vp9", [vp9] * 3), "corruption", pixels),
        "vp9_declared.webm": (
            bombs.declared(bombs.in_container("webm", "libvpx-vp9", [vp9] * 3, 4096)),
            "unsupported",
            pixels,
        ),
        "frames.mp4": (bombs.mp4_of_many_frames(4_000_000), "unsupported", "more than 2000000 frames"),
        "frames_of_gigabytes.mp4": (bombs.mp4_of_many_frames(1_000_000_000), "unsupported", "more than 2000000 frames"),
    }
    for name, (data, _, _) in made.items():
        (folder / name).write_bytes(data)
    return {name: (code, words) for name, (_, code, words) in made.items()}


def expect(outcome: peak.Outcome, expected: dict[str, tuple[str, str]]) -> None:
    for path, raised in outcome.raised.items():
        code, words = expected[Path(path).stem if path.endswith(".tar") else Path(path).name]
        assert raised is not None, path
        assert raised[1] == code, (path, raised)
        assert words in raised[2], (path, raised)
        assert Path(path).name in raised[2]
    assert len(outcome.raised) == len(expected)
    assert max(outcome.mib, outcome.children_mib) < MIB


def test_bombs_are_refused_at_pack(tmp_path: Path) -> None:
    expected = files(tmp_path)
    expect(peak.run("tests.attacks.calls:pack_media", [tmp_path / name for name in expected]), expected)


def test_bombs_are_refused_at_index(tmp_path: Path) -> None:
    expected = files(tmp_path)
    for name in expected:
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(tmp_path / name, name)
    expect(peak.run("tests.attacks.calls:index_tar", [tmp_path / f"{name}.tar" for name in expected]), expected)


def test_a_worker_s_memory_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "frames.mp4").write_bytes(bombs.mp4_of_many_frames(40_000_000))  # 1 GB for the demuxer's own table
    outcome = peak.run("tests.attacks.calls:describe_member", [tmp_path / "frames.mp4"])
    ((_, raised),) = outcome.raised.items()
    assert raised is not None
    assert raised[1] == "unsupported"
    assert outcome.mib < 3 * 1024 + 256  # limits.PROBE_MEMORY_BYTES and the program itself


def test_the_bombs_are_bombs(tmp_path: Path) -> None:
    """Without a limit they do what they are said to: else the tests above would prove nothing."""
    import av

    data = bombs.in_container("matroska", "mjpeg", [bombs.jpeg_bomb(8192 + 64, 8192)])
    with av.open(io.BytesIO(data), "r") as container:
        frame = next(container.decode(video=0))
    assert (frame.width, frame.height) == (8192 + 64, 8192)
    assert len(bombs.in_container("webm", "libvpx-vp9", [bombs.vp9_bomb()] * 3)) < 1000


def test_a_bomb_that_takes_the_place_of_an_indexed_clip_is_damage(tmp_path: Path) -> None:
    from tests.support.written_media import write_clip

    bomb = bombs.in_container("matroska", "mjpeg", [bombs.jpeg_bomb(1024, 1024)])
    clip = write_clip(tmp_path / "a.mkv").read_bytes()
    length = max(len(bomb), len(clip))

    def archive(data: bytes) -> bytes:
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as tar:
            info = tarfile.TarInfo("a.mkv")
            info.size = length
            tar.addfile(info, io.BytesIO(data.ljust(length, b"\0")))
        return sink.getvalue()

    (tmp_path / "s.tar").write_bytes(archive(clip + b"\xec" + (1 << 56 | length - len(clip) - 9).to_bytes(8, "big")))
    with index(tmp_path / "s.tar", tmp_path / "set") as dataset:
        (tmp_path / "s.tar").write_bytes(archive(bomb))
        with pytest.raises(CorruptionError, match=r"s\.tar: the checksum"):
            dataset.read(dataset.sample(0), "mkv")
