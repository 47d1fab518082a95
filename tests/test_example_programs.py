"""The programs in examples/: a killed and resumed run ends as an unbroken one, on loose files of a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.core.data import write_video
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]


def bucket(folder: Path) -> None:
    """MP4 and PNG files with captions, in folders."""
    import av

    for name in ("videos", "images"):
        (folder / name).mkdir(parents=True)
    for number in range(9):
        shades = np.random.default_rng(number).integers(0, 255, (24, 48, 80 if number % 2 else 48, 3), np.uint8)
        write_video(folder / "videos" / f"clip {number}.mp4", "libx264", shades // 4 + 90)
        (folder / "videos" / f"clip {number}.txt").write_text(f"noise, number {number}")
    for number in range(40):
        with av.open(str(folder / "images" / f"{number}.png"), "w", format="image2") as out:
            stream = out.add_stream("png", rate=1)
            stream.width, stream.height, stream.pix_fmt = 72, 64, "rgb24"
            shades = np.random.default_rng(100 + number).integers(0, 255, (64, 72, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(shades, format="rgb24")
            out.mux([*stream.encode(frame), *stream.encode(None)])


def test_a_diffusion_transformer_trains_on_loose_files_and_resumes_exactly(tmp_path: Path) -> None:
    bucket(tmp_path / "raw")

    def start(name: str, steps: int) -> subprocess.Popen[str]:
        places = [str(tmp_path / "raw"), str(tmp_path / f"{name}-dataset"), str(tmp_path / f"{name}-runs")]
        command = [sys.executable, str(ROOT / "examples" / "diffusion_transformer.py"), *places, "--steps", str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HEADRACE_SIDECAR": "", "OMP_NUM_THREADS": "1"}
        log = (tmp_path / f"{name}.log").open("a")
        with log:
            return subprocess.Popen([*command, "--save-every", "3"], stdout=log, stderr=log, text=True, env=environment)

    def lines(name: str) -> list[str]:
        return [line for line in (tmp_path / f"{name}.log").read_text().splitlines() if line.startswith("step ")]

    assert start("unbroken", 24).wait(200) == 0, (tmp_path / "unbroken.log").read_text()
    killed = start("killed", 10_000)
    try:
        wait_for(lambda: len(lines("killed")) >= 5, 200)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait(20)
    before = len(lines("killed"))
    assert 5 <= before < 24
    assert start("killed", 24).wait(200) == 0, (tmp_path / "killed.log").read_text()
    unbroken = dict(line.split(" ", 2)[1:] for line in lines("unbroken"))
    again = [line.split(" ", 2)[1:] for line in lines("killed")]
    assert all(unbroken[step] == rest for step, rest in again)
    assert len(again) > before
    assert {text.split("clips ")[1].split(" keys")[0] for text in unbroken.values()} == {
        "(32, 1, 3, 64, 64)",
        "(4, 8, 3, 64, 64)",
        "(4, 8, 3, 48, 80)",
    }
