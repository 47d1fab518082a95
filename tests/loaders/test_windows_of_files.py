"""Samples that are windows of one long file: the clips are those of the whole file, and few bytes are read."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.dataio import index, open_store
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.windows import window
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions import documents, history
from headrace.dataio.shards.workers import jobs
from headrace.dataio.shards.workers.worker_pool import WorkerPool
from headrace.loaders import Clip, Loader, Rows, Video, VideoLoader
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fetch.partial_file import PartialFile
from tests.support.batches import take
from tests.support.noise_video import noise_video
from tests.support.shared_folder import shared_folder

pytestmark = pytest.mark.slow

GROUPS, GROUP, RATE = 60, 12, 25
BOUNDS = (0, 7, 8, 20, 41, GROUPS)
"""The first key frame of each window, and the end."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "windows", _make)


def _make(folder: Path) -> None:
    """`whole` has one sample of two files; `parts` has a sample for each window of both files."""
    (folder / "whole-shards").mkdir()
    files = {f"rows{n}.npy": rows_of(first, end) for n, (first, end) in enumerate(pairwise(BOUNDS))}
    files |= {
        "mp4": noise_video(GROUPS * GROUP, RATE, "mp4", 1),
        "side.mkv": noise_video(GROUPS * GROUP, RATE, "matroska", 2),
        "rows.npy": rows_of(0, GROUPS),
    }
    with tarfile.open(folder / "whole-shards" / "0.tar", "w") as tar:
        for ext, data in files.items():
            member = tarfile.TarInfo(f"film.{ext}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with index([str(folder / "whole-shards")], str(folder / "whole"), workers=1) as whole:
        (film,) = whole.samples(range(1))
    key = "shards/00000000-parts.tar"
    (folder / "parts" / "shards").mkdir(parents=True)
    (folder / "parts" / key).write_bytes((folder / "whole-shards" / "0.tar").read_bytes())
    parts = [_part(film, key, n, first, end) for n, (first, end) in enumerate(pairwise(BOUNDS))]
    store = open_store(str(folder / "parts"))
    stored = part_writer.store_parts(store, parts, 0)
    shard = documents.Shard(key=key, size=(folder / "parts" / key).stat().st_size, samples=len(parts))
    history.publish(
        store, documents.new_document("parts", (shard,), tuple(stored), version=1, parent=None, message="made")
    )


def rows_of(first: int, end: int) -> bytes:
    """The number of each frame in these groups, counted from the beginning of the film."""
    np.save(target := io.BytesIO(), np.arange(first * GROUP, end * GROUP))
    return target.getvalue()


def _part(film: Sample, shard: str, number: int, first: int, end: int) -> Sample:
    """A window of both videos, with rows of its own. So its first file is its own, which identifies a sample."""
    assert film.video is not None
    videos = tuple(window(one, first, end) for one in film.videos)
    video = window(film.video, first, end)
    shared = (film.member("mp4"), film.member("side.mkv"))
    members = (replace(film.member(f"rows{number}.npy"), ext="rows.npy"), *shared)
    return replace(
        film,
        key=f"part{number}",
        shard=shard,
        members=members,
        video=video,
        videos=videos,
        duration=float(video.duration_pts * video.time_base),
    )


@pytest.fixture
def parts(folder: Path) -> Iterator[Dataset]:
    with Dataset(folder / "parts") as dataset:
        yield dataset


@pytest.fixture(scope="session")
def frames(folder: Path) -> dict[str, torch.Tensor]:
    """All frames of both files."""
    everything = Clip(GROUPS * GROUP, start="center")
    fields = {"v": Video(everything, (16, 16)), "s": Video(like="v", file="side.mkv", size=(16, 16))}
    with Loader(folder / "whole", 1, fields=fields, sidecar=None, num_threads=1, trust_mounts=True) as loader:
        batch = next(iter(loader))
        return {name: batch[name][0].clone() for name in fields}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("clip", [Clip(6, per_video=3), Clip(5, 3), Clip(6, fps=10), Clip(60, fps=50), Clip(1)])
def test_clips_of_windows_are_those_of_the_whole_file(
    folder: Path, frames: dict[str, torch.Tensor], clip: Clip, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:
        monkeypatch.setattr(byte_ranges, "member_of", lambda sample, ext: None)
    fields = {"v": Video(clip, (16, 16)), "s": Video(like="v", file="side.mkv", size=(16, 16))}
    shown = set()
    with Loader(folder / "parts", 1, fields=fields, sidecar=None, num_threads=1, seed=4) as loader:
        for batch in take(loader, 10):
            number = int(batch["key"][0].removeprefix("part"))
            first, end = BOUNDS[number] * GROUP, BOUNDS[number + 1] * GROUP
            start = first + round(float(batch["v.start"][0]) * RATE)
            assert first <= start < end
            step = clip.stride if clip.rate is None else RATE / float(clip.rate)
            chosen = [min(end - 1, start + int(n * step + 1e-9)) for n in range(clip.frames)]
            if clip.rate is None:
                assert torch.equal(batch["v"][0], frames["v"][chosen])
                assert torch.equal(batch["s"][0], frames["s"][chosen])
            else:  # the instants may begin between two frames
                assert torch.equal(batch["v"][0, 0], frames["v"][chosen[0]])
                inside = {bytes(one.numpy()) for one in frames["s"][first:end]}
                assert all(bytes(one.numpy()) in inside for one in batch["s"][0])
            shown.add(number)
    assert len(shown) >= 4


def test_video_loader_delivers_windows_and_reads_what_it_foresaw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed, predicted = list[int](), list[int]()
    fetch_on, prefetch = PartialFile._fetch_on, PartialFile.prefetch
    monkeypatch.setattr(PartialFile, "_fetch_on", lambda self, number: (missed.append(number), fetch_on(self, number)))
    monkeypatch.setattr(PartialFile, "prefetch", lambda self, runs: (predicted.append(len(runs)), prefetch(self, runs)))
    with VideoLoader(folder / "parts", 1, clip=Clip(4), size=(16, 16), sidecar=None, num_threads=1) as loader:
        starts = [float(batch["clip"][0]) for batch in take(loader, 10)]
    assert min(starts) >= 0
    assert len(predicted) >= 10
    assert len(missed) <= 2  # the last window has no next key frame, and its end is read through


def test_windows_of_one_length_are_read_in_part(parts: Dataset) -> None:
    part = parts.sample(1)
    assert part.video is not None
    member = byte_ranges.member_of(part, "mp4")
    assert member is not None
    assert byte_ranges.reads_part_of_video(member, part.video, Clip(16), with_audio=False)
    assert byte_ranges.window_bytes(part.video, member.length) < member.length / 20


def test_all_windows_decode_as_the_index_says(parts: Dataset) -> None:
    with WorkerPool(jobs.COMMAND, jobs.HELLO, 1) as pool:
        for sample in parts.samples(range(len(parts))):
            assert jobs.decode_sample(parts.store, sample, pool) == ()


def test_the_clock_of_rows_is_that_of_the_window(folder: Path) -> None:
    fields: dict[str, Any] = {"v": Video(Clip(4), (16, 16)), "r": Rows("rows.npy", like="v", rate=RATE)}
    for name in ("whole", "parts"):
        with Loader(folder / name, 1, fields=fields, sidecar=None, num_threads=1, trust_mounts=True) as loader:
            for batch in take(loader, 4):
                part = 0 if name == "whole" else int(batch["key"][0].removeprefix("part"))
                first = BOUNDS[part] * GROUP + round(float(batch["v.start"][0]) * RATE)
                assert batch["r"][0].tolist() == list(range(first, first + 4))


def test_samples_with_windows_survive_the_index(parts: Dataset) -> None:
    samples: list[Any] = list(parts.samples(range(len(parts))))
    assert [one.video.frames for one in samples] == [GROUP * (end - first) for first, end in pairwise(BOUNDS)]
    assert [one.video.origin_pts == 0 for one in samples] == [True, False, False, False, False]
    assert all(one.videos[0].ext == "side.mkv" and one.videos[0].frames == one.video.frames for one in samples)
