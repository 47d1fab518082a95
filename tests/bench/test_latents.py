"""`headrace bench latents`: every candidate delivers the same arrays and captions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from headrace.bench.core.data import tar_shards
from headrace.bench.core.results import Part
from headrace.bench.peers import latents as peers
from headrace.bench.workloads import latents
from headrace.bench.workloads.loader import installed
from headrace.dataio import Dataset
from tests.support.benchmarks import run_part

INSTALLED = [name for name, (_, package) in peers.PEERS.items() if package in ("webdataset", "torch")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SHAPES", {peers.LATENT: (4, 8, 8), peers.EMBEDDING: (2, 8)})
    monkeypatch.setattr(latents, "EPOCHS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves tars open
def test_every_candidate_delivers_the_same_samples(tmp_path: Path) -> None:
    peers.make(tmp_path, 70, lambda *_: None)
    if has_litdata := importlib.util.find_spec("litdata") is not None:
        peers.to_litdata(tmp_path)
    names = [*latents.CANDIDATES, *INSTALLED, *(["litdata, 2 workers"] if has_litdata else [])]
    found = [latents.measure(name, str(tmp_path), 70) for name in names]
    assert len({figures["digest"] for figures in found}) == 1
    assert all(figures["samples_per_s"] > 0 for figures in found)


@pytest.mark.usefixtures("small")
def test_a_candidate_that_leaves_samples_out_fails(tmp_path: Path) -> None:
    peers.make(tmp_path, 40, lambda *_: None)
    with pytest.raises(AssertionError, match="delivered 80 of 82 samples"):
        latents.measure(latents.PLAIN, str(tmp_path), 41)


@pytest.mark.slow
def test_the_command_names_peers_that_are_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [latents.OURS, latents.PLAIN_CHECKED_HELD]
    part: Part = run_part(
        capsys, "latents", "--samples", "40", "--rounds", "1", *(text for name in chosen for text in ("--only", name))
    )
    assert list(part.candidates) == chosen
    assert all(found.metrics.keys() == latents.METRICS.keys() for found in part.candidates.values())
    missing = [package for _, package in peers.PEERS.values() if not installed(package)]
    assert part.settings["missing"] == sorted(missing)
    assert all(package in " ".join(part.notes) for package in missing)


def test_the_files_of_a_sample_are_in_one_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.core.data.SHARD_BYTES", 1000)
    (tmp_path / "files").mkdir()
    for number in range(5):
        for ext in ("a", "b"):
            (tmp_path / "files" / f"{number}.{ext}").write_bytes(bytes(999))
    with Dataset(tar_shards(tmp_path / "files", tmp_path), trust_mounts=True) as dataset:
        assert [[member.ext for member in sample.members] for sample in dataset] == [["a", "b"]] * 5
        assert len({sample.shard for sample in dataset}) == 5
