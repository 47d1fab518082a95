"""What `millrace bench loader` compares: short and long clips, from local disk.

Invariant: candidates alternate, each in its own process, over the same clips; peers that are not installed are
left out and named. Nothing heavy is imported before the options were understood.
Failure behaviour: a candidate that fails is named with its last words; the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from bench.core import command
from bench.core.measure import Candidate, alternate
from bench.core.results import Metric, Part
from bench.loader import data

METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "cpu_s_per_1k": Metric("CPU s per 1k", "s"),
    "first_batch_s": Metric("first batch s", "s"),
    "peak_mib": Metric("peak MiB of all processes", "MiB"),
}


def main(argv: Sequence[str]) -> int:
    """`millrace bench loader`."""
    about = "One epoch of decoded clips beside other loaders. `millrace bench resume` is about going on in the middle."
    return command.run(argv, "loader", about, fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clips", type=int, default=600, help="clips of the dataset (default: %(default)s)")
    parser.add_argument(
        "--kind", choices=list(data.KINDS), default="short", help="4 s clips, or 10 s with few key frames"
    )
    parser.add_argument("--only", action="append", help="a candidate's name; may be repeated (default: all)")


def fill(job: command.Job, part: Part) -> None:
    """Every candidate reads the same clips."""
    from bench.loader.by_hand import FRAMES, STRIDE
    from bench.loader.candidates import BATCH, FAST, FLOOR, OURS, PEERS, THREADS

    kind = data.KINDS[job.args.kind]
    folder = job.scratch / kind.name
    data.make(kind, folder, job.args.clips, job.tell)
    missing = sorted({package for package in PEERS.values() if importlib.util.find_spec(package) is None})
    names = [OURS, FAST, FLOOR, *(name for name, package in PEERS.items() if package not in missing)]
    names = [name for name in names if not job.args.only or name in job.args.only]
    if any(name.startswith("litdata") for name in names):
        data.to_litdata(folder)
    described = f"{kind.seconds} s, {kind.width}x{kind.height}, a key frame every {kind.gop}"
    part.title = (
        f"Loader: {job.args.clips} H.264 clips of {described}; {FRAMES} frames, every {STRIDE}nd, to {kind.size}²"
    )
    part.settings = {"clips": job.args.clips, "kind": kind.name, "batch": BATCH, "threads": THREADS, "missing": missing}
    part.metrics, part.against = METRICS, FLOOR if FLOOR in names else names[0]
    wanted = [Candidate(name, "bench.loader", (name, str(folder), kind.name)) for name in names]
    alternate(wanted, job.rounds, job.tell, part.candidates)
