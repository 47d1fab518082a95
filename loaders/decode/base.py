"""The contract of all decoding back ends. Start reading here.

Purpose: turn compressed bytes, an index entry and a list of frames into pixels, identically in every back end.

Invariants, for every back end:

* *Same pixels.* Frames are uint8 RGB, and rotation metadata is ignored (`resize.rotate` rotates the frames afterwards).
  `color="bt601"` converts by BT.601 and ignores the stream's colour tags. CPU back ends are bit-identical; a GPU may
  differ by 2, and rarely differs by more than 1. "tagged" and "fast" use the tags, which only PyAV supports. "fast"
  uses libswscale's fastest conversion. JPEGs always have libjpeg-turbo's RGB.
* *Same crop.* Frames are returned at full resolution. With `Request.fit` they are bit-identical to the output of
  `resize.fit`. The exception is "fast" with antialiasing, which scales and converts in one pass of libswscale.
* *All or nothing.* A request returns exactly the requested frames, or an error. It never returns zeros, frames of
  another request, or an adjacent frame in place of a missing one.
* *Independent requests.* A bad request never affects the other requests of the same call.

Failure behaviour: `decode` returns an error at the position of each bad request: `CorruptionError` for damaged bytes,
`UnsupportedError` for a request that this back end cannot decode, `CapacityError` for a clip above `MAX_CLIP_BYTES`. It
raises only when the back end itself fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.limits import GIB
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.fetch.partial_file import Media

if TYPE_CHECKING:  # the decoding subprocess does not import torch
    import numpy.typing as npt
    import torch

Color = Literal["bt601", "tagged", "fast"]
PixelFormat = Literal["rgb", "yuv420p", "nv12", "yuv420p10"]
MAX_CLIP_BYTES = 4 * GIB
"""The limit on the size of one decoded clip before it is resized."""
GPU_BATCH = 16
"""Number of clips that are decoded together on a GPU."""
_FRAMES_IN_WORK = 8
"""Number of full-size frames that a decoder and a converter hold for a clip that is cropped frame by frame."""


class Fit(msgspec.Struct, frozen=True):
    """How frames are scaled and cropped.

    They are scaled to cover `size` (height, width), cropped, and optionally mirrored left to right. `at` is the
    position of the crop, vertically and horizontally: 0 to 1 each.
    """

    size: tuple[int, int]
    antialias: bool = True
    at: tuple[float, float] = (0.5, 0.5)
    mirror: bool = False


class Planes(msgspec.Struct, frozen=True):
    """A clip of planes instead of RGB (see `headrace.loaders.decode.planes`).

    Frames are scaled and cropped as by `Fit`; a `size` of None keeps the source's size. Then they are rotated clockwise
    by `rotation` degrees and mirrored. `size` and `at` are those of the rotated clip.
    """

    pixel_format: PixelFormat
    size: tuple[int, int] | None = None
    at: tuple[float, float] = (0.5, 0.5)
    mirror: bool = False
    rotation: int = 0


class Request(msgspec.Struct, frozen=True):
    """One clip to decode.

    `data` is the file, as bytes or as an object that reads them on access. It must stay valid until `decode` returns.
    `allocate(shape)` returns memory for the fitted frames or planes, or None; the decoder then allocates its own. With
    `planes`, which only PyAV supports, `color` and `fit` have no effect.
    """

    data: Media
    info: VideoInfo
    wanted: Wanted
    color: Color = "bt601"
    fit: Fit | None = None
    allocate: Callable[[tuple[int, ...]], npt.NDArray[Any] | None] | None = None
    planes: Planes | None = None


class Decoded(msgspec.Struct, frozen=True):
    """A decoded clip.

    `frames` is uint8 (T, H, W, 3), or (T, 3, h, w) if a `Fit` was applied, on the back end's device. `pts` are the T
    time stamps in units of the stream's time base. Of planes, `frames` is (T, h * 3 / 2, w), and `color` is the matrix
    (its code point in ITU-T H.273) and the range (1 if it is full).
    """

    frames: torch.Tensor
    pts: tuple[int, ...]
    color: tuple[int, int] | None = None


class Decoder(Protocol):
    """A decoding back end. Safe to share between threads."""

    name: str

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        """The decoded clip or the error of each request, in the same order."""
        ...

    def clip_bytes(self, info: VideoInfo, frames: int, size: tuple[int, int] | None, color: Color) -> int:
        """The maximum number of bytes that decoding a clip takes, without its file: `whole_clip_bytes`, or less.

        Args:
            info: the index entry of the stream.
            frames: number of frames of the clip.
            size: height and width of the clip if the decoder scales and crops it (`Request.fit`), else None.
            color: how colours are converted.
        """
        ...

    def close(self) -> None:
        """Release the decoder's resources. It is not used afterwards."""
        ...


def whole_clip_bytes(info: VideoInfo, frames: int) -> int:
    """Bytes of a clip whose frames are all kept at full size."""
    return info.width * info.height * 3 * frames


def cropped_clip_bytes(info: VideoInfo, frames: int, size: tuple[int, int]) -> int:
    """Bytes of a clip whose frames are scaled and cropped one by one, so that only a few are kept at full size."""
    return whole_clip_bytes(info, _FRAMES_IN_WORK) + size[0] * size[1] * 3 * frames


def planes_bytes(info: VideoInfo, frames: int, size: tuple[int, int] | None, pixel_format: PixelFormat) -> int:
    """The maximum number of bytes that decoding a clip of planes takes."""
    height, width = size or (info.height, info.width)
    sample_bytes = 2 if pixel_format == "yuv420p10" else 1
    return whole_clip_bytes(info, _FRAMES_IN_WORK) + height * width * 3 // 2 * sample_bytes * frames
