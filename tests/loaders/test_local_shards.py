"""Loaders whose shards are files of this machine: they are read without a cache, and may change under the loader."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from headrace.dataio.cache import blocks
from headrace.dataio.cache.readers.local import DirectReader
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Clip, VideoLoader


@pytest.fixture
def copy(tmp_path: Path, made_dataset: Dataset) -> Path:
    return Path(shutil.copytree(made_dataset.url.removeprefix("file://"), tmp_path / "copy"))


def loader_of(folder: Path) -> VideoLoader:
    return VideoLoader(
        folder, 2, clip=Clip(4), size=(32, 32), sidecar=None, num_threads=2, max_bad_samples=8, prefetch_batches=1
    )


def test_a_shard_that_is_truncated_while_it_is_read_is_damage_and_nothing_worse(copy: Path) -> None:
    with loader_of(copy) as loader, Dataset(copy) as dataset:
        batches = iter(loader)
        next(batches)
        assert loader._prefetcher is not None
        assert isinstance(loader._prefetcher._builder._readers[0]._reader, DirectReader)
        lost = dataset.sample(0).shard
        os.truncate(copy / lost, 700)
        for _ in range(3):  # what was read before may still be delivered whole
            for batch in batches:
                assert len(batch["id"]) == 2
            batches = iter(loader)
        gone = {number for number in range(len(dataset)) if dataset.sample(number).shard == lost}
        assert {refusal.id for refusal in loader.quarantine} == gone
        assert all(refusal.reason.count("700") for refusal in loader.quarantine)
        assert gone
        assert len(gone) < len(dataset)
        for error in loader._quarantine._known_bad.values():  # nothing keeps what was read of them
            assert error.__traceback__ is None
            assert error.__cause__ is None
        assert not gone & set(torch.cat([batch["id"] for batch in batches]).tolist())


def test_a_shard_that_is_removed_while_it_is_open_is_read_to_the_end(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "TRUSTED_SECONDS", 1e9)
    with loader_of(copy) as loader, Dataset(copy) as dataset:
        batches = iter(loader)
        for batch in batches:  # an epoch opens all shards
            assert len(batch["id"])
        for shard in {dataset.sample(number).shard for number in range(len(dataset))}:
            (copy / shard).unlink()
        assert sorted(torch.cat([batch["id"] for batch in loader]).tolist()) == list(range(len(dataset)))
        assert not loader.quarantine
