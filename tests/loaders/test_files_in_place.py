"""Loaders read files where they lie, as joined shards: the same batches as from tars, and only the bytes that clips need."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from headrace.dataio import Dataset, index, open_store, pack
from headrace.dataio.core import limits, metrics
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.testing.fault_proxy import FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from headrace.loaders import Clip, FileLoader, Loader, Video, VideoLoader
from headrace.loaders.clip import choose
from headrace.loaders.fetch import byte_ranges
from tests.support import long_media
from tests.support.written_media import write_clip, write_wav

NAMES = ["arm_wrestling.mp4", "nasa_h264_aac.mp4", "pancake_h264.mkv", "testsrc2_vp9.webm", "youtube_clip.mp4"]
CLIP = Clip(4, 2, start="center")


@pytest.fixture(scope="module")
def folder(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real clips in two folders, with captions."""
    made = tmp_path_factory.mktemp("real")
    for number, name in enumerate(NAMES):
        target = made / "clips" / ("deep" if number % 2 else "") / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(media / name, target)
        target.with_suffix(".txt").write_text(f"caption {number}")
    pack(made / "clips", made / "packed", workers=2).close()
    return made


def batches(dataset: Any, **options: Any) -> list[tuple[list[str], list[str], torch.Tensor]]:
    defaults: dict[str, Any] = {"size": (32, 32), "shuffle": False, "num_threads": 2, "sidecar": None, "evaluate": True}
    with VideoLoader(dataset, 2, clip=CLIP, **(defaults | options)) as loader:
        found = [(batch["key"], batch["text"], batch["video"].clone()) for batch in loader]
        assert not loader.quarantine
    return found


def assert_equal(some: Any, others: Any) -> None:
    assert [one[:2] for one in some] == [other[:2] for other in others]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(some, others, strict=True))


def upload(folder: Path, url: str) -> None:
    with open_store(url) as store:
        for path in folder.rglob("*"):
            if path.is_file():
                store.put(str(path.relative_to(folder)), path.read_bytes())


@pytest.fixture
def socket() -> Iterator[Path]:
    """The socket of a daemon, in a folder of short name."""
    with tempfile.TemporaryDirectory(prefix="mr-") as short:
        path = Path(short) / "s" / "sidecar.sock"
        program = "from headrace.dataio.cli import main; raise SystemExit(main())"
        options = ["sidecar", "run", "--socket", path, "--cache-dir", Path(short) / "c", "--http-port", "off"]
        process = subprocess.Popen([sys.executable, "-c", program, *map(str, options)], stderr=subprocess.DEVNULL)
        try:
            while (sidecar := Sidecar.find(path)) is None:
                assert process.poll() is None
                time.sleep(0.05)
            sidecar.close()
            yield path
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(150)


def test_batches_from_a_folder_are_those_from_tars(folder: Path, tmp_path: Path) -> None:
    expected = batches(folder / "packed")
    with index(folder / "clips", tmp_path / "set", workers=2) as dataset:
        assert_equal(batches(dataset), expected)
        every = dict(epoch(dataset))
        assert every == dict(epoch(Dataset(folder / "packed")))
    assert_equal(batches(tmp_path / "set", trust_mounts=True), expected)


def epoch(dataset: Dataset) -> Iterator[tuple[str, bytes]]:
    """The bytes of each sample's text, by FileLoader."""
    with FileLoader(dataset, 2, files=["txt"], sidecar=None, num_threads=1, drop_last=False) as loader:
        for batch in loader:
            each = torch.split(batch["bytes"], batch["sizes"].flatten().tolist())
            yield from zip(batch["key"], (data.numpy().tobytes() for data in each), strict=True)


def test_a_loader_of_fields_reads_files_in_place(folder: Path, tmp_path: Path) -> None:
    fields = {"video": Video(clip=CLIP, size=(32, 32))}

    def read(url: Any, **options: Any) -> list[torch.Tensor]:
        with Loader(url, 1, fields=fields, shuffle=False, sidecar=None, num_threads=1, **options) as loader:
            return [batch["video"].clone() for batch in loader]

    index(folder / "clips", tmp_path / "set", workers=2).close()
    found = read(tmp_path / "set", trust_mounts=True)
    assert len(found) == len(NAMES)
    assert all(map(torch.equal, found, read(folder / "packed")))


@pytest.mark.s3
def test_batches_from_a_bucket_with_and_without_a_daemon(folder: Path, s3_url: str, socket: Path) -> None:
    upload(folder / "clips", f"{s3_url}/clips")
    index(f"{s3_url}/clips", f"{s3_url}/set", workers=2).close()
    expected = batches(folder / "packed")
    assert_equal(batches(f"{s3_url}/set"), expected)
    own = metrics.store_bytes.labels("s3", "read")
    before = own._value.get()
    assert_equal(batches(f"{s3_url}/set", sidecar=socket), expected)
    assert own._value.get() - before < 200_000  # all but the index was read by the daemon
    assert_equal(batches(f"{s3_url}/set", sidecar=socket), expected)


@pytest.mark.parametrize("change", ["size", "content", "gone"])
def test_an_object_that_changed_is_a_bad_sample_that_is_replaced(tmp_path: Path, change: str) -> None:
    for number in range(6):
        write_wav(tmp_path / "in" / f"{number}.wav", seconds=0.1 + number / 100)
    bad = write_wav(tmp_path / "in" / "bad.wav")
    index(tmp_path / "in", tmp_path / "set", workers=1).close()
    if change == "gone":
        bad.unlink()
    elif change == "size":
        bad.write_bytes(bad.read_bytes()[:50])
    else:
        bad.write_bytes(bytes(bad.stat().st_size))
        os.utime(bad, (1e9, 1e9))
    said = {"size": "it has 50 bytes", "content": "it was modified at 2001", "gone": "it does not exist any more"}
    with FileLoader(
        tmp_path / "set", 7, files=["wav"], sidecar=None, num_threads=1, max_bad_samples=2, trust_mounts=True
    ) as loader:
        batch = next(iter(loader))
        assert len(batch["key"]) == 7
        assert "bad" not in batch["key"]
        (skipped,) = loader.quarantine
    assert skipped.key == "bad"
    assert f"file://{bad} ({said[change]}" in skipped.reason


@pytest.fixture(scope="module")
def long_clips(films: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one MP4 of more than 50 MB, whose index is at the front."""
    target = tmp_path_factory.mktemp("long") / "clips" / "long.mp4"
    target.parent.mkdir()
    with av.open(str(target), "w", options={"movflags": "faststart"}) as output:
        stream: Any = None
        for repetition in range(8):
            with av.open(str(films / "clips" / "front-mp4.mp4")) as source:
                video: Any = source.streams.video[0]
                stream = stream or output.add_stream_from_template(video)
                shift = repetition * round(long_media.FRAMES / 25 / video.time_base)
                packets: Any = source.demux(video)
                for packet in packets:
                    if packet.size:
                        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                        packet.stream = stream
                        output.mux(packet)
    return target.parent


@pytest.mark.s3
@pytest.mark.slow
def test_short_clips_of_a_long_file_read_only_parts(
    long_clips: Path, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(long_clips, f"{s3_url}/clips")
    with FaultProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        index(f"{s3_url}/clips", f"{s3_url}/set", workers=2).close()
        with Dataset(f"{s3_url}/set") as dataset:
            whole, groups, blocks = needed(dataset)
        before = proxy.answered
        assert len(batches(f"{s3_url}/set")) == 1
        read = proxy.answered - before
    assert whole > 50_000_000
    assert groups < 0.01 * whole
    # the cache reads blocks, so these bound what is read: 8.4 MB here
    assert read < blocks + 500_000
    assert read < 0.25 * whole


def needed(dataset: Dataset) -> tuple[int, int, int]:
    """The bytes of the files, of the groups of pictures that the clips need, and of the cache's blocks that hold these."""
    whole = groups = 0
    blocks, size = set[tuple[int, int]](), limits.CACHE_BLOCK_BYTES
    for sample in dataset:
        video = sample.video
        assert video is not None
        member = sample.member(video.ext)
        wanted = choose(video, CLIP, 0, 0, sample.id, 0)
        start, end = byte_ranges.of_clip(video, wanted, member.length)
        next_key = next((key.at for key in video.key_frames if key.index > wanted.values[-1]), member.length)
        whole += member.length
        groups += next_key - start
        for at, length in byte_ranges.ranges(member, byte_ranges.runs(member, [(start, end)])):
            blocks |= {(sample.id, block) for block in range(at // size, (at + length - 1) // size + 1)}
    return whole, groups, size * len(blocks)


def test_two_cameras_of_a_sample_are_read_in_place(tmp_path: Path) -> None:
    for episode in range(3):
        for camera in ("front", "left"):
            write_clip(tmp_path / "in" / f"ep{episode}.{camera}.mp4", frames=12 + episode)
    fields = {
        "front": Video(file="front.mp4", clip=Clip(4, start="center"), size=(16, 16)),
        "left": Video(file="left.mp4", like="front", size=(16, 16)),
    }
    with index(tmp_path / "in", tmp_path / "set", group="dot", workers=1) as dataset:
        sample = dataset.find("ep1")
        assert sample.video is not None
        assert [sample.video.ext, *(video.ext for video in sample.videos)] == ["front.mp4", "left.mp4"]
        with Loader(dataset, 3, fields=fields, shuffle=False, sidecar=None, num_threads=1) as loader:
            batch = next(iter(loader))
            assert batch["key"] == ["ep0", "ep1", "ep2"]
            assert torch.equal(batch["front"], batch["left"])
            assert not loader.quarantine
