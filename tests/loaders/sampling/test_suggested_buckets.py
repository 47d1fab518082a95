"""Suggested buckets: the best division of the aspect ratios, and honest shares."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.cli import main
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.store.open import open_store
from headrace.loaders.sampling.suggested_buckets import MAX_RATIOS, _binned, _centres, shapes_of, suggest
from tests.support import indexed_datasets

SHAPES = {(1080, 1920): 700, (1920, 1080): 200, (720, 720): 99, (360, 640): 1}


def test_each_common_shape_gets_a_bucket_that_crops_little() -> None:
    suggested = suggest(SHAPES, 3, (256, 256))
    assert [bucket.size for bucket in suggested] == [(192, 336), (336, 192), (256, 256)]
    assert [round(bucket.share, 3) for bucket in suggested] == [0.701, 0.2, 0.099]
    assert max(bucket.waste for bucket in suggested) < 0.02
    assert [bucket.enlarged for bucket in suggested] == [0, 0, 0]


def test_one_bucket_crops_much_and_small_samples_are_enlarged() -> None:
    (bucket,) = suggest(SHAPES, 1, (512, 512))
    assert bucket.share == 1
    assert bucket.waste > 0.2
    assert bucket.enlarged == pytest.approx(1 / 1000)
    assert all(side % 16 == 0 for side in bucket.size)


def test_more_buckets_than_shapes_are_not_made_up() -> None:
    assert len(suggest({(100, 100): 5}, 9, (64, 64))) == 1
    with pytest.raises(UsageError, match="no videos or images"):
        suggest({}, 3, (64, 64))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 9)), min_size=1, max_size=7), st.integers(1, 4))
def test_no_other_division_has_a_smaller_distance(samples: list[tuple[float, int]], groups: int) -> None:
    points, weights = _binned(np.array([x for x, _ in samples]), np.array([float(w) for _, w in samples]))

    def distance(centres: list[float]) -> float:
        return float((weights * np.min((points[:, None] - np.array(centres)[None, :]) ** 2, axis=1)).sum())

    count = len(points)
    divisions = itertools.chain.from_iterable(
        itertools.combinations(range(1, count), cuts) for cuts in range(min(groups, count))
    )
    best = min(
        distance(
            [np.average(part, weights=w) for part, w in zip(np.split(points, cut), np.split(weights, cut), strict=True)]
        )
        for cut in map(list, divisions)
    )
    assert distance(_centres(points, weights, groups).tolist()) <= best + 1e-9


def test_many_ratios_are_joined() -> None:
    logs = np.random.default_rng(0).uniform(-2, 2, 10_000)
    points, weights = _binned(logs, np.ones(10_000))
    assert len(points) <= MAX_RATIOS
    assert weights.sum() == 10_000
    assert (np.diff(points) > 0).all()


def test_the_command_prints_what_it_suggests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    indexed_datasets.make(open_store(tmp_path / "set"), range(60))
    with Dataset(tmp_path / "set") as dataset:
        videos = sum(sample.video is not None for sample in dataset)
        assert shapes_of(dataset).videos.total() == videos
    assert main(["order", str(tmp_path / "set"), "--suggest-buckets", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(bucket["share"] for bucket in found["buckets"]) == pytest.approx(1)
    assert (
        main(["order", str(tmp_path / "set"), "--suggest-buckets", "2", "--size", "128x128", "--budget", "9999999"])
        == 0
    )
    *_, code = capsys.readouterr().out.splitlines()
    assert code.endswith("budget=9999999)")
    ast.parse(code)
