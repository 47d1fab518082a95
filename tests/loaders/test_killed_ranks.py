"""Four gloo ranks, killed in the middle of steps and started again, also as two and three, train on what one process would."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataio import pack
from headrace.dataio.shards.dataset import Dataset
from tests.support import killed_ranks, nursery
from tests.support.pictures import picture
from tests.support.shared_folder import shared_folder
from tests.support.video_corpus import Made, make


def check(made_dataset: Dataset, folder: Path, worlds: list[int], seed: int, kind: str = "plain") -> None:
    """One run for each of `worlds`, all but the last one killed a few steps after it began."""
    draw = random.Random(seed)
    runs: list[tuple[int, int | None]] = []
    at = 0
    for world_size in worlds[:-1]:
        at += killed_ranks.FURTHER + draw.randint(1, 3)  # so that each run has a step to make
        runs.append((world_size, at))
    steps = at + killed_ranks.FURTHER + 1
    job = killed_ranks.Job(made_dataset.url, str(folder), steps, [*runs, (worlds[-1], None)], seed, kind)
    child = nursery.start("tests.support.killed_ranks", job.text())
    stdout, stderr = child.communicate(600)
    assert child.returncode == 0, stderr
    ends: list[dict[str, Any]] = json.loads(stdout)
    for end, (world_size, kill_at) in zip(ends, runs, strict=False):
        assert end["ends"] == [-9] * world_size, stderr  # every rank was killed, none ended by itself
        assert kill_at is not None
        assert kill_at <= end["lines"] <= kill_at + killed_ranks.FURTHER < steps
    assert ends[-1] == {"world_size": worlds[-1], "ends": [0] * worlds[-1], "lines": steps}
    found = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert found == uninterrupted(made_dataset.url, steps, kind)


def uninterrupted(url: str, steps: int, kind: str) -> list[Any]:
    """What one process delivers if it is not killed."""
    rows: list[Any] = []
    with killed_ranks.make_loader(url, 0, 1, kind) as loader:
        while len(rows) < steps:
            for batch in loader:
                rows.append(killed_ranks.row(batch))
                if len(rows) == steps:
                    break
    return rows


def test_ranks_killed_three_times_go_on_exactly_as_two_and_as_three(made_dataset: Dataset, tmp_path: Path) -> None:
    check(made_dataset, tmp_path, [4, 2, 3, 4], seed=1)


@pytest.fixture(scope="session")
def images_and_videos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Six images and eight videos, each with a latent. Most videos have a second camera and states."""
    folder = shared_folder(tmp_path_factory, "images-videos-latents", _make_images_and_videos)
    with Dataset(folder / "ds") as packed:
        yield packed


def _make_images_and_videos(folder: Path) -> None:
    with tarfile.open(folder / "in.tar", "w") as tar:
        for number in range(14):
            files = {"latent.npy": array(np.full((2, 3), number, np.float32))}
            if number < 6:
                files["png"] = picture("png", 40 + 8 * (number % 6), 48)
            else:
                files["mp4"] = make(Made("h264.mp4", "libx264", "mp4", frames=20 + number))
                files["state.npy"] = array(np.arange(40) + 100 * number)
            if number not in (9, *range(6)):
                files["cam1.mp4"] = make(Made("h264.mp4", "libx264", "mp4", width=80, frames=22 + number))
            for ext, data in files.items():
                member = tarfile.TarInfo(f"{number:02}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    pack([folder / "in.tar"], folder / "ds", workers=1).close()


def array(values: Any) -> bytes:
    np.save(target := io.BytesIO(), values)
    return target.getvalue()


def test_images_videos_cameras_rows_and_latents_go_on_exactly_on_other_ranks(
    images_and_videos: Dataset, tmp_path: Path
) -> None:
    check(images_and_videos, tmp_path, [4, 2, 3], seed=4, kind="fields")
    rows = [row for line in (tmp_path / "log").read_text().splitlines() for row in json.loads(line)]
    assert {row[0] < 6 for row in rows} == {True, False}  # images and videos
    assert len({row[-1] for row in rows}) == len(rows)  # all noise is different
    assert {row[0] < 6 or row[0] == 9 for row in rows if not row[-3]} == {True}  # no second camera
    assert len({row[-3] for row in rows}) > 10


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_ranks_killed_twenty_times_go_on_exactly(kind: str, made_dataset: Dataset, tmp_path: Path) -> None:
    check(made_dataset, tmp_path, [4] * 10 + [2, 2, 3, 3, 4, 2, 3, 4, 2, 3, 1], seed=2, kind=kind)
