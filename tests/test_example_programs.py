"""The programs in examples/ do what they show: runs that are killed continue exactly, answers come from one version."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.bench.core.data import write_video
from headrace.checkpoint import Subscriber
from tests.support import nursery
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]
PARAMETERS = ["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias"]


def start(log: Path, program: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program of examples/, with its output appended to `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HEADRACE_SIDECAR": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / program), *map(str, arguments)]
    with log.open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)


def run(log: Path, program: str, *arguments: object) -> str:
    """Run a program to its end, and return its output."""
    assert start(log, program, *arguments).wait(200) == 0, log.read_text()
    return log.read_text()


@contextmanager
def killed_at_last(process: Any) -> Iterator[None]:
    """A context after which the process is dead."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)


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

    def arguments(name: str, steps: int) -> Any:
        places = [tmp_path / "raw", tmp_path / f"{name}-dataset", tmp_path / f"{name}-runs"]
        return [tmp_path / f"{name}.log", "diffusion_transformer.py", *places, "--steps", steps, "--save-every", 3]

    def lines(name: str) -> list[str]:
        return [line for line in (tmp_path / f"{name}.log").read_text().splitlines() if line.startswith("step ")]

    run(*arguments("unbroken", 24))
    with killed_at_last(start(*arguments("killed", 10_000))):
        wait_for(lambda: len(lines("killed")) >= 5, 200)
    before = len(lines("killed"))
    assert 5 <= before < 24
    run(*arguments("killed", 24))
    unbroken = dict(line.split(" ", 2)[1:] for line in lines("unbroken"))
    again = [line.split(" ", 2)[1:] for line in lines("killed")]
    assert all(unbroken[step] == rest for step, rest in again)
    assert len(again) > before
    assert {text.split("clips ")[1].split(" keys")[0] for text in unbroken.values()} == {
        "(32, 1, 3, 64, 64)",
        "(4, 8, 3, 64, 64)",
        "(4, 8, 3, 48, 80)",
    }


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_each_answer_of_the_server_comes_from_one_version_also_while_publishers_die(tmp_path: Path) -> None:
    log, repository = tmp_path / "log", tmp_path / "runs"

    def publisher(versions: int) -> nursery.Process:
        return nursery.start_with_log(log, "tests.support.policy_publisher", str(repository), str(versions))

    assert publisher(1).wait(120) == 0, log.read_text()
    server = start(log, "serve_published.py", repository, "--port", 0)
    with killed_at_last(server), ThreadPoolExecutor(2) as pool:
        port = wait_for(lambda: re.search(r"serving on port (\d+)", log.read_text()), 120)[1]
        url, stop, answers = f"http://127.0.0.1:{port}", False, list[dict[str, Any]]()

        def ask_on() -> None:
            while not stop:
                answers.append(ask(f"{url}/act?observation={len(answers)}"))

        asking = [pool.submit(ask_on) for _ in range(2)]
        try:
            with killed_at_last(publisher(1000)):
                wait_for(lambda: ask(f"{url}/version")["number"] >= 10)
            assert publisher(10).wait(120) == 0, log.read_text()
            with Subscriber(repository, "policy") as subscriber:
                last = subscriber.wait(10)
            assert last.number >= 20
            wait_for(lambda: ask(f"{url}/version")["number"] == last.number)
        finally:
            stop = True
        for each in asking:
            each.result(60)
    seen = {(answer["number"], answer["weights"]) for answer in answers}
    assert len({number for number, _ in seen}) == len(seen) >= 5
    with Subscriber(repository, "policy") as subscriber:
        for number, weights in sorted(seen):
            version = subscriber.at(number, 10)
            version.apply(tensors := version.empty_tensors())
            stored = [tensors[name].view(torch.uint8).numpy().tobytes() for name in PARAMETERS]
            assert hashlib.sha256(b"".join(stored)).hexdigest()[:16] == weights


def test_players_follow_the_policy_and_its_rollback(tmp_path: Path) -> None:
    output = run(tmp_path / "log", "rl_publish.py", tmp_path / "runs", "--updates", 8)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", output)]
    assert len(rewards) == 8
    back = re.search(r"rollback to step 16: version 7", output)
    assert back, output
    assert rewards[5] < 0.3 < 0.6 < min(rewards[4], *rewards[6:])
    assert re.search(r"player 1 has version 7, step 16", output)
    assert re.search(r"player 2 has version 7, step 16", output)
