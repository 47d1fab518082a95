"""A real daemon, and trainers that are processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from headrace.checkpoint.format.documents import Base
from headrace.dataio.sidecar.client import Sidecar
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]


@dataclass
class Node:
    """`headrace sidecar run`, its trainers, and the place where a process is held."""

    folder: Path
    daemon: subprocess.Popen[bytes] | None = None
    trainers: list[Trainer] = field(default_factory=list)
    flags: tuple[str, ...] = ()

    @property
    def socket(self) -> str:
        return str(self.folder / "sidecar.sock")

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    def start(self, **environment: str) -> None:
        command = [
            sys.executable,
            "-m",
            "headrace.dataio.cli",
            "sidecar",
            "run",
            "--socket",
            self.socket,
            "--http-port",
            "off",
        ]
        command += ["--cache-dir", str(self.folder / "cache"), "--cache-bytes", "1MiB", *self.flags]
        with open(self.folder / "log", "ab") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment(environment), cwd=ROOT)
        wait_for(self.answers)

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, **more, "HEADRACE_CRASH_MARK": str(self.mark)}

    def answers(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, self.log
        found = Sidecar.find(self.socket)
        if found is not None:
            found.close()
        return found is not None

    def trainer(self, url: str, step: int, seed: int, size: int, parent: Base, **environment: str) -> Trainer:
        more = [url, self.socket, str(step), str(seed), str(size), msgspec.json.encode(parent).decode()]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfer_client", *more],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(environment),
            cwd=ROOT,
        )
        self.trainers.append(Trainer(process))
        return self.trainers[-1]

    def held(self) -> int:
        """The process that is held at its point, once one is."""
        text: str = wait_for(lambda: self.mark.exists() and self.mark.read_text())
        return int(text.split()[1])

    def go(self) -> None:
        """Let whoever is held and alive go on."""
        Path(f"{self.mark}.go").touch()

    def kill_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait(150)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def entries(self) -> list[str]:
        """The journal's entries."""
        return sorted(path.name for path in Path(f"{self.socket}.jobs").glob("*.job"))

    def stop(self) -> None:
        self.go()
        for trainer in self.trainers:
            trainer.process.kill()
            trainer.process.wait(150)
            trainer.reader.join(150)
        if self.daemon is not None and self.daemon.poll() is None:
            wait_for(lambda: not self.entries, 30)
            self.kill_daemon()


class Trainer:
    """A process, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.said = process, list[str]()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.said.append(line.strip())

    def ends(self) -> str:
        """The last thing it says."""
        self.process.wait(120)
        self.reader.join(150)
        assert self.process.returncode == 0, self.said
        return self.said[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(150)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:  # short, since a socket's path must be
        made = Node(Path(folder))
        yield made
        made.stop()
