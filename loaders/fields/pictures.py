"""Masks: one class number per pixel, from PNG files.

Purpose: deliver segmentation masks whose pixels stay aligned with the pixels of an image or a video.

Invariants:
- A class number is the number that the file stores: the grey value, or the index into the palette. Grey values of 1, 2
  and 4 bits are not scaled to 0 … 255.
- `fit_mask` has the geometry of `headrace.loaders.decode.resize.fit`. Each pixel is that of the mask below its centre,
  so class numbers are never mixed.
- The size is checked before any memory is allocated. The checksums and the number of rows are checked, so missing rows
  are never filled in.

Failure behaviour: damaged files raise `CorruptionError`. RGB and other files that are not masks, and masks of more than
`limits.FRAME_PIXELS`, raise `UnsupportedError`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as option
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.dataio.core.limits import FRAME_PIXELS, format_bytes
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.media import images
from headrace.dataio.shards.sample import Sample
from headrace.loaders.decode.base import Fit
from headrace.loaders.decode.convert import Axis, axes
from headrace.loaders.fields.base import Collate, Field, FieldInput
from headrace.loaders.fields.options import check_file, check_options
from headrace.loaders.validation import checked

Classes = npt.NDArray[Any]
"""uint8 or int32 (H, W)."""

MAX_SIDE = 16_384
_PIXELS_PER_BYTE = 64
"""Estimate of the pixels that a byte of a mask's file holds, if the sample has no image or video to compare with."""
_PIXEL_BYTES = 8
"""Memory per pixel while a mask is decoded: the frame, the class numbers, and the part that is kept."""


@suggests_arguments(align="like")
@dataclass(frozen=True)
class Mask(Field):
    """The class number of each pixel: uint8 (H, W), or int32 (H, W) for PNG files of 16 bits.

    The file is a PNG: grey with 1, 2, 4, 8 or 16 bits, or with a palette. The class number is the stored number: the
    grey value, or the index into the palette.

    Args:
        file (str): extension of the file. Default: "mask.png".
        size (tuple[int, int] | None): height and width in pixels, 1 to 16384 each. The mask is scaled to cover them,
            and its middle is kept, exactly as images and videos of this `size` are. Scaling takes the nearest pixel.
            Default: None, the size of the file.
        like (str | None): name of the video or image field that the mask is aligned with. It is scaled, cropped,
            mirrored and rotated like that field's frames; replaces `size`. Default: None.
        collate (str | Callable): how a batch holds the masks: "stack", "pad", "concat", "list" or a function. Default:
            "stack", a tensor (B, H, W).
        required (bool): leave out samples that lack the file. Default: True.

    Raises:
        UsageError: for an impossible size, or for `size` together with `like`.

    Example:
        >>> Mask(size=(256, 256)).files
        ('mask.png',)
    """

    file: str = "mask.png"
    _: KW_ONLY
    size: tuple[int, int] | None = None
    like: str | None = None
    collate: Collate = "stack"
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, check_file(self, self.file))
        size = checked("Mask's size", self.size, tuple[int, int] | None, "(height, width)")
        if size is not None and not all(1 <= side <= MAX_SIDE for side in size):
            raise UsageError(f"Mask's size cannot be {size}", hint=f"height and width are from 1 to {MAX_SIDE}")
        object.__setattr__(self, "size", None if size is None else tuple(size))
        if checked("Mask's like", self.like, str | None, "the name of a field") == "":
            raise UsageError("Mask's like cannot be ''", hint="give the name of a field")
        if size is not None and self.like is not None:
            raise UsageError("a mask has the size of the field that it is like", hint="leave size out")

    def decode(self, data: FieldInput) -> Classes:
        mask = read_mask(data.files[self.file], f".{self.file}")
        return mask if self.size is None else fit_mask(mask, Fit(self.size))

    def nbytes(self, sample: Sample) -> int:
        pixels = _PIXELS_PER_BYTE * super().nbytes(sample)
        if sample.video is not None:
            pixels = max(sample.video.width * sample.video.height, super().nbytes(sample))
        kept = 0 if self.size is None else self.size[0] * self.size[1]
        return _PIXEL_BYTES * (min(FRAME_PIXELS, pixels) + kept)


def fit_mask(mask: Classes, fit: Fit | None, *, rotation: int = 0, image: tuple[int, int] | None = None) -> Classes:
    """Scale, crop and mirror a mask as `resize.rotate` and `resize.fit` do with the frames of its image or video.

    Args:
        mask: (H, W).
        fit: size, position of the crop, and whether to mirror. None changes nothing but the rotation.
        rotation: 0, 90, 180 or 270 degrees clockwise, applied first. Give it if the frames are rotated.
        image: height and width of the image's frames after rotation, if the mask may have another resolution. Default:
            the mask's size.

    Returns:
        (h, w), with the dtype of `mask`. It may be a view.

    Example:
        >>> fit_mask(np.array([[1, 1, 2, 2], [3, 3, 4, 4]]), Fit((1, 1), at=(0.0, 0.9), mirror=True))
        array([[4]])
    """
    turned = np.rot90(mask, -rotation // 90 % 4)
    if fit is None:
        return turned
    height, width = turned.shape if image is None else image
    down, across = axes(height, width, fit)
    rows, columns = _nearest(down, turned.shape[0]), _nearest(across, turned.shape[1])
    return turned[rows][:, columns[::-1] if fit.mirror else columns]


def _nearest(axis: Axis, source: int) -> npt.NDArray[np.int64]:
    """The mask's pixel below the centre of each kept pixel, if the axis is `source` pixels of the mask."""
    centres = 2 * np.arange(axis.first, axis.first + axis.kept) + 1  # in half pixels of the scaled image
    return centres * source // (2 * axis.scaled)


def read_mask(data: memoryview, what: str = "the mask") -> Classes:
    """Decode a mask: uint8 (H, W), or int32 (H, W) for files of 16 bits.

    Args:
        data: the whole file.
        what: name of the file, for errors.
    """
    png = _read_header(data, what)
    _check_data(data, png, what)
    frame = images.decode(data)
    if (frame.width, frame.height) != (png.width, png.height) or frame.format.name not in _SAMPLES:
        raise CorruptionError(f"{what} is damaged: it decodes as {frame.width}x{frame.height} {frame.format.name}")
    dtype, samples = _SAMPLES[frame.format.name]
    first: Any = frame.planes[0]  # of a palette's two planes, the indices
    plane = np.frombuffer(first, np.uint8).reshape(-1, first.line_size)[: png.height]
    if frame.format.name == "monob":
        return np.unpackbits(plane, axis=1)[:, : png.width]
    values: Classes = plane.view(dtype)[:, : samples * png.width : samples]
    if png.bits == 16:
        return values.astype(np.int32)
    scale = 255 // ((1 << png.bits) - 1) if png.color == _GREY else 1  # libav scales grey to 0 … 255
    classes: Classes = values // np.uint8(scale)
    return classes


# --- the structure of a PNG

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _PALETTE = 0, 3
_BITS = {_GREY: (1, 2, 4, 8, 16), _PALETTE: (1, 2, 4, 8)}
_COLORS = {2: "RGB", 4: "grey with transparency", 6: "RGB with transparency"}
_SAMPLES = {
    "monob": ("u1", 1),
    "gray": ("u1", 1),
    "pal8": ("u1", 1),
    "gray16be": (">u2", 1),
    "ya8": ("u1", 2),
    "ya16be": (">u2", 2),
}
"""libav's formats of masks: the type of a number, and the numbers of a pixel."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""The passes of an interlaced file: first column and row, and the steps between columns and rows."""
_MOST_CHUNKS = 1 << 17
_DEFLATED, _INFLATED = 1 << 14, 1 << 16  # bytes at a time


class _Png(msgspec.Struct, frozen=True):
    width: int
    height: int
    bits: int
    color: int
    interlaced: bool

    @property
    def size(self) -> int:
        """Bytes of the rows, each with its filter."""
        passes = _ADAM7 if self.interlaced else ((0, 0, 1, 1),)
        total = 0
        for left, top, across, down in passes:
            width, height = -((left - self.width) // across), -((top - self.height) // down)
            if width > 0 and height > 0:
                total += height * (1 + -(-width * self.bits // 8))
        return total


def _read_header(data: memoryview, what: str) -> _Png:
    head = bytes(data[:33])
    if head[:8] != _SIGNATURE:
        raise UnsupportedError(f"{what} is not a PNG", hint="masks are PNG files of class numbers")
    if len(data) > images.IMAGE_BYTES:
        raise UnsupportedError(f"{what} is larger than {format_bytes(images.IMAGE_BYTES)}")
    if len(head) < 33 or head[8:16] != b"\0\0\0\x0dIHDR" or zlib.crc32(head[12:29]) != int.from_bytes(head[29:], "big"):
        raise CorruptionError(f"{what} is damaged: its header is not that of a PNG")
    width, height, bits, color, compression, filtering, interlace = struct.unpack(">IIBBBBB", head[16:29])
    if color in _COLORS:
        raise UnsupportedError(
            f"{what} is an image in {_COLORS[color]}, not a mask",
            hint="save class numbers as a grey PNG or with a palette",
        )
    if bits not in _BITS.get(color, ()) or compression or filtering or interlace > 1 or width * height == 0:
        raise CorruptionError(f"{what} is damaged: its header is not that of a PNG")
    if width * height > FRAME_PIXELS:
        raise UnsupportedError(f"{what} has {width}x{height} pixels", hint=f"at most {FRAME_PIXELS}")
    return _Png(width, height, bits, color, bool(interlace))


def _check_data(data: memoryview, png: _Png, what: str) -> None:
    """Check that the file holds all rows, which libav does not."""
    inflater, size = zlib.decompressobj(), 0
    try:
        for piece in _pieces(data, what):
            left: bytes | memoryview = piece
            while len(left) and not inflater.eof and size <= png.size:
                size += len(inflater.decompress(left, _INFLATED))
                left = inflater.unconsumed_tail
        if not inflater.eof and size <= png.size:
            size += len(inflater.flush(_INFLATED))
    except zlib.error as error:
        raise CorruptionError(f"{what} is damaged: {error}") from error
    if size < png.size or (size == png.size and not inflater.eof):
        raise CorruptionError(f"{what} is damaged: it has {size} of {png.size} bytes of rows")


def _pieces(data: memoryview, what: str) -> Iterator[memoryview]:
    """Yield the compressed rows in small pieces. The checksums of all chunks are checked."""
    at = len(_SIGNATURE)
    for _ in range(_MOST_CHUNKS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), bytes(data[at + 4 : at + 8])
        end = at + 8 + length
        if len(data) < end + 4:
            raise CorruptionError(f"{what} is truncated")
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise CorruptionError(f"{what} is damaged: the checksum at offset {end} is wrong")
        if kind == b"IDAT":
            for begin in range(at + 8, end, _DEFLATED):
                yield data[begin : min(begin + _DEFLATED, end)]
        elif kind == b"acTL":
            raise UnsupportedError(f"{what} is an animation, not a mask")
        elif kind == b"IEND":
            return
        at = end + 4
    raise UnsupportedError(f"{what} has more than {_MOST_CHUNKS} chunks")
