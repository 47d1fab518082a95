"""`headrace bench media`: one loader in several uses, each compared with another use of it.

- Images and videos: the time of an epoch of both in one order, compared with the times of an epoch of each kind alone.
- Raw planes: clips as `yuv420p` and `nv12`, compared with RGB.
- In place: clips from files where they lie, compared with the same files packed into tars.

The page cache holds all files. Every candidate runs in its own process, in two threads.

Invariant: candidates of one comparison deliver the same samples. The digests of their pixels are equal, except those
of planes.

Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.data import write_video
from headrace.bench.core.measure import Candidate, Meter, alternate, memory_kib
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_int

EPOCHS = 3
"""The first epoch warms up, and the others are measured."""
THREADS = 2
FRAMES, SIDE = 16, 256
SOURCE = (288, 512)
DISTINCT = 24
"""Number of distinct videos and images. The others are copies of them."""
METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "epoch_s": Metric("epoch s", "s", "lower"),
    "cpu_s": Metric("CPU s an epoch", "s", "lower"),
    "peak_mib": Metric("peak MiB", "MiB", "lower"),
}
Epochs = Callable[[Path], Iterator[Iterator[Any]]]


@benchmark(
    "media",
    "Images and videos in one order, raw planes, and files in place, compared with the plain case of each.",
    argument("--videos", type=positive_int, default=192, help="of 4 s, 512x288, H.264 (default: %(default)s)"),
    argument("--images", type=positive_int, default=960, help="JPEG of 512x288 (default: %(default)s)"),
)
def media(job: Job, part: Part) -> None:
    """Make the files, pack them, index them in place, and measure all candidates in turn."""
    make(job.scratch, job.args.videos, job.args.images)
    part.title = f"{job.args.videos} videos and {job.args.images} images, clips of {FRAMES}x{SIDE}x{SIDE}"
    part.settings = {"videos": job.args.videos, "images": job.args.images, "epochs": EPOCHS, "threads": THREADS}
    part.metrics, part.against = METRICS, RGB
    candidates = [
        Candidate(name, "headrace.bench.workloads.media:measure", (name, str(job.scratch))) for name in CANDIDATES
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)
    _note_shares(part)


def _note_shares(part: Part) -> None:
    """Add the ratios of the comparisons, from the medians."""

    def median(name: str, metric: str) -> float | None:
        values = part.candidates[name].metrics.get(metric)
        return float(np.median(values)) if values else None

    alone = [median(name, "epoch_s") for name in (IMAGES, VIDEOS)]
    mixed = median(MIXED, "epoch_s")
    if mixed and None not in alone:
        part.notes.append(
            f"Images and videos in one order take {sum(filter(None, alone)) / mixed:.3f} of the speed of each kind alone."
        )
    packed, in_place = median(RGB, "samples_per_s"), median(IN_PLACE, "samples_per_s")
    if packed and in_place:
        part.notes.append(f"Files in place: {in_place / packed:.3f} of the samples/s of the packed ones.")


def make(folder: Path, videos: int, images: int) -> None:
    """Write the files, and make the datasets `packed` and `in-place`."""
    from headrace.dataio import index, pack

    files = folder / "files"
    files.mkdir()
    sources: dict[str, list[bytes]] = {"mp4": [], "jpg": []}
    for number in range(DISTINCT):
        path = folder / "clip.mp4"
        write_video(path, "libx264", _pictures(number, 100), options={"g": "25", "crf": "23"})
        sources["mp4"].append(path.read_bytes())
        sources["jpg"].append(_jpeg(next(_pictures(number, 1))))
    for ext, count in (("mp4", videos), ("jpg", images)):
        for number in range(count):
            (files / f"{ext}_{number:05d}.{ext}").write_bytes(sources[ext][number % DISTINCT])
    pack(files, str(folder / "packed")).close()
    index(f"{files}/**/*.*", str(folder / "in-place")).close()


def _pictures(number: int, count: int) -> Iterator[np.ndarray]:
    """Yield pictures of waves that move, with a little noise."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[0 : SOURCE[0], 0 : SOURCE[1]].astype(np.float32)
    slopes = rng.uniform(0.01, 0.06, (3, 2))
    noise = rng.integers(0, 12, (*SOURCE, 3))
    for frame in range(count):
        waves = [np.sin(x * a + y * b + frame / 9) * 100 + 120 for a, b in slopes]
        yield np.clip(np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)


def _jpeg(picture: np.ndarray) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(picture, quality=90))


# --- the candidates


def _mixed(kinds: str) -> Epochs:
    """Batches of images, of videos, or of both, in buckets with one budget."""

    def epochs(folder: Path) -> Iterator[Iterator[Any]]:
        from headrace.dataio import Dataset
        from headrace.loaders import Bucket, Buckets, Clip, VideoLoader

        shapes = {"images": Bucket((SIDE, SIDE), 1), "videos": Bucket((SIDE, SIDE), FRAMES)}
        condition = {"images": "video_ext = 'jpg'", "videos": "video_ext = 'mp4'"}
        chosen = kinds.split()
        with Dataset(str(folder / "packed")) as dataset:
            view = dataset if len(chosen) > 1 else dataset.where(condition[kinds])
            buckets = Buckets(tuple(shapes[kind] for kind in chosen), budget=4 * FRAMES * SIDE * SIDE)
            with VideoLoader(view, buckets=buckets, clip=Clip(FRAMES, start="center"), **_OPTIONS) as loader:
                for _ in range(EPOCHS):
                    yield (batch["video"] for batch in loader)

    return epochs


def _clips(dataset_name: str, pixel_format: str) -> Epochs:
    """Batches of clips, in one format of pixels."""

    def epochs(folder: Path) -> Iterator[Iterator[Any]]:
        from headrace.dataio import Dataset
        from headrace.loaders import Clip, Loader, Video

        video = Video(Clip(FRAMES, start="center"), size=(SIDE, SIDE), pixel_format=pixel_format)  # type: ignore[arg-type]
        with (
            Dataset(str(folder / dataset_name), trust_mounts=True) as dataset,
            Loader(dataset.where("video_ext = 'mp4'"), 4, fields={"video": video}, **_OPTIONS) as loader,
        ):
            for _ in range(EPOCHS):
                yield (batch["video"] for batch in loader)

    return epochs


_OPTIONS: dict[str, Any] = {"seed": 1, "sidecar": None, "num_threads": THREADS, "drop_last": False}
MIXED, IMAGES, VIDEOS = "images and videos", "images alone", "videos alone"
RGB, IN_PLACE = "clips as RGB", "clips as RGB, in place"
CANDIDATES: Mapping[str, Epochs] = {
    MIXED: _mixed("images videos"),
    IMAGES: _mixed("images"),
    VIDEOS: _mixed("videos"),
    RGB: _clips("packed", "rgb"),
    IN_PLACE: _clips("in-place", "rgb"),
    "clips as yuv420p": _clips("packed", "yuv420p"),
    "clips as nv12": _clips("packed", "nv12"),
}


# --- one candidate, in its own process


def measure(name: str, folder: str) -> dict[str, float]:
    """Measure one candidate: all epochs but the first."""
    import torch

    torch.set_num_threads(1)
    counts, ends, digest = list[int](), list[float](), 0
    meter = Meter()
    for epoch in CANDIDATES[name](Path(folder)):
        if len(ends) == 1:
            meter = Meter()
        counts.append(sum(len(batch) for batch in epoch))
        ends.append(time.perf_counter())
    cpu_s = meter.read()["cpu_s"]
    epochs = CANDIDATES[name](Path(folder))  # the loader is open as long as this is
    for batch in next(epochs):
        digest += sum(xxhash.xxh3_64_intdigest(clip.numpy().data.cast("B")) for clip in batch)
    seconds = ends[-1] - ends[0]
    return {
        "samples_per_s": sum(counts[1:]) / seconds,
        "epoch_s": seconds / (EPOCHS - 1),
        "cpu_s": cpu_s / (EPOCHS - 1),
        "peak_mib": memory_kib("VmHWM") / 1024,
        "digest": float((digest % (1 << 64)) >> 12),
    }
