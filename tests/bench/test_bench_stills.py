"""`headrace bench loader --kind pictures`: every candidate delivers every picture, and the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.bench.peers import images
from headrace.bench.peers.source import FLOOR, OURS, Source, batches, make
from headrace.bench.workloads.loader import measure

KIND = replace(images.KINDS[0], batch=4)
HERE = [OURS, FLOOR, "Pillow, 2 threads", "DALI on the CPU, 2 threads"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    make(KIND, folder, 6, lambda *_: None)
    return folder


@pytest.mark.parametrize("name", HERE)
def test_every_picture_comes_once(name: str, pictures: Path) -> None:
    assert name in KIND.ours() | KIND.peers()
    assert measure(name, Source(pictures), KIND)["samples_per_s"] > 0
    made = torch.cat(list(batches(name, Source(pictures), KIND)))
    means = sorted(float(one.float().mean()) for one in made)
    theirs = sorted(
        float(images.pillow(path.read_bytes(), KIND).float().mean()) for path in (pictures / "clips").iterdir()
    )
    assert means == pytest.approx(theirs, abs=0.5)


def test_ours_shows_what_pillow_shows(pictures: Path) -> None:
    paths = sorted((pictures / "clips").iterdir())
    (floor,) = (torch.cat(list(batches(FLOOR, Source(pictures), KIND))),)
    for one, path in zip(floor, paths, strict=True):
        difference = (one.int() - images.pillow(path.read_bytes(), KIND)[0].int()).abs()
        assert difference.float().mean() < 1
