"""The loader through a real daemon, also when that daemon is killed in the middle of an epoch."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio.core import metrics
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.sidecar.client import Sidecar
from headrace.loaders import Clip, VideoLoader
from tests.support.waiting import wait_for


@pytest.fixture
def daemon() -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A daemon that answers, and its socket, in a folder of short name, since a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        socket = Path(folder) / "s" / "sidecar.sock"
        options = ["--socket", str(socket), "--cache-dir", str(Path(folder) / "c"), "--http-port", "off"]
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from headrace.dataio.cli import main; raise SystemExit(main())",
                "sidecar",
                "run",
                *options,
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            yield _answering(process, socket), socket
        finally:
            process.kill()
            process.wait(150)


@pytest.fixture
def through_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets of these tests are local, and are read through the daemon, as those of a network file system are."""
    monkeypatch.setattr("headrace.dataio.sidecar.client.may_have_local_files", lambda _: False)


def _answering(process: subprocess.Popen[bytes], socket: Path) -> subprocess.Popen[bytes]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the daemon ended"
        found = Sidecar.find(socket)
        if found is not None:
            found.close()
            return process
        time.sleep(0.02)
    raise AssertionError("the daemon never answered")


@pytest.mark.usefixtures("through_the_daemon")
def test_batches_through_the_daemon_are_the_same_and_go_on_when_it_is_killed(
    dataset: Dataset, daemon: tuple[subprocess.Popen[bytes], Path]
) -> None:
    process, socket = daemon
    with (
        VideoLoader(dataset, 4, clip=Clip(2, per_video=4), size=(16, 16), sidecar=None) as alone,
        VideoLoader(dataset, 4, clip=Clip(2, per_video=4), size=(16, 16), sidecar=socket, prefetch_batches=1) as served,
    ):
        for number, (one, other) in enumerate(zip(alone, served, strict=True)):
            assert one["key"] == other["key"]
            assert torch.equal(one["video"], other["video"])
            if number == 2:
                process.send_signal(signal.SIGKILL)
                assert process.wait(150) == -signal.SIGKILL
        assert number == 7
        assert not served.quarantine


def test_local_files_are_read_directly_and_the_daemon_gets_the_figures(
    films: Path, daemon: tuple[subprocess.Popen[bytes], Path]
) -> None:
    with VideoLoader(films / "ds", 4, clip=Clip(4, 2), size=(16, 16), sidecar=daemon[1]) as loader:
        batches = len(list(loader))
        sidecar = Sidecar.find(daemon[1])
        assert sidecar is not None
        try:
            wait_for(lambda: [job["steps"] for job in _status(sidecar)["training"]] == [batches])
            report = loader._meter.report()
            assert report is not None
            assert report.read > 0
            assert _status(sidecar)["cache"]["fetched_bytes"] == 0
        finally:
            sidecar.close()


def _status(sidecar: Sidecar) -> Any:
    return sidecar.status()


@pytest.mark.usefixtures("through_the_daemon")
def test_clips_of_films_through_the_daemon_are_the_same(
    films: Path, daemon: tuple[subprocess.Popen[bytes], Path]
) -> None:
    def epoch(sidecar: Path | None) -> list[tuple[list[str], torch.Tensor]]:
        clip = Clip(4, 2, per_video=5)
        with VideoLoader(films / "ds", 4, clip=clip, size=(16, 16), num_threads=2, sidecar=sidecar) as loader:
            return [(batch["key"], batch["video"].clone()) for batch in loader]

    own = metrics.store_bytes.labels("posix", "read")
    before = own._value.get()
    served = epoch(daemon[1])
    assert own._value.get() - before < 1_000_000  # all but the index was read by the daemon
    for one, other in zip(served, epoch(None), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
