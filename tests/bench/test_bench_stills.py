"""`headrace bench loader --kind pictures`: everyone delivers every picture, and the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.bench.peers import candidates, image_peers
from headrace.bench.peers.video_peers import FLOOR, OURS
from headrace.bench.workloads import images, video
from headrace.bench.workloads.loader_worker import measure
from headrace.bench.workloads.source import Place

KIND = replace(images.KINDS["pictures"], batch=4)
HERE = [OURS, FLOOR, "Pillow, 2 threads", "DALI on the CPU, 2 threads"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    video.make(KIND, folder, 6, lambda *_: None)
    return folder


@pytest.mark.parametrize("name", HERE)
def test_every_picture_comes_once(name: str, pictures: Path) -> None:
    assert name in [*candidates.ours(KIND), *candidates.peers(KIND)]
    assert measure(name, Place(pictures), KIND)["samples_per_s"] > 0
    made = torch.cat(list(candidates.batches(name, Place(pictures), KIND)))
    means = sorted(float(one.float().mean()) for one in made)
    theirs = sorted(
        float(image_peers.pillow(path.read_bytes(), KIND).float().mean()) for path in (pictures / "clips").iterdir()
    )
    assert means == pytest.approx(theirs, abs=0.5)


def test_ours_shows_what_pillow_shows(pictures: Path) -> None:
    paths = sorted((pictures / "clips").iterdir())
    (floor,) = (torch.cat(list(candidates.batches(FLOOR, Place(pictures), KIND))),)
    for one, path in zip(floor, paths, strict=True):
        difference = (one.int() - image_peers.pillow(path.read_bytes(), KIND)[0].int()).abs()
        assert difference.float().mean() < 1
