"""`headrace bench loader --kind films`: what a film is, that all peers take the same clips, and what is counted."""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import av
import pytest

from headrace.bench.core.processes import server
from headrace.bench.peers import video
from headrace.bench.peers.source import FLOOR, OURS, Source, batches, ffmpeg_libraries, make
from headrace.bench.workloads.loader import measure
from headrace.dataio.cli import main

TINY = video.Videos(
    name="tiny", seconds=2, width=64, height=48, gop=12, size=32, parts=3, per_file=2, shard_bytes=1 << 20
)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films") / "tiny"
    make(TINY, folder, 2, lambda *_: None)
    return folder


def test_films_are_clips_without_a_seam_each_in_its_own_order_with_sound_as_long(films: Path) -> None:
    pictures = []
    for path in sorted((films / "clips").iterdir()):
        with av.open(str(path)) as film:
            pictures_stream, sound_stream = film.streams.video[0], film.streams.audio[0]
            frames = list(film.decode(pictures_stream))
            assert [frame.time for frame in frames] == pytest.approx([n / 25 for n in range(150)])
            film.seek(0)
            assert sum(frame.samples for frame in film.decode(sound_stream)) / 48_000 == pytest.approx(6, abs=0.05)
        pictures.append([frame.to_ndarray(format="gray").tobytes() for frame in frames[::50]])
        assert len(set(pictures[-1])) == 3
    assert pictures[0] != pictures[1]
    assert sorted(path.name for path in films.iterdir()) == ["clips", "dataset"]


@pytest.mark.parametrize("name", [OURS, FLOOR])
def test_an_epoch_has_some_clips_of_each_film(films: Path, name: str) -> None:
    assert measure(name, Source(films), TINY)["samples_per_s"] > 0
    assert sum(batch.shape[0] for batch in batches(name, Source(films), TINY)) == 4


def test_seeking_in_a_film_gives_the_same_clips_as_reading_it_whole(
    films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Source(films).files()[0]
    monkeypatch.setattr(random, "uniform", lambda low, high: high / 2)
    whole = video.pyav(Source(films).read(name), TINY)
    with Source(films).opened(name) as film:
        assert video.pyav(film, TINY).equal(whole)
    assert whole.shape == (2, 16, 3, 32, 32)


PEERS = """
import random
import sys
from pathlib import Path

import torch

from headrace.bench.peers import video
from headrace.bench.peers.source import Source, batches
from tests.bench.test_bench_films import TINY

place = Source(Path(sys.argv[1]))
film = place.link(place.files()[0])

def taken(decode, frames):
    left = iter(frames)
    random.uniform, random.randint = lambda *_: next(left) / 25, lambda *_: next(left)
    return decode(film, TINY).float()

shifted = [taken(video.pyav, (61 + by, 112 + by)) for by in (-1, 0, 1)]
for decode in (video.torchcodec, video.spdl):
    found = taken(decode, (61, 112))
    assert found.shape == shifted[1].shape
    apart = [float((found - one).abs().mean()) for one in shifted]
    assert min(apart) == apart[1], (decode, apart)
assert taken(video.spdl, (0.02, 0.0001)).shape == shifted[1].shape, "a start that a float tells with 70 bits"

def fails(source, kind):
    raise ValueError("this film")

video.spdl = fails
try:
    delivered = sum(map(len, batches("SPDL, 2 threads", place, TINY)))
except Exception:
    sys.exit(0)
sys.exit(f"what failed was left out, and {delivered} delivered")
"""


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("spdl", "torchcodec"))), reason="needs SPDL and torchcodec")
def test_peers_take_the_same_frames_and_a_failed_clip_is_not_skipped(films: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(ffmpeg_libraries(tmp_path))}
    done = subprocess.run(
        [sys.executable, "-c", PEERS, str(films)], env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr


FROM_S3 = """
import functools
import sys
from pathlib import Path

from headrace.bench.peers import loaders
from headrace.bench.peers import video
from headrace.bench.peers.source import Source, batches
from tests.bench.test_bench_films import TINY

place = Source(Path(sys.argv[1]), int(sys.argv[2]))
decode = functools.partial(video.pyav, kind=TINY)
for found in (loaders.threads(decode, place, TINY), batches("webdataset + PyAV, 0 workers", place, TINY)):
    print(sum(batch.shape[0] for batch in found))
"""


def test_films_on_a_server_are_read_by_seeking_or_whole(films: Path) -> None:
    with server(films.parent) as running:
        command = [sys.executable, "-c", FROM_S3, str(films), str(running.port)]
        done = subprocess.run(
            command, env={**os.environ, **running.environ}, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["4", "4"]


def test_bytes_that_arrived_of_an_aborted_answer_are_counted(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "key").write_bytes(bytes(1 << 20))
    with server(tmp_path) as running:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", running.port))
            client.sendall(b"GET /bucket/key HTTP/1.1\r\nRange: bytes=1000-\r\n\r\n")
            got = b""
            while len(got) < 1000:
                got += client.recv(1000)
        until = time.monotonic() + 30
        while running.sent() > 100_000:
            assert time.monotonic() < until, f"{running.sent()} bytes are counted as read"
            time.sleep(0.01)
        assert running.sent() > 0


def test_the_clips_of_an_epoch_are_whole_films(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", "--kind", "films", "--clips", "12", "--data", str(tmp_path / "data")]) == 2
    assert "a multiple of 8" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
