"""`Loader`: any fields of a sample, in one exact order."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataio import index, pack
from headrace.dataio.core.errors import CorruptionError, MismatchError, UnsupportedError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioLoader, AudioSpec, Bucket, Buckets, Clip, LogMel, Mixture, VideoLoader, Window
from headrace.loaders.field_loader import Loader
from headrace.loaders.fields.audio import Audio
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.fields.video import Image, Video
from headrace.loaders.interfaces import Collate
from tests.support.batches import same, take
from tests.support.pictures import picture
from tests.support.shared_folder import shared_folder

pytestmark = pytest.mark.slow

SIZE = (32, 40)


@dataclasses.dataclass(frozen=True)
class Points(Field):
    """A point cloud of float32 (n, 4)."""

    files: tuple[str, ...] = ("points.bin",)
    collate: Collate = "concat"
    required: bool = True

    def decode(self, data: FieldInput) -> Any:
        points = np.frombuffer(data.files["points.bin"], np.float32)
        if len(points) % 4:
            raise CorruptionError("the number of values is not a multiple of 4")
        return points.reshape(-1, 4)


@dataclasses.dataclass(frozen=True)
class Label(Field):
    files: tuple[str, ...] = ("json",)
    collate: Collate = "stack"

    def decode(self, data: FieldInput) -> Any:
        return json.loads(bytes(data.files["json"]))["label"]


@dataclasses.dataclass(frozen=True)
class Caption(Field):
    collate: Collate = "list"
    uses_caption: bool = True
    required: bool = True

    def decode(self, data: FieldInput) -> Any:
        return data.sample.text


@dataclasses.dataclass(frozen=True)
class Never(Points):
    """A field that has no value for any sample."""

    def decode(self, data: FieldInput) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class Noise(Field):
    def decode(self, data: FieldInput) -> Any:
        return torch.rand(3, generator=data.generator())


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> Iterator[Dataset]:
    """Eight clips, all with labels; seven with points; six with captions."""
    folder = shared_folder(tmp_path_factory, "mixed", lambda at: _make_mixed(at, small_clips))
    with Dataset(folder / "ds", trust_mounts=True) as packed:
        yield packed


def _make_mixed(folder: Path, clips: Path) -> None:
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "0.tar", "w") as tar:
        for number, clip in enumerate(sorted(clips.iterdir())):
            files = {clip.suffix[1:]: clip.read_bytes(), "json": json.dumps({"label": number}).encode()}
            if number != 3:
                files["points.bin"] = points(number).tobytes()
            if number < 6:
                files["txt"] = f"clip {number}".encode()
            for ext, data in files.items():
                member = tarfile.TarInfo(f"{number}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    index([str(folder / "shards")], str(folder / "ds")).close()


def points(number: int) -> Any:
    return np.arange(4 * (number + 1), dtype=np.float32).reshape(-1, 4) + 100 * number


@pytest.fixture
def make(mixed: Dataset) -> Iterator[Callable[..., Loader]]:
    loaders = []

    def loader(fields: Any, source: Any = mixed, batch_size: int | None = 2, **options: Any) -> Loader:
        loaders.append(Loader(source, batch_size, fields=fields, **({"num_threads": 2} | options)))
        return loaders[-1]

    yield loader
    for one in loaders:
        one.close()


def test_a_batch_has_an_entry_for_each_field(make: Callable[..., Loader]) -> None:
    video = Video(Clip(2, 2), size=SIZE)
    loader = make({"video": video, "points": Points(), "label": Label(), "caption": Caption()}, shuffle=False)
    batch = next(iter(loader))
    assert list(batch) == ["video", "points", "points.offsets", "label", "caption", "id", "key", "video.start"]
    assert batch["video"].shape == (2, 2, 3, *SIZE)
    assert batch["video.start"].dtype == torch.float64
    numbers = [int(key) for key in batch["key"]]
    assert batch["label"].tolist() == numbers
    assert batch["caption"] == [f"clip {number}" for number in numbers]
    assert batch["points.offsets"].tolist() == [0, numbers[0] + 1, sum(numbers) + 2]
    assert torch.equal(batch["points"], torch.from_numpy(np.concatenate([points(number) for number in numbers])))


def test_samples_that_lack_a_required_field_are_left_out(make: Callable[..., Loader]) -> None:
    def keys(**fields: Field) -> list[str]:
        batches = take(loader := make(fields, evaluate=True, drop_last=False), len(loader))
        return sorted(key for batch in batches for key in batch["key"])

    assert keys(label=Label()) == list("01234567")
    assert keys(points=Points()) == list("0124567")
    assert keys(points=Points(), caption=Caption()) == list("01245")
    assert keys(points=Points(required=False), caption=Caption(required=False)) == list("01234567")


@pytest.mark.parametrize("collate", ["concat", "pad", "list"])
def test_samples_without_an_optional_field_have_an_empty_value(make: Callable[..., Loader], collate: Any) -> None:
    loader = make({"points": Points(collate=collate, required=False)}, batch_size=8, shuffle=False)
    batch = next(iter(loader))
    numbers = [int(key) for key in batch["key"]]
    assert batch["points.present"].tolist() == [number != 3 for number in numbers]
    lengths = [0 if number == 3 else number + 1 for number in numbers]
    if collate == "concat":
        assert batch["points.offsets"].diff().tolist() == lengths
    elif collate == "list":
        assert [None if value is None else len(value) for value in batch["points"]] == [n or None for n in lengths]
    else:
        assert batch["points"].shape == (8, 8, 4)
        assert batch["points.lengths"].tolist() == lengths
        for row, number in zip(batch["points"], numbers, strict=True):
            assert not row[lengths[numbers.index(number)] :].any()


@pytest.mark.parametrize(("collate", "entry", "length"), [("pad", "lengths", 3), ("concat", "offsets", 4)])
def test_a_batch_without_any_value_has_lengths_and_offsets_of_zero(
    make: Callable[..., Loader], collate: Any, entry: str, length: int
) -> None:
    field = Never(collate=collate, required=False)
    batch = next(iter(make({"value": field, "label": Label()}, batch_size=3)))
    assert batch["value"] is None
    assert batch["value.present"].tolist() == [False] * 3
    assert (batch[f"value.{entry}"].dtype, batch[f"value.{entry}"].tolist()) == (torch.int64, [0] * length)


@dataclasses.dataclass(frozen=True)
class FirstPoint(Points):
    collate: Collate = "stack"

    def decode(self, data: FieldInput) -> Any:
        return super().decode(data)[0]


def test_a_stacked_optional_field_is_zero_where_it_is_missing(make: Callable[..., Loader]) -> None:
    loader = make({"first": FirstPoint(required=False)}, batch_size=8, shuffle=False, copy=False)
    for _ in range(3):  # memory is reused
        batch = next(iter(loader))
        for row, key, present in zip(batch["first"], batch["key"], batch["first.present"], strict=True):
            assert row.tolist() == ([0] * 4 if key == "3" else points(int(key))[0].tolist())
            assert bool(present) == (key != "3")
        del batch


def test_a_function_collates(make: Callable[..., Loader]) -> None:
    loader = make({"points": Points(collate=lambda values: [len(value) for value in values])}, shuffle=False)
    batch = next(iter(loader))
    assert batch["points"] == [int(key) + 1 for key in batch["key"]]


@pytest.mark.parametrize("options", [{}, {"drop_last": False, "batch_size": 3}, {"evaluate": True, "batch_size": 5}])
def test_a_video_field_delivers_what_video_loader_delivers(
    make: Callable[..., Loader], mixed: Dataset, options: dict[str, Any]
) -> None:
    clip, spec = Clip(2, fps=8, per_video=2), AudioSpec(8000)
    loader = make(
        {"video": Video(clip, SIZE, crop="random"), "audio": Audio(like="video", sample_rate=8000)}, **options
    )
    settings = {"batch_size": 2, "num_threads": 2} | options
    with VideoLoader(mixed, clip=clip, size=SIZE, crop="random", audio=spec, **settings) as video_loader:
        assert loader.state_dict() == video_loader.state_dict()
        for ours, theirs in zip(take(loader, 6), take(video_loader, 6), strict=True):
            assert torch.equal(ours["video"], theirs["video"])
            assert torch.equal(ours["audio"], theirs["audio"])
            assert torch.equal(ours["video.start"], theirs["clip"])
            assert torch.equal(ours["audio.samples"], theirs["audio_samples"])
            assert ours["id"].tolist() == theirs["id"].tolist()


def test_an_audio_field_delivers_what_audio_loader_delivers(
    make: Callable[..., Loader], sounds: Path, tmp_path: Path
) -> None:
    with pack([sounds], tmp_path / "sounds", workers=1) as dataset:
        window, mel = Window(0.5, start="every"), LogMel(n_mels=20)
        loader = make({"sound": Audio(0.5, start="every", features=mel)}, dataset)
        with AudioLoader(dataset, 2, window=window, features=mel, num_threads=2) as audio_loader:
            assert loader.state_dict() == audio_loader.state_dict()
            for ours, theirs in zip(take(loader, 4), take(audio_loader, 4), strict=True):
                assert torch.equal(ours["sound"], theirs["mel"])
                assert torch.equal(ours["sound.start"], theirs["start"])


def test_two_fields_show_one_clip_in_two_sizes(make: Callable[..., Loader]) -> None:
    fields = {"small": Video(Clip(2), (16, 16)), "large": Video(Clip(2), SIZE, dtype="float32", layout="CTHW")}
    batch = next(iter(make(fields)))
    assert batch["small"].shape == (2, 2, 3, 16, 16)
    assert batch["large"].shape == (2, 3, 2, *SIZE)
    assert batch["large"].dtype == torch.float32
    assert torch.equal(batch["small.start"], batch["large.start"])


@pytest.mark.parametrize(
    ("layout", "shape"), [("TCHW", (2, 3, *SIZE)), ("CTHW", (2, 3, *SIZE)), ("THWC", (2, *SIZE, 3))]
)
def test_an_image_has_no_axis_for_time(make: Callable[..., Loader], mixed: Dataset, layout: str, shape: Any) -> None:
    batch = next(iter(make({"picture": Image(size=SIZE, layout=layout)})))
    assert batch["picture"].shape == shape
    with VideoLoader(mixed, 2, clip=Clip(1), size=SIZE, layout=layout) as loader:
        assert torch.equal(batch["picture"].flatten(), next(iter(loader))["video"].flatten())


def test_buckets_go_by_the_video_field(make: Callable[..., Loader], mixed: Dataset) -> None:
    buckets = Buckets((Bucket((32, 32)), Bucket((32, 48))), budget=2 * 2 * 32 * 48)
    loader = make({"label": Label(), "video": Video(Clip(2))}, batch_size=None, buckets=buckets, drop_last=False)
    with VideoLoader(mixed, clip=Clip(2), buckets=buckets, drop_last=False) as other:
        for ours, theirs in zip(take(loader, len(loader)), take(other, len(other)), strict=True):
            assert ours["bucket"] == theirs["bucket"]
            assert torch.equal(ours["video"], theirs["video"])
            assert ours["label"].tolist() == [int(key) for key in theirs["key"]]


@pytest.fixture(scope="session")
def images_and_videos(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> Iterator[Dataset]:
    """Eight clips and six images."""

    def make(folder: Path) -> None:
        (sources := folder / "in").mkdir()
        for clip in small_clips.iterdir():
            (sources / clip.name).write_bytes(clip.read_bytes())
        for number in range(6):
            (sources / f"image{number}.png").write_bytes(picture("png", 40 + 8 * number, 64))
        pack([sources], folder / "ds", workers=1).close()

    with Dataset(shared_folder(tmp_path_factory, "images-and-videos", make) / "ds") as packed:
        yield packed


IMAGE_BUCKETS = Buckets((Bucket((32, 32), 1), Bucket((32, 48), 1), Bucket((32, 32), 4)), budget=3 * 4 * 32 * 32)


def test_images_and_videos_come_in_one_order(make: Callable[..., Loader], images_and_videos: Dataset) -> None:
    fields = {"video": Video(Clip(4)), "name": Caption(required=False)}
    settings = {"batch_size": None, "buckets": IMAGE_BUCKETS, "drop_last": False, "seed": 1}
    loader = make(fields, images_and_videos, **settings)
    batches = take(loader, len(loader))
    assert sorted(key for batch in batches for key in batch["key"]) == sorted(one.key for one in images_and_videos)
    for batch in batches:
        frames = 4 if batch["bucket"] == 2 else 1
        assert batch["video"].shape[1] == frames
        assert {key.startswith("image") for key in batch["key"]} == {frames == 1}
    state = json.loads(json.dumps(loader.state_dict()))
    whole, ranks = (
        take(loader, 4),
        [make(fields, images_and_videos, rank=r, world_size=3, **settings) for r in range(3)],
    )
    for rank in ranks:
        rank.load_state_dict(state)
    for batch, *parts in zip(whole, *(take(rank, 4) for rank in ranks), strict=True):
        assert [key for part in parts for key in part["key"]] == batch["key"]


def test_a_mixture_of_images_and_videos_keeps_to_its_weights(
    make: Callable[..., Loader], images_and_videos: Dataset
) -> None:
    images, videos = (images_and_videos.where(f"key {how} 'image%'") for how in ("LIKE", "NOT LIKE"))
    mixture = Mixture({"images": images, "videos": videos}, weights={"images": 3, "videos": 1})
    loader = make({"video": Video(Clip(4))}, mixture, batch_size=None, buckets=IMAGE_BUCKETS)
    counts = {"images": 0, "videos": 0}
    for batch in take(loader, 60):
        for source in batch["source"]:
            counts[source] += 1
    assert 0.7 < counts["images"] / sum(counts.values()) < 0.8


def test_an_evaluation_of_images_and_videos_takes_each_once(
    make: Callable[..., Loader], images_and_videos: Dataset
) -> None:
    settings: dict[str, Any] = {"buckets": IMAGE_BUCKETS, "evaluate": True, "drop_last": False}
    with VideoLoader(images_and_videos, clip=Clip(4), **settings) as loader:
        keys = [key for batch in loader for key in batch["key"]]
    assert sorted(keys) == sorted(one.key for one in images_and_videos)


def test_a_transform_adds_drops_and_renames_values(make: Callable[..., Loader]) -> None:
    def transform(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        assert values["points"].dtype == torch.float32
        return {
            "pixels": values["video"].float().mean((2, 3)),
            "random": torch.rand(2, generator=generator),
            "many": values["points"][:, 0],
            "word": f"label {values['label']}",
        }

    fields = {"video": Video(Clip(2), SIZE), "points": Points(), "label": Label()}
    batch = next(iter(make(fields, transform=transform, collate={"many": "pad"}, shuffle=False)))
    assert {"pixels", "random", "many", "many.lengths", "word", "id", "key"} <= batch.keys()
    assert not {"video", "points", "label"} & batch.keys()
    assert batch["pixels"].shape == (2, 2, 3)
    assert batch["word"] == [f"label {key}" for key in batch["key"]]
    assert batch["many.lengths"].tolist() == [int(key) + 1 for key in batch["key"]]
    again = next(iter(make(fields, transform=transform, collate={"many": "pad"}, shuffle=False)))
    assert same(batch, again)


def test_a_transform_that_returns_other_names_for_one_sample_is_an_error(make: Callable[..., Loader]) -> None:
    def transform(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        return values | ({"odd": 1} if values["label"] % 2 else {})

    loader = make({"label": Label()}, transform=transform, shuffle=False)
    with pytest.raises(UsageError, match="only one has 'odd'"):
        next(iter(loader))


def test_the_order_and_all_random_numbers_continue_on_other_ranks(make: Callable[..., Loader]) -> None:
    fields = {"video": Video(Clip(2), SIZE, crop="random"), "points": Points(), "noise": Noise(), "label": Label()}
    whole = take(make(fields, batch_size=6, drop_last=False, seed=5), 6)
    loader = make(fields, batch_size=6, drop_last=False, seed=5)
    take(loader, 2)
    state = json.loads(json.dumps(loader.state_dict()))
    ranks = [make(fields, batch_size=3, drop_last=False, seed=5, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for batch, *parts in zip(whole[2:], *(take(rank, 4) for rank in ranks), strict=True):
        assert [key for part in parts for key in part["key"]] == batch["key"]
        for name in ("video", "noise", "label", "points"):
            assert torch.equal(torch.cat([part[name] for part in parts if part[name] is not None]), batch[name])


def test_a_state_of_other_samples_or_clips_is_refused(make: Callable[..., Loader]) -> None:
    state = make({"label": Label(), "video": Video(Clip(2), SIZE)}).state_dict()
    for fields in (
        {"label": Label(), "video": Video(Clip(3), SIZE)},
        {"label": Label(), "video": Video(Clip(2), SIZE), "points": Points()},
        {"label": Label(), "video": Video(Clip(2), SIZE), "caption": Caption()},
    ):
        with pytest.raises(MismatchError):
            make(fields).load_state_dict(state)
    make({"other_name": Video(Clip(2), (16, 16)), "label": Label()}).load_state_dict(state)


@dataclasses.dataclass(frozen=True)
class Fails(Field):
    error: Exception = dataclasses.field(default_factory=lambda: UnsupportedError("not this one"))
    files: tuple[str, ...] = ("json",)

    def decode(self, data: FieldInput) -> Any:
        if data.sample.key == "4":
            raise self.error
        return 1.0


def test_a_damaged_field_makes_the_sample_a_bad_one(make: Callable[..., Loader]) -> None:
    loader = make({"label": Label(), "value": Fails()}, batch_size=4, max_bad_samples=4, drop_last=False)
    keys = [key for batch in take(loader, 2) for key in batch["key"]]
    assert "4" not in keys
    assert len(keys) == 8
    (skipped,) = loader.quarantine
    assert skipped.key == "4"
    assert "field 'value': not this one" in skipped.reason


def test_a_damaged_field_is_left_out_with_skip(make: Callable[..., Loader]) -> None:
    fields = {"caption": Caption(required=False), "value": Fails()}
    loader = make(fields, batch_size=8, on_error="skip", max_bad_samples=4, shuffle=False)
    (batch,) = loader
    assert sorted(batch["key"]) == list("0123567")
    assert len(batch["caption"]) == len(batch["value"]) == 7


def test_other_errors_of_a_field_are_raised_with_its_name(make: Callable[..., Loader]) -> None:
    loader = make({"value": Fails(error=ZeroDivisionError("oops"))}, batch_size=8)
    with pytest.raises(ZeroDivisionError) as caught:
        next(iter(loader))
    assert caught.value.__notes__ == ["in the field 'value', for sample '4'"]


def test_values_of_other_shapes_name_the_sample(make: Callable[..., Loader]) -> None:
    with pytest.raises(UsageError, match=r"sample '\d' has points of"):
        next(iter(make({"points": Points(collate="stack")}, batch_size=7)))


@dataclasses.dataclass(frozen=True)
class SometimesNone(Field):
    files: tuple[str, ...] = ("json",)
    collate: Collate = "stack"
    required: bool = True

    def decode(self, data: FieldInput) -> Any:
        return None if data.sample.key == "2" else np.ones(2)


@pytest.mark.parametrize("collate", ["stack", "pad", "concat", "list"])
def test_none_is_a_value_of_lists_and_of_optional_fields_only(make: Callable[..., Loader], collate: Any) -> None:
    assert (
        next(iter(make({"value": SometimesNone(collate=collate, required=False)}, batch_size=8)))["value"] is not None
    )
    loader = make({"value": SometimesNone(collate=collate)}, batch_size=8)
    if collate == "list":
        assert [value is None for value in next(iter(loader))["value"]].count(True) == 1
        return
    with pytest.raises(UsageError, match="sample '2' has None as value"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "not a dict of fields"),
        (["video"], "not a dict of fields"),
        ({"video": "mp4"}, "field 'video' cannot be 'mp4'"),
        ({"id": Label()}, "a field cannot be called 'id'"),
        ({"a.b": Label()}, "a field cannot be called 'a.b'"),
        ({"audio": Audio(like="video")}, "is like 'video', which is not a Video or Image field"),
        ({"v": Video(Clip(2, fps=8)), "a": Audio(like="v"), "b": Audio(like="v")}, "are both like 'v'"),
        ({"v": Video(Clip(2, per_video=2)), "w": Video(Clip(3))}, "several parts of a sample"),
        (
            {"v": Video(Clip(2)), "a": Audio(like="v")},
            r"'a' is as long as the clip of 'v', .*the clip needs fps, such as Clip\(2, fps=8\), or give Audio\(seconds",
        ),
        ({"nothing": Points(files=("zip",))}, "has no sample with all of 'nothing'"),
    ],
)
def test_impossible_fields_are_refused(make: Callable[..., Loader], fields: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make(fields)


def test_buckets_without_their_field_are_refused(make: Callable[..., Loader]) -> None:
    with pytest.raises(UsageError, match="buckets cannot be used with these fields"):
        make({"label": Label()}, batch_size=None, buckets=Buckets((Bucket((32, 32)),), budget=10**6))


def test_values_of_different_lengths_that_are_stacked_are_refused_with_what_takes_them(
    make: Callable[..., Loader],
) -> None:
    loader = make({"points": Points(collate="stack")}, shuffle=False)
    with pytest.raises(UsageError, match=r"has points of \(\d, 4\).*field 'points' collate=\"pad\".*collate=\"list\""):
        next(iter(loader))


def test_frames_of_different_sizes_are_refused_with_the_size_of_a_field(make: Callable[..., Loader]) -> None:
    loader = make({"video": Video(Clip(2))}, batch_size=8)
    with pytest.raises(UsageError, match=r"has video of .*give the field a size=\(height, width\)"):
        next(iter(loader))
