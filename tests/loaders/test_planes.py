"""Raw planes: what they hold, and that they become the same RGB."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import KeyFrame, Sample, VideoInfo
from headrace.loaders import Bucket, Buckets, Clip, Image, Loader, Video, planes_to_rgb, split_planes
from headrace.loaders.batch.batch import Output
from headrace.loaders.batch.field_batch import FieldBatch
from headrace.loaders.batch.memory import BufferPool
from headrace.loaders.clip import Wanted, choose
from headrace.loaders.decode import resize
from headrace.loaders.decode.base import Decoded, Planes, Request
from headrace.loaders.decode.convert import Converter, FullSizeCanvas
from headrace.loaders.decode.planes import PlanesCanvas
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.interfaces import FieldsLayout, ProcessedSample, SampleLayout
from tests.support.batches import same, take
from tests.support.pictures import picture
from tests.support.shared_folder import shared_folder
from tests.support.video_corpus import Made, make

pytestmark = pytest.mark.slow

FORMATS: tuple[Any, ...] = ("yuv420p", "nv12", "yuv420p10")
MATRICES = {1: 1, 2: 6, 4: 4, 5: 6, 6: 6, 7: 7, 9: 9}
LIMITED, FULL = 1, 2


# --- one frame


def smooth(width: int = 64, height: int = 48) -> np.ndarray:
    """A picture without fine detail, of which half the chroma loses little."""
    y, x = np.mgrid[:height, :width]
    colors = [np.sin(x / 15), np.cos(y / 17), np.sin((x + y) / 20)]
    return np.stack([127 + 127 * color for color in colors], axis=-1).astype(np.uint8)


def frame(pixel_format: str, pixels: np.ndarray, matrix: int = 1, tagged_range: int = LIMITED) -> av.VideoFrame:
    """The pixels in another format, with its tags."""
    rgb = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    made = rgb.reformat(format=pixel_format, dst_colorspace=max(matrix, 1), dst_color_range=tagged_range)
    made.colorspace, made.color_range = matrix, tagged_range
    return made


def request_for(source: av.VideoFrame, **options: Any) -> Request:
    key, name = KeyFrame(0, 0), source.format.name
    info = VideoInfo(
        "mp4", 0, "h264", source.width, source.height, Fraction(25), 1, Fraction(1, 25), 0, 1, name, 0, (key,)
    )
    return Request(memoryview(b""), info, Wanted("index", (0,), key), **options)


def drawn(source: av.VideoFrame, planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
    canvas = PlanesCanvas(request_for(source), planes, Converter())
    canvas.draw(0, source)
    return torch.from_numpy(canvas.clip), torch.tensor(canvas.color)


def tagged(source: av.VideoFrame) -> torch.Tensor:
    """(1, 3, H, W), as `color="tagged"` converts it."""
    canvas = FullSizeCanvas(request_for(source, color="tagged"), Converter())
    canvas.draw(0, source)
    return torch.from_numpy(canvas.clip).permute(0, 3, 1, 2)


def difference(rgb: torch.Tensor, expected: torch.Tensor) -> tuple[int, float]:
    """The largest and the mean difference."""
    assert rgb.shape == expected.shape
    values = (rgb.int() - expected.int()).abs()
    return int(values.max()), float(values.float().mean())


def converted(source: av.VideoFrame, pixel_format: Any) -> torch.Tensor:
    return planes_to_rgb(*drawn(source, Planes(pixel_format)), pixel_format, dtype=torch.uint8)


@pytest.mark.parametrize("tagged_range", [LIMITED, FULL])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(
    ("stored", "pixel_format"),
    [
        ("yuv420p", "yuv420p"),
        ("yuv420p", "nv12"),
        ("yuv420p", "yuv420p10"),
        ("yuvj420p", "yuv420p"),
        ("yuv420p10le", "yuv420p10"),
        ("nv12", "yuv420p"),
    ],
)
def test_the_rgb_of_planes_is_that_of_tagged(stored: str, pixel_format: Any, matrix: int, tagged_range: int) -> None:
    noise = np.random.default_rng(matrix).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    for pixels in (noise, smooth()):
        source = frame(stored, pixels, matrix, tagged_range)
        planes, color = drawn(source, Planes(pixel_format))
        assert color.tolist() == [MATRICES[matrix], int(tagged_range == FULL or stored == "yuvj420p")]
        most, mean = difference(planes_to_rgb(planes, color, pixel_format, dtype=torch.uint8), tagged(source))
        assert most <= 1
        assert mean < 0.5  # libswscale rounds 10 bits of full range down


@pytest.mark.parametrize("pixel_format", FORMATS)
@pytest.mark.parametrize("tagged_range", [LIMITED, FULL])
@pytest.mark.parametrize(
    ("stored", "most"),
    [
        ("gray", 0),
        ("yuva420p", 1),
        ("yuv420p10le", 3),  # 8 bits are dithered
        ("yuv420p12le", 3),
        ("p010le", 3),
        ("gray10le", 3),
        ("yuv422p", 8),  # half of the chroma is lost
        ("yuyv422", 8),
        ("yuv444p", 10),
        ("yuv444p10le", 10),
        ("yuv411p", 10),
        ("yuv410p", 10),
        ("gbrp", 10),
        ("rgb24", 10),
    ],
)
def test_other_formats_are_converted(stored: str, most: int, tagged_range: int, pixel_format: Any) -> None:
    source = frame(stored, smooth(), 1, tagged_range)
    largest, mean = difference(converted(source, pixel_format), tagged(source))
    assert largest <= most
    assert mean < 1


def test_the_planes_of_a_frame_are_copied() -> None:
    source = frame("yuv420p", smooth())
    planes, _ = drawn(source, Planes("yuv420p"))
    assert np.array_equal(planes[0].numpy(), source.to_ndarray())
    pairs, _ = drawn(source, Planes("nv12"))
    assert np.array_equal(pairs[0].numpy(), source.reformat(format="nv12").to_ndarray())
    deep = frame("yuv420p10le", smooth())
    planes, _ = drawn(deep, Planes("yuv420p10"))
    assert np.array_equal(planes[0].numpy(), deep.to_ndarray())
    for pixel_format, all_planes in (("nv12", pairs), ("yuv420p10", planes)):
        luma, chroma = split_planes(all_planes, pixel_format)  # type: ignore[arg-type]
        assert luma.shape == (1, 48, 64)
        assert chroma.shape == (1, 2, 24, 32)
        assert luma.untyped_storage().data_ptr() == chroma.untyped_storage().data_ptr()


@pytest.mark.parametrize("matrix", [3, 8, 10, 14])
def test_a_matrix_that_tagged_refuses_too_is_unsupported(matrix: int) -> None:
    source = frame("yuv420p", smooth())
    source.colorspace = matrix
    with pytest.raises(UnsupportedError, match=f"matrix {matrix}"):
        drawn(source, Planes("yuv420p"))


def test_frames_with_other_tags_are_converted_to_those_of_the_first() -> None:
    first, second = frame("yuv420p", smooth(), 1), frame("yuv420p", smooth(), 6, FULL)
    request = request_for(first)
    canvas = PlanesCanvas(request, Planes("yuv420p"), Converter())
    canvas.draw(0, second)
    assert canvas.color == (6, 1)
    canvas.draw(0, first)
    assert canvas.color == (6, 1)
    rgb = planes_to_rgb(torch.from_numpy(canvas.clip), torch.tensor(canvas.color), dtype=torch.uint8)
    largest, mean = difference(rgb, tagged(first))
    assert largest <= 8
    assert mean < 1


@pytest.mark.parametrize("stored", ["yuv420p", "yuv444p"])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_an_odd_last_row_and_column_are_left_out(stored: str, rotation: int) -> None:
    source = frame(stored, smooth(63, 47))
    planes, color = drawn(source, Planes("yuv420p", rotation=rotation))
    rgb = planes_to_rgb(planes, color, dtype=torch.uint8)
    expected = torch.rot90(tagged(source)[..., :46, :62], -rotation // 90, (2, 3))
    largest, mean = difference(rgb, expected)
    assert largest <= 14  # "tagged" stretches the chroma of odd sides by half a pixel
    assert mean < 2


def test_a_frame_of_one_column_has_no_planes() -> None:
    with pytest.raises(UnsupportedError, match="one pixel wide"):
        drawn(frame("yuv444p", smooth(1, 48)), Planes("yuv420p"))


# --- clips


@pytest.fixture(scope="session")
def wide_clips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Smooth clips in several sizes: the last is tagged as rotated, and one has 10 bits."""

    def make_them(folder: Path) -> None:
        (clips := folder / "clips").mkdir()
        for number, (width, height, rotation, pixel_format) in enumerate(
            [(160, 96, 0, "yuv420p"), (96, 160, 0, "yuv420p10le"), (128, 128, 0, "yuv420p"), (160, 96, 90, "yuv420p")]
        ):
            (clips / f"{number}.mov").write_bytes(_film(width, height, rotation, pixel_format))
        pack([clips], folder / "ds", workers=1).close()

    with Dataset(shared_folder(tmp_path_factory, "wide-clips", make_them) / "ds") as packed:
        yield packed


def _film(width: int, height: int, rotation: int, pixel_format: str) -> bytes:
    target = io.BytesIO()
    with av.open(target, "w", format="mov") as output:
        stream: Any = output.add_stream("libx264", rate=25, options={"crf": "4", "g": "6"})
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(24):
            pixels = np.roll(smooth(width, height), number, axis=1)
            output.mux(stream.encode(frame(pixel_format, pixels, 6)))
        output.mux(stream.encode(None))
    return target.getvalue()


@pytest.fixture
def loader() -> Iterator[Callable[..., Loader]]:
    loaders = []

    def open_loader(source: Any, fields: Any, batch_size: int | None = 1, **options: Any) -> Loader:
        loaders.append(Loader(source, batch_size, fields=fields, **({"num_threads": 2} | options)))
        return loaders[-1]

    yield open_loader
    for one in loaders:
        one.close()


def test_a_batch_has_planes_and_their_colour(loader: Callable[..., Loader], wide_clips: Dataset) -> None:
    for pixel_format, dtype in zip(FORMATS, (torch.uint8, torch.uint8, torch.uint16), strict=True):
        fields = {"video": Video(Clip(3), (32, 48), pixel_format=pixel_format), "plain": Video(Clip(3), (32, 48))}
        batch = next(iter(loader(wide_clips, fields, 4)))
        assert list(batch) == ["video", "video.color", "plain", "id", "key", "video.start", "plain.start"]
        assert batch["video"].shape == (4, 3, 48, 48)
        assert batch["video"].dtype == dtype
        assert batch["video.color"].dtype == torch.int64
        assert batch["video.color"].tolist() == [[6, 0]] * 4
        assert batch["video.color"].device == batch["video"].device


@pytest.mark.parametrize("pixel_format", FORMATS)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("size", [None, (64, 48), (48, 64), (32, 80)])
@pytest.mark.parametrize("crop", ["center", "random"])
def test_planes_show_what_rgb_shows(
    loader: Callable[..., Loader], wide_clips: Dataset, size: Any, rotate: bool, crop: Any, pixel_format: Any
) -> None:
    same_options: dict[str, Any] = {"rotate": rotate, "crop": crop, "flip_prob": 0.5}
    fields = {
        "planes": Video(Clip(2), size, pixel_format=pixel_format, **same_options),
        "rgb": Video(Clip(2), size, color="tagged", **same_options),
    }
    for batch in take(loader(wide_clips, fields), 8):
        rgb = planes_to_rgb(batch["planes"], batch["planes.color"], pixel_format, dtype=torch.uint8)
        largest, mean = difference(rgb, batch["rgb"])
        deep = batch["key"] == ["1"] and pixel_format != "yuv420p10"
        if size is None:
            assert largest <= (3 if deep else 1)
        else:
            assert mean < 4  # up to a source pixel of shift, where a pixel changes by up to 9
            assert largest < 60


@pytest.mark.parametrize("size", [None, (64, 112), (256, 448)])
def test_planes_of_real_clips(media: Path, size: Any) -> None:
    """At their own size, 1 of 255 apart; scaled, what half the chroma and a fraction of a pixel make."""
    decoder, seen = PyAVDecoder(), 0
    for path in sorted(media.iterdir()):
        if path.name == "corrupted.mp4" or path.suffix not in (".mp4", ".mkv", ".mov", ".webm", ".avi"):
            continue
        data, ext = path.read_bytes(), path.suffix[1:]
        info = probe(data, ext=ext).video
        assert info is not None
        wanted = choose(info, Clip(2, start="center"), 0, 0, 0, 0)
        request = Request(memoryview(data), info, wanted, color="tagged", planes=Planes("yuv420p", size))
        (planes,) = decoder.decode([request])
        assert isinstance(planes, Decoded)
        assert planes.color is not None
        rgb = planes_to_rgb(planes.frames, torch.tensor(planes.color), dtype=torch.uint8)
        (whole,) = decoder.decode([Request(memoryview(data), info, wanted, color="tagged")])
        assert isinstance(whole, Decoded)
        expected = resize.fit(whole.frames, size)
        largest, mean = difference(rgb, expected)
        if size is None:
            assert largest <= 1, path.name
            assert mean < 0.02, path.name
        else:
            weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
            luma, same_luma = (rgb * weights).sum(1), (expected * weights).sum(1)
            assert float((luma - same_luma).abs().mean()) < 2.5, path.name
            assert mean < 8, path.name
        seen += 1
    assert seen >= 8


def test_planes_are_written_into_the_memory_of_the_batch() -> None:
    output = Output(torch.device("cpu"), pinned=False)
    for dtype in (torch.uint8, torch.uint16):
        fields = FieldsLayout(collate={"video": "stack"}, planes={"video": dtype}, drawn="video")
        layout = SampleLayout(("video", "video.color"), fields=fields)
        batch = FieldBatch(2, layout=layout, output=output, buffers=BufferPool(torch.device("cpu")))
        values = []
        for slot in range(2):
            target = batch.target(slot)
            assert target is not None
            memory = target((3, 12, 8))
            assert memory is not None
            memory[...] = slot + 1
            values.append({"video": torch.from_numpy(memory), "video.color": torch.tensor([1, 0])})
        for slot, value in enumerate(values):
            batch.put(slot, ProcessedSample(Sample(slot, str(slot), "", (), 1.0), value))
        entry = batch.tensors()["video"]
        assert entry.dtype == dtype
        assert entry.data_ptr() == values[0]["video"].data_ptr()
        assert entry.float().mean((1, 2, 3)).tolist() == [1, 2]


@pytest.mark.parametrize("pixel_format", FORMATS)
def test_clips_of_one_video_are_those_that_are_decoded_alone(
    loader: Callable[..., Loader], wide_clips: Dataset, pixel_format: Any
) -> None:
    clip = Clip(2, start="every")
    fields = {"video": Video(clip, (32, 48), pixel_format=pixel_format)}
    together = take(loader(wide_clips, fields, 8, shuffle=False, drop_last=False), 6)
    alone = take(loader(wide_clips, fields, 1, shuffle=False), 48)
    assert sum(len(batch["key"]) for batch in together) == 48
    assert torch.equal(
        torch.cat([batch["video"] for batch in together]), torch.cat([batch["video"] for batch in alone])
    )


def test_subprocesses_deliver_the_same_planes(loader: Callable[..., Loader], wide_clips: Dataset) -> None:
    for pixel_format, size in (("nv12", (32, 48)), ("yuv420p10", None), ("yuv420p", (64, 32))):
        video: Any = Video(Clip(2), size, rotate=True, crop="random", pixel_format=pixel_format)  # type: ignore[arg-type]
        here = take(loader(wide_clips, {"video": video}), 4)
        there = take(loader(wide_clips, {"video": video}, decode_in_subprocess=True), 4)
        assert all(same(one, other) for one, other in zip(here, there, strict=True))


def test_the_order_and_the_crops_continue_on_other_ranks(loader: Callable[..., Loader], wide_clips: Dataset) -> None:
    fields = {"video": Video(Clip(2), (32, 48), crop="random", flip_prob=0.5, pixel_format="yuv420p10")}
    whole = loader(wide_clips, fields, 2, seed=5)
    take(whole, 1)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = take(whole, 3)
    ranks = [loader(wide_clips, fields, 1, seed=5, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for batch, *parts in zip(expected, *(take(rank, 3) for rank in ranks), strict=True):
        assert torch.equal(torch.cat([part["video"] for part in parts]), batch["video"])


def test_buckets_of_even_sizes_have_planes(loader: Callable[..., Loader], wide_clips: Dataset) -> None:
    fields = {"video": Video(Clip(2), pixel_format="nv12")}
    buckets = Buckets((Bucket((32, 32)), Bucket((32, 48)), Bucket((48, 32))), budget=2 * 2 * 32 * 48)
    shapes = {tuple(batch["video"].shape[2:]) for batch in take(loader(wide_clips, fields, None, buckets=buckets), 4)}
    assert shapes <= {(48, 32), (48, 48), (72, 32)}
    with pytest.raises(UsageError, match="size 33x48 is odd"):
        loader(wide_clips, fields, None, buckets=Buckets((Bucket((33, 48)),), budget=10**6))


def test_a_transform_sees_the_planes_and_their_colour(loader: Callable[..., Loader], wide_clips: Dataset) -> None:
    def transform(values: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        return {"rgb": planes_to_rgb(values["video"], values["video.color"], "nv12", dtype=torch.float16)}

    fields = {"video": Video(Clip(2), (32, 48), pixel_format="nv12")}
    batch = next(iter(loader(wide_clips, fields, 4, transform=transform)))
    assert batch["rgb"].shape == (4, 2, 3, 32, 48)
    assert "video.color" not in batch


def test_images_have_planes(loader: Callable[..., Loader], tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    for kind in ("jpg", "png", "webp"):
        (folder / f"{kind}1.{kind}").write_bytes(picture(kind, 96, 80))
    (folder / "clip.mp4").write_bytes(make(Made("", "libx264", "mp4", width=96, height=80)))
    with pack([folder], tmp_path / "ds", workers=1) as dataset:
        for size, shape in ((None, (80, 96)), ((40, 48), (40, 48))):
            fields = {
                "planes": Image(size=size, pixel_format="nv12"),
                "rgb": Image(size=size, color="tagged"),
            }
            batch = next(iter(loader(dataset, fields, 4)))
            assert batch["planes"].shape == (4, shape[0] * 3 // 2, shape[1])
            colors = dict(zip(batch["key"], batch["planes.color"].tolist(), strict=True))
            assert colors == {"jpg1": [6, 1], "png1": [6, 0], "webp1": [6, 0], "clip": [6, 0]}
            rgb = planes_to_rgb(batch["planes"], batch["planes.color"], "nv12", dtype=torch.uint8)
            for number, key in enumerate(batch["key"]):
                if key != "clip":
                    assert difference(rgb[number], batch["rgb"][number])[1] < (2 if size is None else 4), key


@pytest.mark.parametrize("pixel_format", FORMATS)
def test_a_damaged_clip_is_left_out(loader: Callable[..., Loader], tmp_path: Path, pixel_format: Any) -> None:
    (folder := tmp_path / "in").mkdir()
    for number in range(3):
        (folder / f"{number}.mp4").write_bytes(make(Made("", "libx264", "mp4", width=64, height=48)))
    with pack([folder], tmp_path / "ds", workers=1) as dataset:
        shard = next((tmp_path / "ds").rglob("*.tar"))
        member = dataset.sample(1).members[0]
        data = bytearray(shard.read_bytes())
        data[member.offset + member.length // 2] ^= 0xFF
        shard.write_bytes(data)
        fields = {"video": Video(Clip(2), (32, 48), pixel_format=pixel_format)}
        batch = next(iter(loader(dataset, fields, 3, shuffle=False, on_error="skip", max_bad_samples=2)))
        assert batch["key"] == ["0", "2"]
        assert len(batch["video"]) == len(batch["video.color"]) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pixel_format": "yuv444p"}, "pixel_format='yuv444p' is not known"),
        ({"size": (33, 48)}, "the size 33x48 is odd"),
        ({"size": (32, 47)}, "the size 32x47 is odd"),
        ({"decoder": "dali"}, "decoder='dali' delivers no nv12; PyAV does"),
        ({"color": "fast"}, "color='fast' does not go with"),
        ({"dtype": "float32"}, "dtype='float32' does not go with"),
        ({"normalize": ((0.5,) * 3, (0.5,) * 3)}, "normalize=.* does not go with"),
        ({"layout": "CTHW"}, "layout='CTHW' does not go with"),
        ({"antialias": False}, "antialias=False does not go with"),
    ],
)
def test_options_that_planes_do_not_have_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Video(**({"pixel_format": "nv12"} | options))


# --- the conversion


def test_the_conversion_keeps_the_first_axes() -> None:
    planes = torch.randint(0, 256, (2, 3, 24, 32), dtype=torch.uint8)
    color = torch.tensor([[1, 0], [6, 1]])
    batch = planes_to_rgb(planes, color)
    assert batch.shape == (2, 3, 3, 16, 32)
    assert batch.dtype == torch.float32
    assert 0 <= batch.min() <= batch.max() <= 1
    for clip, one_color, expected in zip(planes, color, batch, strict=True):
        assert torch.equal(planes_to_rgb(clip, one_color), expected)
        assert torch.equal(planes_to_rgb(clip[0], one_color), expected[0])
    each = color[:, None].expand(2, 3, 2)
    assert torch.equal(planes_to_rgb(planes, each), batch)
    assert planes_to_rgb(planes[:0], color[:0]).shape == (0, 3, 3, 16, 32)
    transposed = planes.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(planes_to_rgb(transposed, color), batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_the_conversion_has_other_dtypes(dtype: torch.dtype) -> None:
    planes, color = torch.randint(0, 256, (2, 24, 32), dtype=torch.uint8), torch.tensor([1, 0])
    exact, other = planes_to_rgb(planes, color), planes_to_rgb(planes, color, dtype=dtype)
    assert other.dtype == dtype
    assert torch.equal(other, (exact * 255).round().to(dtype) if dtype == torch.uint8 else exact.to(dtype))


@pytest.mark.parametrize("pixel_format", FORMATS)
def test_the_conversion_compiles_to_one_graph(pixel_format: Any) -> None:
    dtype = torch.uint16 if pixel_format == "yuv420p10" else torch.uint8
    planes = torch.randint(0, 256, (2, 3, 24, 32)).to(dtype)
    color = torch.tensor([[1, 0], [6, 1]])
    compiled = torch.compile(planes_to_rgb, backend="eager", fullgraph=True)
    assert torch.equal(compiled(planes, color, pixel_format), planes_to_rgb(planes, color, pixel_format))


@pytest.mark.gpu
@pytest.mark.parametrize("pixel_format", FORMATS)
def test_a_gpu_converts_to_the_same_rgb(pixel_format: Any) -> None:
    dtype = torch.uint16 if pixel_format == "yuv420p10" else torch.uint8
    planes = torch.randint(0, 256, (2, 3, 96, 64)).to(dtype)
    color = torch.tensor([[1, 0], [6, 1]])
    on_gpu = planes_to_rgb(planes.cuda(), color.cuda(), pixel_format)
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), planes_to_rgb(planes, color, pixel_format), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("planes", "color", "options", "reason"),
    [
        (torch.zeros(3, 25, 32, dtype=torch.uint8), torch.zeros(2), {}, "are not yuv420p"),
        (torch.zeros(3, 24, 31, dtype=torch.uint8), torch.zeros(2), {}, "are not yuv420p"),
        (torch.zeros(3, 24, 32), torch.zeros(2), {}, "are not yuv420p"),
        (torch.zeros(24, dtype=torch.uint8), torch.zeros(2), {}, "are not yuv420p"),
        (torch.zeros(3, 24, 32, dtype=torch.uint16), torch.zeros(2), {}, "are not yuv420p"),
        (torch.zeros(3, 24, 32, dtype=torch.uint8), torch.zeros(2), {"pixel_format": "yuv420p10"}, "are not yuv420p10"),
        (torch.zeros(3, 24, 32, dtype=torch.uint8), torch.zeros(2), {"pixel_format": "rgb"}, "not known"),
        (torch.zeros(3, 24, 32, dtype=torch.uint8), torch.zeros(2, 2), {}, "does not go with planes"),
        (torch.zeros(3, 24, 32, dtype=torch.uint8), torch.zeros(3, 1), {}, "does not go with planes"),
        (torch.zeros(3, 24, 32, dtype=torch.uint8), torch.zeros(2), {"dtype": torch.int64}, "makes no torch.int64"),
    ],
)
def test_tensors_that_are_no_planes_are_refused(planes: Any, color: Any, options: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        planes_to_rgb(planes, color, **options)
