"""Nodes of a cluster on this machine: a real daemon with a local tier each, and the processes that run on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.dataio.sidecar.client import Sidecar
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]


def free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


@dataclass
class Node:
    """A machine: a daemon with a tier, and what runs beside it."""

    folder: Path
    environment: dict[str, str]
    options: dict[str, object]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def socket(self) -> str:
        return str(self.folder / "sidecar.sock")

    @property
    def tier(self) -> Path:
        return self.folder / "tier"

    def start(self) -> None:
        options = {"socket": self.socket, "http_port": "off", "cache_dir": self.folder / "cache", "cache_bytes": "1MiB"}
        options |= {"tier_dir": self.tier, "tier_bytes": "256MiB", **self.options}
        flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self.run("headrace.dataio.cli", "sidecar", "run", *flags)
        wait_for(self.answers)

    def run(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """A process of this node, in a session of its own."""
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**self.environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE if module != "headrace.dataio.cli" else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def answers(self) -> bool:
        assert self.processes[-1].poll() is None, (self.folder / "log").read_text()
        found = Sidecar.find(self.socket)
        if found is not None:
            found.close()
        return found is not None

    def status(self) -> dict[str, Any]:
        found = Sidecar.find(self.socket)
        assert found is not None, (self.folder / "log").read_text()
        with found:
            tier = found.status()["tier"]
        assert isinstance(tier, dict)
        return tier

    def train(self, mode: str, url: str, steps: int = 0) -> tuple[subprocess.Popen[str], list[dict[str, Any]]]:
        """The trainer, and the lines that it has printed: one for each step, or the only one."""
        process = self.run("tests.support.tier_trainer", mode, url, self.socket, str(steps))
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(max(steps, 1))]
        assert all(lines), (self.folder / "log").read_text()
        return process, [json.loads(line) for line in lines]

    def kill(self) -> int:
        """SIGKILL for all that runs here, workers too; returns how many processes the node had."""
        mine = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and self._owns(path)]
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(150)
            if process.stdout is not None:
                process.stdout.close()
        self.processes.clear()
        return len(mine)

    def _owns(self, process: Path) -> bool:
        try:
            return f"NODE={self.folder}".encode() in (process / "environ").read_bytes()
        except OSError:
            return False


def tls_files(certificates: Path, host: str) -> dict[str, object]:
    """The options by which a daemon shows that it is `host`."""
    paths = {"tls_cert": f"{host}.pem", "tls_key": f"{host}.key", "tls_ca": "ca.pem"}
    return {name: certificates / file for name, file in paths.items()}
