"""Ids in little memory: every representation gives what an array of ids gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loaders.sampling import sample_ids
from headrace.loaders.sampling.plan import Parts
from headrace.loaders.sampling.sample_ids import (
    AllIds,
    BitmapIds,
    BucketNumbers,
    IdsBuilder,
    ListedIds,
    RunIds,
    SampleIds,
    SmallArray,
    bucket_ends,
    ids_from,
)


def masks(samples: int, seed: int, kind: str) -> npt.NDArray[np.bool_]:
    random = np.random.default_rng(seed)
    if kind == "all":
        return np.ones(samples, np.bool_)
    if kind == "none":
        return np.zeros(samples, np.bool_)
    if kind == "runs":
        return np.repeat(random.random(-(-samples // 700)) < 0.5, 700)[:samples]
    return random.random(samples) < {"few": 0.01, "half": 0.5, "most": 0.99}[kind]


kinds = st.sampled_from(["all", "none", "runs", "few", "half", "most"])
chosen = st.builds(masks, st.integers(1, 5000), st.integers(0, 999), kinds)


def built(mask: npt.NDArray[np.bool_], cuts: list[int]) -> SampleIds:
    builder = IdsBuilder(len(mask))
    for piece in np.split(mask, sorted(cut % (len(mask) + 1) for cut in cuts)):
        builder.add(piece)
    return builder.ids()


def check(ids: SampleIds, plain: npt.NDArray[np.int64], samples: int, data: st.DataObject) -> None:
    assert len(ids) == len(plain)
    if len(plain):
        rows = np.array(data.draw(st.lists(st.integers(0, len(plain) - 1), max_size=20)), np.int64)
        assert ids.take(rows).tolist() == plain[rows].tolist()
        assert ids.take(np.arange(len(plain))).tolist() == plain.tolist()
        assert ids[len(plain) - 1] == plain[-1]
    start, stop = sorted(data.draw(st.tuples(st.integers(0, samples), st.integers(0, samples))))
    assert ids.between(start, stop).tolist() == plain[(plain >= start) & (plain < stop)].tolist()


@settings(deadline=None)
@given(chosen, st.lists(st.integers(0, 5000), max_size=5), st.data())
def test_ids_are_those_of_an_array(mask: npt.NDArray[np.bool_], cuts: list[int], data: st.DataObject) -> None:
    ids = built(mask, cuts)
    check(ids, np.flatnonzero(mask), len(mask), data)
    assert ids.nbytes <= len(mask) / 8 * 1.13 + 80


@settings(deadline=None)
@given(chosen, st.data())
def test_ids_of_buckets_are_those_of_arrays(mask: npt.NDArray[np.bool_], data: st.DataObject) -> None:
    ids, plain = built(mask, []), np.flatnonzero(mask)
    seed, buckets = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 9))
    of_each = np.random.default_rng(seed).integers(0, buckets, len(plain)).astype(np.uint8)
    divided = BucketNumbers(of_each, bucket_ends(of_each, buckets))
    for bucket in range(buckets):
        expected = plain[of_each == bucket]
        assert divided.samples_in(bucket) == len(expected)
        check(divided.ids_in(bucket, ids), expected, len(mask), data)


@pytest.mark.parametrize("samples", [0, 1, 512, 513, 4096, 5000])
def test_directories_of_buckets_go_on_in_the_next_blocks(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    monkeypatch.setattr(sample_ids, "_ROWS_AT_ONCE", 2)
    numbers = np.random.default_rng(samples).integers(0, 3, samples).astype(np.uint8)
    blocks = range(512, samples + 512, 512)
    assert bucket_ends(numbers, 3).tolist() == [[int((numbers[:end] == n).sum()) for end in blocks] for n in range(3)]


@settings(deadline=None)
@given(chosen, st.data())
def test_ids_are_made_again_from_their_arrays(mask: npt.NDArray[np.bool_], data: st.DataObject) -> None:
    ids = built(mask, [])
    again = ids_from(ids.arrays(), len(mask))
    assert type(again) is type(ids)
    check(again, np.flatnonzero(mask), len(mask), data)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all", AllIds), ("none", RunIds), ("runs", RunIds), ("few", ListedIds), ("half", BitmapIds), ("most", BitmapIds)],
)
def test_the_smallest_representation_is_chosen(kind: str, expected: type) -> None:
    assert type(built(masks(100_000, 1, kind), [])) is expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=2000), st.data())
def test_parts_of_samples_are_those_of_prefix_sums(counts: list[int], data: st.DataObject) -> None:
    array: Any = SmallArray(len(counts))
    cut = data.draw(st.integers(0, len(counts)))
    array.add(np.array(counts[:cut], np.int64))
    array.add(np.array(counts[cut:], np.int64))
    assert array.values.tolist() == counts
    assert array.values.dtype == (np.uint8 if max(counts) < 256 else np.uint16)
    parts, each = Parts(len(counts), array.values), np.array(counts)
    assert parts.total == sum(counts)
    owners = np.repeat(np.arange(len(counts)), each)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(each) - each, each)
    rows, positions = parts.split(np.arange(parts.total))
    assert (rows.tolist(), positions.tolist()) == (owners.tolist(), numbers.tolist())
    row = data.draw(st.integers(0, len(counts) - 1))
    assert parts.first(row) == sum(counts[:row])
    assert parts.of(np.array([row])).tolist() == [counts[row]]


def test_a_loader_of_everything_keeps_no_ids() -> None:
    assert AllIds(10**9).nbytes == 0
    assert AllIds(10**9).take(np.array([999_999_999])).tolist() == [999_999_999]
