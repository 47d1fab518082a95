"""`headrace bench pieces`: the cost of single steps that the documentation mentions: one clip, one probe, one digest.

Each candidate prepares its input, repeats one step on one thread for `SECONDS` after a warm-up, and reports CPU and
wall time of each piece.
Invariant: candidates that are compared have the same input. Colours and decoders use one video, and so do clips decoded
together and separately. Digests and reads have the same length.
Failure behaviour: a candidate that fails, or lacks a package, is named, and the others continue.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate, cpu_seconds
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.errors import UsageError

SECONDS = 0.6
METRICS = {
    "cpu_ms": Metric("CPU ms each", "ms"),
    "wall_ms": Metric("ms each", "ms"),
    "padding": Metric("padding, %", "%"),
}
Step = tuple[Callable[[], float | None], int]
"""A step to repeat, and the number of pieces that one step handles. The step may return a share of padding."""


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench pieces` and return the exit code."""
    return command.run(argv, "pieces", "What single steps cost: one clip, one probe, one digest.", fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their name")


def fill(job: command.Job, part: Part) -> None:
    """Make all inputs, then measure all candidates in turn."""
    names = [name for name in CANDIDATES if job.args.only in name]
    if not names:
        raise UsageError(f"no step has {job.args.only!r} in its name", hint=f"there are {', '.join(CANDIDATES)}")
    make(job.scratch, job.tell)
    part.title, part.metrics = "Single steps, one thread", METRICS
    part.settings = {"seconds": SECONDS}
    alternate(
        [Candidate(name, "headrace.bench.workloads.pieces", (name, str(job.scratch))) for name in names],
        job.rounds,
        job.tell,
        part.candidates,
    )


def make(folder: Path, tell: Callable[[str, float], None], seconds: int = 6) -> None:
    """Write the videos: H.264 with rare and with frequent key frames, VP9, and a clip of each container of
    `headrace.bench.demo`."""
    from headrace.bench.demo.media import make_clip
    from headrace.bench.workloads.video import Kind, encode

    tell("making videos", 0.0)
    encode(folder / "long.mp4", Kind("long", seconds, 640, 360, 60, 0), 1)
    encode(folder / "small.mp4", Kind("small", min(4, seconds), 340, 256, 12, 0), 2)
    encode(folder / "large.webm", Kind("large", 1, 1280, 720, 25, 0), 3, codec="libvpx-vp9")
    for number in range(4):
        made = make_clip(folder / "made", number, seconds=min(4, seconds), width=320, height=240)
        made.rename(folder / f"probed{made.suffix}")


# --- candidates; each runs in its own process


def _decoding(folder: Path, name: str, clip: Any, size: int, color: Any = "bt601") -> tuple[list[Any], Any]:
    """Return the requests for all clips of a video, and a PyAV decoder."""
    import torch

    from headrace.dataio.shards.media.probe import probe
    from headrace.loaders.clip import choose, counts
    from headrace.loaders.decode.base import Fit, Request
    from headrace.loaders.decode.pyav import PyAVDecoder

    torch.set_num_threads(1)
    info, data = probe(folder / name).video, memoryview((folder / name).read_bytes())
    assert info is not None
    of_video = int(np.max(counts(clip, np.array([float(info.frames)]), np.array([info.frames / 25]))))
    fit = Fit((size, size))
    return [Request(data, info, choose(info, clip, 0, 0, 0, n), color, fit) for n in range(of_video)], PyAVDecoder()


def _nothing(_: object) -> None:
    """Drop a result, so that a step returns None."""


def _decode(decoder: Any, requests: Sequence[Any]) -> None:
    for found in decoder.decode(requests):
        if isinstance(found, Exception):
            raise found


def _colour(color: str) -> Callable[[Path], Step]:
    def prepare(folder: Path) -> Step:
        from headrace.loaders.clip import Clip

        requests, decoder = _decoding(folder, "small.mp4", Clip(16, start="center"), 112, color)
        return lambda: _decode(decoder, requests), 1

    return prepare


def _of_one_video(start: Any, per_video: int, *, together: bool) -> Callable[[Path], Step]:
    def prepare(folder: Path) -> Step:
        from headrace.loaders.clip import Clip

        requests, decoder = _decoding(folder, "long.mp4", Clip(16, start=start, per_video=per_video), 112)
        calls = [requests] if together else [[request] for request in requests]

        def step() -> None:
            for call in calls:
                _decode(decoder, call)

        return step, len(requests)

    return prepare


def _by(decoder: str) -> Callable[[Path], Step]:
    def prepare(folder: Path) -> Step:
        from headrace.loaders.clip import Clip

        requests, used = _decoding(folder, "large.webm", Clip(16, start="center"), 224)
        if decoder == "DALI":
            used = importlib.import_module("headrace.loaders.decode.dali").DaliDecoder()
        return lambda: _decode(used, requests), 1

    return prepare


def _probed(suffix: str) -> Callable[[Path], Step]:
    def prepare(folder: Path) -> Step:
        from headrace.dataio.shards.media.probe import probe

        return lambda: _nothing(probe(folder / f"probed{suffix}")), 1

    return prepare


def _packed(*, anew: bool) -> Callable[[Path], Step]:
    def prepare(folder: Path) -> Step:
        from headrace.loaders.sampling.packing import Packing, pack, with_room
        from headrace.loaders.sampling.permutation import key_of

        # log-normal, five seconds on average
        lengths = np.random.default_rng(0).lognormal(np.log(5) - 0.5, 1.0, 100_000)
        sizes, packing = (
            (np.maximum(1, lengths * 16_000)).astype(np.int64),
            Packing(30 * 16_000, repack_each_epoch=anew),
        )

        def step() -> float:
            return 100 * (with_room(pack(sizes, packing, key_of(1))) if anew else pack(sizes, packing)).waste

        return step, 100

    return prepare


def _digest(name: str) -> Callable[[Path], Step]:
    def prepare(folder: Path) -> Step:
        data = np.random.default_rng(0).bytes(4 << 20)
        if name == "BLAKE3":
            blake3 = importlib.import_module("blake3").blake3
            return lambda: _nothing(blake3(data).digest()), 1
        digest = importlib.import_module("xxhash").xxh3_64_intdigest
        return lambda: _nothing(digest(data)), 1

    return prepare


def _read(*, mapped: bool) -> Callable[[Path], Step]:
    """Read 450 kB at a time, at random places of a file of 64 MiB that the page cache holds."""

    def prepare(folder: Path) -> Step:
        length, path = 450_000, folder / "bytes"
        path.write_bytes(np.random.default_rng(0).bytes(64 << 20))
        places = np.random.default_rng(1).integers(0, (64 << 20) - length, 200).tolist()
        memory = memoryview(bytearray(length))
        fd = os.open(path, os.O_RDONLY)
        source = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))

        def step() -> None:
            for place in places:
                if mapped:
                    memory[:] = source[place : place + length]
                else:
                    os.preadv(fd, [memory], place)

        return step, len(places)

    return prepare


_SHARED = {"4 clips of one video": ("center", 4), "16 clips of one video": ("center", 16), "end to end": ("every", 1)}
CANDIDATES: Mapping[str, Callable[[Path], Step]] = {
    **{f"clip of 16 frames, 340x256 to 112x112, {color}": _colour(color) for color in ("bt601", "tagged", "fast")},
    **{
        f"clip of 16 frames, 640x360 to 112x112, {name}, {'together' if together else 'apart'}": _of_one_video(
            *how, together=together
        )
        for name, how in _SHARED.items()
        for together in (False, True)
    },
    **{f"clip of 16 frames, VP9 720p to 224x224, {name}": _by(name) for name in ("PyAV", "DALI")},
    **{f"probe of 4 s, 320x240, {suffix}": _probed(suffix) for suffix in (".mp4", ".webm", ".mkv", ".avi")},
    "1,000 recordings packed into rows": _packed(anew=False),
    "1,000 recordings packed anew, in a mixture": _packed(anew=True),
    **{f"digest of 4 MiB, {name}": _digest(name) for name in ("BLAKE3", "XXH3")},
    "450 kB from the page cache, preadv": _read(mapped=False),
    "450 kB from the page cache, copied from a mapping": _read(mapped=True),
}


def measure(name: str, folder: Path, seconds: float = SECONDS) -> dict[str, float]:
    """Measure one candidate, after one warm-up step."""
    step, pieces = CANDIDATES[name](folder)
    padding = step()
    began, cpu, steps = time.perf_counter(), cpu_seconds(), 0
    while steps == 0 or time.perf_counter() - began < seconds:
        step()
        steps += 1
    wall, spent = time.perf_counter() - began, cpu_seconds() - cpu
    found = {"cpu_ms": 1000 * spent / steps / pieces, "wall_ms": 1000 * wall / steps / pieces}
    return found if padding is None else found | {"padding": padding}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
