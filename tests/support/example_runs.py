"""Starts the programs of examples/ as processes, reads what they print, and writes the media that they train on."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.core.data import write_video
from tests.support import nursery
from tests.support.ranks import meeting

ROOT = Path(__file__).parents[2]
_MODULES = {"torchtitan_finetune.py": "tests.support.example_torchtitan"}
"""Programs whose framework the nursery imports once for all processes."""


def start(log: Path, program: str, *arguments: object, **environment: str) -> nursery.Process:
    """Start a program of examples/, with its output appended to `log`."""
    environment = {"HEADRACE_SIDECAR": "off", "PYTHONWARNINGS": "ignore", **environment}
    module = _MODULES.get(program, "tests.support.example_program")
    return nursery.start_with_log(log, module, program, *map(str, arguments), **environment)


def run(log: Path, program: str, *arguments: object) -> str:
    """Run a program to its end, and return its output."""
    assert start(log, program, *arguments).wait(200) == 0, log.read_text()
    return log.read_text()


@contextmanager
def ranks_of(log: Path, world_size: int, program: str, *arguments: object) -> Iterator[list[nursery.Process]]:
    """Start a program on several ranks, as torchrun does. They are dead after the context."""
    with meeting(world_size) as place:
        ranks = [start(log, program, *arguments, **place, RANK=str(rank)) for rank in range(world_size)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(20)


def run_ranks(log: Path, world_size: int, program: str, *arguments: object) -> str:
    """Run a program on several ranks to its end, and return its output."""
    with ranks_of(log, world_size, program, *arguments) as ranks:
        assert [rank.wait(200) for rank in ranks] == [0] * world_size, log.read_text()
    return log.read_text()


def steps_of(output: str) -> dict[int, str]:
    """The lines of a run by step. A step that was done twice had the same outcome."""
    found = dict[int, str]()
    for line in output.splitlines():
        if match := re.match(r"step (\d+) (.*)", line):
            assert found.setdefault(int(match[1]), match[2]) == match[2], output
    return found


@contextmanager
def killed_at_last(process: nursery.Process) -> Iterator[None]:
    """A context after which the process is dead. It did not end by itself."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        code = process.wait(20)
    assert code == -signal.SIGKILL


def write_media(folder: Path) -> None:
    """Write nine MP4 files of two shapes with captions to `videos`, and forty PNG files to `images`."""
    import av

    for name in ("videos", "images"):
        (folder / name).mkdir(parents=True)
    for number in range(9):
        shades = np.random.default_rng(number).integers(0, 255, (24, 48, 80 if number % 2 else 48, 3), np.uint8)
        write_video(folder / "videos" / f"clip {number}.mp4", "libx264", shades // 4 + 90)
        (folder / "videos" / f"clip {number}.txt").write_text(f"noise, number {number}")
    for number in range(40):
        with av.open(str(folder / "images" / f"{number}.png"), "w", format="image2") as out:
            stream: Any = out.add_stream("png", rate=1)
            stream.width, stream.height, stream.pix_fmt = 72, 64, "rgb24"
            shades = np.random.default_rng(100 + number).integers(0, 255, (64, 72, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(shades, format="rgb24")
            out.mux([*stream.encode(frame), *stream.encode(None)])
