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

from dataclasses import KW_ONLY, dataclass
from dataclasses import field as option
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.dataio.core.limits import FRAME_PIXELS, format_bytes
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.media import images, png
from headrace.dataio.shards.sample import Sample
from headrace.loaders.decode.base import Fit
from headrace.loaders.decode.convert import Axis, axes
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.fields.options import check_file, check_options
from headrace.loaders.interfaces import Collate
from headrace.loaders.validation import checked

Classes = npt.NDArray[Any]
"""uint8 or int32 (H, W)."""

MAX_SIDE = 16_384
_PIXELS_PER_BYTE = 64
"""Estimate of the pixels that a byte of a mask's file holds, if the sample has no image or video to compare with."""
_PIXEL_BYTES = 8
"""Memory per pixel while a mask is decoded: the frame, the class numbers, and the part that is kept."""
_SAMPLES = {
    "monob": ("u1", 1),
    "gray": ("u1", 1),
    "pal8": ("u1", 1),
    "gray16be": (">u2", 1),
    "ya8": ("u1", 2),
    "ya16be": (">u2", 2),
}
"""libav's formats of masks: the type of a number, and the numbers of a pixel."""


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
    if len(data) > images.IMAGE_BYTES:
        raise UnsupportedError(f"{what} is larger than {format_bytes(images.IMAGE_BYTES)}")
    header = png.read_header(data, what)
    if header.color not in (png.GREY, png.PALETTE):
        raise UnsupportedError(
            f"{what} is an image in {png.COLORS[header.color]}, not a mask",
            hint="save class numbers as a grey PNG or with a palette",
        )
    png.check(data, header, what)
    frame = images.decode(data)
    if (frame.width, frame.height) != (header.width, header.height) or frame.format.name not in _SAMPLES:
        raise CorruptionError(f"{what} is damaged: it decodes as {frame.width}x{frame.height} {frame.format.name}")
    dtype, samples = _SAMPLES[frame.format.name]
    first: Any = frame.planes[0]  # of a palette's two planes, the indices
    plane = np.frombuffer(first, np.uint8).reshape(-1, first.line_size)[: header.height]
    if frame.format.name == "monob":
        return np.unpackbits(plane, axis=1)[:, : header.width]
    values: Classes = plane.view(dtype)[:, : samples * header.width : samples]
    if header.bits == 16:
        return values.astype(np.int32)
    scale = 255 // ((1 << header.bits) - 1) if header.color == png.GREY else 1  # libav scales grey to 0 … 255
    classes: Classes = values // np.uint8(scale)
    return classes
