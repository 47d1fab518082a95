"""Decoding a random clip as pipelines do it by hand, with PyAV, torchcodec or SPDL: the peers' side of the comparison.

Invariant: each gives uint8 (16, 3, size, size) of every second frame from a random start, resized to cover and cropped around the
centre, with one decoder thread.
Failure behaviour: exceptions of the libraries.
"""

from __future__ import annotations

import importlib
import io
import random
from typing import Any

import torch

FRAMES, STRIDE = 16, 2


def pyav(payload: bytes, size: int) -> torch.Tensor:
    """Seek before a random start, decode on, take every second frame."""
    import av

    with av.open(io.BytesIO(payload), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        seconds = float(container.duration or 0) / 1e6
        start = random.uniform(0, max(0.0, seconds - FRAMES * STRIDE / float(stream.average_rate or 25)))
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


def torchcodec(payload: bytes, size: int) -> torch.Tensor:
    """By frame numbers, as its documentation shows; approximate seeking, which trusts the header and spares a scan."""
    decoders: Any = importlib.import_module("torchcodec.decoders")
    decoder = decoders.VideoDecoder(payload, num_ffmpeg_threads=1, seek_mode="approximate")
    room = (decoder.metadata.num_frames or 0) - (FRAMES - 1) * STRIDE - 1
    start = random.randint(0, max(0, room))
    clip: torch.Tensor = decoder.get_frames_in_range(start, start + FRAMES * STRIDE - 1, STRIDE).data
    return _fit(clip, size)


def spdl(payload: bytes, size: int, seconds: float) -> torch.Tensor:
    """Demultiplex the window, then trim, scale and crop in FFmpeg's filter graph, which is where SPDL does it.

    It is told how long the clip is, which the others find out.
    """
    io_: Any = importlib.import_module("spdl.io")
    span = FRAMES * STRIDE / 25
    start = random.uniform(0, max(0.0, seconds - span))
    chain = (
        f"trim=start={start}:end={start + span},select='not(mod(n,{STRIDE}))',"
        f"scale={size}:{size}:force_original_aspect_ratio=increase,crop={size}:{size},format=rgb24"
    )
    packets = io_.demux_video(payload, timestamp=(start, start + span))
    config = io_.decode_config(decoder_options={"threads": "1"})
    frames: Any = io_.decode_packets(packets, filter_desc=chain, decode_config=config)
    clip = io_.to_torch(io_.convert_frames(frames)).permute(0, 3, 1, 2)[:FRAMES]
    return torch.cat([clip, clip[-1:].expand(FRAMES - len(clip), -1, -1, -1)]).contiguous()


def _fit(video: torch.Tensor, size: int) -> torch.Tensor:
    height, width = video.shape[-2:]
    scale = size / min(height, width)
    shape = (max(size, round(height * scale)), max(size, round(width * scale)))
    video = torch.nn.functional.interpolate(video, shape, mode="bilinear", antialias=True)
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    return video[..., top : top + size, left : left + size].contiguous()
