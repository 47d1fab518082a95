"""Trainers and daemons of two releases on one node: while daemons are upgraded one after another, jobs run on.

The earlier release is a commit of this repository, unpacked into a folder. Both sides are real processes.
`tests/golden` also has the messages that earlier versions sent, for clones without history.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import pack
from headrace.checkpoint import read
from tests.dataio.sidecar.conftest import wait_for
from tests.support.written_media import write_wav

ROOT = Path(__file__).parents[2]
EARLIER = "9506253cea150ef8991492a2c7cb72a57348e8b1"
"""The last commit before the daemon told its version. At a release, add its tag."""
TRAINER = ROOT / "tests" / "support" / "upgrade_trainer.py"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the earlier release."""
    parts = ["headrace", "dataio", "loaders", "checkpoint", "bench"]
    packed = subprocess.run(["git", "archive", EARLIER, *parts], cwd=ROOT, capture_output=True)
    if packed.returncode:
        pytest.skip(f"this clone has no commit {EARLIER[:8]}: {packed.stderr.decode()[:200]}")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="tar")
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for number in range(8):
        write_wav(folder / f"{number}.wav", 0.2 + number / 10)
    pack([folder], folder / "set", workers=1).close()
    return folder / "set"


@dataclass
class Node:
    """A node: one socket, one cache, and the processes that a test starts on it."""

    folder: Path
    dataset: Path
    log: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "s" / "sidecar.sock"

    @property
    def repository(self) -> Path:
        return self.folder / "ck"

    def start(self, code: Path, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.fspath(code), "HEADRACE_SIDECAR": ""}
        environment.pop("NOTIFY_SOCKET", None)
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments], env=environment, cwd="/", stderr=log, text=True, **streams
            )
        self.running.append(process)
        return process

    def daemon(self, code: Path) -> subprocess.Popen[str]:
        options = ["--socket", str(self.socket), "--cache-dir", str(self.folder / "cache"), "--cache-bytes", "64MiB"]
        process = self.start(code, "-m", "headrace.dataio.cli", "sidecar", "run", *options)
        wait_for(lambda: self.status(code) is not None or process.poll() is not None)
        assert process.poll() is None, self.log.read_text()
        return process

    def trainer(self, code: Path) -> Trainer:
        arguments = [str(TRAINER), str(self.socket), str(self.dataset), str(self.repository)]
        return Trainer(self.start(code, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE), self)

    def status(self, code: Path = ROOT) -> dict[str, Any] | None:
        """What the daemon says to `headrace sidecar status` of this code; None without a daemon."""
        command = [sys.executable, "-P", "-m", "headrace.dataio.cli", "sidecar", "status", "--json", "--socket"]
        environment = {**os.environ, "PYTHONPATH": os.fspath(code)}
        done = subprocess.run([*command, str(self.socket)], env=environment, cwd="/", capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None


@dataclass
class Trainer:
    process: subprocess.Popen[str]
    node: Node

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.node.log.read_text()[-4000:]
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("end\n")
        self.process.stdin.close()
        assert self.process.wait(120) == 0, self.node.log.read_text()[-4000:]


@pytest.fixture
def node(dataset: Path, tmp_path: Path) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="up-") as folder:
        made = Node(Path(folder), dataset, tmp_path / "log")
        try:
            yield made
        finally:
            for process in made.running:
                with contextlib.suppress(OSError):
                    process.kill()
                process.wait(60)
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()


def weight(node: Node, step: int) -> torch.Tensor:
    with read(node.repository, run="exp", step=step) as saved:
        weight: torch.Tensor = saved["w"].read()
    return weight


@pytest.mark.parametrize("old", ["trainer", "daemon"])
def test_a_trainer_and_a_daemon_of_two_releases_work_together(node: Node, earlier: Path, old: str) -> None:
    codes = {"trainer": ROOT, "daemon": ROOT, old: earlier}
    node.daemon(codes["daemon"])
    trainer = node.trainer(codes["trainer"])
    assert trainer.hear()["restored"] == 0
    first, second = trainer.tell("step"), trainer.tell("step")
    assert [first["committed_by"], second["committed_by"]] == ["sidecar", "sidecar"]
    assert first["audio"] != second["audio"]
    for code in (ROOT, earlier):  # the command line of each release understands the daemon
        status = node.status(code)
        assert status is not None
        assert status["cache"]["fetched_bytes"] > 0
        # reads before the first save may still be listed by their process group
        assert "exp" in [job["job"] for job in status["training"]]
    last = node.status() or {}
    assert ("version" in last) == (old == "trainer")
    trainer.end()
    assert torch.equal(weight(node, 2), torch.full((100_000,), 2.0))


def test_a_job_runs_on_while_its_daemon_is_upgraded_and_rolled_back(node: Node, earlier: Path) -> None:
    daemon = node.daemon(earlier)
    trainer = node.trainer(earlier)
    trainer.hear()
    heard = [trainer.tell("step")]
    for code in (ROOT, earlier):  # an upgrade, and a rollback
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
        heard.append(trainer.tell("step"))  # without a daemon
        daemon = node.daemon(code)
        for _ in range(20):
            heard.append(trainer.tell("step"))
            if heard[-1]["committed_by"] == "sidecar":
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                trainer.process.wait(0.5)  # the trainer looks for a daemon every 3 seconds
        assert heard[-1]["committed_by"] == "sidecar"
        status = node.status()
        assert status is not None
        assert status["pid"] == daemon.pid
    trainer.end()
    assert [one["step"] for one in heard] == list(range(1, len(heard) + 1))
    assert {one["committed_by"] for one in heard} == {"sidecar", "process"}
    assert torch.equal(weight(node, len(heard)), torch.full((100_000,), float(len(heard))))


def _workers(daemon: int) -> list[int]:
    """The upload workers that the daemon has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == daemon and b"commit_worker" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("first", ["earlier", "new"])
def test_a_checkpoint_that_one_release_accepted_is_committed_by_the_other(
    node: Node, earlier: Path, first: str
) -> None:
    accepted, takes_over = (earlier, ROOT) if first == "earlier" else (ROOT, earlier)
    daemon, training = node.daemon(accepted), node.trainer(accepted)
    training.hear()
    for step in range(1, 11):
        assert training.tell("stage")["step"] == step
        daemon.send_signal(signal.SIGSTOP)  # it starts no other worker
        for worker in _workers(daemon.pid):
            os.kill(worker, signal.SIGKILL)
        if len([*node.repository.rglob("COMMIT")]) < step:
            break
        daemon.send_signal(signal.SIGCONT)  # the worker was faster: try again
    else:
        pytest.fail("no worker could be killed before it committed")
    for process in (training.process, daemon):
        process.kill()
        process.wait(60)
    node.daemon(takes_over)
    wait_for(lambda: len([*node.repository.rglob("COMMIT")]) == step)
    assert torch.equal(weight(node, step), torch.full((100_000,), float(step)))
