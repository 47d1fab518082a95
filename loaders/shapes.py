"""Buckets of clips and of sound: which shape each sample is given, and what a clip or window of each shape is like.

Purpose: the join between `headrace.loaders.sampling.buckets`, which knows numbers, and the index and the clips.
Invariants: a video is sorted by its size as shown (after rotation, where the loader rotates) and by how many frames, spaced
as the loader's clip spaces them, it holds.
Failure behaviour: `UsageError` for what cannot be asked for together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Sorting, Stream, column
from headrace.loaders.works.clips import Look

if TYPE_CHECKING:
    from headrace.loaders.sampling.buckets import Buckets, Durations
    from headrace.loaders.sound.window import Window


def sorting(buckets: Buckets | None, look: Look) -> Sorting | None:
    """How videos are sorted for clips of this look."""
    if buckets is None:
        return None
    if look.size is not None:
        raise UsageError("with buckets each bucket has its size", hint="leave size out")
    if look.clip.start == "every" and any(bucket.frames for bucket in buckets.buckets):
        raise UsageError(
            "start='every' counts clips of one length; buckets that name their frames have several",
            hint="leave the buckets' frames out, or start otherwise",
        )

    def sort(stream: Stream) -> I64:
        numbers = {name: column(stream.dataset, name, stream.ids) for name in ("height", "width", "rotation")}
        height, width = numbers["height"].astype(np.int64), numbers["width"].astype(np.int64)
        turned = (numbers["rotation"] % 180 == 90) & look.rotate
        heights, widths = np.where(turned, width, height), np.where(turned, height, width)
        return buckets.assign(heights, widths, _lengths(stream, look), look.clip.frames)

    frames = look.clip.frames
    return Sorting(buckets.batches(frames), sort, buckets.numbers(frames))


def looks(look: Look, buckets: Buckets | None, streams: Sequence[int]) -> list[Look]:
    """The look of each stream's clips; `streams` says which bucket each is."""
    if buckets is None:
        return [look]
    chosen = [buckets.buckets[bucket] for bucket in streams]
    return [
        msgspec.structs.replace(look, size=one.size, clip=replace(look.clip, frames=one.frames or look.clip.frames))
        for one in chosen
    ]


def sorting_sound(buckets: Durations | None, window: Window | None) -> Sorting | None:
    """How recordings are sorted by how long they are; `window` is the one that was asked for, whose length they replace."""
    if buckets is None:
        return None
    if window is not None and window.start == "every":
        raise UsageError("start='every' counts windows of one length, and buckets have several", hint="start otherwise")

    def sort(stream: Stream) -> I64:
        samples, rate = (column(stream.dataset, name, stream.ids) for name in ("samples", "sample_rate"))
        return buckets.assign(samples / rate)

    return Sorting(buckets.batches(), sort, buckets.numbers())


def windows(window: Window, buckets: Durations | None, streams: Sequence[int]) -> list[Window]:
    """The window of each stream; `streams` says which bucket each is."""
    if buckets is None:
        return [window]
    return [replace(window, seconds=buckets.seconds[bucket]) for bucket in streams]


def _lengths(stream: Stream, look: Look) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Frames that each video can give, spaced as the clip spaces them."""
    if look.clip.rate is not None:
        return column(stream.dataset, "duration", stream.ids) * float(look.clip.rate)
    return np.floor((column(stream.dataset, "frames", stream.ids) - 1) / look.clip.stride) + 1
