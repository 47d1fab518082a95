"""Decoders are chosen from a registry, to which users add their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from headrace.dataio import pack
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders import Clip, VideoLoader, register_decoder
from headrace.loaders.decode import registry, resize
from headrace.loaders.decode.base import Color, Decoded, Request, whole_clip_bytes
from headrace.loaders.decode.pyav import PyAVDecoder

GREY = 77


class GreyDecoder:
    """A decoder as a user would write it: grey frames of the right shape and time stamps."""

    name = "grey"

    def __init__(self) -> None:
        self.closed = False

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        return [self._decode(request) for request in requests]

    def clip_bytes(self, info: VideoInfo, frames: int, size: tuple[int, int] | None, color: Color) -> int:
        return whole_clip_bytes(info, frames)

    def close(self) -> None:
        self.closed = True

    def _decode(self, request: Request) -> Decoded | HeadraceError:
        stamps = request.wanted.values
        frames = torch.full((len(stamps), request.info.height, request.info.width, 3), GREY, dtype=torch.uint8)
        return Decoded(resize.apply(frames, request.fit), stamps)


class RefusingDecoder(GreyDecoder):
    """Decodes nothing."""

    def _decode(self, request: Request) -> Decoded | HeadraceError:
        return UnsupportedError("not today")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    monkeypatch.setattr(registry, "_registered", registry.all_decoders())
    monkeypatch.setattr("headrace.dataio.core.log._logged", set())


@pytest.fixture
def dataset(media: Path, tmp_path: Path) -> Iterator[Dataset]:
    with pack([media / "arm_wrestling.mp4", media / "testsrc2_vp9.webm"], tmp_path / "ds", workers=1) as packed:
        yield packed


def is_h264(info: VideoInfo, color: Color) -> bool:
    return info.codec == "h264"


def batches(dataset: Dataset, decoder: str) -> dict[str, torch.Tensor]:
    with VideoLoader(dataset, 2, clip=Clip(3), size=(24, 32), shuffle=False, sidecar=None, decoder=decoder) as loader:
        batch = next(iter(loader))
    return dict(zip(batch["key"], batch["video"], strict=True))


def test_a_users_decoder_decodes_the_streams_that_it_reads_and_pyav_the_others(dataset: Dataset) -> None:
    built = list[GreyDecoder]()

    def build(device_id: int) -> GreyDecoder:
        built.append(GreyDecoder())
        return built[-1]

    register_decoder("grey", build, reads=is_h264)
    usual, own = batches(dataset, "auto"), batches(dataset, "grey")
    assert (own["arm_wrestling"] == GREY).all()
    assert torch.equal(own["testsrc2_vp9"], usual["testsrc2_vp9"])
    assert not (usual["arm_wrestling"] == GREY).all()
    assert [one.closed for one in built] == [True]


def test_an_automatic_decoder_is_used_without_being_asked_for(dataset: Dataset) -> None:
    register_decoder("grey", lambda device_id: GreyDecoder(), reads=is_h264, automatic=True)
    assert (batches(dataset, "auto")["arm_wrestling"] == GREY).all()
    assert not (batches(dataset, "pyav")["arm_wrestling"] == GREY).all()


def test_pyav_decodes_what_a_users_decoder_refuses(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    register_decoder("refusing", lambda device_id: RefusingDecoder(), reads=is_h264)
    with caplog.at_level(logging.WARNING, "headrace"):
        found = batches(dataset, "refusing")
    assert torch.equal(found["arm_wrestling"], batches(dataset, "pyav")["arm_wrestling"])
    assert caplog.text.count("not today") == 1


def test_a_decoder_that_is_not_available_is_passed_over_with_the_reason(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    register_decoder("grey", lambda device_id: GreyDecoder(), reads=is_h264, missing=lambda device_id: "no card here")
    with caplog.at_level(logging.WARNING, "headrace"):
        assert not (batches(dataset, "grey")["arm_wrestling"] == GREY).all()
    assert caplog.text.count("no card here") == 1
    with VideoLoader(dataset, 2, clip=Clip(3), size=(24, 32), decoder="grey", sidecar=None) as loader:
        lines = {sample.key: loader.explain(sample) for sample in loader.dataset.samples(range(2))}
    assert "decoder: pyav\nnot available: grey: no card here" in lines["arm_wrestling"]
    assert "not available" not in lines["testsrc2_vp9"]


def test_the_explanation_is_about_the_gpu_that_the_loader_uses(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_decoder(
        "grey",
        lambda device_id: GreyDecoder(),
        reads=is_h264,
        missing=lambda number: f"GPU {number} has no such circuit",
    )
    with VideoLoader(dataset, 2, clip=Clip(3), size=(24, 32), decoder="grey", sidecar=None) as loader:
        output = replace(loader._delivery.output, device=torch.device("cuda", 3))
        monkeypatch.setattr(loader, "_delivery", replace(loader._delivery, output=output))
        lines = [loader.explain(sample) for sample in loader.dataset.samples(range(2))]
    assert any("not available: grey: GPU 3 has no such circuit" in text for text in lines)


@pytest.mark.parametrize("decoder", ["grey", "dali"])
def test_a_decoder_that_would_not_be_used_in_a_subprocess_is_refused(dataset: Dataset, decoder: str) -> None:
    register_decoder("grey", lambda device_id: GreyDecoder(), reads=is_h264)
    with pytest.raises(UsageError, match=f"decoder='{decoder}' cannot be used with decode_in_subprocess"):
        VideoLoader(dataset, 2, decoder=decoder, decode_in_subprocess=True, sidecar=None)


@pytest.mark.parametrize("decoder", ["auto", "pyav"])
def test_the_explanation_names_the_decoder_of_a_subprocess(dataset: Dataset, decoder: str) -> None:
    register_decoder("grey", lambda device_id: GreyDecoder(), automatic=True)
    with VideoLoader(
        dataset, 2, clip=Clip(3), size=(24, 32), decoder=decoder, decode_in_subprocess=60.0, sidecar=None
    ) as loader:
        assert "decoder: pyav" in loader.explain()


def test_the_decoder_with_the_highest_priority_gets_the_clip(dataset: Dataset) -> None:
    register_decoder("low", lambda device_id: GreyDecoder(), option="both", priority=30)
    register_decoder("high", lambda device_id: PyAVDecoder(), option="both", priority=31)
    assert [one.name for one in registry.candidates("both")] == ["high", "low", "pyav"]
    assert not (batches(dataset, "both")["arm_wrestling"] == GREY).all()


def test_decoders_for_a_gpu_are_not_used_on_the_cpu() -> None:
    assert [one.name for one in registry.candidates("auto", "cpu")] == ["pyav"]
    assert [one.name for one in registry.candidates("auto", "cuda")] == ["dali_gpu", "pyav"]
    assert [one.name for one in registry.candidates("dali", "cpu")] == ["dali_cpu", "pyav"]
    assert [one.name for one in registry.candidates("dali", "cuda")] == ["dali_gpu", "dali_cpu", "pyav"]
    assert [one.name for one in registry.candidates("pyav", "cuda")] == ["pyav"]


def test_an_unknown_decoder_is_refused_with_the_known_ones(dataset: Dataset) -> None:
    register_decoder("grey", lambda device_id: GreyDecoder())
    with pytest.raises(UsageError, match=r"decoder='gray' is not known .*'auto', 'dali', 'grey', 'pyav'"):
        VideoLoader(dataset, 2, decoder="gray", sidecar=None)


def test_every_decoder_says_how_much_memory_a_clip_takes(dataset: Dataset) -> None:
    info = dataset.sample(0).video
    assert info is not None
    register_decoder("grey", lambda device_id: GreyDecoder(), reads=is_h264)
    whole = info.width * info.height * 3 * 100
    assert registry.open_decoder("grey").clip_bytes(info, 100, (24, 32), "bt601") == whole
    assert registry.open_decoder().clip_bytes(info, 100, (24, 32), "bt601") < whole / 4
    assert registry.open_decoder().clip_bytes(info, 100, None, "bt601") == whole


def test_damage_is_damage_whatever_decoder_was_asked_first(dataset: Dataset) -> None:
    register_decoder("refusing", lambda device_id: RefusingDecoder())
    info = dataset.sample(0).video
    assert info is not None
    from headrace.loaders.clip import choose

    request = Request(memoryview(b"no video at all"), info, choose(info, Clip(3), 0, 0, 0, 0))
    (result,) = registry.open_decoder("refusing").decode([request])
    assert isinstance(result, CorruptionError)
