"""The samples that a loader leaves out for lack of a file, and what it says about them."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.core.data import make_clip
from headrace.dataio import index, pack
from headrace.dataio.core import log
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioLoader, Clip, FileLoader, VideoLoader
from headrace.loaders.field_loader import Loader
from headrace.loaders.fields.audio import Audio
from headrace.loaders.fields.text import Bytes, Text
from headrace.loaders.fields.video import Image, Video
from tests.support.pictures import picture
from tests.support.written_media import write_wav

SAMPLES = 12
EMBEDDING, TEXT = Bytes("t5.safetensors"), Text()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Twelve samples in two shards: all have class.json, all but number 7 t5.safetensors, and nine a caption."""
    folder = tmp_path_factory.mktemp("left-out")
    (folder / "shards").mkdir()
    for first in range(0, SAMPLES, 6):
        with tarfile.open(folder / "shards" / f"{first}.tar", "w") as tar:
            for number in range(first, first + 6):
                files = {"class.json": b"{}"}
                if number != 7:
                    files["t5.safetensors"] = b"latent"
                if number % 4:
                    files["txt"] = b"a caption"
                for ext, data in files.items():
                    member = tarfile.TarInfo(f"{number:02}.{ext}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    index([str(folder / "shards")], str(folder / "ds")).close()
    with Dataset(folder / "ds", trust_mounts=True) as opened:
        yield opened


def warnings_of(caplog: pytest.LogCaptureFixture, dataset: Dataset, level: int = logging.WARNING) -> list[str]:
    said = [record.message for record in caplog.records if record.levelno >= level and "left out" in record.message]
    return [message.replace(dataset.url, "URL") for message in said]


LACKS_T5 = "1 of 12 samples of URL lack .t5.safetensors and are left out"
LACKS_CAPTION = "3 of 12 samples of URL lack a caption and are left out"


@pytest.mark.parametrize(
    ("fields", "said", "left"),
    [
        ({"t5": EMBEDDING}, [f"{LACKS_T5}; required=False keeps them"], 11),
        ({"text": TEXT}, [f"{LACKS_CAPTION}; required=False keeps them"], 9),
        ({"t5": EMBEDDING, "text": TEXT, "all": Bytes("class.json")}, [LACKS_CAPTION, LACKS_T5], 8),
        ({"t5": Bytes("t5.safetensors", required=False), "text": Text(required=False)}, [], 12),
    ],
    ids=["a file", "a caption", "both", "optional"],
)
def test_samples_that_lack_a_file_are_counted_once_a_job(
    dataset: Dataset, caplog: pytest.LogCaptureFixture, fields: Any, said: list[str], left: int
) -> None:
    log._logged.clear()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        for _ in range(2):
            with Loader(dataset, 1, fields=fields, num_threads=1) as loader:
                assert len(loader) == left
    found = warnings_of(caplog, dataset)
    assert len(found) == len(said), "a second loader says nothing new"
    assert all(line.startswith(begin) for line, begin in zip(found, said, strict=True))


def test_only_one_rank_of_a_job_says_so(
    dataset: Dataset, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    log._logged.clear()
    with caplog.at_level(logging.DEBUG, logger="headrace"), Loader(dataset, 1, fields={"t5": EMBEDDING}, num_threads=1):
        pass
    assert warnings_of(caplog, dataset) == []
    assert warnings_of(caplog, dataset, logging.DEBUG) == [f"{LACKS_T5}; required=False keeps them"]


def test_loaders_of_video_and_audio_say_so_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_wav(tmp_path / "sound.wav", 0.5)
    make_clip(tmp_path, 0, seconds=1)
    (tmp_path / "picture.png").write_bytes(picture("png", 64, 48))
    with pack([tmp_path], tmp_path / "ds", workers=1) as packed:
        log._logged.clear()
        with caplog.at_level(logging.WARNING, logger="headrace"):
            VideoLoader(packed, 1, clip=Clip(2)).close()
            VideoLoader(packed, 1, clip=Clip(1)).close()
            AudioLoader(packed, 1).close()
        assert warnings_of(caplog, packed) == [
            "1 image of URL are left out, since all clips have several frames. "
            "Clip(frames=1), or a bucket with frames=1, takes images",
            "1 of 3 samples of URL lack a video and are left out",
            "1 of 3 samples of URL lack a video or an image and are left out",
            "2 of 3 samples of URL lack sound and are left out",
        ]


def test_a_loader_of_files_says_so_too(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    log._logged.clear()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        FileLoader(dataset, 1, files=["class.json", "t5.safetensors"], num_threads=1).close()
    assert warnings_of(caplog, dataset) == [LACKS_T5]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"t5": EMBEDDING, "x": Bytes("x.npy")}, r"has no sample with all of 't5', 'x': no sample has \.x\.npy"),
        ({"v": Video(), "a": Audio()}, "no sample has a video or sound"),
        ({"i": Image()}, "no sample has a video or an image"),
    ],
    ids=["a file", "media", "an image"],
)
def test_an_error_names_the_missing_file_and_those_that_exist(dataset: Dataset, fields: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        Loader(dataset, 1, fields=fields)
    assert "there are: .class.json, .t5.safetensors, .txt" in str(caught.value)


def test_an_error_says_how_captions_of_json_files_are_indexed(dataset: Dataset) -> None:
    without = dataset.where("caption is null")
    with pytest.raises(
        UsageError, match=r"no sample has a caption .*`headrace pack` or `headrace index` with --text-field"
    ):
        Loader(without, 1, fields={"text": TEXT})
    with pytest.raises(UsageError) as caught:
        Loader(dataset, 1, fields={"text": TEXT, "x": Bytes("x.npy")})
    assert "--text-field" not in str(caught.value), "some samples have captions"


def test_an_error_counts_the_samples_if_no_sample_has_all_files(dataset: Dataset) -> None:
    few = dataset.where("key = '07' or key = '08'")
    with pytest.raises(UsageError, match=r"1 of 2 samples lack a caption, 1 of 2 samples lack \.t5\.safetensors"):
        Loader(few, 1, fields={"t5": EMBEDDING, "text": TEXT})


def test_an_optional_file_that_no_sample_has_is_named_once_with_a_similar_one(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    log._logged.clear()
    fields: dict[str, Any] = {
        "t5": Bytes("t5.safetensor", required=False),
        "top": Video(file="cam1.mp4", required=False),
    }
    with caplog.at_level(logging.WARNING, logger="headrace"):
        for _ in range(2):
            Loader(dataset, 1, fields=fields, num_threads=1).close()
        Loader(dataset, 1, fields={"t5": Bytes("t5.safetensors", required=False)}, num_threads=1).close()
    camera, embedding = [record.message for record in caplog.records]
    assert "has .t5.safetensor (did you mean .t5.safetensors?), so no batch has values for it" in embedding
    assert "has .cam1.mp4, so no batch has values for it" in camera
    assert "--group dot" in camera
    assert "--group" not in embedding


def test_an_error_names_a_similar_file_and_what_keeps_the_samples(dataset: Dataset) -> None:
    fields: dict[str, Any] = {"t5": Bytes("t5.safetensor"), "text": Text(required=False), "all": Bytes("class.json")}
    with pytest.raises(
        UsageError, match=r"all of 't5', 'all': no sample has \.t5\.safetensor \(did you mean"
    ) as caught:
        Loader(dataset, 1, fields=fields)
    assert "samples without .t5.safetensor: required=False keeps them" in str(caught.value)
    with pytest.raises(UsageError, match="--group dot") as caught:
        Loader(dataset, 1, fields={"top": Video(file="cam1.mp4")})
    assert "Clip(frames=1)" not in str(caught.value)


def test_audio_that_clips_lack_says_how_silent_clips_are_kept(tmp_path: Path) -> None:
    make_clip(tmp_path, 0, seconds=1)
    (tmp_path / "picture.png").write_bytes(picture("png", 64, 48))
    with pack([tmp_path], tmp_path / "ds", workers=1) as packed:
        fields: dict[str, Any] = {"video": Video(Clip(2), (16, 16)), "sound": Audio(0.5)}
        with pytest.raises(UsageError, match=r"all of 'video', 'sound': no sample has sound") as caught:
            Loader(packed, 1, fields=fields)
        assert 'samples without sound: Audio(seconds=0.5, like="video") keeps them, silent' in str(caught.value)
        assert "required=False" not in str(caught.value)
        assert "Clip(frames=1)" in str(caught.value), "an image is left out"
        with pytest.raises(UsageError) as caught:
            Loader(packed, 1, fields={"sound": Audio(0.5)})
        assert "like=" not in str(caught.value), "there is no clip to follow"
        with Loader(packed, 1, fields=fields | {"sound": Audio(seconds=0.5, like="video")}, num_threads=1) as loader:
            assert next(iter(loader))["sound.samples"].tolist() == [0]
