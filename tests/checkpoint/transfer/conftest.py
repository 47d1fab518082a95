"""A real daemon, and trainers that are processes of their own."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import msgspec
import pytest

from headrace.checkpoint.format.documents import Base
from headrace.dataio.sidecar.client import Sidecar
from tests.support import nursery
from tests.support.waiting import wait_for


@dataclass
class Node:
    """`headrace sidecar run`, its trainers, and the place where a process is held."""

    folder: Path
    daemon: nursery.Process | None = None
    trainers: list[Trainer] = field(default_factory=list)
    flags: tuple[str, ...] = ()

    @property
    def socket(self) -> str:
        return str(self.folder / "sidecar.sock")

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    def start(self, **environment: str) -> None:
        options = ["--socket", self.socket, "--http-port", "off", "--cache-dir", str(self.folder / "cache")]
        options += ["--cache-bytes", "1MiB", *self.flags]
        more = self.environment(environment)
        self.daemon = nursery.start_with_log(self.folder / "log", "tests.support.daemon_command", *options, **more)
        wait_for(self.answers)

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**more, "HEADRACE_CRASH_MARK": str(self.mark)}

    def answers(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, self.log
        found = Sidecar.find(self.socket)
        if found is not None:
            found.close()
        return found is not None

    def trainer(self, url: str, step: int, seed: int, size: int, parent: Base, **environment: str) -> Trainer:
        more = [url, self.socket, str(step), str(seed), str(size), msgspec.json.encode(parent).decode()]
        process = nursery.start("tests.support.transfer_client", *more, **self.environment(environment))
        self.trainers.append(Trainer(process))
        return self.trainers[-1]

    def held(self) -> int:
        """The process that is held at its point, once one is."""
        text: str = wait_for(lambda: self.mark.exists() and self.mark.read_text())
        return int(text.split()[1])

    def go(self) -> None:
        """Release the processes that are alive and held at a crash point."""
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
            trainer.join()
        if self.daemon is not None and self.daemon.poll() is None:
            wait_for(lambda: not self.entries, 30)
            self.kill_daemon()


class Trainer:
    """A process, and its output so far."""

    def __init__(self, process: nursery.Child) -> None:
        self.process, self.said, self.errors = process, list[str](), list[str]()
        self.readers = [
            threading.Thread(target=_read, args=pair, daemon=True)
            for pair in ((process.stdout, self.said), (process.stderr, self.errors))
        ]
        for reader in self.readers:
            reader.start()

    def ends(self) -> str:
        """The last thing it says."""
        self.process.wait(120)
        self.join()
        assert self.process.returncode == 0, (self.said, self.errors)
        return self.said[-1]

    def join(self) -> None:
        for reader in self.readers:
            reader.join(150)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(150)


def _read(pipe: TextIO, lines: list[str]) -> None:
    with pipe:
        lines.extend(line.strip() for line in pipe)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:  # short, since a socket's path must be
        made = Node(Path(folder))
        yield made
        made.stop()
