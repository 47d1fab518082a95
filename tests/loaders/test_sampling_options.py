"""Mixtures, buckets and evaluations through the real loader: real clips, decoded, on several ranks, killed and resumed."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.core.errors import CorruptionError, MismatchError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Bucket, Buckets, Clip, Mixture, VideoLoader
from headrace.loaders import loader as loader_module
from headrace.loaders.fetch.sample_reader import StoreReader
from headrace.loaders.quarantine.quarantine import skips_allowed
from headrace.loaders.sampling import state as state_module
from tests.support import video_corpus
from tests.support.batches import same, take

pytestmark = pytest.mark.slow

SIZE = (16, 24)
SHAPES = Buckets((Bucket((16, 16)), Bucket((16, 28)), Bucket((28, 16), 4)), budget=16 * 28 * 4 * 6, multiple=2)
Make = Callable[..., VideoLoader]


@pytest.fixture(autouse=True)
def _reads_go_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "open_shard_reader", lambda store, *_: StoreReader(store))


@pytest.fixture
def dataset(made_dataset: Dataset) -> Dataset:
    """Eight generated clips."""
    return made_dataset


@pytest.fixture
def make(dataset: Dataset) -> Iterator[Make]:
    made: list[VideoLoader] = []

    def loader(source: Any = dataset, batch_size: int | None = 6, **options: Any) -> VideoLoader:
        settings: dict[str, Any] = {"clip": Clip(2, 2), "size": SIZE, "num_threads": 2, "seed": 3}
        made.append(VideoLoader(source, batch_size, **(settings | options)))
        return made[-1]

    yield loader
    for one in made:
        one.close()


@pytest.fixture
def mixture(dataset: Dataset) -> Mixture:
    """Two views: five clips and three."""
    sizes = sorted(sample.key for sample in dataset)
    first, rest = (", ".join(f"'{key}'" for key in keys) for keys in (sizes[:5], sizes[5:]))
    views = {"five": dataset.where(f"key in ({first})"), "three": dataset.where(f"key in ({rest})")}
    return Mixture(views, weights=[(0, {"five": 1, "three": 2}), (4, {"five": 5, "three": 1})])


def test_a_mixture_names_the_source_of_each_sample_and_keeps_to_the_weights(make: Make, mixture: Mixture) -> None:
    loader = make(mixture)
    batches = take(loader, 12)
    assert len(loader) == 1  # eight clips, batches of six
    keys = {
        name: {sample.key for sample in view} for name, view in mixture.sources.items() if isinstance(view, Dataset)
    }
    for batch in batches:
        assert all(key in keys[source] for key, source in zip(batch["key"], batch["source"], strict=True))
    counts = [Counter[str](batch["source"])["three"] for batch in batches]
    assert sum(counts[:4]) == pytest.approx(16, abs=2)
    assert sum(counts[4:]) == pytest.approx(8, abs=2)
    assert {name: row[2] for name, row in loader.state_dict()["sources"].items()} == Counter(
        source for batch in batches for source in batch["source"]
    )


def test_neither_the_order_of_the_sources_nor_that_of_a_states_keys_matters(make: Make, mixture: Mixture) -> None:
    turned = Mixture(dict(reversed(list(mixture.sources.items()))), weights=mixture.weights)
    loader = make(mixture)
    take(loader, 2)
    state = loader.state_dict()
    other = make(turned)
    other.load_state_dict(dict(sorted(state.items())) | {"sources": dict(reversed(state["sources"].items()))})
    assert all(same(a, b) for a, b in zip(take(loader, 3), take(other, 3), strict=True))


def test_each_source_has_its_own_epochs_and_draws_its_clips_anew(make: Make, mixture: Mixture) -> None:
    seen: dict[str, list[tuple[str, float]]] = {"five": [], "three": []}
    for batch in take(make(mixture), 12):
        for source, key, start in zip(batch["source"], batch["key"], batch["clip"].tolist(), strict=True):
            seen[source].append((key, start))
    for source, size in (("five", 5), ("three", 3)):
        epochs = [seen[source][at : at + size] for at in range(0, len(seen[source]) - size, size)]
        assert all(len({key for key, _ in epoch}) == size for epoch in epochs)
        assert any(sorted(one) != sorted(next_) for one, next_ in pairwise(epochs))


@pytest.mark.parametrize("kind", ["mixture", "buckets", "both", "evaluation"])
def test_any_world_size_sees_the_same_batches_and_resumes_where_the_other_stopped(
    make: Make, mixture: Mixture, dataset: Dataset, kind: str
) -> None:
    stop = random.Random(kind).randrange(1, 4)

    def loader(world_size: int, rank: int) -> VideoLoader:
        place = {"rank": rank, "world_size": world_size}
        if kind == "mixture":
            return make(mixture, 6 // world_size, **place)
        if kind == "buckets":
            return make(dataset, None, size=None, buckets=SHAPES, clip=Clip(2, 2, per_video=4), **place)
        if kind == "both":
            return make(mixture, None, size=None, buckets=SHAPES, clip=Clip(2, 2, per_video=4), **place)
        return make(dataset, 6 // world_size, evaluate=True, clip=Clip(2, 2, per_video=3), **place)

    whole = take(loader(1, 0), 6)
    for world_size, later in ((2, 3), (3, 2)):
        ranks = [loader(world_size, rank) for rank in range(world_size)]
        before = [take(rank, stop) for rank in ranks]
        states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        assert states.count(states[0]) == world_size
        resumed = [loader(later, rank) for rank in range(later)]
        for rank in resumed:
            rank.load_state_dict(states[0])
        after = [take(rank, 6 - stop) for rank in resumed]
        for number, batch in enumerate(whole):
            parts = [one[number] for one in before] if number < stop else [one[number - stop] for one in after]
            full = [part for part in parts if part["video"] is not None]
            assert torch.equal(torch.cat([part["video"] for part in full]), batch["video"])
            assert [key for part in parts for key in part["key"]] == batch["key"]


def test_buckets_give_batches_of_one_shape_within_the_budget(make: Make, dataset: Dataset) -> None:
    loader = make(dataset, None, size=None, buckets=SHAPES, clip=Clip(2, 2, per_video=4), drop_last=False)
    seen, sizes = Counter[tuple[str, float]](), [bucket.size for bucket in SHAPES.buckets]
    for batch in loader:
        bucket = SHAPES.buckets[batch["bucket"]]
        count, frames, _, height, width = batch["video"].shape
        assert (height, width, frames) == (*bucket.size, bucket.frames or 2)
        assert count * frames * height * width <= SHAPES.budget
        for key in batch["key"]:
            video = dataset.find(key).video
            assert video is not None
            tall = math.log(video.height / video.width)
            assert abs(math.log(height / width) - tall) == min(abs(math.log(h / w) - tall) for h, w in sizes)
        seen.update(zip(batch["key"], batch["clip"].tolist(), strict=True))
    assert sum(seen.values()) == 8 * 4


def test_a_mixture_in_buckets_keeps_to_the_weights_and_every_batch_is_of_one_shape(
    make: Make, mixture: Mixture
) -> None:
    loader = make(mixture, None, size=None, buckets=SHAPES, clip=Clip(2, 2, per_video=4))
    batches = take(loader, 24)
    for batch in batches:
        bucket = SHAPES.buckets[batch["bucket"]]
        assert batch["video"].shape[3:] == bucket.size
    late = Counter(source for batch in batches[4:] for source in batch["source"])
    assert late["five"] / late.total() == pytest.approx(5 / 6, abs=0.12)
    taken = {name: row[2] for name, row in loader.state_dict()["sources"].items()}
    assert taken == Counter(source for batch in batches for source in batch["source"])
    plain = make(mixture, clip=Clip(2, 2, per_video=4))
    with pytest.raises(MismatchError, match=r"(buckets|global_batch) was"):
        plain.load_state_dict(loader.state_dict())
    loss = plain.load_state_dict(loader.state_dict(), force=True)
    assert loss is not None
    assert loss.again is not None


@pytest.mark.parametrize("in_buckets", [False, True])
def test_an_evaluation_of_a_mixture_sees_each_source_once_and_each_batch_is_of_one(
    make: Make, mixture: Mixture, in_buckets: bool
) -> None:
    options: dict[str, Any] = {"evaluate": True, "clip": Clip(2, 2, start="center")}
    if in_buckets:
        options |= {"buckets": SHAPES, "size": None, "batch_size": None}
    loader = make(mixture, **options)
    for _ in range(2):
        seen, per_source = list[tuple[str, str]](), Counter[str]()
        for batch in loader:
            assert len(set(batch["source"])) == 1
            assert sum(batch["samples_per_rank"]) == len(batch["key"])
            assert ("bucket" in batch) == in_buckets
            seen.extend(zip(batch["source"], batch["key"], strict=True))
            per_source[batch["source"][0]] += batch["samples_per_rank"][0]
        assert len(set(seen)) == len(seen) == 8
        assert per_source == {"five": 5, "three": 3}
    for force in (False, True):
        assert not make(mixture, **options).load_state_dict(loader.state_dict(), force=force)


def test_an_epoch_that_is_left_after_its_last_batch_is_over(make: Make) -> None:
    options: dict[str, Any] = {"batch_size": 4, "clip": Clip(1)}
    loader, other = make(**options), make(**options)
    first = [batch["key"] for _, batch in zip(range(2), loader, strict=False)]  # zip asks for no third one
    state = loader.state_dict()
    second = [batch["key"] for batch in loader]
    assert len(first) == len(second) == len(loader) == 2
    assert [[batch["key"] for batch in other] for _ in range(2)] == [first, second]
    other.load_state_dict(state)
    assert [[batch["key"] for batch in other] for _ in range(2)] == [[], second]  # first the rest, which is nothing


@pytest.mark.parametrize("batches", [2, 4])
def test_an_evaluation_that_is_left_begins_anew_and_one_that_is_restored_goes_on(make: Make, batches: int) -> None:
    options: dict[str, Any] = {"batch_size": 2, "evaluate": True, "clip": Clip(1, start="center")}
    loader = make(**options)
    keys = list(loader.dataset.keys)
    for _ in range(2):
        assert [key for batch in take(loader, batches) for key in batch["key"]] == keys[: 2 * batches]
    state = loader.state_dict()
    assert [key for batch in loader for key in batch["key"]] == keys
    other = make(**options)
    other.load_state_dict(state)
    assert [key for batch in other for key in batch["key"]] == keys[2 * batches :]
    assert [key for batch in other for key in batch["key"]] == keys


def test_an_evaluation_sees_every_clip_once_and_names_the_ranks_without_samples(make: Make) -> None:
    ranks = [
        make(batch_size=3, rank=rank, world_size=2, evaluate=True, clip=Clip(1, start="center")) for rank in range(2)
    ]
    for _ in range(2):  # as often as one likes
        parts = [list(rank) for rank in ranks]
        assert [len(part) for part in parts] == [2, 2]
        assert sorted(n for part in parts for batch in part for n in batch["id"].tolist()) == list(range(8))
        assert [batch["samples_per_rank"] for batch in parts[0]] == [[3, 3], [1, 1]]
    many = [
        make(batch_size=1, rank=rank, world_size=5, evaluate=True, clip=Clip(1, start="center")) for rank in range(5)
    ]
    last = [list(rank)[-1] for rank in many]
    assert {tuple(batch["samples_per_rank"]) for batch in last} == {(0, 1, 0, 1, 1)}
    assert all(batch["empty_ranks"] == [0, 2] for batch in last)
    assert [batch["video"] is None for batch in last] == [True, False, True, False, False]


# -- states that do not fit


def test_weights_may_change_from_the_position_on_but_not_before_it(make: Make, mixture: Mixture) -> None:
    loader = make(mixture)
    take(loader, 3)
    state = loader.state_dict()
    later = make(Mixture(mixture.sources, weights=[(0, {"five": 1, "three": 2}), (3, {"five": 1, "three": 1})]))
    later.load_state_dict(state)
    assert later.epoch == 2
    other = make(Mixture(mixture.sources, weights={"five": 1, "three": 1}))
    with pytest.raises(MismatchError, match="weights"):
        other.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"sources was \['five', 'three'\]"):
        make(Mixture({"five": mixture.sources["five"]})).load_state_dict(state)


def test_a_forced_batch_size_says_which_clips_come_again_and_which_are_missed(make: Make) -> None:
    clip = Clip(2, 2, per_video=6)
    old, new = make(batch_size=6, clip=clip, drop_last=False), make(batch_size=4, clip=clip, drop_last=False)
    before = [batch for _, batch in zip(range(3), old, strict=False)]
    with pytest.raises(MismatchError, match="global_batch was 6"):
        new.load_state_dict(old.state_dict())
    loss = new.load_state_dict(old.state_dict(), force=True)
    assert loss
    assert [one.field for one in loss.fields] == ["global_batch"]
    assert (loss.epoch, loss.batch) == (0, 4)  # 18 of 48 clips: 4 batches of 4
    seen, to_come = _virtual(old, range(3)), _virtual(new, range(4, 12))
    assert loss.again == len(seen & to_come)
    assert loss.missed == 48 - len(seen | to_come)
    assert len(list(new)) == 8
    assert len(before) == 3


def test_a_forced_clip_loses_nothing_of_the_order_unless_it_counts_otherwise(make: Make) -> None:
    old = make(clip=Clip(2, 2, per_video=3))
    take(old, 2)
    longer = make(clip=Clip(4, 2, per_video=3)).load_state_dict(old.state_dict(), force=True)
    assert longer is not None
    assert [one.field for one in longer.fields] == ["clip"]
    assert (longer.batch, longer.again, longer.missed) == (2, 0, 0)
    every = make(clip=Clip(4, start="every")).load_state_dict(old.state_dict(), force=True)
    assert every is not None
    assert (every.again, every.missed) == (None, None)


def test_a_state_with_digests_for_clip_and_order_is_forced_like_one_without(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = Clip(2, 2, per_video=6)
    old, new = make(batch_size=6, clip=clip), make(batch_size=4, clip=clip)
    take(old, 3)
    plain = new.load_state_dict(old.state_dict(), force=True)
    monkeypatch.setattr(state_module, "MAX_BYTES", 0)
    assert isinstance(old.state_dict()["clip"], str)
    short = new.load_state_dict(old.state_dict(), force=True)
    assert short == plain
    assert plain is not None
    assert plain.again is not None
    other = make(batch_size=6, clip=Clip(3, 2, per_video=6)).load_state_dict(old.state_dict(), force=True)
    assert other is not None
    assert (other.again, other.missed) == (None, None)  # what the digest stood for is not known
    loaded = make(batch_size=6, clip=clip)
    loaded.load_state_dict(old.state_dict())
    assert loaded.state_dict() == old.state_dict()


def _virtual(loader: VideoLoader, batches: range) -> set[int]:
    return {v for number in batches for v in loader.order.batch_of(0, number).tolist()}


def test_a_forced_mixture_counts_by_source(make: Make, mixture: Mixture) -> None:
    loader = make(mixture)
    take(loader, 3)
    taken = {name: row[2] for name, row in loader.state_dict()["sources"].items()}
    other = make(Mixture(mixture.sources, weights={"five": 1, "three": 0}))
    loss = other.load_state_dict(loader.state_dict(), force=True)
    assert loss is not None
    assert [one.field for one in loss.fields] == ["weights"]
    assert (loss.again, loss.missed) == (taken["three"], taken["three"])
    assert (other.epoch, loss.batch) == (2, 1)


def test_forcing_a_state_that_fits_loses_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    loader, again = make(clip=Clip(2, per_video=3)), make(clip=Clip(2, per_video=3))
    take(loader, 2)
    loss = again.load_state_dict(loader.state_dict(), force=True)
    assert not loss
    assert str(loss) == "nothing is lost"
    assert not caplog.records
    assert all(same(a, b) for a, b in zip(take(loader, 2), take(again, 2), strict=True))


def test_forcing_another_dataset_reports_an_unknown_loss_and_drops_the_quarantine(
    make: Make, dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(dataset.where("bytes > 1"))
    state = make().state_dict() | {"batch": 1, "quarantine": [2]}
    loss = loader.load_state_dict(state, force=True)
    assert loss is not None
    assert [one.field for one in loss.fields] == ["digest"]
    assert (loss.again, loss.missed, loss.quarantine_dropped) == (None, None, True)
    assert loader.state_dict()["quarantine"] == []
    assert "an unknown number" in caplog.text
    with pytest.raises(UsageError, match="not the state"):
        loader.load_state_dict({"epoch": 3}, force=True)


# -- what cannot be


def test_what_does_not_go_together_is_refused(make: Make, mixture: Mixture, dataset: Dataset) -> None:
    for match, wrong in (
        ("batch_size is missing", lambda: make(dataset, None)),
        ("leave batch_size out", lambda: make(dataset, 4, buckets=SHAPES, size=None)),
        ("leave size out", lambda: make(dataset, None, buckets=SHAPES)),
        ("start='every'", lambda: make(dataset, None, buckets=SHAPES, size=None, clip=Clip(2, start="every"))),
        ("cannot be used with a mixture", lambda: make(mixture, version=1)),
        ("needs sources", lambda: Mixture({})),
        ("cannot be the name", lambda: Mixture({"": dataset})),
        ("'b'", lambda: Mixture({"a": dataset}, weights={"b": 1})),
    ):
        with pytest.raises(UsageError, match=match):
            wrong()


def test_a_dataset_is_opened_by_a_tag_and_what_was_opened_is_closed(
    make: Make, dataset: Dataset, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.mp4").write_bytes(video_corpus.make(video_corpus.Made("", "libx264", "mp4")))
    with pack([tmp_path / "one.mp4", tmp_path / "two.mp4"], tmp_path / "ds", workers=1) as packed:
        packed.tag("first")
        packed.remove(where="key = 'two'")
    by_tag, newest = make(str(tmp_path / "ds"), 1, version="first"), make(str(tmp_path / "ds"), 1)
    assert (by_tag.dataset.version, len(by_tag)) == (1, 2)
    assert (newest.dataset.version, len(newest)) == (2, 1)
    with pytest.raises(UsageError, match="third"):
        make(str(tmp_path / "ds"), 1, version="third")
    mixed = make(Mixture({"opened": dataset, "here": str(tmp_path / "ds")}))
    mixed.close()
    assert next(iter(make(dataset)))["key"]  # not the loader's own: still open


@pytest.mark.parametrize(
    ("limit", "samples", "allowed"), [(0.01, 1000, 10), (0.01, 8, 1), (0, 8, 0), (5, 8, 5), (1, 9, 1)]
)
def test_the_limit_of_refusals_is_a_share_or_a_number(limit: float, samples: int, allowed: int) -> None:
    assert skips_allowed(limit, samples) == allowed


@pytest.mark.parametrize("limit", [-1, 1.5, float("nan"), float("inf"), True])
def test_other_limits_are_refused(limit: float) -> None:
    with pytest.raises(UsageError, match="max_bad_samples"):
        skips_allowed(limit, 10)


def test_a_sample_condemned_in_one_source_is_read_in_another(
    make: Make, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sources number their samples from 0; the damage is in "bad" alone."""
    copy = tmp_path / "bad"
    shutil.copytree(dataset.url.removeprefix("file://"), copy)
    member = dataset.sample(1).members[0]
    with (copy / dataset.sample(1).shard).open("r+b") as shard:
        shard.seek(member.offset + 20)
        shard.write(b"\xff" * 64)
    mixed = Mixture({"good": dataset, "bad": str(copy)}, weights={"good": 1, "bad": 1})
    loader = make(mixed, 8, max_bad_samples=4)
    batches = take(loader, 4)
    by_source = {
        name: [n for b in batches for s, n in zip(b["source"], b["id"].tolist(), strict=True) if s == name]
        for name in ("good", "bad")
    }
    assert 1 in by_source["good"]
    assert 1 not in by_source["bad"]
    (refusal,) = loader.quarantine
    assert (refusal.source, refusal.id) == (0, 1)  # sources are numbered by their names
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["quarantine"] == [[0, 1]]
    resumed = make(mixed, 8, max_bad_samples=4)
    resumed.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(take(loader, 2), take(resumed, 2), strict=True))
    with pytest.raises(CorruptionError, match="more than 0"):
        take(make(mixed, 8, max_bad_samples=0), 4)
