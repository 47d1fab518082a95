"""`headrace bench ranges`: how many bytes of long videos a store sends for short clips, and in how many requests.

Each video has about 106 MB, in groups of pictures of half a second. Clips of about one second are read from the file in
place, through the cache in the loader's process, from a server with some latency. The server counts the bytes and the
requests. *Needed* are the bytes of the groups of pictures that the clips decode, each once. All that a loader reads
counts, also the index and the tables of the containers.

The second epoch delivers the same clips again, so it shows what the cache kept.

Invariant: every candidate delivers all clips of its video.

Failure behaviour: a candidate that fails is named, and the others continue.
"""

from __future__ import annotations

import io
import itertools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.data import write_video
from headrace.bench.core.measure import Candidate, Meter, alternate
from headrace.bench.core.processes import Server, environment_variables, server
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_float, positive_int

if TYPE_CHECKING:
    from headrace.dataio.shards.sample import VideoInfo

FRAMES, RATE, GROUP = 24, 25, 12
"""The frames of a clip, the frames of the video in a second, and those of a group of pictures."""
SIDE = (160, 288)
DISTINCT = 3 * GROUP
"""Frames that are encoded. The rest of a video repeats them."""
CODECS = {
    "h264": ("libx264", {"preset": "ultrafast", "qp": "20", "g": str(GROUP), "bf": "0", "sc_threshold": "0"}),
    "hevc": (
        "libx265",
        {
            "preset": "ultrafast",
            "x265-params": f"qp=16:keyint={GROUP}:min-keyint={GROUP}:scenecut=0:bframes=0:log-level=none",
        },
    ),
}
CONTAINERS = ("mp4", "mkv")
COUNTS = {"one clip": 1, "six clips": 6, "90 clips": 90}
METRICS = {
    "ratio": Metric("bytes sent / needed", "", "lower"),
    "media_ratio": Metric("of them, of the video", "", "lower"),
    "requests": Metric("requests a clip", "", "lower"),
    "epoch_s": Metric("epoch s", "s", "lower"),
    "again": Metric("second epoch: bytes sent / needed", "", "lower"),
    "peak_mib": Metric("peak MiB", "MiB", "lower"),
}


@benchmark(
    "ranges",
    "Bytes and requests for short clips of long videos in place, from a store with latency.",
    argument("--megabytes", type=positive_int, default=106, help="of each video (default: %(default)s)"),
    argument("--latency", type=positive_float, default=30.0, help="of the store, in ms (default: %(default)s)"),
    rounds=1,
)
def ranges(job: Job, part: Part) -> None:
    """Make the videos, index them in place, and measure all candidates in turn."""
    part.title = f"Clips of {FRAMES} frames from videos of {job.args.megabytes} MB, {job.args.latency:g} ms of latency"
    part.settings = {"megabytes": job.args.megabytes, "latency_ms": job.args.latency}
    part.metrics = METRICS
    candidates = list[Candidate]()
    for codec, container in itertools.product(CODECS, CONTAINERS):
        make(job.scratch / f"{codec}-{container}", codec, container, job.args.megabytes * 1_000_000)
    with server(job.scratch, delay=job.args.latency / 1000) as store:
        for (codec, container), name in itertools.product(itertools.product(CODECS, CONTAINERS), COUNTS):
            candidates.append(
                Candidate(
                    f"{codec} in {container}, {name}",
                    "headrace.bench.workloads.ranges:measure",
                    (f"s3://{codec}-{container}/set", COUNTS[name], store.port),
                    environ=store.environ,
                )
            )
        alternate(candidates, job.rounds, job.progress, part.candidates)


def make(folder: Path, codec: str, container: str, size: int) -> None:
    """Make `folder/set`, a dataset of one video of about `size` bytes, indexed in place."""
    from headrace.dataio import index

    films = folder / "set" / "films"
    films.mkdir(parents=True)
    write_film(films / f"film.{container}", codec, size)
    index(films, folder / "set", workers=1).close()


def write_film(path: Path, codec: str, size: int) -> None:
    """Write a video of noise. The same groups of pictures follow each other until the file has about `size` bytes."""
    import av

    encoder, options = CODECS[codec]
    piece = io.BytesIO()
    write_video(piece, encoder, _noise(DISTINCT), options=options, container="matroska")
    piece.seek(0)
    source: Any
    with av.open(piece) as source:
        packets = [packet for packet in source.demux(video=0) if packet.size]
        stream, seconds = source.streams.video[0], DISTINCT / Fraction(RATE)
        assert stream.time_base is not None
        step = int(seconds / stream.time_base)
        times = [(packet, packet.pts or 0, packet.duration) for packet in packets]
        with av.open(str(path), "w") as output:
            target = output.add_stream_from_template(stream)
            for number in range(max(1, size // sum(packet.size for packet in packets))):
                for packet, pts, duration in times:  # `mux` has changed the packet for the target's time base
                    packet.pts = packet.dts = pts + number * step  # there are no B-frames
                    packet.duration, packet.time_base, packet.stream = duration, stream.time_base, target
                    output.mux(packet)


def _noise(count: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield rng.integers(0, 256, (*SIDE, 3), np.uint8)


# --- one candidate, in its own process


def measure(url: str, clips: int, port: int, sidecar: str | None = None) -> dict[str, float]:
    """Read the clips of two epochs, and compare what the server at `port` sends with what the clips need.

    `sidecar` is the socket of a daemon. Default: a cache in this process.
    """
    store, meter = Server(port), Meter()
    began = _mark(store)
    with environment_variables(store.environ):
        ends, needed = read_epochs(url, clips, lambda: _mark(store), sidecar)
    first, again = (_Mark(*np.subtract(after, before)) for before, after in itertools.pairwise([began, *ends]))
    figures = {
        "ratio": first.sent / needed,
        "media_ratio": first.media / needed,
        "requests": first.requests / clips,
        "epoch_s": first.time,
        "again": again.sent / needed,
        "peak_mib": meter.read()["peak_mib"],
    }
    return {name: float(value) for name, value in figures.items()}


class _Mark(NamedTuple):
    """What the store has sent at one moment: all bytes, those of videos, and the requests for videos."""

    time: float
    sent: int
    media: int
    requests: int


def _mark(store: Server) -> _Mark:
    media = [counts for path, counts in store.files().items() if "/films/" in path]
    return _Mark(
        time.perf_counter(), store.sent(), sum(size for _, size in media), sum(requests for requests, _ in media)
    )


T = TypeVar("T")


def read_epochs(url: str, clips: int, mark: Callable[[], T], sidecar: str | None = None) -> tuple[list[T], int]:
    """Read the clips of each video twice.

    Args:
        url: The dataset.
        clips: The number of clips of each video.
        mark: Called at the end of each epoch.
        sidecar: The socket of a daemon. Default: a cache in this process.

    Returns:
        The two results of `mark`, and the bytes that an epoch needs.
    """
    from headrace.dataio import Dataset
    from headrace.loaders import Clip, VideoLoader

    clip = Clip(FRAMES, start="center", per_video=clips)
    ends, starts = list[T](), dict[str, list[float]]()
    with (
        Dataset(url, trust_mounts=True) as dataset,
        VideoLoader(dataset, 1, clip=clip, size=(32, 32), evaluate=True, sidecar=sidecar, **_OPTIONS) as loader,
    ):
        for _ in range(2):
            for batch in loader:
                starts.setdefault(batch["key"][0], []).append(float(batch["clip"][0]))
            ends.append(mark())
        videos = [(sample.video, sample.members[0].length, starts[sample.key]) for sample in dataset]
    return ends, sum(needed_bytes(video, length, times) for video, length, times in videos if video is not None)


_OPTIONS: dict[str, Any] = {"shuffle": False, "num_threads": 2, "drop_last": False}


def needed_bytes(video: VideoInfo, length: int, starts: Sequence[float]) -> int:
    """Return the bytes of all groups of pictures that clips beginning at these seconds decode."""
    keys = video.key_frames
    groups = set[int]()
    for start in starts:
        first, last = (
            round(float((Fraction(seconds) / video.time_base) + video.origin_pts))
            for seconds in (start, start + (FRAMES - 1) / RATE)
        )
        groups.update(range(_group(keys, first), _group(keys, last) + 1))
    ends = [*(key.at for key in keys[1:]), length]
    return sum(ends[group] - keys[group].at for group in groups)


def _group(keys: Iterable[Any], pts: int) -> int:
    return max(0, bisect_right([key.pts for key in keys], pts + 1) - 1)
