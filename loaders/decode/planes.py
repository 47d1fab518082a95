"""Raw planes: the luma and chroma of a clip's frames, without conversion to RGB.

Purpose: a trainer that converts colours on its GPU needs half the bytes of RGB. Planes of the requested format are
copied from the decoder's frame. libswscale converts other formats, and scales.

Invariants:
- A frame is uint8 (H * 3 / 2, W), or uint16 with 10 bits. The first H rows are luma. The rest holds one chroma sample of
  each kind for each 2 x 2 pixels: all of Cb before all of Cr ("yuv420p", "yuv420p10"), or pairs ("nv12").
- The part of the frame that RGB would show is cropped to the nearest even source pixels, then scaled. So chroma stays
  aligned with luma. An odd last row or column of the source is left out.
- Matrix and range are those of the clip's first frame, by the rule of `color="tagged"`. They are not converted. RGB
  becomes BT.601 of limited range, and grey keeps its full range.
- The module does not import torch, so the decoding subprocess starts quickly.

Failure behaviour: `UnsupportedError` for a matrix that libswscale does not convert to RGB either, and for a video that
is one pixel wide or high.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.plane import VideoPlane

from headrace.dataio.core.errors import UnsupportedError
from headrace.loaders.decode.base import Fit, PixelFormat, Planes, Request
from headrace.loaders.decode.convert import EXACT, PLANAR, Axis, Chain, Converter, Part, axes, cut

Samples = npt.NDArray[Any]

_MATRICES = {0: 6, 1: 1, 2: 6, 4: 4, 5: 6, 6: 6, 7: 7, 9: 9}
"""The matrix of each code point of ITU-T H.273 that libswscale converts; 5 and 6 have one matrix, BT.601. libswscale
takes it where the file names none (2), and for 0, which has no meaning for YCbCr."""
_MATRIX_NAMES = {1: "bt709", 4: "fcc", 6: "smpte170m", 7: "smpte240m", 9: "bt2020"}
_FULL_RANGE = 2  # libav's AVCOL_RANGE_JPEG
_RGB_COLOR = (6, 0)  # of the planes of RGB sources: libswscale's chroma of full range is darker by half a step
_GREY_COLOR = (6, 1)
_AS_STORED = {"yuv420p": ("yuv420p", "yuvj420p"), "yuv420p10le": ("yuv420p10le",)}


def sample_type(pixel_format: PixelFormat) -> type[np.uint8] | type[np.uint16]:
    """The type of the samples in this format."""
    return np.uint16 if pixel_format == "yuv420p10" else np.uint8


def clip_shape(request: Request, planes: Planes) -> tuple[int, int, int]:
    """The shape of the clip."""
    height, width = planes.size or _shown(request.info.height, request.info.width, planes.rotation)
    return len(request.wanted.values), height * 3 // 2, width


def color_of(frame: VideoFrame) -> tuple[int, int]:
    """The code point of the matrix in ITU-T H.273, and 1 for the full range, else 0."""
    pixels = frame.format
    if pixels.is_rgb or pixels.has_palette:
        return _RGB_COLOR
    if len(pixels.components) < 3:
        return _GREY_COLOR
    matrix = _MATRICES.get(int(frame.colorspace))
    if matrix is None:
        raise UnsupportedError(f"frames with the colour matrix {int(frame.colorspace)} of H.273")
    return matrix, int(pixels.name.startswith("yuvj") or int(frame.color_range) == _FULL_RANGE)


class PlanesCanvas:
    """Planes of a clip. `clip` is (T, H * 3 / 2, W). `color` is the matrix and range, once a frame is drawn."""

    def __init__(self, request: Request, planes: Planes, converter: Converter) -> None:
        self._planes, self._convert = planes, converter
        shape = clip_shape(request, planes)
        if not min(shape[1:]) or min(request.info.height, request.info.width) < 2:
            raise UnsupportedError("a frame that is one pixel wide or high has no planes of 4:2:0")
        self._down, self._across = _sides(
            request.info.height, request.info.width, (shape[1] * 2 // 3, shape[2]), planes
        )
        self._stored = "yuv420p10le" if planes.pixel_format == "yuv420p10" else "yuv420p"
        self._type = sample_type(planes.pixel_format)
        self._chains: dict[tuple[str, tuple[int, int]], Chain] = {}
        memory = None if request.allocate is None else request.allocate(shape)
        self.clip: Samples = np.empty(shape, self._type) if memory is None else memory
        self.color: tuple[int, int] | None = None

    def draw(self, number: int, frame: VideoFrame) -> None:
        color = color_of(frame)
        self.color = self.color or color
        kind = frame.format.name, color
        if kind not in self._chains:
            self._chains[kind] = self._chain(frame, color)
        chain = self._chains[kind]
        picture: Any = self._convert(frame, chain) if chain else frame
        y, x = (0, 0) if chain else (self._down.begin, self._across.begin)
        rows, columns = self._down.kept, self._across.kept
        luma, blue, red = (self._samples(plane) for plane in picture.planes)
        out = self.clip[number]
        height, width = out.shape[0] * 2 // 3, out.shape[1]
        out[:height] = self._turned(luma[y : y + rows, x : x + columns])
        rest = out[height:]
        if self._planes.pixel_format == "nv12":
            chroma = rest.reshape(height // 2, width // 2, 2).transpose(2, 0, 1)
        else:
            chroma = rest.reshape(2, height // 2, width // 2)
        for part, samples in zip(chroma, (blue, red), strict=True):
            part[...] = self._turned(samples[y // 2 : y // 2 + rows // 2, x // 2 : x // 2 + columns // 2])

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]

    def _chain(self, frame: VideoFrame, color: tuple[int, int]) -> Chain:
        """The filter chain for frames like this one. An empty chain if the frame's own planes are copied."""
        down, across = self._down, self._across
        is_scaled = (down.length, across.length) != (down.kept, across.kept)
        if frame.format.name in _AS_STORED[self._stored] and not is_scaled and color == self.color:
            return ()
        assert self.color is not None
        matrix, is_full = self.color
        colors = f"out_color_matrix={_MATRIX_NAMES[matrix]}:out_range={'full' if is_full else 'limited'}"
        flags = f"flags={EXACT}+full_chroma_inp:{colors}"
        part = cut(Part(down.begin, down.begin + down.length, across.begin, across.begin + across.length), frame)
        scale = (("scale", f"{across.kept}:{down.kept}:{flags}"), ("format", self._stored))
        if frame.format.name in PLANAR:
            return *part, *scale
        return ("scale", flags), ("format", self._stored), *part, *scale  # chroma of other formats may be coarser

    def _samples(self, plane: VideoPlane) -> Samples:
        """The memory of a plane, without a copy."""
        memory: Any = plane
        rows = np.frombuffer(memory, self._type).reshape(-1, plane.line_size // np.dtype(self._type).itemsize)
        return rows[: plane.height, : plane.width]

    def _turned(self, samples: Samples) -> Samples:
        """A view of the samples, rotated and mirrored."""
        if self._planes.rotation:
            samples = np.rot90(samples, -self._planes.rotation // 90)
        return samples[:, ::-1] if self._planes.mirror else samples


def _shown(height: int, width: int, rotation: int) -> tuple[int, int]:
    """The even sides of the rotated frame."""
    return _even(width, height) if rotation % 180 else _even(height, width)


def _even(*sides: int) -> tuple[int, int]:
    height, width = sides
    return height // 2 * 2, width // 2 * 2


class _Side(msgspec.Struct, frozen=True):
    """One side of the frame: `length` source pixels from `begin` on are scaled to `kept` pixels. All are even."""

    source: int
    begin: int
    length: int
    kept: int

    @property
    def reversed(self) -> _Side:
        return _Side(self.source, self.source - self.begin - self.length, self.length, self.kept)


def _side(axis: Axis) -> _Side:
    """The source pixels that become the kept pixels, to the nearest even pixel."""
    if axis.source == axis.scaled:
        return _Side(axis.source, 2 * round(axis.first / 2), axis.kept, axis.kept)
    begin, end = (2 * round(axis.step * place / 2) for place in (axis.first, axis.first + axis.kept))
    begin = min(begin, axis.source - 2)
    return _Side(axis.source, begin, max(2, min(end, axis.source) - begin), axis.kept)


def _sides(height: int, width: int, size: tuple[int, int], planes: Planes) -> tuple[_Side, _Side]:
    """The height and the width of the frame before it is rotated. `size` is that of the rotated clip."""
    shown = _shown(height, width, planes.rotation)
    down, across = (_side(axis) for axis in axes(*shown, Fit(size, at=planes.at)))
    match planes.rotation // 90 % 4:
        case 1:
            return across.reversed, down
        case 2:
            return down.reversed, across.reversed
        case 3:
            return across, down.reversed
        case _:
            return down, across
