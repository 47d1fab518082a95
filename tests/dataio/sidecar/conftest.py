"""A real daemon in a separate process, and stores to read from."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support import nursery
from tests.support.waiting import wait_for as wait_for

SUPPORT = Path(__file__).parents[2] / "support"


@dataclass
class RunningDaemon:
    """A daemon that can be killed and started again on the same socket."""

    folder: Path
    log: Path
    options: dict[str, object] = field(default_factory=dict)
    fresh: bool = False
    """In an interpreter of its own, which has imported only what a daemon imports; else forked from a prepared process."""
    process: nursery.Process | subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "s" / "sidecar.sock"

    @property
    def configuration(self) -> Path:
        """JSON with the changed settings, which SIGHUP reads."""
        return self.folder / "changes.json"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        config = {
            "socket": str(self.socket),
            "cache_dir": str(self.folder / "cache"),
            "cache_bytes": 64 * MIB,
            "http_port": 0,
            "commands": {"test": [sys.executable, str(SUPPORT / "sidecar_job.py")]},
            "drain_seconds": 30.0,
            "changes": str(self.configuration),
            **self.options,
        }
        if self.fresh:
            program = "import sys; from tests.support import sidecar_daemon; sys.exit(sidecar_daemon.main(sys.argv[1]))"
            command = [sys.executable, "-c", program, json.dumps(config)]
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=SUPPORT.parents[1])
        else:
            self.process = nursery.start_with_log(self.log, "tests.support.sidecar_daemon", json.dumps(config))
        wait_for(self.answers)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        found = Sidecar.find(self.socket)
        if found is not None:
            found.close()
        return found is not None

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(150)

    def status(self) -> dict[str, Any]:
        with self.connect() as sidecar:
            return sidecar.status()

    def connect(self) -> Sidecar:
        found = Sidecar.find(self.socket)
        assert found is not None, self.log.read_text()
        return found

    def descriptors(self, *, but: Path | None = None) -> int:
        """How many are open, not counting files below `but`."""
        found = []
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found.append(path.readlink())
        return sum(1 for name in found if but is None or not name.is_relative_to(but))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon whose jobs are `job.py`. Its folder is short-named, since a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        running = RunningDaemon(Path(folder), tmp_path / "daemon.log")
        running.start()
        yield running
        running.stop()


@pytest.fixture
def fresh_daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """As `daemon`, in a separate interpreter."""
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        running = RunningDaemon(Path(folder), tmp_path / "daemon.log", fresh=True)
        running.start()
        yield running
        running.stop()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Contents of three objects."""
    return {f"shards/{n}.tar": random.Random(n).randbytes(9 * MIB + n * 1000) for n in range(3)}


@pytest.fixture
def store(tmp_path: Path, shards: dict[str, bytes]) -> Store:
    made = open_store(tmp_path / "data")
    for key, data in shards.items():
        made.put(key, data)
    return made
