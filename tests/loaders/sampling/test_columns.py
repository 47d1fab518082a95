"""Ids and numbers of samples: what processes share is what each of them would compute."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.store.open import open_store
from headrace.loaders import Bucket, Buckets, Clip
from headrace.loaders.fields.video import AssignVideos
from headrace.loaders.sampling import columns, shared_arrays
from headrace.loaders.sampling.columns import (
    F64,
    HasValue,
    bucket_numbers,
    column,
    counts_by_bucket,
    samples_where,
    small_numbers,
)
from headrace.loaders.sampling.sample_ids import AllIds, BucketNumbers, ListedIds, bucket_ends
from tests.support import indexed_datasets

SAMPLES = 400


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: int

    def __call__(self, duration: F64) -> Any:
        return (duration * self.factor).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class InThree:
    def __call__(self, height: F64) -> Any:
        return (height // 400).astype(np.int64)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(columns, "PIECE_SAMPLES", 60)
    monkeypatch.setattr(columns, "_OWN_PACKAGES", ("headrace.", "tests."))
    indexed_datasets.make(open_store(tmp_path / "set"), range(SAMPLES))
    with Dataset(tmp_path / "set") as opened:
        yield opened


def everything(dataset: Dataset) -> list[Any]:
    """All that a loader computes from columns, as lists."""
    ids = samples_where(dataset, HasValue("video_ext"))
    rows = np.arange(len(ids))
    few, many = (small_numbers(dataset, ["duration"], ids, Scaled(factor)) for factor in (3, 100))
    chosen = bucket_numbers(dataset, ["height"], ids, InThree(), 3)
    buckets = [chosen.ids_in(number, ids) for number in range(3)]
    return [
        ids.take(rows).tolist(),
        few.tolist(),
        many.tolist(),
        [bucket.take(np.arange(len(bucket))).tolist() for bucket in buckets],
        [counts.tolist() for counts in counts_by_bucket(many, chosen)],
    ]


def expected(dataset: Dataset) -> list[Any]:
    videos = [one for one in dataset if one.video is not None]
    heights = {one.id: one.video.height for one in videos if one.video is not None}
    in_bucket = [[one for one in videos if heights[one.id] // 400 == number] for number in range(3)]
    return [
        [one.id for one in videos],
        [int(one.duration * 3) for one in videos],
        [int(one.duration * 100) for one in videos],
        [[one.id for one in bucket] for bucket in in_bucket],
        [[int(one.duration * 100) for one in bucket] for bucket in in_bucket],
    ]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("view", ["", "number % 3 != 1", "number < 100 or number % 7 = 1"])
def test_columns_are_those_of_the_samples(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, shared: bool, view: str
) -> None:
    if shared:
        monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    if view:
        dataset = dataset.where(view)  # the last one has parts of very different sizes, so pieces begin anywhere
    assert everything(dataset) == expected(dataset)
    assert everything(dataset) == expected(dataset)  # shared arrays are opened


def test_views_and_versions_do_not_share(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    for condition in ("number % 3 != 1", "number % 3 != 2"):
        view = dataset.where(condition)
        assert everything(view) == expected(view)


def test_arrays_of_another_version_ids_columns_or_function_are_not_used(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All results have as many samples, and differ in what determines them."""
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    indexed_datasets.make(open_store(tmp_path / "again"), range(7, 7 + SAMPLES))
    even, odd = (ListedIds(np.arange(first, SAMPLES, 2, dtype=np.uint32)) for first in (0, 1))
    with Dataset(tmp_path / "again") as other:
        for one, ids in ((dataset, even), (dataset, odd), (other, even), (dataset, AllIds(SAMPLES))):
            durations = column(one, "duration", ids)
            for factor in (1, 3):
                assert small_numbers(one, ["duration"], ids, Scaled(factor)).tolist() == (durations * factor).tolist()
        videos = samples_where(dataset, HasValue("video_ext"))
        for name in ("height", "width", "frames"):
            expected = (column(dataset, name, videos) * 3).tolist()
            assert small_numbers(dataset, [name], videos, Scaled(3)).tolist() == expected
        heights = [bucket_numbers(dataset, ["height"], videos, InThree(), buckets) for buckets in (3, 4)]
        assert [len(chosen.ends) for chosen in heights] == [3, 4]


def test_arrays_of_a_dataset_that_was_at_the_same_url_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Dataset
) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    for first in (7, 14):
        indexed_datasets.make(open_store(tmp_path / "again"), range(first, first + SAMPLES))
        with Dataset(tmp_path / "again") as made:
            found = small_numbers(made, ["duration"], AllIds(SAMPLES), Scaled(3))
            assert found.tolist() == [3 * (number % 30) for number in range(first, first + SAMPLES)]
        shutil.rmtree(tmp_path / "again")


def test_ids_of_another_column_or_condition_are_not_used(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    samples = list(dataset)
    texts = sorted({one.text for one in samples if one.text})
    for left_out in ((), texts[:5], texts[5:9]):
        ids = samples_where(dataset, HasValue("text", tuple(left_out)))
        kept = [one.id for one in samples if one.text and one.text not in left_out]
        assert ids.take(np.arange(len(ids))).tolist() == kept
    sounds = samples_where(dataset, HasValue("audio_ext"))
    assert sounds.take(np.arange(len(sounds))).tolist() == [one.id for one in samples if one.audio]


def test_counts_of_other_samples_are_not_used(monkeypatch: pytest.MonkeyPatch, dataset: Dataset) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    random = np.random.default_rng(1)
    for kind in (np.uint8, np.uint16):
        counts = random.integers(1, 9, 1200).astype(kind)
        for _ in range(2):
            numbers = random.integers(0, 3, 1200).astype(np.uint8)
            for given, buckets in ((counts, 3), (counts[::-1], 3), (counts, 4)):
                found = counts_by_bucket(given, BucketNumbers(numbers, bucket_ends(numbers, buckets)))
                assert [part.tolist() for part in found] == [given[numbers == n].tolist() for n in range(buckets)]
                assert {part.dtype for part in found} == {np.dtype(kind)}


def test_a_second_process_reads_no_column(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    first = everything(dataset)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_without_tables, (dataset.url,)) == first


def _without_tables(url: str) -> list[Any]:
    shared_arrays.SHARED_SAMPLES, columns.PIECE_SAMPLES = 0, 60
    columns._OWN_PACKAGES = ("headrace.", "tests.")
    with Dataset.open_lazy(url) as dataset:
        dataset.index.tables = None  # type: ignore[method-assign,assignment]
        return everything(dataset)


def test_processes_of_a_machine_read_the_columns_once(dataset: Dataset) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    with context.Pool(4, _remember, (barrier,)) as pool:
        counted = pool.map(_counting_parts, [dataset.url] * 4, chunksize=1)
    assert all(values == expected(dataset) for values, _ in counted)
    parts = SAMPLES // 25
    assert sum(reads for _, reads in counted) == 4 * parts  # ids, two of numbers, buckets


def _remember(barrier: Any) -> None:
    globals()["_barrier"] = barrier


def _counting_parts(url: str) -> tuple[list[Any], int]:
    shared_arrays.SHARED_SAMPLES, columns.PIECE_SAMPLES = 0, 60
    columns._OWN_PACKAGES = ("headrace.", "tests.")
    reads = 0
    with Dataset.open_lazy(url) as dataset:
        tables = dataset.index.tables

        def count(names: Any = None, parts: range | None = None) -> Iterator[Any]:
            nonlocal reads
            for table in tables(names, parts):
                reads += 1
                yield table

        dataset.index.tables = count  # type: ignore[method-assign,assignment]
        globals()["_barrier"].wait(60)
        return everything(dataset), reads


class OtherBuckets(Buckets):
    """A subclass of the user."""

    def assign(self, heights: Any, widths: Any, lengths: Any, frames: int) -> Any:
        return np.ones(len(heights), np.int64)


def test_the_results_of_other_classes_are_not_shared(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    monkeypatch.setattr(columns, "_OWN_PACKAGES", ("headrace.",))
    videos = samples_where(dataset, HasValue("video_ext"))
    folder = Path(os.environ["TMPDIR"], f"headrace-{os.geteuid()}", "arrays")
    works = len(list(folder.iterdir()))
    shapes = (Bucket((16, 16)), Bucket((32, 32)))
    for buckets in (OtherBuckets(shapes, 10**6), Buckets(shapes, 10**6)):
        assign = AssignVideos(buckets, Clip(2), rotate=False)
        chosen = bucket_numbers(dataset, ["height", "width", "rotation", "frames"], videos, assign, 2)
        assert chosen.samples_in(1) == len(videos)
    assert len(list(folder.iterdir())) == works + 1


def test_a_function_that_its_repr_does_not_describe_is_refused(dataset: Dataset) -> None:
    with pytest.raises(TypeError, match="is not a dataclass"):
        small_numbers(dataset, ["duration"], samples_where(dataset, HasValue("video_ext")), np.floor)


def test_a_whole_column_is_in_the_order_of_the_ids(dataset: Dataset) -> None:
    ids = samples_where(dataset, HasValue("video_ext"))
    assert column(dataset, "duration", ids).tolist() == [one.duration for one in dataset if one.video]


def test_small_datasets_leave_no_files(dataset: Dataset) -> None:
    everything(dataset)
    assert os.listdir(os.environ["TMPDIR"]) == []
