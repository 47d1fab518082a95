"""Candidates for video: Headrace, the floors, and the peers with PyAV, torchcodec or SPDL.

A peer decodes as its documentation shows. It gets the bytes of a file, a path or a file object; SPDL gets a URL in
place of a file object. The floor is our decoder alone: the same clips, read from files and decoded by as many threads,
without batches, plan or digests.
Invariant: each delivers uint8 (clips of a file, 16, 3, size, size): every second frame from random starts, resized to
cover and cropped around the centre, by one decoder thread. Peers take all clips of a file from one open file, in order
of time. Headrace mixes the clips of different files in a batch.
Failure behaviour: exceptions of the libraries, which end the candidate's process.
"""

from __future__ import annotations

import functools
import importlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from headrace.bench.peers import peer_loaders
from headrace.bench.peers.peer_loaders import THREADS, decoding
from headrace.bench.workloads.source import Place
from headrace.bench.workloads.video import BATCH, FPS, FRAMES, STRIDE, Kind


def pyav(source: Any, kind: Kind) -> torch.Tensor:
    """Seek before a random start, decode from there, and take every second frame."""
    import av

    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source, "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        seconds = float(container.duration or 0) / 1e6
        starts = _starts(seconds - FRAMES * STRIDE / float(stream.average_rate or FPS), kind)
        return torch.stack([_pyav(container, stream, start, kind.size) for start in starts])


def _pyav(container: Any, stream: Any, start: float, size: int) -> torch.Tensor:
    container.seek(int(start * 1e6))
    pictures: list[torch.Tensor] = []
    index = 0
    for frame in container.decode(stream):
        if frame.time is None or frame.time < start - 1e-3:
            continue
        if index % STRIDE == 0:
            pictures.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
        index += 1
        if len(pictures) == FRAMES:
            break
    pictures += [pictures[-1]] * (FRAMES - len(pictures))
    return _fit(torch.stack(pictures).permute(0, 3, 1, 2), size)


def torchcodec(source: Any, kind: Kind) -> torch.Tensor:
    """Decode by frame numbers, as the documentation shows. Approximate seeking trusts the header and avoids a scan."""
    decoders: Any = importlib.import_module("torchcodec.decoders")
    decoder = decoders.VideoDecoder(source, num_ffmpeg_threads=1, seek_mode="approximate")
    room = (decoder.metadata.num_frames or 0) - (FRAMES - 1) * STRIDE - 1
    clips = list[torch.Tensor]()
    for start in sorted(random.randint(0, max(0, room)) for _ in range(kind.per_file)):
        clips.append(_fit(decoder.get_frames_in_range(start, start + FRAMES * STRIDE - 1, STRIDE).data, kind.size))
    return torch.stack(clips)


def spdl(source: bytes | str, kind: Kind) -> torch.Tensor:
    """Demultiplex the window, then trim, scale and crop in FFmpeg's filter graph, as SPDL does.

    SPDL gets the length of the file. The other peers find it out.
    """
    io_: Any = importlib.import_module("spdl.io")
    with io_.Demuxer(source) as demuxer:
        starts = _starts(kind.length - FRAMES * STRIDE / FPS, kind)
        return torch.stack([_spdl(io_, demuxer, start, kind.size) for start in starts])


def _spdl(io_: Any, demuxer: Any, start: float, size: int) -> torch.Tensor:
    # Whole microseconds: below a thousandth, the exact fraction of a float needs a denominator of more than 64 bits.
    begin = Fraction(round(start * 1e6), 1_000_000)
    end = begin + Fraction(FRAMES * STRIDE, FPS)
    chain = (
        f"trim=start={float(begin):.6f}:end={float(end):.6f},select='not(mod(n,{STRIDE}))',"
        f"scale={size}:{size}:force_original_aspect_ratio=increase,crop={size}:{size},format=rgb24"
    )
    packets = demuxer.demux_video((begin, end))
    config = io_.decode_config(decoder_options={"threads": "1"})
    frames: Any = io_.decode_packets(packets, filter_desc=chain, decode_config=config)
    clip = io_.to_torch(io_.convert_frames(frames)).permute(0, 3, 1, 2)[:FRAMES]
    return torch.cat([clip, clip[-1:].expand(FRAMES - len(clip), -1, -1, -1)]).contiguous()


def _starts(room: float, kind: Kind) -> Sequence[float]:
    return sorted(random.uniform(0, max(0.0, room)) for _ in range(kind.per_file))


def _fit(video: torch.Tensor, size: int) -> torch.Tensor:
    height, width = video.shape[-2:]
    scale = size / min(height, width)
    shape = (max(size, round(height * scale)), max(size, round(width * scale)))
    video = torch.nn.functional.interpolate(video, shape, mode="bilinear", antialias=True)
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    return video[..., top : top + size, left : left + size].contiguous()


def _headrace_video(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip, VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS, "color": color}
    clip = Clip(frames=FRAMES, stride=STRIDE, per_video=kind.per_file)
    with VideoLoader(place.url("dataset"), BATCH, clip=clip, size=(kind.size, kind.size), **options) as loader:
        for batch in loader:
            yield batch["video"]


def _bare_video(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    """The floor: Headrace's decoder without the loader."""
    from headrace.dataio.shards.sample import Sample
    from headrace.loaders.clip import Clip, choose
    from headrace.loaders.decode.base import Decoded, Fit, Request
    from headrace.loaders.decode.pyav import PyAVDecoder

    decoder, clip = PyAVDecoder(), Clip(frames=FRAMES, stride=STRIDE, per_video=kind.per_file)
    cut = Fit((kind.size, kind.size))

    def one(sample: Sample, data: memoryview) -> torch.Tensor:
        assert sample.video is not None
        wanted = [choose(sample.video, clip, 0, 0, sample.id, number) for number in range(kind.per_file)]
        found = decoder.decode([Request(data, sample.video, frames, color, cut) for frames in wanted])
        assert all(isinstance(decoded, Decoded) for decoded in found), found
        return torch.stack([decoded.frames for decoded in found if isinstance(decoded, Decoded)])

    return peer_loaders.alone(one, place, kind)


def _spdl_named(named: tuple[str, bytes | str], kind: Kind) -> torch.Tensor:
    return spdl(named[1], kind)


OURS, FAST = "headrace", "headrace, color='fast'"
ENERGON = "energon + PyAV, 2 workers"
MOSAIC = "mosaicml-streaming + PyAV, 2 workers"
FLOOR, FAST_FLOOR = "floor: our decoder alone", "floor: our decoder alone, color='fast'"
PEERS: dict[str, tuple[str, ...]] = {
    "webdataset + PyAV, 0 workers": ("webdataset",),
    "webdataset + PyAV, 2 workers": ("webdataset",),
    "webdataset + torchcodec, 2 workers": ("webdataset", "torchcodec"),
    "torchdata StatefulDataLoader + PyAV, 2 workers": ("torchdata",),
    "litdata + PyAV, 2 workers": ("litdata",),
    "SPDL, 2 threads": ("spdl",),
    "torchcodec, 2 threads": ("torchcodec",),
    ENERGON: ("megatron.energon",),
    MOSAIC: ("streaming",),
}
"""Each peer and the packages that it needs."""
CANDIDATES: dict[str, Callable[[Place, Kind], Iterator[torch.Tensor]]] = {
    OURS: _headrace_video,
    FAST: functools.partial(_headrace_video, color="fast"),
    FLOOR: _bare_video,
    FAST_FLOOR: functools.partial(_bare_video, color="fast"),
    "webdataset + PyAV, 0 workers": decoding(pyav, peer_loaders.webdataset, 0),
    "webdataset + PyAV, 2 workers": decoding(pyav, peer_loaders.webdataset, 2),
    "webdataset + torchcodec, 2 workers": decoding(torchcodec, peer_loaders.webdataset, 2),
    "torchdata StatefulDataLoader + PyAV, 2 workers": decoding(pyav, peer_loaders.torchdata),
    "litdata + PyAV, 2 workers": decoding(pyav, peer_loaders.litdata),
    "SPDL, 2 threads": decoding(_spdl_named, peer_loaders.spdl),
    "torchcodec, 2 threads": decoding(torchcodec, peer_loaders.threads),
    ENERGON: decoding(pyav, peer_loaders.energon),
    MOSAIC: decoding(pyav, peer_loaders.mosaic),
}
