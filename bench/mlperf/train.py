"""`headrace bench train`: utilisation of emulated accelerators, unofficial, in the shape of MLPerf Storage's workloads.

How: as many processes as accelerators each take batches and sleep for the published computation time; utilisation is
computing time over wall time from the start to the slowest accelerator's end. `--fraction` shrinks records and
computation alike, so the bytes a second stay those of the rules; the dataset does not have five times the host's memory,
as the rules would want.
Invariant: prints no figure that was not measured in this run. Failure behaviour: as for all benchmarks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part
from headrace.bench.mlperf import data
from headrace.bench.mlperf.accelerator import CANDIDATES, Seat
from headrace.bench.mlperf.workloads import WORKLOADS, Workload, utilisation, workload
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.options import amount, count

UNOFFICIAL = (
    "Unofficial: in the shape of MLPerf Storage's workloads, not verified by MLCommons, not comparable with published "
    "results."
)


def main(argv: Sequence[str]) -> int:
    """Run it, or one candidate of it; the exit code."""
    if argv[:1] == ["--seats"]:
        print(json.dumps(seats(msgspec.json.decode(argv[1], type=list[Seat]))))
        return 0
    return command.run(argv, "train", __doc__ or "", fill, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        default="resnet50",
        help=f"of {', '.join(sorted({n for n, _ in WORKLOADS}))} (default: %(default)s)",
    )
    parser.add_argument("--accelerator", default="h100", help="h100 or a100 (default: %(default)s)")
    parser.add_argument("--accelerators", default="1,2", help="how many at once (default: %(default)s)")
    parser.add_argument("--batches", type=count, default=12, help="batches for each accelerator (default: %(default)s)")
    parser.add_argument(
        "--fraction", type=amount, default=1.0, help="of records and computation (default: %(default)s)"
    )


def fill(job: command.Job, part: Part) -> None:
    """One dataset for the most accelerators; every candidate with every number of them, alternating."""
    args = job.args
    work = workload(args.workload, args.accelerator).scaled(args.fraction)
    counts = _counts(args.accelerators)
    video = work.name == "video"
    part.title = f"{work.name} on emulated {args.accelerator}s (unofficial)"
    part.settings = {"fraction": args.fraction, "batches": args.batches, "rate_mb_s": round(work.rate / 1e6, 1)}
    part.metrics, part.notes = _metrics(work, counts), [UNOFFICIAL]
    part.against = "" if video else CANDIDATES[1]
    names = CANDIDATES[:1] if video else CANDIDATES
    for ranks in counts:
        folder = job.scratch / str(ranks)
        samples = work.batch * args.batches * ranks
        _video_data(folder, samples) if video else data.make(folder, work, samples, job.tell)
        wanted = [
            Candidate(name, "headrace.bench.mlperf.train", _arguments(name, folder, work, ranks, video))
            for name in names
        ]
        found = alternate(wanted, job.rounds, job.tell)
        for name, samples_ in found.items():
            mine = part.candidates.setdefault(name, samples_)
            mine.metrics |= {f"{metric}_{ranks}": values for metric, values in samples_.metrics.items()}
            mine.errors += [] if mine is samples_ else samples_.errors
    for samples_ in part.candidates.values():
        samples_.metrics = {name: values for name, values in samples_.metrics.items() if name in part.metrics}


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.isdigit()]
    if not counts or min(counts) < 1:
        raise UsageError(f"{text!r} is no list of numbers of accelerators", hint="write for example 1,2,4")
    return counts


def _metrics(work: Workload, counts: Sequence[int]) -> dict[str, Metric]:
    found = {}
    for ranks in counts:
        axes: dict[str, str | float] = {"ranks": ranks}
        found[f"au_{ranks}"] = Metric(
            f"AU, % ×{ranks}", "%", "higher", goal=100 * work.least_au, quantity="accelerator utilisation", axes=axes
        )
        found[f"rate_{ranks}"] = Metric(f"MB/s ×{ranks}", "MB/s", "higher", quantity="throughput", axes=axes)
        found[f"first_{ranks}"] = Metric(f"first batch, s ×{ranks}", "s", quantity="first batch", axes=axes)
        found[f"cpu_{ranks}"] = Metric(f"CPU s/GB ×{ranks}", "s/GB", quantity="cpu", axes=axes)
    return found


def _arguments(name: str, folder: Path, work: Workload, ranks: int, video: bool) -> tuple[str, str]:
    places = [Seat(name, str(folder), work.batch, work.compute_seconds, rank, ranks, video) for rank in range(ranks)]
    return "--seats", msgspec.json.encode(places).decode()


def _video_data(folder: Path, samples: int) -> None:
    from headrace.bench.demo.media import make_clip
    from headrace.dataio import pack

    (folder / "clips").mkdir(parents=True)
    for number in range(samples):
        make_clip(folder / "clips", number * 4, seconds=2, width=320, height=240)
    pack([str(folder / "clips")], str(folder / "dataset")).close()


def seats(places: Sequence[Seat]) -> dict[str, float]:
    """Start an accelerator for each, let them go together; figures of all."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_start(place)) for place in places]
        for process in processes:
            _line(process)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(_line(process)) for process in processes]
    wall, size = max(one["wall_s"] for one in found), sum(one["bytes"] for one in found)
    busy = [
        utilisation(place.compute_seconds, int(one["steps"]), wall) for place, one in zip(places, found, strict=True)
    ]
    return {
        "au": 100 * sum(busy) / len(busy),
        "rate": size / wall / 1e6,
        "first": max(one["first_s"] for one in found),
        "cpu": sum(one["cpu_s"] for one in found) / (size / 1e9),
    }


@contextlib.contextmanager
def _start(place: Seat) -> Iterator[subprocess.Popen[str]]:
    command_ = [sys.executable, "-m", "headrace.bench.mlperf.accelerator", msgspec.json.encode(place).decode()]
    process = subprocess.Popen(
        command_, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, said = process.communicate(timeout=30)
        raise RuntimeError(f"an accelerator ended early, exit status {process.returncode}: {said.strip()[-300:]}")
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
