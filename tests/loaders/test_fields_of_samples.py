"""`Loader` with all kinds of files beside a video: arrays, tensors, JSON, text and masks."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from headrace.dataio import index
from headrace.dataio.core.errors import UsageError
from headrace.loaders import Bytes, Clip, Image, Json, Loader, Mask, Npy, Safetensors, Text, Video
from tests.support.batches import take
from tests.support.pictures import picture
from tests.support.shared_folder import shared_folder

pytestmark = pytest.mark.slow

SIDES = [(48, 64), (64, 48), (96, 96), (50, 70)]


def files_of(number: int) -> dict[str, bytes]:
    """Sample `number`: an image whose red rises from left to right, and files of every kind."""
    height, width = SIDES[number % len(SIDES)]
    array, lengths = io.BytesIO(), 2 + number
    np.save(array, np.full((3, 4), number, np.float16))
    data = np.arange(2 * lengths, dtype=np.float32)
    header = json.dumps({"emb": {"dtype": "F32", "shape": [lengths, 2], "data_offsets": [0, data.nbytes]}}).encode()
    return {
        "png": picture("png", width, height),
        "latent.npy": array.getvalue(),
        "t5.safetensors": len(header).to_bytes(8, "little") + header + data.tobytes(),
        "json": json.dumps({"camera": {"pose": [[number, 1], [2, 3]]}, "label": f"class {number}"}).encode(),
        "txt": f"picture {number}".encode(),
        "mask.png": mask_of(height, width),
    }


def mask_of(height: int, width: int) -> bytes:
    """A mask that has the column's number of each pixel."""
    frame = av.VideoFrame.from_ndarray(np.tile(np.arange(width, dtype=np.uint8), (height, 1)), format="gray")
    context: Any = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt, context.time_base = width, height, "gray", 1
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "fields-of-samples", _make)


def _make(folder: Path) -> None:
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "0.tar", "w") as tar:
        for number in range(8):
            for ext, data in files_of(number).items():
                member = tarfile.TarInfo(f"{number}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    index([str(folder / "shards")], str(folder / "ds")).close()


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Loader]]:
    loaders = []

    def loader(fields: Any, batch_size: int = 4, **options: Any) -> Loader:
        settings = {"num_threads": 2, "sidecar": None, "trust_mounts": True} | options
        loaders.append(Loader(folder / "ds", batch_size, fields=fields, **settings))
        return loaders[-1]

    yield loader
    for one in loaders:
        one.close()


FIELDS = {
    "picture": Image(size=(32, 32)),
    "latent": Npy("latent.npy"),
    "text_emb": Safetensors("t5.safetensors", "emb", collate="pad"),
    "pose": Json("camera.pose", dtype="float32"),
    "label": Json("label"),
    "caption": Text(),
    "raw": Bytes("txt"),
}


def test_all_kinds_of_fields_come_in_one_batch(make: Callable[..., Loader]) -> None:
    for batch in take(make(FIELDS), 4):
        numbers = torch.tensor([int(key) for key in batch["key"]])
        assert batch["picture"].shape == (4, 3, 32, 32)
        assert torch.equal(batch["latent"], numbers.half()[:, None, None].expand(4, 3, 4))
        assert batch["text_emb.lengths"].tolist() == (2 + numbers).tolist()
        assert batch["text_emb"].shape == (4, int(2 + numbers.max()), 2)
        assert batch["pose"][:, 0, 0].tolist() == numbers.tolist()
        assert batch["label"] == [f"class {number}" for number in numbers]
        assert batch["caption"] == [f"picture {number}" for number in numbers]
        assert [bytes(one) for one in batch["raw"]] == [text.encode() for text in batch["caption"]]


def test_fields_are_described_by_mappings_too(make: Callable[..., Loader]) -> None:
    described = {
        "picture": {"field": "image", "size": [32, 32]},
        "latent": {"field": "npy", "file": "latent.npy"},
        "clip": {"field": "video", "clip": {"frames": 1}, "size": [16, 16]},
    }
    fields = {"picture": FIELDS["picture"], "latent": FIELDS["latent"], "clip": Video(Clip(1), (16, 16))}
    one, other = (next(iter(make(form))) for form in (described, fields))
    assert all(torch.equal(one[name], other[name]) for name in fields)
    with pytest.raises(UsageError, match="there is no field 'nqy'"):
        make({"latent": {"field": "nqy"}})


@pytest.mark.parametrize(
    "options",
    [
        {"size": (32, 32)},
        {"size": (32, 32), "crop": "random", "flip_prob": 0.5},
        {"size": (20, 44), "crop": "random", "antialias": False},
    ],
)
def test_a_mask_stays_aligned_with_its_image(make: Callable[..., Loader], options: dict[str, Any]) -> None:
    """The image's red and the mask both are the column of the source, so they fall on one line."""
    loader = make({"picture": Image(color="tagged", **options), "mask": Mask(like="picture")}, seed=3)
    for batch in take(loader, 6):
        for pixels, mask, key in zip(batch["picture"], batch["mask"], batch["key"], strict=True):
            width = SIDES[int(key) % len(SIDES)][1]
            expected = mask.float() * 255 / width
            assert (pixels[0].float() - expected).abs().max() < 2 * 255 / 20, key
            assert (pixels[0].float() - expected).abs().mean() < 6


def test_a_mask_of_a_video_without_size_is_mirrored_with_it(make: Callable[..., Loader]) -> None:
    loader = make({"picture": Image(flip_prob=1.0), "mask": Mask(like="picture")}, batch_size=1)
    batch = next(iter(loader))
    assert batch["mask"].shape == batch["picture"].shape[:1] + batch["picture"].shape[2:]
    assert batch["mask"][0, 0].tolist() == sorted(batch["mask"][0, 0].tolist(), reverse=True)


def test_a_mask_is_like_a_field_of_pixels_only(make: Callable[..., Loader]) -> None:
    with pytest.raises(UsageError, match="is like 'latent', which is not a Video or Image field"):
        make({"latent": Npy("latent.npy"), "mask": Mask(like="latent")})


def test_arrays_in_a_list_are_tensors_of_their_own(make: Callable[..., Loader]) -> None:
    batch = next(iter(make({"latent": Npy("latent.npy", collate="list")})))
    batch["latent"][0] += 1  # not the bytes of the file
    assert [one.dtype for one in batch["latent"]] == [torch.float16] * 4


def test_arrays_of_other_dtypes_name_the_sample(make: Callable[..., Loader]) -> None:
    def transform(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        odd = values["pose"][0, 0] % 2
        return {"pose": values["pose"].double() if odd else values["pose"]}

    with pytest.raises(UsageError, match=r"sample '\d' has pose of torch.float\d\d, others in its batch"):
        next(iter(make({"pose": Json("camera.pose", dtype="float32")}, transform=transform, batch_size=8)))
