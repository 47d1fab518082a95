"""Clips and windows from long files: the same to the bit as when the files are read whole, from a small part of their bytes."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.dataio import open_store, pack
from headrace.dataio.core import metrics
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Sample
from headrace.loaders import AudioLoader, AudioSpec, Clip, Mixture, VideoLoader, Window
from headrace.loaders import loader as loader_module
from headrace.loaders.decode import mp4_excerpt, subprocess_decoder, trim
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fetch.partial_file import HEAD_CACHE_BYTES, PartialFile
from headrace.loaders.fetch.sample_reader import SampleReader
from headrace.loaders.quarantine.records import SkippedSample
from tests.support import long_media, reference_decoder, video_corpus

pytestmark = pytest.mark.slow

CLIP, PARTS = Clip(4, 2, per_video=5), Clip(4, 2, per_video=12)


def read() -> float:
    """Bytes that this process read from local files so far."""
    return metrics.store_bytes.labels("posix", "read")._value.get()


def clips(url: Any, **options: Any) -> list[tuple[str, float, torch.Tensor, torch.Tensor]]:
    """Key, time, pictures and sound of an epoch's clips."""
    sizes: dict[str, Any] = {
        "size": (32, 32),
        "audio": AudioSpec(16_000, seconds=0.5),
        "sidecar": None,
        "num_threads": 2,
        "seed": 3,
    }
    with VideoLoader(url, 2, clip=CLIP, drop_last=False, **(sizes | options)) as loader:
        return [
            (key, clip, video.clone(), audio.clone())
            for batch in loader
            for key, clip, video, audio in zip(
                batch["key"], batch["clip"].tolist(), batch["video"], batch.get("audio", batch["video"]), strict=True
            )
        ]


def alike(some: Any, others: Any) -> bool:
    """Whether two epochs are the same, to the bit."""
    return len(some) == len(others) and all(
        one[:2] == other[:2] and all(map(torch.equal, one[2:], other[2:]))
        for one, other in zip(some, others, strict=True)
    )


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Until this is undone, files are read whole, as those of datasets without pieces are."""
    with monkeypatch.context() as context:
        context.setattr(byte_ranges, "member_of", lambda sample, ext: None)
        yield context


@pytest.fixture(scope="session")
def expected(films: Path) -> Any:
    """The clips of whole files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "member_of", lambda sample, ext: None)
        return clips(films / "ds")


def test_clips_and_their_sound_are_those_of_whole_files(films: Path, expected: Any) -> None:
    with Dataset(str(films / "ds")) as dataset:
        assert all(sample.members[0].pieces for sample in dataset.samples(range(len(dataset))))
    assert alike(clips(films / "ds"), expected)


def test_clips_of_excerpts_are_those_of_whole_files_and_read_no_more(
    films: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    once: Any = {"evaluate": True, "shuffle": False, "num_threads": 1}  # nothing is read ahead for another epoch
    before, real, taken = read(), mp4_excerpt.excerpt, list[bool]()
    in_order = clips(films / "ds", **once)
    plainly = read() - before
    monkeypatch.setattr(mp4_excerpt, "FEW", 0)
    monkeypatch.setattr(trim, "excerpt", lambda *asked: (made := real(*asked), taken.append(made is not None))[0])
    before = read()
    assert alike(clips(films / "ds", **once), in_order)
    assert read() - before <= plainly
    assert alike(clips(films / "ds"), expected)
    assert sum(taken) > CLIP.per_video


@pytest.mark.parametrize("name", ["front-mp4", "back-mp4", "film-mkv"])
def test_a_clip_costs_a_small_part_of_its_file(films: Path, name: str) -> None:
    with Dataset(str(films / "ds")) as dataset:
        size, before = dataset.find(name).members[0].length, read()
        seen = len(clips(dataset.where(f"key = '{name}'")))
    assert read() - before < (seen + 4) * size / 4  # a few more are read ahead


def test_clips_are_those_of_plain_decoding(films: Path) -> None:
    with Dataset(str(films / "ds")) as dataset:
        images, times = reference_decoder.frames(dataset.read(dataset.find("front-mp4"), "mp4"))
        alone = dataset.where("key = 'front-mp4'")
        loader = VideoLoader(alone, 1, clip=CLIP, size=None, sidecar=None, num_threads=2)
        for batch in loader:
            for start, video in zip(batch["clip"].tolist(), batch["video"], strict=True):
                first = min(range(long_media.FRAMES), key=lambda n: abs(float(times[n]) - start))
                wanted = np.stack(images[first : first + 8 : 2]).transpose(0, 3, 1, 2)
                assert np.array_equal(video.numpy(), wanted)
        loader.close()


@pytest.mark.parametrize("few", [0, mp4_excerpt.FEW])
@pytest.mark.parametrize("name", ["front-mp4", "back-mp4", "film-mkv"])
def test_what_a_clip_reads_was_foreseen(films: Path, name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp4_excerpt, "FEW", few)
    missed, predicted = list[int](), list[int]()
    fetch_on, prefetch = PartialFile._fetch_on, PartialFile.prefetch
    monkeypatch.setattr(PartialFile, "_fetch_on", lambda self, number: (missed.append(number), fetch_on(self, number)))
    monkeypatch.setattr(PartialFile, "prefetch", lambda self, runs: (predicted.append(len(runs)), prefetch(self, runs)))
    with Dataset(str(films / "ds")) as dataset:
        clips(dataset.where(f"key = '{name}'"), audio=None)
    assert len(predicted) >= CLIP.per_video
    assert not missed


def test_a_loader_says_how_much_of_a_film_a_clip_reads(films: Path) -> None:
    with VideoLoader(films / "ds", 1, clip=CLIP, sidecar=None) as loader:
        explanations = {sample.key: loader.explain(sample) for sample in loader.dataset.samples(range(4))}
    assert "reading: about 256 KiB of its 6.5 MiB for a clip" in explanations["front-mp4"]
    assert "reading: its whole file" in explanations["fragments-mp4"]


@pytest.mark.parametrize("at", [-1, 0, 10**9])
@pytest.mark.parametrize("head", [(), ((0, 1),), ((3, 2), (7, 1))])
def test_wrong_hints_change_nothing(
    films: Path, expected: Any, at: int, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Dataset.samples

    def misled(self: Dataset, numbers: Any) -> list[Sample]:
        return [_misled(sample, at, head) for sample in samples(self, numbers)]

    monkeypatch.setattr(Dataset, "samples", misled)
    monkeypatch.setattr(byte_ranges, "reads_part_of_video", lambda *_, **__: True)
    assert alike(clips(films / "ds"), expected)


def _misled(sample: Sample, at: int, head: Any) -> Sample:
    video, (member,) = sample.video, sample.members
    assert video is not None
    assert member.pieces is not None
    keys = tuple(replace(key, at=at) for key in video.key_frames)
    member = replace(member, pieces=replace(member.pieces, head=head))
    return replace(sample, video=replace(video, key_frames=keys), members=(member,))


def test_processes_that_may_crash_get_what_they_ask_for(
    films: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alike(clips(films / "ds", decode_in_subprocess=60.0), expected)
    whole, nothing = list[int](), ((0, 1),)
    monkeypatch.setattr(subprocess_decoder, "_MAX_PIECE_REQUESTS", 2)
    monkeypatch.setattr(byte_ranges, "runs", lambda member, spans: nothing)
    get = PartialFile.__getitem__
    monkeypatch.setattr(PartialFile, "__getitem__", lambda self, where: (whole.append(1), get(self, where))[1])
    assert alike(clips(films / "ds", decode_in_subprocess=60.0), expected)
    assert whole  # of one file at least so much was missing that all of it was sent


# --- sound alone


def windows(url: Any) -> list[tuple[str, float, torch.Tensor]]:
    """Key, time and sound of an epoch's windows."""
    options: dict[str, Any] = {"sidecar": None, "num_threads": 2, "seed": 5, "drop_last": False}
    with AudioLoader(url, 1, window=Window(1.5, per_sample=4), sample_rate=16_000, **options) as loader:
        return [(batch["key"][0], float(batch["start"][0]), batch["audio"][0].clone()) for batch in loader]


def test_windows_of_long_recordings_are_those_of_whole_files(sounds: Path, whole: pytest.MonkeyPatch) -> None:
    expected = windows(sounds / "ds")
    whole.undo()
    assert len(expected) == 4 * len(long_media.SOUNDS)
    assert alike(windows(sounds / "ds"), expected)


@pytest.mark.parametrize("name", ["pcm_s16le-long", "flac-long", "libmp3lame-long"])
def test_a_window_costs_a_small_part_of_its_file(sounds: Path, name: str) -> None:
    with Dataset(str(sounds / "ds")) as dataset:
        size, before = dataset.find(name).members[0].length, read()
        seen = len(windows(dataset.where(f"key = '{name}'")))
    assert read() - before < (seen + 4) * size / 2


@pytest.mark.parametrize("pictures", ["long", "short"])
def test_a_clip_reads_part_of_a_long_recording_stored_next_to_its_video(
    pictures: str, films: Path, sounds: Path, tmp_path: Path, whole: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    if pictures == "long":
        long_media.copied((films / "clips" / "front-mp4.mp4").read_bytes(), "a.mp4", {}, tmp_path / "in", silent=True)
    else:
        (tmp_path / "in" / "a.mp4").write_bytes(
            video_corpus.make(video_corpus.Made("a.mp4", "libx264", "mp4", frames=60))
        )
    shutil.copy(sounds / "clips" / "pcm_s16le-long.wav", tmp_path / "in" / "a.wav")
    with pack([tmp_path / "in"], tmp_path / "ds", workers=1) as dataset:
        (sample,) = dataset
        assert sample.audio is not None
        assert sample.audio.ext == "wav"
        assert (pictures == "long") == (sample.member("mp4").pieces is not None)
    expected = clips(tmp_path / "ds")
    whole.undo()
    before = read()
    assert alike(clips(tmp_path / "ds"), expected)
    assert read() - before < CLIP.per_video * sum(member.length for member in sample.members) / 2


# --- damage


@pytest.fixture
def damaged(films: Path, tmp_path: Path) -> tuple[Path, int]:
    """The films, one of which has a wrong byte in its middle, and the frame there."""
    shutil.copytree(films / "ds", tmp_path / "ds")
    with Dataset(str(tmp_path / "ds")) as dataset:
        sample = dataset.find("front-mp4")
    assert sample.video is not None
    key = sample.video.key_frames[len(sample.video.key_frames) // 2]
    with (tmp_path / "ds" / sample.shard).open("r+b") as shard:
        shard.seek(sample.members[0].offset + key.at + 5000)
        wrong = bytes([shard.read(1)[0] ^ 1])
        shard.seek(-1, io.SEEK_CUR)
        shard.write(wrong)
    return tmp_path / "ds", key.index


def test_damage_costs_the_clips_that_need_it_and_no_others(films: Path, damaged: tuple[Path, int]) -> None:
    def epoch(url: Path) -> tuple[list[tuple[str, float]], tuple[SkippedSample, ...]]:
        options: dict[str, Any] = {
            "size": (16, 16),
            "sidecar": None,
            "seed": 3,
            "on_error": "skip",
            "drop_last": False,
        }
        with VideoLoader(url, 2, clip=PARTS, num_threads=2, max_bad_samples=20, **options) as loader:
            seen = [one for batch in loader for one in zip(batch["key"], batch["clip"].tolist(), strict=True)]
            return seen, loader.quarantine

    (sound, none), (seen, refused) = epoch(films / "ds"), epoch(damaged[0])
    missing = [one for one in sound if one not in seen]
    assert not none
    assert 1 <= len(missing) <= 6
    assert seen == [one for one in sound if one not in missing]
    assert all(key == "front-mp4" and abs(clip * 25 - damaged[1]) < 80 for key, clip in missing)
    assert [(one.key, one.code, one.permanent) for one in refused] == [("front-mp4", "corruption", False)]
    assert "are not those that were packed" in refused[0].reason


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_stands_in_for_damage_is_the_same_on_any_number_of_ranks(damaged: tuple[Path, int], ranks: int) -> None:
    def epoch(rank: int, of: int, batch: int) -> list[list[tuple[str, float]]]:
        options: dict[str, Any] = {
            "size": (16, 16),
            "sidecar": None,
            "num_threads": 2,
            "seed": 3,
            "max_bad_samples": 20,
        }
        with VideoLoader(damaged[0], batch, clip=PARTS, rank=rank, world_size=of, **options) as loader:
            return [list(zip(one["key"], one["clip"].tolist(), strict=True)) for one in loader]

    alone = epoch(0, 1, 6)
    shares = [epoch(rank, ranks, 6 // ranks) for rank in range(ranks)]
    assert [[one for part in parts for one in part] for parts in zip(*shares, strict=True)] == alone


def test_a_truncated_shard_costs_the_clips_after_the_cut(films: Path, tmp_path: Path) -> None:
    shutil.copytree(films / "ds", tmp_path / "ds")
    with Dataset(str(tmp_path / "ds")) as dataset:
        last = max(dataset.samples(range(len(dataset))), key=lambda sample: (sample.shard, sample.members[0].offset))
    member = last.members[0]
    os.truncate(tmp_path / "ds" / last.shard, member.offset + member.length * 3 // 4)
    options: dict[str, Any] = {
        "size": (16, 16),
        "sidecar": None,
        "num_threads": 2,
        "on_error": "skip",
        "drop_last": False,
    }
    with VideoLoader(tmp_path / "ds", 2, clip=PARTS, max_bad_samples=20, **options) as loader:
        seen = [key for batch in loader for key in batch["key"]]
        assert [one.key for one in loader.quarantine] == [last.key]
    assert seen.count(last.key) < 12
    assert len(seen) - seen.count(last.key) == 36


def test_the_sources_of_a_mixture_share_what_is_held_of_heads(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, real = list[int](), SampleReader
    monkeypatch.setattr(
        loader_module, "SampleReader", lambda reader, store, most: (held.append(most), real(reader, store, most))[1]
    )
    mixture = Mixture({"one": str(films / "ds"), "other": str(films / "ds")})
    with VideoLoader(mixture, 2, clip=CLIP, size=(16, 16), sidecar=None, num_threads=2) as loader:
        assert loader.memory["heads"] == 0
        assert len(next(iter(loader))["key"]) == 2
        assert 0 < loader.memory["heads"] <= HEAD_CACHE_BYTES
    assert held == [HEAD_CACHE_BYTES // 2] * 2


# --- elsewhere


@pytest.mark.s3
def test_clips_from_s3_are_the_same(films: Path, expected: Any, s3_url: str) -> None:
    with open_store(s3_url) as target:
        for path in [films / "ds" / "dataset.json", *(films / "ds").glob("[a-z]*/*.*")]:
            target.put(str(path.relative_to(films / "ds")), path.read_bytes())
    assert alike(clips(s3_url), expected)
