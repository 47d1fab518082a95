"""Long runs: a trainer that is killed over and over still does exactly the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.core.data import make_clip
from headrace.checkpoint import Checkpointer
from headrace.dataio import pack
from headrace.dataio.sidecar.client import Sidecar

STEPS, SAVE_EVERY = 30, 3


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Path]:
    socket = tmp_path / "run" / "sidecar.sock"
    socket.parent.mkdir(mode=0o700)
    command = [sys.executable, "-m", "headrace.dataio.cli", "sidecar", "run", "--socket", str(socket)]
    process = subprocess.Popen([*command, "--cache-dir", str(tmp_path / "cache"), "--http-port", "off"])
    deadline = time.monotonic() + 30
    while (found := Sidecar.find(socket)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found.close()
    yield socket
    process.terminate()
    assert process.wait(timeout=60) == 0


def trainer(data: str, repository: Path, run: str, socket: Path) -> subprocess.Popen[str]:
    arguments = ["--data", data, "--checkpoints", str(repository), "--name", run, "--steps", str(STEPS)]
    arguments += ["--save-every", str(SAVE_EVERY), "--clips-per-video", "5", "--batch-size", "4"]
    environment = {**os.environ, "HEADRACE_SIDECAR": str(socket)}
    command = [sys.executable, "-m", "headrace.bench.demo.trainer", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def steps(events: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {event["step"]: (event["ids"], event["loss"]) for event in events if event["event"] == "step"}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_kills_at_random_moments_change_nothing(tmp_path: Path, sidecar: Path) -> None:
    for number in range(6):
        make_clip(tmp_path / "clips", number, seconds=2)
    data = str(tmp_path / "data")
    pack([str(tmp_path / "clips")], data)
    whole = finish(trainer(data, tmp_path / "ckpt", "whole", sidecar))
    wanted, moment, kills = steps(whole), random.Random(7), 0
    while kills < 20:
        process = trainer(data, tmp_path / "ckpt", "killed", sidecar)
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "step":
                seen += 1
                assert wanted[event["step"]] == (event["ids"], event["loss"])
            if seen and moment.random() < 0.25:
                break
        time.sleep(moment.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:  # it was quicker than the signal: the run is over
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    last = finish(trainer(data, tmp_path / "ckpt", "killed", sidecar))
    for step, did in steps(last).items():
        assert did == wanted[step]
    assert kills >= 5
    assert [e["weights"] for e in last if e["event"] == "end"] == [e["weights"] for e in whole if e["event"] == "end"]
    with Checkpointer(str(tmp_path / "ckpt"), run="killed", sidecar=None) as checkpointer:
        assert checkpointer.steps()[-1] == STEPS
