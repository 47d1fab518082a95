"""`headrace bench loader`: Headrace and other loaders on video, audio and images, from files or from a local S3 server.

Invariant: candidates alternate, each in its own process, and read the same clips. Peers that are not installed are left
out and named. Large packages are imported only after the options are parsed.
Failure behaviour: a candidate that fails is named with the end of its error, and the others continue.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part
from headrace.bench.workloads import video
from headrace.dataio.core.cli import positive_int
from headrace.dataio.core.errors import UsageError

METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "steady_per_s": Metric("after the first batch", "1/s", "higher"),
    "cpu_s_per_1k": Metric("CPU s per 1k", "s"),
    "first_batch_s": Metric("first batch s", "s"),
    "peak_mib": Metric("peak MiB of all processes", "MiB"),
}
FROM_S3 = {"read_mb": Metric("MB read from the server", "MB")}


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench loader` and return the exit code."""
    about = "One epoch of decoded samples, compared with other loaders. `headrace bench resume` measures resuming."
    return command.run(argv, "loader", about, fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clips",
        type=positive_int,
        help="of the epoch (default: 600, of films and recordings 608, of sound and mels 2400, of pictures 4800)",
    )
    parser.add_argument(
        "--kind",
        choices=list(video.KINDS),
        default="short",
        help="4 s clips, 10 s with few key frames, or films of 10 minutes of which an epoch takes 8 clips each; short "
        "recordings as samples or as log-mel spectrograms, or long recordings of which it takes 8 windows each; or JPEGs",
    )
    parser.add_argument("--s3", action="store_true", help="read from an S3 server on this machine, not from files")
    parser.add_argument("--delay", type=float, default=0, metavar="MS", help="milliseconds by which it answers late")
    parser.add_argument("--rate", type=float, default=0, metavar="MB", help="the most MB that it sends a second")
    parser.add_argument("--data", type=Path, help="keep the files in this folder, and use those that it has")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PACKAGE=PATH",
        help="the interpreter of a peer that needs its own environment; may be repeated",
    )
    parser.add_argument("--only", action="append", help="a candidate's name; may be repeated (default: all)")


def fill(job: command.Job, part: Part) -> None:
    """Measure all candidates in turn. Every candidate reads the same clips."""
    from headrace.bench.peers import candidates
    from headrace.bench.peers.peer_loaders import THREADS
    from headrace.bench.peers.video_peers import FLOOR

    kind = video.KINDS[job.args.kind]
    files = _files(job.args.clips or kind.default, kind)
    pythons, peers = _pythons(job.args.peer_python), candidates.peers(kind)
    needed = {package for packages in peers.values() for package in packages}
    missing = sorted(package for package in needed if not pythons.get(_short(package)) and not _is_here(package))
    names = _names(job.args.only, candidates.ours(kind), peers, missing)
    folder = _prepared(job, kind, files, names, pythons)
    part.title = f"Loader: {kind.described(files)}{', from S3' if job.args.s3 else ''}"
    part.settings = {
        "clips": files * kind.per_file,
        "kind": kind.name,
        "batch": kind.batch * kind.per_file,
        "threads": THREADS,
        "s3": job.args.s3,
        "delay_ms": job.args.delay,
        "rate_mb": job.args.rate,
        "missing": missing,
    }
    part.metrics, part.against = METRICS | (FROM_S3 if job.args.s3 else {}), FLOOR if FLOOR in names else names[0]
    if kind.per_file > 1:
        part.notes.append(
            f"Peers take the {kind.per_file} of a file at once, from one open file, and give them in one batch, which is the "
            "least work; webdataset, litdata, Energon and mosaicml-streaming read files whole. Batches of Headrace mix files."
        )
    if job.args.s3:
        part.notes.append("The floors read files. The server shares the cores with its clients.")
        limit = f", all together at {job.args.rate:g} MB/s at most" if job.args.rate else ""
        if job.args.delay or limit:
            part.notes.append(f"Its answers come {job.args.delay:g} ms late{limit}.")
    with _served(folder.parent, job.args) as port:
        wanted = [
            Candidate(
                name,
                "headrace.bench.workloads.loader_worker",
                (name, str(folder), kind.name, str(port)),
                next((pythons[at] for at in map(_short, peers.get(name, ())) if at in pythons), ""),
            )
            for name in names
        ]
        alternate(wanted, job.rounds, job.tell, part.candidates)


def _files(clips: int, kind: video.AnyKind) -> int:
    if clips % kind.per_file:
        raise UsageError(f"--clips {clips}: of each file come {kind.per_file}", hint=f"a multiple of {kind.per_file}")
    return clips // kind.per_file


def _pythons(given: Sequence[str]) -> dict[str, str]:
    """Return the interpreter of each peer that has its own."""
    found = dict[str, str]()
    for pair in given:
        name, separator, python = pair.partition("=")
        if not separator or shutil.which(python) is None:
            raise UsageError(
                f"--peer-python {pair!r:.200} names no interpreter", hint="for example energon=/envs/energon/bin/python"
            )
        found[name] = python
    return found


def _short(package: str) -> str:
    return package.rpartition(".")[2]


def _is_here(package: str) -> bool:
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
            needed = " and ".join(peers[name])
            raise UsageError(f"{name!r} needs {needed}", hint="pip install 'headrace[peers]', or --peer-python")
        if name not in names:
            raise UsageError(f"there is no candidate {name!r:.200}", hint=f"there are {', '.join(map(repr, names))}")
    return [name for name in names if not only or name in only]


def _prepared(
    job: command.Job, kind: video.AnyKind, files: int, names: Sequence[str], pythons: Mapping[str, str]
) -> Path:
    """Write the files in every format that the candidates need, and return the folder."""
    folder: Path = (job.args.data or job.scratch) / kind.folder
    if not (folder / "dataset").is_dir():
        video.make(kind, folder, files, job.tell)
    if (there := len(list((folder / "clips").iterdir()))) != files:
        there *= kind.per_file
        raise UsageError(f"{folder} is for {there} clips", hint=f"--clips {there}, or another --data")
    if any(name.startswith("litdata") for name in names) and not (folder / "litdata").is_dir():
        video.to_litdata(kind, folder)
    if any(name.startswith("energon") for name in names) and not (folder / "energon").is_dir():
        from headrace.bench.peers.peer_loaders import write_energon_index

        write_energon_index(folder, pythons.get("energon", sys.executable))
    if any(name.startswith("mosaicml") for name in names) and not (folder / "mosaic").is_dir():
        from headrace.bench.peers.peer_loaders import write_mosaic

        write_mosaic(kind, folder, pythons.get("streaming", sys.executable))
    return folder


@contextlib.contextmanager
def _served(root: Path, args: argparse.Namespace) -> Iterator[int]:
    """Serve `root` over S3 and yield the port, or yield 0 without a server.

    Candidates run in their own processes and find the server through the environment.
    """
    if not args.s3:
        yield 0
        return
    from headrace.bench.core.processes import server

    with server(root, args.rate * 1e6, args.delay / 1e3) as found:
        os.environ.update(found.environ)
        yield found.port
