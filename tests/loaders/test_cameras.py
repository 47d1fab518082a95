"""Several cameras of a sample: each frame is the one that is shown at the instant of the driving camera's frame."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from headrace.dataio import index
from headrace.dataio.core import log
from headrace.dataio.core.errors import CorruptionError, MismatchError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import Sample
from headrace.loaders import Audio, Bucket, Buckets, Clip, Image, Json, Loader, Mask, Rows, Video
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fetch.partial_file import PartialFile
from tests.support import long_media, numbered_video
from tests.support.batches import take
from tests.support.noise_video import noise_video
from tests.support.shared_folder import shared_folder

pytestmark = pytest.mark.slow

SAMPLES, SECONDS = 5, 4
RANDOM = np.random.default_rng(5)
GAPS = np.cumsum(RANDOM.integers(7, 90, 120)).tolist()


def camera(name: str, number: int) -> bytes:
    """The file of a camera: they differ in rate, time base, container, start and length."""
    if name == "mp4":
        return numbered_video.make(25 * SECONDS, options={"bf": "2"}, offset=number)
    if name == "cam1.mkv":
        return numbered_video.make(30 * SECONDS, container="matroska", rate=30, codec="libx264", options={"bf": "3"})
    if name == "cam2.mp4":
        return numbered_video.make(10 * SECONDS + 4, rate=10, options={"g": "5"})
    if name == "cam3.mp4":  # of a variable rate
        return numbered_video.make(len(GAPS), stamps=GAPS, time_base=Fraction(1, 1000), options={"bf": "0", "g": "7"})
    assert name == "late.mp4"
    stamps = [9000 * 2 + 3600 * n for n in range(40)]
    return numbered_video.make(40, stamps=stamps, time_base=Fraction(1, 90_000), options={"bf": "0"})


CAMERAS = ("mp4", "cam1.mkv", "cam2.mp4", "cam3.mp4")


def files_of(number: int) -> dict[str, bytes]:
    files = {name: camera(name, number) for name in CAMERAS if not (number == 3 and name == "cam2.mp4")}
    files["json"] = json.dumps({"label": number}).encode()
    if number == 4:
        files["late.mp4"] = camera("late.mp4", number)
    return files


def write_tar(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for ext, data in files.items():
                member = tarfile.TarInfo(f"{key}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "cameras", _make)


def _make(folder: Path) -> None:
    (folder / "shards").mkdir()
    write_tar(folder / "shards" / "0.tar", {str(n): files_of(n) for n in range(SAMPLES)})
    index([str(folder / "shards")], str(folder / "ds"), workers=1).close()


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Loader]]:
    loaders = []

    def loader(fields: Any, batch_size: int | None = 2, source: Any = None, **options: Any) -> Loader:
        settings = {"num_threads": 2, "sidecar": None, "trust_mounts": True} | options
        loaders.append(Loader(source or folder / "ds", batch_size, fields=fields, **settings))
        return loaders[-1]

    yield loader
    for one in loaders:
        one.close()


_shown: dict[tuple[str, int], list[Fraction]] = {}


def shown(name: str, number: int) -> list[Fraction]:
    """When the frames of a camera are shown, according to plain PyAV."""
    if (name, number) not in _shown:
        with av.open(io.BytesIO(camera(name, number)), "r") as container:
            decoded: list[Any] = list(container.decode(video=0))
        _shown[name, number] = [frame.pts * frame.time_base for frame in decoded]
    return _shown[name, number]


def expected(name: str, number: int, instants: list[Fraction]) -> list[int]:
    times = shown(name, number)
    return [max(0, bisect_right(times, instant + Fraction(1, 1000)) - 1) for instant in instants]


SIZE = (64, 160)
FRONT = Clip(5, fps=9)
CLIPS = [FRONT, Clip(6, 3), Clip(4), Clip(3, fps=4), Clip(2, 40), Clip(1)]


@pytest.mark.parametrize("clip", CLIPS)
def test_cameras_show_the_instants_of_the_driving_camera(make: Callable[..., Loader], clip: Clip) -> None:
    others = {"cam1": "cam1.mkv", "cam2": "cam2.mp4", "cam3": "cam3.mp4"}
    fields = {name: Video(file=file, like="front", size=SIZE) for name, file in others.items()}
    loader = make({**fields, "front": Video(clip, SIZE), "label": Json("label")})
    for batch in take(loader, 4):
        for slot, number in enumerate(int(key) for key in batch["key"]):
            front = numbered_video.numbers_in(batch["front"][slot])
            instants = [shown("mp4", number)[frame] for frame in front]
            assert float(instants[0]) == pytest.approx(float(batch["front.start"][slot]))
            for name, file in others.items():
                frames = expected(file, number, instants)
                assert numbered_video.numbers_in(batch[name][slot]) == frames, (name, number)
                assert float(batch[f"{name}.start"][slot]) == pytest.approx(float(shown(file, number)[frames[0]]))


def test_any_camera_may_drive_the_others(make: Callable[..., Loader]) -> None:
    fields = {
        "wrist": Video(Clip(4, fps=10, start="center"), SIZE, file="cam3.mp4"),
        "front": Video(like="wrist", size=SIZE),
        "side": Video(like="wrist", file=".cam1.mkv", size=SIZE, pixel_format="nv12"),
    }
    for batch in take(make(fields), 2):
        assert batch["side"].shape == (2, 4, SIZE[0] * 3 // 2, SIZE[1])
        assert batch["side.color"].shape == (2, 2)
        for slot, number in enumerate(int(key) for key in batch["key"]):
            instants = [shown("cam3.mp4", number)[n] for n in numbered_video.numbers_in(batch["wrist"][slot])]
            assert numbered_video.numbers_in(batch["front"][slot]) == expected("mp4", number, instants)
            luma = batch["side"][slot, :, : SIZE[0]][..., None]
            assert [numbered_video.number_in(frame) for frame in luma] == expected("cam1.mkv", number, instants)


def test_samples_without_a_camera_are_left_out_and_counted(
    make: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    log._logged.clear()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        loader = make({"v": Video(Clip(2), SIZE), "w": Video(file="cam2.mp4", like="v", size=SIZE)}, evaluate=True)
        keys = sorted(key for batch in loader for key in batch["key"])
    assert keys == ["0", "1", "2", "4"]
    (line,) = [record.message for record in caplog.records if "left out" in record.message]
    assert line.startswith("1 of 5 samples of ")
    assert "lack .cam2.mp4" in line
    assert not [record for record in caplog.records if "cam2" in record.message and "not .cam" in record.message]


@pytest.mark.parametrize("pixel_format", ["rgb", "yuv420p"])
@pytest.mark.parametrize("first", [True, False])
def test_optional_cameras_are_zeros_where_they_are_missing(
    make: Callable[..., Loader], pixel_format: Any, first: bool
) -> None:
    camera2 = Video(file="cam2.mp4", like="v", size=SIZE, required=False, pixel_format=pixel_format)
    video = Video(Clip(2), SIZE)
    fields = {"w": camera2, "v": video} if first else {"v": video, "w": camera2}
    for evaluate in range(2):
        (batch,) = take(make(fields, batch_size=5, evaluate=bool(evaluate)), 1)
        present = [key != "3" for key in batch["key"]]
        assert batch["w.present"].tolist() == present
        assert "v.present" not in batch
        assert "w.color.present" not in batch
        for clip, there, start in zip(batch["w"], present, batch["w.start"], strict=True):
            assert bool(clip.any()) == there
            assert there or start == 0
        if pixel_format != "rgb":
            assert (batch["w.color"][:, 0] > 0).tolist() == present


def test_an_optional_camera_that_no_sample_of_a_batch_has_is_none(make: Callable[..., Loader], folder: Path) -> None:
    with Dataset(folder / "ds", trust_mounts=True) as dataset:
        alone = dataset.where("key = '3'")
        fields = {"v": Video(Clip(2), SIZE), "w": Video(file="cam2.mp4", like="v", size=SIZE, required=False)}
        batch = next(iter(make(fields, batch_size=1, source=alone)))
        assert batch["w"] is None
        assert batch["w.present"].tolist() == [False]


def test_normalized_optional_cameras_are_zeros_too(make: Callable[..., Loader]) -> None:
    half = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    camera2 = Video(file="cam2.mp4", like="v", size=SIZE, required=False, normalize=half, layout="CTHW")
    (batch,) = take(make({"v": Video(Clip(2), SIZE), "w": camera2}, batch_size=5), 1)
    assert batch["w"].shape == (5, 3, 2, *SIZE)
    assert not batch["w"][batch["key"].index("3")].any()


def test_a_video_that_shows_nothing_at_an_instant_makes_a_bad_sample(make: Callable[..., Loader]) -> None:
    fields = {"v": Video(Clip(2, start="center"), SIZE), "w": Video(file="late.mp4", like="v", size=SIZE)}
    loader = make(fields, 1, on_error="skip", max_bad_samples=4, evaluate=True)
    assert not [key for batch in loader for key in batch["key"]]
    (skipped,) = loader.quarantine
    assert "field 'w': .late.mp4 ends at 1.800 s, and the clip has a frame at 2." in skipped.reason
    fields["v"] = Video(Clip(2, start="every"), SIZE)
    loader = make(fields, 1, on_error="skip", max_bad_samples=100, evaluate=True, shuffle=False)
    next(iter(loader))
    (skipped,) = loader.quarantine
    assert "begins at 0.200 s, and the clip has a frame at 0.000 s" in skipped.reason


def test_an_index_that_does_not_describe_a_camera_says_what_to_do(
    make: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sample, "video_of", lambda self, ext: None if ext else self.video)
    loader = make({"v": Video(Clip(2), SIZE), "w": Video(file="cam2.mp4", like="v", size=SIZE)}, 4, on_error="skip")
    with pytest.raises(CorruptionError, match=r"the index does not describe a video in the sample's \.cam2\.mp4"):
        take(loader, 2)


def test_independent_videos_draw_their_own_clips(make: Callable[..., Loader]) -> None:
    fields = {
        "v": Video(Clip(2), SIZE),
        "w": Video(Clip(3), SIZE, file="cam1.mkv"),
        "i": Image(size=SIZE, file="cam1.mkv"),
    }
    batch = next(iter(make(fields)))
    for slot in range(2):
        frames = numbered_video.numbers_in(batch["w"][slot])
        assert frames == list(range(frames[0], frames[0] + 3))
    assert batch["i"].shape == (2, 3, *SIZE)


def test_other_decoders_of_the_same_clips_agree(make: Callable[..., Loader]) -> None:
    fields = {"v": Video(FRONT, SIZE), "w": Video(file="cam1.mkv", like="v", size=SIZE, crop="random", flip_prob=0.5)}
    plain, isolated = (take(make(fields, decode_in_subprocess=how), 2) for how in (False, 30.0))
    for one, other in zip(plain, isolated, strict=True):
        assert torch.equal(one["w"], other["w"])
        assert torch.equal(one["w.start"], other["w.start"])


def test_buckets_go_by_the_driving_camera(make: Callable[..., Loader]) -> None:
    buckets = Buckets((Bucket((32, 80), 1), Bucket((32, 80), 8)), budget=2 * 8 * 32 * 80)
    fields = {"v": Video(Clip(8)), "w": Video(file="cam1.mkv", like="v", size=SIZE)}
    batch = next(iter(make(fields, None, buckets=buckets)))
    assert batch["v"].shape == (2, 8, 3, 32, 80)
    assert batch["w"].shape == (2, 8, 3, *SIZE)
    with pytest.raises(UsageError, match="'w' has no size"):
        make(fields | {"w": Video(file="cam1.mkv", like="v")}, None, buckets=buckets)
    with pytest.raises(UsageError, match="follow the sample's own video"):
        make({"v": Video(Clip(8), file="cam1.mkv")}, None, buckets=buckets)


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"v": Video(like="front")}, "is like 'front', which is not a Video"),
    "a mistyped field": (
        {"front": Video(), "w": Video(like="front"), "v": Video(like="fornt")},
        r"a Video or Image field \(did you mean front\?\) \(it may be like: 'front'\)",
    ),
    "a chain": (
        {"a": Video(), "b": Video(like="a"), "c": Video(like="b")},
        "'c' is like 'b', which is itself like 'a'",
    ),
    "itself": ({"a": Video(like="a")}, "is itself like 'a'"),
    "an optional field": (
        {"a": Video(file="cam2.mp4", required=False), "b": Video(like="a")},
        "is like 'a', which some samples may lack",
    ),
    "audio of an optional field": (
        {"a": Video(Clip(2, fps=2), file="cam2.mp4", required=False), "b": Audio(like="a")},
        "is like 'a', which some samples may lack",
    ),
    "all clips of a file": ({"a": Video(Clip(2, start="every"), file="cam2.mp4")}, "start='every' follow"),
    "a file that no sample has": ({"a": Video(file="cam9.mp4")}, "has no sample with all of 'a'"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_cameras_are_refused(make: Callable[..., Loader], case: str) -> None:
    fields, reason = IMPOSSIBLE[case]
    with pytest.raises(UsageError, match=reason):
        make(fields)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"like": "a", "clip": Clip(2)}, "shows the instants of that field"),
        ({"file": "cam1.png"}, r'is an image, and the index describes only further videos.*Bytes\("cam1.png"\)'),
        ({"file": "cam1.txt"}, "is not a video file"),
        ({"file": ""}, "is not a video file"),
        ({"required": False}, "required=False is for a field with file="),
        ({"required": 1}, "required"),
        ({"file": 3}, "file"),
    ],
)
def test_impossible_options_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Video(**options)


@pytest.mark.parametrize("like", [["front"], {"name": "front"}, 3])
def test_a_field_is_like_a_name_and_nothing_else(like: Any) -> None:
    for field in (Video, Audio, Mask):
        with pytest.raises(UsageError, match=r"like cannot be .*give the name of a field"):
            field(like=like)
    with pytest.raises(UsageError, match=r"like cannot be .*give the name of a Video field"):
        Rows("rows.parquet", "state", like=like)


def test_an_image_is_not_like_another_field() -> None:
    with pytest.raises(UsageError, match="an Image is not like another field"):
        Image(like="a")


def test_the_state_names_the_files_that_decide(make: Callable[..., Loader]) -> None:
    alone = make({"v": Video(Clip(2), SIZE)}).state_dict()
    for fields in (
        {"v": Video(Clip(2), SIZE, file="cam1.mkv")},
        {"v": Video(Clip(2), SIZE), "w": Video(file="cam1.mkv", like="v", size=SIZE)},
        {"v": Video(Clip(2), SIZE, file="cam1.mkv", required=False)},
    ):
        loader = make(fields)
        with pytest.raises(MismatchError):
            loader.load_state_dict(alone)
        make(fields).load_state_dict(json.loads(json.dumps(loader.state_dict())))
    make({"v": Video(Clip(2), SIZE), "w": Video(file="cam1.mkv", like="v", size=SIZE, required=False)}).load_state_dict(
        alone
    )


def test_a_run_goes_on_exactly_on_other_ranks(make: Callable[..., Loader]) -> None:
    fields = {
        "front": Video(FRONT, SIZE, crop="random"),
        "wrist": Video(file="cam3.mp4", like="front", size=(32, 40), crop="random"),
        "side": Video(file="cam2.mp4", like="front", size=(32, 40), required=False),
    }
    options: dict[str, Any] = {"batch_size": 6, "drop_last": False, "seed": 5}
    whole = take(make(fields, **options), 6)
    loader = make(fields, **options)
    take(loader, 2)
    state = json.loads(json.dumps(loader.state_dict()))
    ranks = [make(fields, **options | {"batch_size": 3}, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for batch, *parts in zip(whole[2:], *(take(rank, 4) for rank in ranks), strict=True):
        assert [key for part in parts for key in part["key"]] == batch["key"]
        for name in ("front", "wrist", "side", "wrist.start", "side.present"):
            there = [part[name] for part in parts if part[name] is not None]
            if sum(map(len, there)) == len(batch["key"]):
                assert torch.equal(torch.cat(there), batch[name])


def test_each_camera_draws_its_own_crop(make: Callable[..., Loader]) -> None:
    one = Video(Clip(2), (32, 40), crop="random")
    fields = {"v": one, "w": Video(like="v", size=(32, 40), crop="random"), "c": Video(like="v", size=(32, 40))}
    batch = next(iter(make(fields)))
    assert torch.equal(batch["v"], batch["w"])  # the same video: the same crop
    assert not torch.equal(batch["v"], batch["c"])


def picture_of(height: int, width: int) -> bytes:
    frame = av.VideoFrame.from_ndarray(np.tile(np.arange(width, dtype=np.uint8), (height, 1)), format="gray")
    context: Any = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt, context.time_base = width, height, "gray", 1
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


def test_a_mask_is_aligned_with_the_camera_that_it_is_like(make: Callable[..., Loader], tmp_path: Path) -> None:
    small, large = numbered_video.make(8), numbered_video.make(8, height=128)
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "0.tar", {"0": {"mp4": small, "cam1.mp4": large, "mask.png": picture_of(128, 160)}})
    index([str(tmp_path / "shards")], str(tmp_path / "ds"), workers=1).close()
    fields = {
        "v": Video(Clip(2), size=(32, 80)),
        "w": Video(file="cam1.mp4", like="v", size=(64, 64), flip_prob=1.0),
        "m": Mask("mask.png", like="w"),
    }
    batch = next(iter(make(fields, 1, source=tmp_path / "ds")))
    row = batch["m"][0, 0].tolist()
    assert row == sorted(row, reverse=True)  # mirrored like the camera
    assert (min(row), max(row)) == (17, 143)  # the middle of its width, at half its size


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "long-cameras", _make_long)


def _make_long(folder: Path) -> None:
    (folder / "shards").mkdir()
    files = {"mp4": noise_video(600, 25, "mp4", 1), "cam1.mkv": noise_video(720, 30, "matroska", 2)}
    write_tar(folder / "shards" / "0.tar", {"0": files})
    index([str(folder / "shards")], str(folder / "ds"), workers=1).close()


@pytest.mark.parametrize("clip", [Clip(4, fps=5), Clip(4, 2)])
def test_long_cameras_are_read_in_part_and_as_predicted(
    make: Callable[..., Loader], long_folder: Path, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"v": Video(clip, (32, 32)), "w": Video(file="cam1.mkv", like="v", size=(32, 32))}
    settings: dict[str, Any] = {"batch_size": 1, "source": long_folder / "ds", "seed": 2}
    missed, predicted = list[int](), list[int]()
    fetch_on, prefetch = PartialFile._fetch_on, PartialFile.prefetch
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "_fetch_on", lambda self, number: (missed.append(number), fetch_on(self, number)))
        patch.setattr(PartialFile, "prefetch", lambda self, runs: (predicted.append(len(runs)), prefetch(self, runs)))
        partial = take(make(fields, **settings), 6)
    assert len(predicted) >= 12  # both files
    assert not missed
    with monkeypatch.context() as patch:
        patch.setattr(byte_ranges, "member_of", lambda sample, ext: None)
        whole = take(make(fields, **settings), 6)
    for one, other in zip(partial, whole, strict=True):
        assert torch.equal(one["v"], other["v"])
        assert torch.equal(one["w"], other["w"])


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with a video with sound (a real clip) and a second camera; a film of both; a separate sound of both."""
    return shared_folder(tmp_path_factory, "talking", _make_talking)


def _make_talking(folder: Path) -> None:
    (folder / "shards").mkdir()
    (folder / "front.mkv").write_bytes(long_media.film())
    for name in ("front.mp4", "sound.mp4"):
        long_media.copied((folder / "front.mkv").read_bytes(), name, {}, folder, silent=name == "front.mp4")
    with av.open(str(folder / "sound.mp4")) as source, av.open(str(folder / "sound.m4a"), "w") as output:
        track = output.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(audio=0):
            if packet.size:
                packet.stream = track
                output.mux(packet)
    silent, sound = (folder / "front.mp4").read_bytes(), (folder / "sound.mp4").read_bytes()
    samples = {
        "inside": {"mp4": sound, "cam1.mp4": silent, "cam2.mkv": (folder / "front.mkv").read_bytes()},
        "beside": {"mp4": silent, "cam1.mp4": silent, "m4a": (folder / "sound.m4a").read_bytes()},
    }
    samples["beside"]["cam2.mkv"] = samples["inside"]["cam2.mkv"]
    write_tar(folder / "shards" / "0.tar", samples)
    index([str(folder / "shards")], str(folder / "ds"), workers=1).close()


@pytest.mark.parametrize("key", ["inside", "beside"])
@pytest.mark.parametrize("whole", [False, True])
def test_the_sound_of_another_camera_s_clip_is_that_of_its_instants(
    make: Callable[..., Loader], talking: Path, key: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:
        monkeypatch.setattr(byte_ranges, "member_of", lambda sample, ext: None)
    clip = Clip(8, fps=12.5)
    with Dataset(talking / "ds", trust_mounts=True) as dataset:
        source = dataset.where(f"key = '{key}'")
        settings: dict[str, Any] = {"batch_size": 1, "source": source, "seed": 7}
        plain = make({"v": Video(clip, SIZE), "a": Audio(like="v")}, **settings)
        driven = make({"w": Video(clip, SIZE, file="cam1.mp4"), "a": Audio(like="w")}, **settings)
        like = make(
            {"v": Video(clip, SIZE), "w": Video(file="cam1.mp4", like="v", size=SIZE), "a": Audio(like="w")}, **settings
        )
        other = make(
            {"v": Video(clip, SIZE), "w": Video(file="cam2.mkv", like="v", size=SIZE), "a": Audio(like="w")}, **settings
        )
        for one, *others in zip(*(take(loader, 4) for loader in (plain, driven, like, other)), strict=True):
            assert one["a"].abs().max() > 0.05
            assert one["a.samples"].item() == one["a"].shape[-1]
            for another in others[:2]:
                assert torch.equal(one["a"], another["a"])
            # time stamps of Matroska are rounded to milliseconds
            assert abs(float(one["v.start"] - others[2]["w.start"])) <= 0.001
            assert others[2]["a"].shape == one["a"].shape
