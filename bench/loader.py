"""Loaders beside their peers: samples/s, CPU seconds, time to first batch, peak memory, on the same shards.

Purpose: `python -m bench.loader CANDIDATE DATASET-URL` reads one epoch of clips (16 frames, every second one, from a random
start, to 112 x 112) from a packed dataset in batches of 8.
Invariant: all candidates read the same tar shards and deliver uint8 batches of the same shape; a candidate that delivers
another number of samples fails.
Failure behaviour: an exception ends the process; `bench.measure` reports it.
"""

from __future__ import annotations

import io
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bench.measure import Meter

CANDIDATES = ("millrace", "webdataset+pyav, 0 workers", "webdataset+pyav, 2 workers")
FRAMES, STRIDE, SIZE, BATCH = 16, 2, 112, 8


def measure(candidate: str, url: str) -> dict[str, float]:
    """Figures of one epoch of one candidate."""
    torch.set_num_threads(1)
    meter = Meter()
    begun = time.perf_counter()
    batches = _millrace(url) if candidate == "millrace" else _webdataset(url, workers=int(candidate.split()[-2]))
    samples, first = 0, 0.0
    for video in batches:
        first = first or time.perf_counter() - begun
        if video.shape[1:] != (FRAMES, 3, SIZE, SIZE) or video.dtype != torch.uint8:
            raise AssertionError(f"{candidate} delivered {tuple(video.shape)} {video.dtype}")
        samples += video.shape[0]
    read = meter.read()
    out = {
        "samples_per_s": samples / read["wall_s"],
        "cpu_s_per_1k": 1000 * read["cpu_s"] / samples,
        "samples": samples,
    }
    return out | {"first_batch_s": first, "peak_mib": read["peak_mib"]}


def _millrace(url: str) -> Iterator[torch.Tensor]:
    from loaders import Clip, VideoLoader

    clip = Clip(frames=FRAMES, stride=STRIDE)
    with VideoLoader(url, batch_size=BATCH, clip=clip, size=(SIZE, SIZE), sidecar=None, drop_last=False) as loader:
        for batch in loader:
            yield batch["video"]


def _webdataset(url: str, *, workers: int) -> Iterator[torch.Tensor]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    from dataio import Dataset

    shards = sorted({sample.shard for sample in Dataset(url)})
    dataset = wds.WebDataset(
        [f"{url}/{shard}" for shard in shards], shardshuffle=False, empty_check=False, handler=wds.reraise_exception
    )
    chain = dataset.shuffle(64).map(_decode)
    yield from DataLoader(chain, batch_size=BATCH, num_workers=workers)


def _decode(sample: Mapping[str, Any]) -> torch.Tensor:
    """What such pipelines do by hand: seek before a random start, decode on, take every second frame, resize, crop."""
    import av

    payload = next(sample[ext] for ext in ("mp4", "mkv", "webm", "avi") if ext in sample)
    with av.open(io.BytesIO(payload), "r") as container:
        stream = container.streams.video[0]
        seconds = float(container.duration or 0) / 1e6
        start = random.uniform(0, max(0.0, seconds - FRAMES * STRIDE / float(stream.average_rate or 25)))
        container.seek(int(start * 1e6))
        pictures: list[torch.Tensor] = []
        for index, frame in enumerate(container.decode(stream)):
            if frame.time is not None and frame.time >= start - 1e-3 and index % STRIDE == 0:
                pictures.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
            if len(pictures) == FRAMES:
                break
    pictures += [pictures[-1]] * (FRAMES - len(pictures))
    return _fit(torch.stack(pictures).permute(0, 3, 1, 2))


def _fit(video: torch.Tensor) -> torch.Tensor:
    height, width = video.shape[-2:]
    scale = SIZE / min(height, width)
    shape = (max(SIZE, round(height * scale)), max(SIZE, round(width * scale)))
    video = torch.nn.functional.interpolate(video, shape, mode="bilinear", antialias=True)
    top, left = (shape[0] - SIZE) // 2, (shape[1] - SIZE) // 2
    return video[..., top : top + SIZE, left : left + SIZE].contiguous()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2])))
