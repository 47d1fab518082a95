"""The loader as a trainer sees it."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.cache.readers.base import ShardReader
from headrace.dataio.core.errors import (
    CorruptionError,
    HeadraceError,
    MismatchError,
    NotFoundError,
    TransientError,
    UsageError,
)
from headrace.dataio.core.metrics import REGISTRY
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioSpec, Clip, VideoLoader
from headrace.loaders import loader as loader_module
from headrace.loaders.clip import choose
from headrace.loaders.decode.base import Request
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.resize import fit
from headrace.loaders.fetch.sample_reader import StoreReader
from tests.support.batches import same, take

pytestmark = pytest.mark.slow

SIZE = (32, 40)


@pytest.fixture(autouse=True)
def _reads_go_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has tests of its own; here every read is one of the store."""
    monkeypatch.setattr(loader_module, "open_shard_reader", lambda store, *_: StoreReader(store))


@pytest.fixture
def make(dataset: Dataset) -> Iterator[Callable[..., VideoLoader]]:
    made = []

    def loader(source: Any = dataset, batch_size: int = 4, **options: Any) -> VideoLoader:
        settings: dict[str, Any] = {"clip": Clip(2, 2, per_video=3), "size": SIZE, "num_threads": 2}
        made.append(VideoLoader(source, batch_size, **(settings | options)))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def test_an_epoch_holds_every_clip_once_and_the_next_one_another_order(make: Callable[..., VideoLoader]) -> None:
    loader = make(seed=3)
    assert len(loader) == 6
    first, second = [[batch["id"] for batch in loader] for _ in range(2)]
    assert len(first) == len(second) == 6
    assert sorted(torch.cat(first).tolist()) == sorted([*range(8)] * 3)
    assert sorted(torch.cat(second).tolist()) == sorted([*range(8)] * 3)
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    assert loader.epoch == 2


def test_a_batch_is_what_the_documentation_says(make: Callable[..., VideoLoader], dataset: Dataset) -> None:
    batch = next(iter(make()))
    assert batch["video"].shape == (4, 2, 3, *SIZE)
    assert batch["video"].dtype == torch.uint8
    assert batch["video"].is_contiguous()
    assert batch["id"].dtype == torch.int64
    assert batch["key"] == [dataset.sample(int(i)).key for i in batch["id"]]
    assert batch["text"] == [None] * 4
    assert batch["clip"].dtype == torch.float64
    assert "audio" not in batch


def test_frames_are_those_of_the_clip_that_the_order_names(make: Callable[..., VideoLoader], dataset: Dataset) -> None:
    loader = make(seed=11)
    for number, batch in enumerate(loader):
        places = loader.order.batch_of(0, number)
        assert batch["id"].tolist() == (places // 3).tolist()
        for slot, place in enumerate(places):
            sample = dataset.sample(int(place // 3))
            assert sample.video is not None
            wanted = choose(sample.video, Clip(2, 2, per_video=3), 11, 0, sample.id, int(place % 3))
            member = sample.member(sample.video.ext)
            data = memoryview(bytearray(member.length))
            dataset.store.get_into(sample.shard, member.offset, data)
            decoded = PyAVDecoder().decode([Request(data, sample.video, wanted)])[0]
            assert not isinstance(decoded, HeadraceError)
            assert (batch["video"][slot] == fit(decoded.frames, SIZE)).all()
            assert batch["clip"][slot] == float(decoded.pts[0] * sample.video.time_base)


def test_normalised_batches_are_the_same_pixels_as_floats(make: Callable[..., VideoLoader]) -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    whole, scaled = next(iter(make())), next(iter(make(normalize=(mean, std))))
    assert scaled["video"].dtype == torch.float32
    expected = (whole["video"] / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(scaled["video"], expected, atol=1e-5)


def test_without_shuffling_samples_come_in_order(make: Callable[..., VideoLoader]) -> None:
    ids = torch.cat([batch["id"] for batch in make(shuffle=False)])
    assert ids.tolist() == [n // 3 for n in range(24)]


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_tail_of_an_epoch_is_dropped_or_delivered(make: Callable[..., VideoLoader], drop_last: bool) -> None:
    sizes = [len(batch["id"]) for batch in make(batch_size=10, drop_last=drop_last)]
    assert sizes == ([10, 10] if drop_last else [10, 10, 4])


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_every_world_size_sees_the_same_global_batches(make: Callable[..., VideoLoader], world_size: int) -> None:
    alone = take(make(batch_size=12), 3)
    ranks = [make(batch_size=12 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [take(rank, 3) for rank in ranks]
    for number, batch in enumerate(alone):
        assert torch.equal(torch.cat([part[number]["id"] for part in parts]), batch["id"])
        assert torch.equal(torch.cat([part[number]["video"] for part in parts]), batch["video"])
    assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1


def test_ranks_without_a_share_of_the_tail_get_an_empty_batch(make: Callable[..., VideoLoader]) -> None:
    ranks = [
        make(batch_size=5, rank=rank, world_size=4, drop_last=False, clip=Clip(1, per_video=1)) for rank in range(4)
    ]
    with pytest.raises(UsageError, match="fewer clips than one global batch"):
        make(batch_size=5, rank=0, world_size=4, clip=Clip(1))
    sizes = [[len(batch["id"]) for batch in rank] for rank in ranks]
    assert sizes == [[2], [2], [2], [2]]
    lonely = [make(batch_size=7, rank=rank, world_size=9, drop_last=False, clip=Clip(1)) for rank in range(9)]
    assert sorted(len(batch["id"]) for rank in lonely for batch in rank) == [0] + [1] * 8


# -- state


@pytest.mark.parametrize("seed", range(4))
def test_a_resumed_loader_continues_with_the_very_next_batch(make: Callable[..., VideoLoader], seed: int) -> None:
    stop = random.Random(seed).randrange(1, 14)
    whole = take(make(seed=seed), stop + 5)
    first = make(seed=seed)
    before = take(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 200
    second = make(seed=seed, num_threads=1, prefetch_batches=1)
    second.load_state_dict(state)
    assert second.state_dict() == state
    after = take(second, 5)
    assert all(same(a, b) for a, b in zip(whole, before + after, strict=True))


@pytest.mark.parametrize(("old", "new"), [(1, 3), (2, 1), (3, 4), (4, 2)])
def test_another_world_size_resumes_at_the_same_global_batch(
    make: Callable[..., VideoLoader], old: int, new: int
) -> None:
    reference = take(make(batch_size=12), 5)
    ranks = [make(batch_size=12 // old, rank=rank, world_size=old) for rank in range(old)]
    states = [take_state(rank, 3) for rank in ranks]
    assert states.count(states[0]) == old
    resumed = [make(batch_size=12 // new, rank=rank, world_size=new) for rank in range(new)]
    for rank in resumed:
        rank.load_state_dict(states[0])
    parts = [take(rank, 2) for rank in resumed]
    for number in range(2):
        assert torch.equal(torch.cat([part[number]["id"] for part in parts]), reference[3 + number]["id"])


def test_the_state_is_that_of_the_batch_received_not_of_what_was_prefetched(make: Callable[..., VideoLoader]) -> None:
    loader = make(prefetch_batches=4)
    assert loader.state_dict()["batch"] == 0
    for number, _ in enumerate(loader, 1):
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, number)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)


def test_a_state_can_be_loaded_in_the_middle_of_an_iteration(make: Callable[..., VideoLoader]) -> None:
    loader = make()
    state = loader.state_dict()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    loader.load_state_dict(state)
    assert all(same(a, next(iterator)) for a in first)


def test_a_state_after_the_last_batch_ends_its_epoch_first(make: Callable[..., VideoLoader]) -> None:
    loader = make()
    take(loader, 6)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    assert resumed.epoch == 1


def test_breaking_out_and_iterating_again_goes_on(make: Callable[..., VideoLoader]) -> None:
    whole = take(make(), 6)
    loader = make()
    parts = []
    for _ in range(3):
        for batch in loader:
            parts.append(batch)
            if len(parts) % 2 == 0:
                break
    assert all(same(a, b) for a, b in zip(whole, parts, strict=True))


def test_states_of_other_loaders_are_refused_with_the_field(
    make: Callable[..., VideoLoader], small_clips: Path, tmp_path: Path
) -> None:
    loader = make()
    for field, other in (
        ("seed", make(seed=1)),
        ("global_batch", make(batch_size=6)),
        ("clip", make(clip=Clip(4, per_video=3))),
        ("order", make(shuffle=False)),
        ("drop_last", make(drop_last=False)),
        ("digest", make(pack([small_clips], tmp_path / "other", workers=1))),
    ):
        with pytest.raises(MismatchError, match=field):
            loader.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="at batch 99 of 6"):
        loader.load_state_dict(loader.state_dict() | {"batch": 99})
    assert loader.state_dict()["batch"] == 0


# -- damage


@pytest.fixture
def damaged(tmp_path: Path, dataset: Dataset) -> Path:
    """A copy of the dataset in which one byte of sample 2 was changed after packing."""
    copy = tmp_path / "damaged"
    shutil.copytree(dataset.url.removeprefix("file://"), copy)
    sample = dataset.sample(2)
    assert sample.video is not None
    member = sample.member(sample.video.ext)
    with (copy / sample.shard).open("r+b") as shard:
        shard.seek(member.offset + member.length // 2)
        byte = shard.read(1)
        shard.seek(-1, 1)
        shard.write(bytes([byte[0] ^ 1]))
    return copy


def test_a_sample_with_wrong_bytes_is_replaced_and_everything_else_stays(
    make: Callable[..., VideoLoader], damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter = "headrace_quarantined_samples_total"
    before = REGISTRY.get_sample_value(counter, {"reason": "corruption"}) or 0
    good, bad = make(), make(damaged)
    replaced = 0
    for right, found in zip(good, bad, strict=True):
        for slot, number in enumerate(right["id"].tolist()):
            if number == 2:
                replaced += 1
                assert found["id"][slot] != 2
            else:
                assert found["id"][slot] == number
                assert torch.equal(found["video"][slot], right["video"][slot])
    assert replaced == 3
    (refusal,) = bad.quarantine
    sample = bad.dataset.sample(2)
    assert (refusal.id, refusal.key, refusal.shard) == (2, sample.key, sample.shard)
    assert str(refusal.offset) in refusal.reason
    assert refusal.permanent
    assert (REGISTRY.get_sample_value(counter, {"reason": "corruption"}) or 0) - before == 3
    assert len([record for record in caplog.records if sample.key in record.message]) == 1


def test_substitutes_are_the_same_for_every_world_size_and_after_a_resume(
    make: Callable[..., VideoLoader], damaged: Path
) -> None:
    alone = make(damaged, batch_size=4)
    reference = take(alone, 6)
    ranks = [make(damaged, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    parts = [take(rank, 6) for rank in ranks]
    for number, batch in enumerate(reference):
        assert torch.equal(torch.cat([part[number]["video"] for part in parts]), batch["video"])
    resumed = make(damaged)
    resumed.load_state_dict(take_state(make(damaged), 3))
    assert all(same(a, b) for a, b in zip(reference[3:], take(resumed, 3), strict=True))
    assert alone.state_dict()["quarantine"] == [2]


def take_state(loader: VideoLoader, count: int) -> dict[str, Any]:
    take(loader, count)
    return loader.state_dict()


def test_a_resumed_run_goes_on_without_a_sample_that_was_repaired_meanwhile(
    make: Callable[..., VideoLoader], damaged: Path, dataset: Dataset
) -> None:
    loader = make(damaged)
    take(loader, 6)
    state = json.loads(json.dumps(loader.state_dict()))
    reference = take(loader, 6)
    repaired = make()  # the same digest, the right bytes
    repaired.load_state_dict(state)
    again = take(repaired, 6)
    assert all(same(a, b) for a, b in zip(reference, again, strict=True))
    assert repaired.state_dict()["quarantine"] == [2]
    assert 2 not in torch.cat([batch["id"] for batch in again]).tolist()


def test_a_clip_that_hits_the_damage_inside_a_file_is_replaced_and_the_rest_of_the_batch_is_intact(
    make: Callable[..., VideoLoader], media: Path, small_clips: Path, tmp_path: Path
) -> None:
    sources = [media / "corrupted.mp4", small_clips]
    packed = pack(sources, tmp_path / "ds", workers=1)
    number = packed.find("corrupted").id
    loader = make(packed, batch_size=7, clip=Clip(16, start="center"), shuffle=False)
    (batch,) = loader
    assert number not in batch["id"].tolist()
    others = [n for n in range(7) if n != number]
    assert [batch["id"].tolist()[n] for n in others] == others
    (refusal,) = loader.quarantine
    assert refusal.key == "corrupted"
    assert not refusal.permanent
    assert loader.state_dict()["quarantine"] == []
    early = make(packed, batch_size=7, clip=Clip(1, per_video=50, start="center"), shuffle=False)
    early.load_state_dict(early.state_dict() | {"batch": number * 50 // 7 + 1})
    assert next(iter(early))["id"].tolist() == [number] * 7  # whole clips of the same file are used
    assert not early.quarantine


def test_a_cache_that_rots_is_passed_by(make: Callable[..., VideoLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    class CorruptingReader(StoreReader):
        wrong = 0

        def read(self, key: str, ranges: Any) -> list[memoryview]:
            views = [bytearray(view) for view in super().read(key, ranges)]
            for view in views:
                view[len(view) // 3] ^= 255
                CorruptingReader.wrong += 1
            return [memoryview(view).toreadonly() for view in views]

    reference = take(make(), 2)
    monkeypatch.setattr(loader_module, "open_shard_reader", lambda store, *_: CorruptingReader(store))
    loader = make()
    assert all(same(a, b) for a, b in zip(reference, take(loader, 2), strict=True))
    assert CorruptingReader.wrong
    assert not loader.quarantine


def test_too_many_damaged_samples_are_an_error(make: Callable[..., VideoLoader], damaged: Path) -> None:
    loader = make(damaged, max_bad_samples=0)
    with pytest.raises(CorruptionError, match="more than 0 samples are damaged"):
        take(loader, 6)
    assert not _loader_threads()


def test_when_every_neighbour_is_damaged_the_first_is_named(
    make: Callable[..., VideoLoader], dataset: Dataset, tmp_path: Path
) -> None:
    copy = tmp_path / "ruins"
    shutil.copytree(dataset.url.removeprefix("file://"), copy)
    for shard in (copy / "shards").iterdir():
        shard.write_bytes(bytes(shard.stat().st_size))
    loader = make(copy)
    with pytest.raises(CorruptionError, match="so are all samples that could replace it"):
        next(iter(loader))
    assert loader.state_dict()["batch"] == 0


def test_a_lost_shard_is_damage_and_an_unreachable_store_is_not(
    make: Callable[..., VideoLoader], dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "lost"
    shutil.copytree(dataset.url.removeprefix("file://"), copy)
    lost = sorted((copy / "shards").iterdir())[0]
    lost.unlink()
    loader = make(copy, max_bad_samples=8)
    ids = torch.cat([batch["id"] for batch in loader]).tolist()
    gone = {n for n in range(len(dataset)) if dataset.sample(n).shard.endswith(lost.name)}
    assert gone
    assert not gone & set(ids)

    class UnreachableReader(StoreReader):
        def read(self, key: str, ranges: Any) -> list[memoryview]:
            raise TransientError("no route to the store")

    reference = take(make(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(loader_module, "open_shard_reader", lambda store, *_: UnreachableReader(store))
        unlucky = make()
        with pytest.raises(TransientError, match="no route"):
            next(iter(unlucky))
    assert not unlucky.quarantine
    assert all(same(a, b) for a, b in zip(reference, take(unlucky, 2), strict=True))  # back, and nothing was lost


# -- sound


def test_a_clip_has_the_audio_of_the_same_window(make: Callable[..., VideoLoader], dataset: Dataset) -> None:
    batch = next(iter(make(batch_size=24, clip=Clip(4, fps=8, per_video=3), audio=AudioSpec(8000, 2))))
    assert batch["audio"].shape == (24, 2, 4000)
    assert batch["audio"].dtype == torch.float32
    for slot, number in enumerate(batch["id"].tolist()):
        has_sound = dataset.sample(number).audio is not None
        assert bool(batch["audio_samples"][slot]) == has_sound
        assert bool(batch["audio"][slot].any()) == has_sound


# -- bad arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 100},
        {"size": (0, 5)},
        {"device": "tpu"},
        {"rank": 1},
        {"rank": 2, "world_size": 2},
        {"normalize": ((0, 0), (1, 1))},
        {"normalize": ((0, 0, 0), (1, 1, 0))},
        {"num_threads": 1000},
        {"prefetch_batches": 0},
        {"audio": True},
        {"version": 7},
    ],
)
def test_impossible_arguments_are_refused_at_once(make: Callable[..., VideoLoader], wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**wrong)


def test_a_dataset_that_is_not_there_or_holds_no_video_is_refused(
    make: Callable[..., VideoLoader], tmp_path: Path, media: Path
) -> None:
    with pytest.raises(NotFoundError):
        make(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="no sample with a video"):
        make(pack([media / "action.wav"], tmp_path / "sound", workers=1))


def test_samples_without_video_are_passed_over(make: Callable[..., VideoLoader], tmp_path: Path, media: Path) -> None:
    packed = pack([media / "action.wav", media / "h265.mp4", media / "rotated_90.mov"], tmp_path / "mixed", workers=1)
    ids = torch.cat([batch["id"] for batch in make(packed, batch_size=2, clip=Clip(1))])
    assert sorted(ids.tolist()) == [packed.find("h265").id, packed.find("rotated_90").id]


def test_clips_of_different_sizes_need_a_size(make: Callable[..., VideoLoader]) -> None:
    with pytest.raises(UsageError, match="size="):
        take(make(size=None), 6)


def test_dali_on_the_cpu_is_used_on_request_and_gives_the_same_pixels(
    make: Callable[..., VideoLoader], tmp_path: Path, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvidia.dali")
    from headrace.loaders.decode.dali import DaliDecoder

    packed = pack([media / "testsrc2_vp9.webm"], tmp_path / "vp9", workers=1)
    asked: list[int] = []
    real = DaliDecoder.decode
    monkeypatch.setattr(DaliDecoder, "decode", lambda self, found: asked.append(len(found)) or real(self, found))
    clip = Clip(3, per_video=2)
    usual, dali = make(packed, 1, clip=clip), make(packed, 1, clip=clip, decoder="dali")
    assert "decoder: pyav" in usual.explain()
    assert "decoder: dali_cpu" in dali.explain()
    reference = take(usual, 2)
    assert not asked
    assert all(map(same, take(dali, 2), reference))
    assert sum(asked) >= 2
    with pytest.raises(UsageError, match="decoder"):
        make(packed, 1, clip=clip, decoder="nvdec")


def test_rotation_is_applied_on_request(make: Callable[..., VideoLoader], tmp_path: Path, media: Path) -> None:
    packed = pack([media / "rotated_90.mov"], tmp_path / "one", workers=1)
    as_stored = next(iter(make(packed, 1, size=None, clip=Clip(1))))["video"]
    turned = next(iter(make(packed, 1, size=None, clip=Clip(1), rotate=True)))["video"]
    quarter_turns = -packed.sample(0).video.rotation // 90  # type: ignore[union-attr]
    assert quarter_turns % 2
    assert torch.equal(turned, torch.rot90(as_stored, quarter_turns, (-2, -1)))


# -- threads


def _loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-loader")]


def _ended() -> bool:
    deadline = time.monotonic() + 30
    while _loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _loader_threads()


def test_no_thread_outlives_the_loader_whatever_ends_it(make: Callable[..., VideoLoader], dataset: Dataset) -> None:
    def new() -> VideoLoader:
        return VideoLoader(dataset, 4, clip=Clip(2), size=SIZE, num_threads=2, drop_last=False)

    loader = new()
    assert not _loader_threads()  # not before the first batch
    take(loader, 1)
    assert _loader_threads()
    loader.close()
    loader.close()
    assert not _loader_threads()
    with pytest.raises(UsageError, match="closed"):
        next(iter(loader))

    with pytest.raises(ZeroDivisionError), new() as loader:
        for _ in loader:
            1 / 0  # noqa: B018
    assert not _loader_threads()

    forgotten = new()
    for _ in forgotten:
        break
    del forgotten
    gc.collect()
    assert _ended()


def test_ctrl_c_while_waiting_ends_the_threads_and_keeps_the_position(
    make: Callable[..., VideoLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make()
    reference = take(whole, 2)
    whole.close()
    loader = make()
    (first,) = take(loader, 1)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.loaders.batch.prefetcher.wait", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(loader, 1)
    assert not _loader_threads()
    (second,) = take(loader, 1)
    assert same(first, reference[0])
    assert same(second, reference[1])


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_decode_threads_leave_torchs_threads_alone(make: Callable[..., VideoLoader]) -> None:
    torch.set_num_threads(2)
    try:
        take(make(normalize=((0.5,) * 3, (0.5,) * 3)), 3)
        assert torch.get_num_threads() == 2
        seen: list[int] = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(1)


def test_memory_ahead_is_bounded_by_prefetch(make: Callable[..., VideoLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.loaders.batch.prefetcher import BatchExecutor

    most = 0
    start = BatchExecutor.start

    def counted(self: BatchExecutor, *what: Any) -> None:
        nonlocal most
        start(self, *what)
        most = max(most, len(self))

    monkeypatch.setattr(BatchExecutor, "start", counted)
    take(make(prefetch_batches=3), 9)
    assert most == 4  # the one being delivered and three more


def test_upcoming_samples_are_announced_soonest_first(
    make: Callable[..., VideoLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.loaders.batch.prefetcher import ANNOUNCED_BATCHES, PLANNED_AT_ONCE

    announcements: list[list[tuple[str, int, int]]] = []
    announced = threading.Semaphore(0)  # by the planner, which the trainer does not wait for

    class RecordingReader(StoreReader):
        def announce(self, upcoming: Any) -> None:
            announcements.append(list(upcoming))
            announced.release()

    def opened(store: Any, sidecar: Any, _meter: Any) -> ShardReader:
        return RecordingReader(store)

    monkeypatch.setattr(loader_module, "open_shard_reader", opened)
    loader = make(shuffle=False, prefetch_batches=1)
    take(loader, 1)
    samples = [loader.dataset.sample(n // 3) for n in range(24)]
    members = [sample.member(sample.video.ext) for sample in samples if sample.video]
    expected = [(sample.shard, member.offset, member.length) for sample, member in zip(samples, members, strict=True)]
    assert announced.acquire(timeout=60)
    assert announced.acquire(timeout=60)
    assert announcements[0] == expected[:4]  # the first batch by itself
    assert announcements[1][:20] == expected[4:]
    assert len(announcements[1]) == 4 * (ANNOUNCED_BATCHES + PLANNED_AT_ONCE)


# -- a GPU


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_batches_are_there_and_hold_the_same_pixels_within_one(make: Callable[..., VideoLoader]) -> None:
    for gpu, cpu in zip(take(make(device="cuda"), 6), take(make(), 6), strict=True):
        assert gpu["video"].is_cuda
        assert torch.equal(gpu["id"], cpu["id"])
        assert (gpu["video"].cpu().int() - cpu["video"].int()).abs().max() <= 2  # decoding 1, resizing 1


@pytest.mark.gpu
@needs_gpu
def test_batches_for_the_cpu_are_pinned_when_cuda_is_there(make: Callable[..., VideoLoader]) -> None:
    assert next(iter(make()))["video"].is_pinned()
