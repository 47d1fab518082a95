"""A film with all of its frames by plain decoding, to which clips of it are compared."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

import av
import numpy as np
from msgspec.structs import replace

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.clip import Clip, Wanted, choose
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from tests.support import reference_decoder


class ReferenceVideo:
    """A file, its frames by plain decoding, and what the index says of it."""

    def __init__(self, data: bytes, ext: str) -> None:
        self.data, probed = data, probe(data, ext=ext)
        self.images, self.times = reference_decoder.frames(data)
        assert probed.video is not None
        self.info, self.notes = probed.video, probed.notes

    def decode(self, wanted: Wanted, info: VideoInfo | None = None) -> Decoded | HeadraceError:
        return PyAVDecoder().decode([Request(memoryview(self.data), info or self.info, wanted)])[0]

    def check(self, clips: Sequence[Clip], info: VideoInfo | None = None, count: int = 8) -> None:
        """Clips by number and by time are those of plain decoding."""
        info = info or self.info
        assert info.frames == len(self.images)
        for clip, number in itertools.product(clips, range(count)):
            wanted = choose(info, clip, 5, 0, 0, number)
            found = self.decode(wanted, info)
            assert isinstance(found, Decoded), found
            if wanted.by == "index":
                numbers = wanted.values
            else:
                seconds = [value * info.time_base for value in wanted.values]
                numbers = tuple(max(n for n, t in enumerate(self.times) if t <= at or not n) for at in seconds)
            if self.times == sorted(self.times):  # else libav does not know them (AVI)
                assert [pts * info.time_base for pts in found.pts] == [self.times[number] for number in numbers]
            assert (found.frames.numpy() == np.stack([self.images[number] for number in numbers])).all()

    def placed(self) -> VideoInfo:
        """What the index would say if the file was long enough to be read in part."""
        with av.open(io.BytesIO(self.data), "r") as file:
            packets = file.demux(file.streams[self.info.stream])
            places = {packet.pts: packet.pos for packet in packets if packet.is_keyframe}
        keys = tuple(replace(key, at=places.get(key.pts) or -1) for key in self.info.key_frames)
        return replace(self.info, key_frames=keys)
