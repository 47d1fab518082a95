"""Masks: class numbers of PNG files, aligned with the pixels of their image."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.dataio.shards.media import images
from headrace.dataio.shards.media import png as png_files
from headrace.loaders.decode import resize
from headrace.loaders.decode.base import Fit
from headrace.loaders.fields.pictures import Mask, fit_mask, read_mask
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.processors.video import Cut
from tests.support.field_input import decode, sample_of
from tests.support.pictures import picture

Classes = np.ndarray[Any, np.dtype[Any]]
DAMAGE = (CorruptionError, UnsupportedError)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def rows_of(classes: Classes, bits: int) -> bytes:
    """The rows of a PNG, none of them filtered."""
    if bits == 16:
        return b"".join(b"\0" + row.astype(">u2").tobytes() for row in classes)
    digits = np.unpackbits(classes.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return b"".join(b"\0" + np.packbits(row.reshape(-1)).tobytes() for row in digits)


def png(
    classes: Classes,
    bits: int = 8,
    color: int = 0,
    *,
    extra: bytes = b"",
    rows: bytes | None = None,
    size: tuple[int, int] | None = None,
) -> bytes:
    palette = chunk(b"PLTE", bytes(3 << bits)) if color == 3 else b""
    height, width = size or classes.shape
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    data = zlib.compress(rows_of(classes, bits) if rows is None else rows)
    pieces = [chunk(b"IDAT", data[at : at + 50]) for at in range(0, len(data), 50)]
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + extra + b"".join(pieces) + chunk(b"IEND", b"")


def pillow(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def drawn(height: int, width: int, classes: int = 256, seed: int = 0) -> Classes:
    """Rectangles of random class numbers."""
    random = np.random.default_rng(seed)
    found = np.zeros((height, width), np.uint16)
    for _ in range(12):
        top, left = random.integers(0, height), random.integers(0, width)
        found[top : top + height // 2 + 1, left : left + width // 2 + 1] = random.integers(0, classes)
    return found


def read(data: bytes) -> Classes:
    return read_mask(memoryview(data).toreadonly())


KINDS = [(bits, 0) for bits in (1, 2, 4, 8, 16)] + [(bits, 3) for bits in (1, 2, 4, 8)]


@pytest.mark.parametrize(("bits", "color"), KINDS)
@pytest.mark.parametrize("transparent", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (64, 129)])
def test_class_numbers_are_those_that_the_file_stores(
    bits: int, color: int, transparent: bool, size: tuple[int, int]
) -> None:
    classes = np.random.default_rng(bits).integers(0, 1 << bits, size)
    extra = chunk(b"tRNS", b"\0\1") if transparent else b""
    found = read(png(classes, bits, color, extra=extra))
    assert found.dtype == (np.int32 if bits == 16 else np.uint8)
    assert (found == classes).all()
    assert found.flags.writeable, "the memory is the caller's own"


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_masks_that_pillow_writes_are_read(bits: int) -> None:
    classes = drawn(50, 70, 1 << bits).astype(np.uint8)
    image = Image.fromarray(classes)
    assert (read(pillow(image)) == classes).all()
    indexed = Image.fromarray(classes)
    indexed.putpalette(bytes(range(256)) * 3)
    assert (read(pillow(indexed, bits=bits)) == classes).all()
    wide = drawn(50, 70, 1 << 16)
    assert (read(pillow(Image.fromarray(wide))) == wide).all()
    black_and_white = Image.fromarray(classes > 0)
    assert (read(pillow(black_and_white)) == (classes > 0)).all()


def test_an_interlaced_mask_is_read() -> None:
    classes = drawn(21, 13)
    passes = [classes[top::down, left::across] for left, top, across, down in png_files._ADAM7]
    rows = b"".join(rows_of(one, 8) for one in passes if one.size)
    data = bytearray(png(classes, rows=rows))
    data[28] = 1  # interlaced
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    assert (read(bytes(data)) == classes).all()
    with Image.open(io.BytesIO(data)) as image:
        assert (np.asarray(image) == classes).all()


# --- aligned with an image

COLORS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
"""No mixture of these colours is one of them."""


def is_aligned(fitted: torch.Tensor, mask: Classes) -> float:
    """Check the mask where the image has a colour unmixed, and return the part of the image that is checked."""
    pixels = fitted[0].permute(1, 2, 0).numpy()
    assert mask.shape == pixels.shape[:2]
    matches = (pixels[:, :, None] == COLORS).all(-1)
    pure = matches.any(-1)
    assert (matches.argmax(-1)[pure] == mask[pure]).all()
    return float(pure.mean())


sides = st.integers(1, 90)
places = st.one_of(st.just(0.5), st.floats(0, 1, exclude_max=True))


@settings(max_examples=300)
@given(sides, sides, sides, sides, places, places, st.booleans(), st.booleans(), st.sampled_from([0, 90, 180, 270]))
def test_a_mask_stays_aligned_with_its_image_when_both_are_scaled_cropped_mirrored_and_rotated(
    height: int,
    width: int,
    rows: int,
    columns: int,
    top: float,
    left: float,
    mirror: bool,
    antialias: bool,
    rotation: int,
) -> None:
    classes = drawn(height, width, 4)
    frames = torch.from_numpy(COLORS[classes])[None]
    fit = Fit((rows, columns), antialias, (top, left), mirror)
    fitted = resize.apply(resize.rotate(frames, rotation), fit)
    is_aligned(fitted, fit_mask(classes, fit, rotation=rotation))


@pytest.mark.parametrize("size", [(64, 64), (40, 96), (180, 320), (250, 250), (360, 500)])
def test_most_of_an_image_is_checked_and_a_shift_by_three_pixels_is_seen(size: tuple[int, int]) -> None:
    classes = drawn(180, 320, 4, seed=3)
    frames = torch.from_numpy(COLORS[classes])[None]
    cut, sample = Cut("random", 0.5), sample_of({})
    mirrored = set[bool]()
    for epoch in range(8):
        ref = SampleRef(epoch, 0, sample)
        fit = Fit(size, True, cut.at(ref), cut.mirrored(ref))
        mirrored.add(fit.mirror)
        fitted, mask = resize.apply(frames, fit), fit_mask(classes, fit)
        assert is_aligned(fitted, mask) > 0.8
        for axis in (0, 1):
            with pytest.raises(AssertionError):
                is_aligned(fitted, np.roll(mask, 3, axis))
        with pytest.raises(AssertionError):
            is_aligned(fitted, mask[:, ::-1])
    assert mirrored == {False, True}


@settings(max_examples=200)
@given(sides, sides, sides, sides, places, places, st.booleans())
def test_each_pixel_is_the_one_below_its_centre(
    height: int, width: int, rows: int, columns: int, top: float, left: float, mirror: bool
) -> None:
    y, x = np.mgrid[:height, :width]
    ramps = np.stack([2 * y, 2 * x, 0 * x], axis=-1).astype(np.uint8)  # so a pixel's colour is its place
    fit = Fit((rows, columns), False, (top, left), mirror)
    places = resize.apply(torch.from_numpy(ramps)[None], fit)[0].float().numpy() / 2
    for axis, numbers in enumerate((y, x)):
        distance = np.abs(fit_mask(numbers.astype(np.uint8), fit) - places[axis])
        assert distance.max() <= 0.5 + 0.3, "half a pixel, and what rounding the colours adds"


@pytest.mark.parametrize("fit", [Fit((60, 60)), Fit((100, 40), at=(0.2, 0.9), mirror=True), Fit((360, 640))])
def test_a_mask_of_half_the_resolution_has_the_crop_of_its_image(fit: Fit) -> None:
    half = drawn(91, 160, 4)
    frames = torch.from_numpy(COLORS[half].repeat(2, 0).repeat(2, 1)[:181])[None]  # 181 rows: not exactly half
    fitted = resize.apply(frames, fit)
    mask = fit_mask(half, fit, image=(181, 320))
    pixels = fitted[0].permute(1, 2, 0).numpy()
    matches = (pixels[:, :, None] == COLORS).all(-1)
    right = (matches.argmax(-1) == mask)[matches.any(-1)]
    assert right.mean() > 0.98


def test_the_size_of_a_field_scales_and_keeps_the_middle() -> None:
    classes = drawn(90, 120, 4)
    found = decode(Mask(size=(30, 30)), png(classes))
    assert (found == fit_mask(classes, Fit((30, 30)))).all()
    is_aligned(resize.fit(torch.from_numpy(COLORS[classes])[None], (30, 30)), found)
    assert decode(Mask(), png(classes)).shape == (90, 120)
    assert decode(Mask(like="video"), png(classes)).shape == (90, 120)
    wide = decode(Mask(size=(30, 30)), png(drawn(90, 120, 1 << 16), 16))
    assert wide.dtype == np.int32


def test_without_a_fit_a_mask_is_only_rotated() -> None:
    classes = np.arange(6).reshape(2, 3)
    assert (fit_mask(classes, None) == classes).all()
    for degrees in (90, 180, 270):
        frames = torch.from_numpy(classes)[None, :, :, None]
        assert (fit_mask(classes, None, rotation=degrees) == resize.rotate(frames, degrees)[0, :, :, 0].numpy()).all()


# --- what is refused


def test_images_in_colour_and_other_formats_are_refused() -> None:
    for mode, named in (("RGB", "RGB"), ("RGBA", "RGB with transparency"), ("LA", "grey with transparency")):
        with pytest.raises(UnsupportedError, match=f"an image in {named}, not a mask"):
            read(pillow(Image.new(mode, (4, 4))))
    for data in (picture("jpg"), picture("webp"), b"", b"\x89PNG"):
        with pytest.raises(UnsupportedError, match="not a PNG"):
            read(data)
    with pytest.raises(UnsupportedError, match="an animation"):
        read(png(drawn(4, 4), extra=chunk(b"acTL", bytes(8))))


@pytest.mark.parametrize("size", [(60_000, 60_000), (1, (1 << 31) - 1), (8193, 8192), ((1 << 32) - 1, (1 << 32) - 1)])
def test_a_mask_that_claims_too_many_pixels_costs_nothing(size: tuple[int, int]) -> None:
    data = png(drawn(4, 4), size=size)
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match=f"has {size[1]}x{size[0]} pixels"):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < limits.MIB
    finally:
        tracemalloc.stop()


def test_a_mask_that_claims_more_rows_than_it_has_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "decode", lambda data: pytest.fail("decoded"))
    data = png(drawn(4, 4), size=(8192, 8192))
    with pytest.raises(CorruptionError, match=r"it has 20 of \d+ bytes of rows"):
        read(data)
    classes = drawn(100, 100)
    for rows in (rows_of(classes, 8)[:-1], rows_of(classes, 8)[:5050], b""):
        with pytest.raises(CorruptionError, match="bytes of rows"):
            read(png(classes, rows=rows))


def test_rows_that_expand_without_end_are_inflated_no_further_than_the_image() -> None:
    classes = drawn(10, 10)
    data = png(classes, rows=rows_of(classes, 8) + bytes(20 * limits.MIB))
    tracemalloc.start()
    try:
        assert (read(data) == classes).all()
        assert tracemalloc.get_traced_memory()[1] < limits.MIB
    finally:
        tracemalloc.stop()


def test_the_number_of_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png_files, "_MOST_CHUNKS", 10)
    read(png(drawn(4, 4)))
    with pytest.raises(UnsupportedError, match="more than 10 chunks"):
        read(png(drawn(4, 4), extra=chunk(b"tEXt", b"a\0b") * 10))


@pytest.mark.parametrize("field", ["bits", "color", "compression", "filter", "interlace", "width"])
def test_a_header_with_a_value_that_png_lacks_is_damage(field: str) -> None:
    at = {"width": 16, "bits": 24, "color": 25, "compression": 26, "filter": 27, "interlace": 28}[field]
    data = bytearray(png(drawn(4, 4)))
    if field == "width":
        data[16:20] = bytes(4)
    else:
        data[at] = 7
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(CorruptionError, match="header"):
        read(bytes(data))
    with pytest.raises(CorruptionError, match="header"):
        read(png(drawn(4, 4), 16, 0)[:24] + b"\3" + png(drawn(4, 4), 16, 0)[25:])


SMALL = png(drawn(9, 11))


def test_every_truncation_is_damage() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(DAMAGE):
            read(SMALL[:length])


def test_every_changed_byte_is_damage() -> None:
    for at in range(len(SMALL) - 4):
        with pytest.raises(DAMAGE):
            read(SMALL[:at] + bytes([SMALL[at] ^ 0x10]) + SMALL[at + 1 :])


@settings(max_examples=200)
@given(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=3))
def test_damage_with_right_checksums_gives_class_numbers_or_damage(kind: int, changes: list[tuple[int, int]]) -> None:
    classes = drawn(9, 11, 4)
    rows = bytearray(rows_of(classes, (2, 4, 8)[kind]))
    for at, value in changes:
        rows[at % len(rows)] = value
    with contextlib.suppress(*DAMAGE):
        assert read(png(classes, (2, 4, 8)[kind], rows=bytes(rows))).shape == (9, 11)


def test_impossible_arguments_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"size": (0, 4)},
        {"size": 4},
        {"size": (4, 4, 4)},
        {"size": (4, 20_000)},
        {"size": (4.5, 4)},
        {"like": ""},
        {"like": 3},
        {"like": "video", "size": (4, 4)},
        {"file": ""},
        {"collate": "sum"},
    ]
    for arguments in wrong:
        with pytest.raises(UsageError):
            Mask(**arguments)
    assert Mask(size=[4, 5]).size == (4, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean size"):
        Mask(sise=(4, 4))  # type: ignore[call-arg]


def test_the_memory_of_a_mask_follows_its_file_or_the_image_beside_it() -> None:
    from tests.loaders.test_clip import VIDEO

    alone, small = sample_of({"mask.png": bytes(1000)}), sample_of({"mask.png": bytes(10)}, video=VIDEO)
    assert Mask().nbytes(alone) == 8 * 64 * 1000
    assert Mask(size=(10, 10)).nbytes(alone) == 8 * (64 * 1000 + 100)
    assert Mask().nbytes(small) == 8 * 64 * 48
    assert Mask().nbytes(sample_of({"mask.png": b""})) == 0
