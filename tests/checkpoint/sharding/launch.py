"""Starts jobs of several ranks (gloo, real processes) and gives back the lines of JSON that each rank printed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(world_size: int, module: str, *arguments: str, **environment: str) -> list[list[dict[str, Any]]]:
    """The lines of each rank; asserts that all of them ended well."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **place, "RANK": str(rank), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        with ThreadPoolExecutor(world_size) as pool:  # all at once: a rank whose pipe is full would hold up the others
            outputs = list(pool.map(lambda process: process.communicate(timeout=180), running))
    finally:
        for process in running:
            process.kill()
    failed = [err[-2000:] for process, (_, err) in zip(running, outputs, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
