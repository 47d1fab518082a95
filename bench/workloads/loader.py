"""`headrace bench loader`: Headrace and other loaders on video, audio and images, from files or from a local S3 server.

Invariants: candidates alternate, each in its own process, and read the same files. Peers that are not installed are
skipped and named. Large packages are imported only after the options are parsed.

Failure behaviour: a candidate that fails is named with the end of its error, and the others continue. A candidate fails
if it delivers too few samples, or samples of another shape.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, Meter, TreeMemory, alternate
from headrace.bench.core.results import Metric, Part
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.errors import UsageError

if TYPE_CHECKING:
    from headrace.bench.peers.source import Kind, Source

METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "steady_per_s": Metric("after the first batch", "1/s", "higher"),
    "cpu_s_per_1k": Metric("CPU s per 1k", "s"),
    "first_batch_s": Metric("first batch s", "s"),
    "peak_mib": Metric("peak MiB of all processes", "MiB"),
}
FROM_S3 = {"read_mb": Metric("MB read from the server", "MB")}
KINDS = ("short", "long", "films", "sound", "mels", "recordings", "pictures")


def kinds() -> dict[str, Kind]:
    """Return the kinds of data by name. This imports torch."""
    from headrace.bench.peers import audio, images, video

    every: tuple[Kind, ...] = (*video.KINDS, *audio.KINDS, *images.KINDS)
    return {kind.name: kind for kind in every}


@benchmark(
    "loader",
    "One epoch of decoded samples, compared with other loaders. `headrace bench resume` measures resuming.",
    argument(
        "--clips",
        type=positive_int,
        help="samples of the epoch (default: 600; films and recordings 608, sound and mels 2400, pictures 4800)",
    ),
    argument(
        "--kind",
        choices=KINDS,
        default="short",
        help="4 s clips, 10 s with few key frames, or films of 10 minutes of which an epoch takes 8 clips each; short "
        "recordings as samples or as log-mel spectrograms, or long recordings of which it takes 8 windows each; or JPEGs",
    ),
    argument("--s3", action="store_true", help="read from an S3 server on this machine, not from files"),
    argument("--delay", type=float, default=0, metavar="MS", help="milliseconds by which the server answers late"),
    argument("--rate", type=float, default=0, metavar="MB", help="the most MB that the server sends a second"),
    argument("--data", type=Path, help="keep the files in this folder, and use those that it has"),
    argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PACKAGE=PATH",
        help="the interpreter of a peer that needs its own environment; may be repeated",
    ),
    argument("--only", action="append", help="a candidate's name; may be repeated (default: all)"),
)
def loader(job: Job, part: Part) -> None:
    """Measure all candidates in turn. Every candidate reads the same files."""
    from headrace.bench.peers.loaders import THREADS
    from headrace.bench.peers.source import FLOOR

    args, kind = job.args, kinds()[job.args.kind]
    files = _file_count(args.clips or kind.default, kind)
    pythons, peers = _pythons(args.peer_python), kind.peers()
    peer_packages = {package for peer in peers.values() for package in peer.packages}
    missing = sorted(
        package for package in peer_packages if not pythons.get(_short(package)) and not installed(package)
    )
    packages = {name: peer.packages for name, peer in peers.items()}
    names = _names(args.only, list(kind.ours()), packages, missing)
    folder = _prepared(job, kind, files, names, pythons)
    part.title = f"Loader: {kind.described(files)}{', from S3' if args.s3 else ''}"
    part.settings = {
        "clips": files * kind.per_file,
        "kind": kind.name,
        "batch": kind.batch * kind.per_file,
        "threads": THREADS,
        "s3": args.s3,
        "delay_ms": args.delay,
        "rate_mb": args.rate,
        "missing": missing,
    }
    part.metrics, part.against = METRICS | (FROM_S3 if args.s3 else {}), FLOOR if FLOOR in names else names[0]
    part.notes += _notes(kind, args)
    with _served(folder.parent, args) as port:
        candidates = [
            Candidate(
                name,
                "headrace.bench.workloads.loader:measure_in_process",
                (name, str(folder), kind.name, port),
                python=next((pythons[at] for at in map(_short, packages.get(name, ())) if at in pythons), ""),
                environ=_environ(name, folder),
            )
            for name in names
        ]
        alternate(candidates, job.rounds, job.progress, part.candidates)


def _notes(kind: Kind, args: argparse.Namespace) -> list[str]:
    notes = list[str]()
    if kind.per_file > 1:
        notes.append(
            f"Peers take the {kind.per_file} of a file at once, from one open file, and give them in one batch, which is the "
            "least work; webdataset, litdata, Energon and mosaicml-streaming read files whole. Batches of Headrace mix files."
        )
    if args.s3:
        notes.append("The floors read files. The server shares the cores with its clients.")
        limit = f", all together at {args.rate:g} MB/s at most" if args.rate else ""
        if args.delay or limit:
            notes.append(f"The server answers {args.delay:g} ms late{limit}.")
    return notes


def _file_count(samples: int, kind: Kind) -> int:
    if samples % kind.per_file:
        raise UsageError(
            f"--clips {samples}: an epoch takes {kind.per_file} of each file", hint=f"a multiple of {kind.per_file}"
        )
    return samples // kind.per_file


def _pythons(pairs: Sequence[str]) -> dict[str, str]:
    """Return the interpreter of each peer that has its own."""
    pythons = dict[str, str]()
    for pair in pairs:
        name, separator, python = pair.partition("=")
        if not separator or shutil.which(python) is None:
            raise UsageError(
                f"--peer-python {pair!r:.200} names no interpreter", hint="for example energon=/envs/energon/bin/python"
            )
        pythons[name] = python
    return pythons


def _short(package: str) -> str:
    return package.rpartition(".")[2]


def installed(package: str) -> bool:
    """Return whether `package` can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is absent, too
        return False


def _names(
    only: Sequence[str] | None, ours: Sequence[str], peers: Mapping[str, Sequence[str]], missing: Sequence[str]
) -> list[str]:
    names = [*ours, *(name for name, packages in peers.items() if not set(packages) & set(missing))]
    for name in only or ():
        if name in peers and name not in names:
            required = " and ".join(peers[name])
            raise UsageError(f"{name!r} needs {required}", hint="pip install 'headrace[peers]', or --peer-python")
        if name not in names:
            raise UsageError(f"there is no candidate {name!r:.200}", hint=f"there are {', '.join(map(repr, names))}")
    return [name for name in names if not only or name in only]


def _prepared(job: Job, kind: Kind, files: int, names: Sequence[str], pythons: Mapping[str, str]) -> Path:
    """Write the files in every format that the candidates need, and return the folder."""
    from headrace.bench.peers import source

    folder: Path = (job.args.data or job.scratch) / kind.folder
    if not (folder / "dataset").is_dir():
        source.make(kind, folder, files, job.progress)
    if (clips := len(list((folder / "clips").iterdir()))) != files:
        clips *= kind.per_file
        raise UsageError(f"{folder} is for {clips} clips", hint=f"--clips {clips}, or another --data")
    if any(name.startswith("litdata") for name in names) and not (folder / "litdata").is_dir():
        source.to_litdata(kind, folder)
    if any(name.startswith("energon") for name in names) and not (folder / "energon").is_dir():
        source.to_energon(folder, pythons.get("energon", sys.executable))
    if any(name.startswith("mosaicml") for name in names) and not (folder / "mosaic").is_dir():
        source.to_mosaic(kind, folder, pythons.get("streaming", sys.executable))
    return folder


def _environ(name: str, folder: Path) -> dict[str, str]:
    """Return the variables of a candidate's process: torchcodec and SPDL find FFmpeg through the dynamic linker."""
    from headrace.bench.peers.source import ffmpeg_libraries

    if "torchcodec" not in name and "SPDL" not in name:
        return {}
    return {"LD_LIBRARY_PATH": str(ffmpeg_libraries(folder))}


@contextlib.contextmanager
def _served(root: Path, args: argparse.Namespace) -> Iterator[int]:
    """Serve `root` over S3 and yield the port, or yield 0 without a server.

    Candidates run in their own processes and find the server through the environment.
    """
    if not args.s3:
        yield 0
        return
    from headrace.bench.core.processes import server

    with server(root, args.rate * 1e6, args.delay / 1e3) as running:
        os.environ.update(running.environ)
        yield running.port


# --- one candidate, in its own process


def measure_in_process(candidate: str, folder: str, kind: str, port: int) -> dict[str, float]:
    """Measure one epoch of one candidate, in its own process."""
    from headrace.bench.peers.source import Source

    return measure(candidate, Source(Path(folder), port), kinds()[kind])


def measure(candidate: str, source: Source, kind: Kind) -> dict[str, float]:
    """Measure one epoch of one candidate. `steady_per_s` excludes everything up to the first batch."""
    import torch

    from headrace.bench.peers.source import batches

    torch.set_num_threads(1)
    memory, sent, meter = TreeMemory(), source.bytes_sent(), Meter()
    began = time.perf_counter()
    samples, first, before, last = 0, 0.0, 0, 0.0
    for batch in batches(candidate, source, kind):
        samples += batch.shape[0]
        if not first:
            first, before = time.perf_counter() - began, samples
        if batch.shape[1:] != kind.shape or str(batch.dtype) != f"torch.{kind.dtype}":
            raise AssertionError(f"{candidate} delivered {tuple(batch.shape)} {batch.dtype}")
        last = time.perf_counter() - began
    read = meter.read()
    peak = memory.stop()
    expected = len(source.files()) * kind.per_file
    if samples != expected:
        raise AssertionError(f"{candidate} delivered {samples} of {expected} clips")
    figures = {
        "samples_per_s": samples / read["wall_s"],
        "steady_per_s": (samples - before) / max(1e-9, last - first),
        "cpu_s_per_1k": 1000 * read["cpu_s"] / samples,
        "first_batch_s": first,
        "peak_mib": peak,
    }
    return figures | ({"read_mb": (source.bytes_sent() - sent) / 1e6} if source.port else {})
