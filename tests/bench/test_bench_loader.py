"""`headrace bench loader`: the same clips through every loader, each delivered once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from headrace.bench.core.processes import server
from headrace.bench.peers import video
from headrace.bench.peers.source import OURS, Peer, Source, make
from headrace.bench.workloads.loader import KINDS, kinds, measure
from headrace.dataio import Dataset
from headrace.dataio.cli import main
from tests.support.benchmarks import run_part

ONLY = (OURS, "webdataset + PyAV, 0 workers")


def test_loaders_are_measured_beside_their_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = [argument for name in ONLY for argument in ("--only", name)]
    part = run_part(capsys, "loader", "--clips", "3", "--rounds", "1", "--directory", str(tmp_path), *only)
    assert set(part.candidates) == set(ONLY)
    for name, samples in part.candidates.items():
        assert samples.metrics["samples_per_s"][0] > 0, name
        assert samples.metrics["peak_mib"][0] > 50, name
    assert not list(tmp_path.iterdir()), "the benchmark left something behind"


def test_the_command_knows_every_kind() -> None:
    assert tuple(sorted(kinds())) == tuple(sorted(KINDS))


def test_a_candidate_that_there_is_not_is_named_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loader", "--data", str(tmp_path / "data"), "--only", "webdataset"]) == 2
    assert "no candidate 'webdataset'" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_clips_that_a_killed_run_had_not_finished_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, real = video.Videos(name="tiny", seconds=1, width=64, height=48, gop=12, size=32), video.encode

    def killed(path: Path, kind: video.Videos, number: int) -> None:
        real(path, kind, number)
        if number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(video, "encode", killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans nothing up
        make(tiny, tmp_path / "tiny", 3, lambda *_: None)
    make(tiny, tmp_path / "tiny", 3, lambda *_: None)
    assert len(list((tmp_path / "tiny" / "clips").iterdir())) == 3
    with Dataset(tmp_path / "tiny" / "dataset") as dataset:
        assert len(dataset) == 3
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == ["clips", "dataset"]


def test_a_candidate_that_delivers_too_few_clips_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "00000.mp4").touch()
    too_few = Peer(lambda *_: iter([torch.zeros(0, 16, 3, 112, 112, dtype=torch.uint8)]))
    monkeypatch.setattr(video.Videos, "ours", lambda _: {"lazy": too_few})
    with pytest.raises(AssertionError, match="delivered 0 of 1"):
        measure("lazy", Source(tmp_path), video.KINDS[0])


def test_a_process_closes_its_connections_before_it_forks() -> None:
    program = """
import os, socket
from headrace.bench.peers.source import close_connections_at_fork
listening = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listening.getsockname())
served, _ = listening.accept()
close_connections_at_fork()
others, pipe = socket.socketpair(), os.pipe()
open_before = os.listdir("/proc/self/fd")
child = os.fork()
if not child:
    os._exit(client.recv(1) != b"")
assert os.waitpid(child, 0)[1] == 0, "the child could go on with the parent's connection"
assert client.recv(1) == served.recv(1) == b""
assert os.listdir("/proc/self/fd") == open_before, "a descriptor was left open, so that no pipe ends"
others[0].send(b"x")
assert others[1].recv(1) == b"x"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_that_seems_far_away_answers_so_much_later(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "key").write_bytes(b"bytes")
    with server(tmp_path, delay=0.05) as running:
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/bucket/key", timeout=120) as answer:
            assert answer.read() == b"bytes"
        assert time.monotonic() - began >= 0.1, "a new connection, and an answer"
