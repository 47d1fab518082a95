"""Two nodes: real daemons on loopback addresses, real trainers, a real S3 server whose requests are counted; one node is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dataio.sidecar.client import Sidecar
from dataio.testing.proxy import Fault, FaultProxy
from dataio.testing.s3server import S3Server, start_seaweedfs
from tests.dataio.sidecar.tier.conftest import make_certificates
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
STEP_BYTES = 1_400_000 * 4


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
        self.run("dataio.cli", "sidecar", "run", *flags)
        wait_for(self.answers)

    def run(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """A process of this node, in a session of its own."""
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**self.environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE if module != "dataio.cli" else log,
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
        process = self.run("tests.checkpoint.tier.trainer", mode, url, self.socket, str(steps))
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


@pytest.fixture
def node(s3_server: S3Server) -> Iterator[Callable[..., Node]]:
    """Makes nodes; whatever still runs on them is killed at the end."""
    made: list[Node] = []

    def make(proxy: FaultProxy | None = None, **options: object) -> Node:
        folder = Path(tempfile.mkdtemp(prefix="mr-"))
        environment = s3_server.environment() | ({"AWS_ENDPOINT_URL": proxy.endpoint} if proxy is not None else {})
        made.append(Node(folder, {**os.environ, **environment, "NODE": str(folder)}, options))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        shutil.rmtree(each.folder, ignore_errors=True)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """In front of the S3 server: it sees every request of every node, and refuses those that it is told to."""
    with FaultProxy(s3_server.endpoint) as made:
        yield made


def refuse(proxy: FaultProxy, method: str, path: str, times: int = 1 << 30) -> None:
    proxy.inject(Fault.REFUSE, times=times, method=method, path=path)


@pytest.mark.soak  # the short version is in test_checkpointer
@pytest.mark.s3
def test_a_trainer_that_starts_again_on_its_node_reads_no_pack_from_the_store(
    node: Callable[..., Node], s3_url: str, proxy: FaultProxy
) -> None:
    here = node(proxy)
    here.start()
    trainer, lines = here.train("save", s3_url, 3)
    assert [(line["step"], line["carrier"]) for line in lines] == [(n, "sidecar") for n in (1, 2, 3)]
    assert all(0 < line["kept"] < 60 for line in lines)
    trainer.kill()
    wait_for(lambda: [s["step"] for s in here.status()["kept"]] == [3, 2])  # tier_steps is 2
    refuse(proxy, "GET", "/packs/", 1)
    _, restored = here.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    assert proxy.fired[Fault.REFUSE] == 0  # nobody asked for a pack
    shutil.rmtree(here.tier)  # a tier that is gone is done without
    _, restored = here.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    assert proxy.fired[Fault.REFUSE] == 1  # and now somebody did


@pytest.mark.soak  # the short version is in test_kept_steps
@pytest.mark.s3
def test_a_trainer_that_starts_again_needs_no_store_at_all(node: Callable[..., Node]) -> None:
    with start_seaweedfs() as server:
        server.create_bucket("millrace")
        here = node()
        here.environment.update(server.environment())
        here.start()
        trainer, _ = here.train("save", "s3://millrace/run", 2)
        trainer.kill()
        wait_for(lambda: all(s["committed"] for s in here.status()["kept"]))
        server.stop()
        _, restored = here.train("restore", "s3://millrace/run")
        assert restored == [{"step": 2, "same": True}]
        assert "the store cannot be reached: restoring step 2" in (here.folder / "log").read_text()


def buddies(node: Callable[..., Node], folder: Path, proxy: FaultProxy) -> tuple[Node, Node, dict[str, object]]:
    """Node A, whose buddy is B; and what a new node needs to have B as its buddy, too."""
    certificates = make_certificates(folder / "tls", "127.0.0.1", "127.0.0.2")

    def files(host: str) -> dict[str, object]:
        paths = {"tls_cert": f"{host}.pem", "tls_key": f"{host}.key", "tls_ca": "ca.pem"}
        return {name: certificates / file for name, file in paths.items()}

    there = f"127.0.0.2:{free_port('127.0.0.2')}"
    b = node(proxy, buddy_listen=there, buddy_names="127.0.0.1", **files("127.0.0.2"))
    b.start()
    a = node(proxy, buddy=there, **files("127.0.0.1"))
    a.start()
    return a, b, {"buddy": there, **files("127.0.0.1")}


@pytest.mark.s3
def test_losing_a_node_loses_nothing_its_buddy_gives_the_newest_step(
    node: Callable[..., Node], s3_url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    a, b, options = buddies(node, tmp_path, proxy)
    a.train("save", s3_url, 3)
    wait_for(lambda: [(c["run"], c["step"]) for c in a.status()["buddy"]["copies"]] == [("exp", 3)])
    wait_for(lambda: a.status()["buddy"]["waiting"] == 0)
    assert a.status()["buddy"]["sent_bytes"] > STEP_BYTES
    assert a.kill() >= 2  # daemon and trainer, at least
    shutil.rmtree(a.tier)
    refuse(proxy, "GET", "/packs/")
    _, restored = b.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    new = node(proxy, **options)
    new.start()
    _, restored = new.train("restore", s3_url)
    assert restored == [{"step": 3, "same": True}]
    assert new.status()["recalled"]["found"] >= 3
    assert new.status()["recalled"]["failed"] == 0
    wait_for(lambda: [s["guest"] for s in new.status()["kept"]] == [True, True])  # the status is drawn up now and then
    assert proxy.fired[Fault.REFUSE] == 0  # not one pack came from the store


@pytest.mark.soak  # the short version is in test_kept_steps
@pytest.mark.s3
def test_a_step_that_never_reached_the_store_is_committed_from_the_buddy(
    node: Callable[..., Node], s3_url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    a, _, options = buddies(node, tmp_path, proxy)
    a.train("save", s3_url, 1)
    wait_for(lambda: a.status()["buddy"]["waiting"] == 0 and a.status()["buddy"]["copies"])
    for process in a.processes[1:]:
        process.kill()
    for method in ("PUT", "POST"):
        refuse(proxy, method, "/packs/")
    _, lines = a.train("again", s3_url, 1)
    assert lines[0]["step"] == 2
    assert "kept in this node's tier" in lines[0]["error"]
    assert proxy.fired[Fault.REFUSE] > 0
    wait_for(lambda: [c["step"] for c in a.status()["buddy"]["copies"]] == [2])
    assert a.kill() >= 2
    shutil.rmtree(a.tier)
    with FaultProxy(proxy_upstream(proxy)) as well:
        new = node(well, **options)
        new.start()
        _, restored = new.train("restore", s3_url)
    assert restored == [{"step": 2, "same": True}]
    assert "step 2 of run exp was committed from the node's tier" in (new.folder / "log").read_text()


def proxy_upstream(proxy: FaultProxy) -> str:
    host, port = proxy._upstream
    return f"http://{host}:{port}"
