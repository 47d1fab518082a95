"""The decode contract: what every back-end promises. Read this first.

Purpose: (compressed bytes, what the index says of them, which frames) -> pixels, whoever decodes.

Invariants, for every back-end:

* *Same pixels.* uint8 RGB, rotation metadata ignored (`resize.rotate` turns the frames afterwards). With
  `color="bt601"` converted by BT.601 whatever the stream's tags say: CPU back-ends agree bit for bit; a GPU is expected
  within 2, and seldom off by more than 1. "tagged" and "fast" follow the tags, which only PyAV can; "fast" takes libswscale's
  quickest way there. Of JPEGs it is libjpeg-turbo's RGB in each case.
* *Same cut.* Frames come at full resolution, or with `Request.fit` as `resize.fit` makes them, to the bit; but "fast", with
  antialiasing, scales and converts in one pass of libswscale.
* *All or nothing.* A request gives exactly the frames it asked for, or an error: never zeros, stale frames of another
  request, or a neighbour in place of a frame that is missing.
* *One by one.* A bad request never harms the others of the same call.

Failure behaviour: `decode` returns, at the place of each bad request, the error that names what is wrong with it:
`CorruptionError` for damaged bytes, `UnsupportedError` for what this back-end cannot do, `CapacityError` for a clip above
`MAX_CLIP_BYTES`. It raises only when the back-end itself fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.limits import GIB
from headrace.dataio.shards.contract import VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.geometry import Fit
from headrace.loaders.fetch.partial_file import Media

if TYPE_CHECKING:  # a process that decodes for another needs no torch
    import numpy as np
    import numpy.typing as npt
    import torch

Color = Literal["bt601", "tagged", "fast"]
MAX_CLIP_BYTES = 4 * GIB
"""The most that one decoded clip may take before it is resized."""


class Request(msgspec.Struct, frozen=True):
    """One clip to decode. `data` is the member of the shard, which may read itself; it must stay valid until `decode` returns.
    `room(shape)` is memory, or None, that the fitted frames may be given in, rather than in memory of their own."""

    data: Media
    info: VideoInfo
    wanted: Wanted
    color: Color = "bt601"
    fit: Fit | None = None
    room: Callable[[tuple[int, ...]], npt.NDArray[np.uint8] | None] | None = None


class Decoded(msgspec.Struct, frozen=True):
    """`frames`: uint8 (T, H, W, 3), or fitted (T, 3, h, w), on the back-end's device. `pts`: the T time stamps, in the stream's
    time base."""

    frames: torch.Tensor
    pts: tuple[int, ...]


class Decoder(Protocol):
    """Safe to share between threads."""

    name: str

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        """The clip of every request, or what is wrong with it, in the same order."""
        ...

    def close(self) -> None:
        """Release what the decoder holds; it is not used afterwards."""
        ...
