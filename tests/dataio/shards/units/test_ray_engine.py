"""The units of pack, index, verify and statistics on a real Ray cluster of this machine, which loses an actor in each run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.dataio import Dataset, index, pack, verify
from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.shards.ingest import file_units, index_units
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.statistics import summary
from headrace.dataio.shards.units.engine import check_shareable
from headrace.dataio.store.open import open_store
from tests.support.lazy_modules import lazily
from tests.support.written_media import write_wav

lazily("ray", needs="ray")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Media, datasets of them made by one process, and tars of more than two units."""
    root = tmp_path_factory.mktemp("ray")
    for i in range(12):
        write_wav(root / "in" / f"{i:02}.wav", seconds=0.05 * (i + 1))
    (root / "in" / "bad.wav").write_bytes(b"no")
    with pack(root / "in", root / "local" / "packed", shard_bytes=8192, workers=1) as packed:
        shutil.copytree(root / "local" / "packed" / "shards", root / "tars")
        assert len(packed.document.shards) > 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writer, "PART_ROWS", 2)
        pack(root / "in", root / "parts", workers=1).close()
    for copy in range(20):  # more than two units of the index
        shutil.copy(next((root / "tars").iterdir()), root / "tars" / f"copy-{copy:02}.tar")
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.ray_units", *(folder / name for name in ("in", "tars", "parts", "ray"))],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        | {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_each_run_lost_an_actor(results: dict[str, Any]) -> None:
    assert set(results["killed"].values()) == {1}


def test_packing_on_ray_makes_the_dataset_that_one_process_makes(folder: Path, results: dict[str, Any]) -> None:
    assert sum(groups for groups, _, _ in results["workers"]) == 13
    assert all(size > 0 and seconds > 0 for _, size, seconds in results["workers"])
    assert results["skipped"] == 1
    with Dataset(folder / "local" / "packed") as local, Dataset(folder / "ray" / "packed") as by_ray:
        assert by_ray.document.shards == local.document.shards
        assert by_ray.document.index == local.document.index
        assert not list(by_ray.store.list("packing/"))


def test_indexing_on_ray_makes_the_dataset_that_one_process_makes(folder: Path, results: dict[str, Any]) -> None:
    with (
        index(folder / "tars", folder / "local" / "indexed", keys="shard", workers=1) as local,
        Dataset(folder / "ray" / "indexed", trust_mounts=True) as by_ray,
    ):
        assert len(local.document.shards) > index_units.UNIT_SHARDS
        assert by_ray.document.shards == local.document.shards
        assert by_ray.document.index == local.document.index
        assert by_ray.document.mounts == local.document.mounts
        assert not list(by_ray.store.list("packing/"))


def test_indexing_files_on_ray_makes_the_dataset_that_one_process_makes(
    folder: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_units, "UNIT_OBJECTS", 4)
    with (
        index(folder / "in", folder / "local" / "files", workers=1) as local,
        Dataset(folder / "ray" / "files", trust_mounts=True) as by_ray,
    ):
        assert len(local.document.shards) == 4
        assert by_ray.document.shards == local.document.shards
        assert by_ray.document.index == local.document.index
        assert by_ray.document.mounts == local.document.mounts
        assert [by_ray.read(s, "wav") for s in by_ray] == [local.read(s, "wav") for s in local]


def test_verifying_on_ray_gives_the_report_that_one_process_gives(folder: Path, results: dict[str, Any]) -> None:
    here = json.loads(msgspec.json.encode(verify(folder / "ray" / "packed", decode="50%", workers=2)))
    there = results["verify"]
    for report in (here, there):
        del report["seconds"]
    assert there == here
    assert 0 < sum(found["decoded"] for found in here["objects"]) < 12
    # a killed actor may leave a hidden file, which the store does not list
    with open_store(folder / "ray" / "journal") as journal:
        assert not list(journal.list(""))


def test_the_statistics_on_ray_are_those_of_one_process(folder: Path, results: dict[str, Any]) -> None:
    with Dataset(folder / "parts") as dataset:
        assert len(dataset.document.index) == 6
        assert results["info"] == summary(dataset.where("duration > 0.2"), workers=2)
        assert results["info"]["samples"] == 8


def test_verifying_on_ray_needs_a_journal_that_all_machines_can_write(folder: Path) -> None:
    with pytest.raises(UsageError, match="needs a journal"):
        verify(folder / "local" / "packed", engine="ray", workers=1)


@pytest.mark.parametrize("workers", [0, -1, 1 << 20])
def test_a_wrong_number_of_workers_is_an_error(tmp_path: Path, workers: int) -> None:
    for make in (pack, index):
        with pytest.raises(UsageError, match=f"workers={workers}"):
            make(tmp_path, tmp_path / "ds", engine="ray", workers=workers)
    with pytest.raises(UsageError, match=f"workers={workers}"):
        verify(tmp_path, engine="ray", workers=workers)


def test_an_engine_that_does_not_exist_is_named(tmp_path: Path) -> None:
    for make in (pack, index):
        with pytest.raises(UsageError, match="no engine 'slurm'"):
            make(tmp_path, tmp_path / "ds", engine="slurm")
    with pytest.raises(UsageError, match="no engine 'slurm'"):
        verify(tmp_path, engine="slurm")


def test_a_store_with_secrets_is_refused() -> None:
    options = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:1"}
    with (
        open_store("s3://bucket/x", storage_options=options) as store,
        pytest.raises(UnsupportedError, match="secrets"),
    ):
        check_shareable(store.location)
