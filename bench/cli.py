"""`millrace bench`: ours beside the peers, in one run, alternating, with medians and spread.

Invariant: prints no figure that was not measured in this run; the raw samples and the environment go into the JSON file.
Failure behaviour: a candidate that fails is listed with its last words, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from bench.measure import Candidate, Samples, alternate, environment, table

_LOADER = {
    "samples_per_s": "samples/s",
    "cpu_s_per_1k": "CPU s per 1k",
    "first_batch_s": "first batch s",
    "peak_mib": "peak MiB",
}
_PACK = {
    "mb_per_s": "MB/s",
    "files_per_s": "files/s",
    "mb_per_core_s": "MB/s a core",
    "files_per_core_s": "files/s a core",
    "cpu_s_per_1k": "CPU s per 1k files",
    "peak_mib": "peak MiB",
}
_CHECKPOINT = {
    "first_stall_s": "stall s",
    "first_durable_s": "durable s",
    "first_mib": "written MiB",
    "again_stall_s": "10 % changed: stall s",
    "again_durable_s": "durable s",
    "again_mib": "written MiB",
    "restore_s": "restore s",
    "cpu_s": "CPU s",
    "peak_mib": "peak MiB",
}


def bench(argv: list[str]) -> int:
    """Run the benchmarks; see `millrace bench --help`."""
    if argv[:1] == ["store"]:
        from bench.store import main

        return main(argv[1:])
    if argv[:1] == ["sidecar"]:
        from bench.sidecar import main as sidecar

        return sidecar(argv[1:])
    parser = argparse.ArgumentParser(
        prog="millrace bench",
        description="Measure packing, loaders and checkpoints beside their peers on this machine.",
        epilog="`millrace bench store [URL]` measures a bucket, `millrace bench sidecar` the node's daemon; they have "
        "options of their own. "
        "exit codes: 0 all candidates ran; 1 one failed and is named; others as in millrace --help",
    )
    parser.add_argument("what", nargs="?", choices=("pack", "loader", "checkpoint", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3, help="times that every candidate runs (default: %(default)s)")
    parser.add_argument("--clips", type=int, default=96, help="clips of the loader's dataset (default: %(default)s)")
    parser.add_argument("--files", type=int, default=160, help="files to pack (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("-o", "--output", type=Path, help="write raw samples and environment to this JSON file")
    parser.add_argument("--json", action="store_true", help="print that JSON instead of tables")
    args = parser.parse_args(argv)
    report: dict[str, object] = {"environment": environment(), "rounds": args.rounds}
    failed = False
    with tempfile.TemporaryDirectory(prefix="millrace-bench-", dir=args.directory) as scratch:
        for what, run in (("pack", _pack), ("loader", _loader), ("checkpoint", _checkpoint)):
            if args.what in (what, "all"):
                samples = run(args, Path(scratch))
                report[what] = {name: asdict(found) for name, found in samples.items()}
                failed = failed or any(found.errors for found in samples.values())
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))
    if args.json:
        print(json.dumps(report))
    return 1 if failed else 0


def _pack(args: argparse.Namespace, scratch: Path) -> Mapping[str, Samples]:
    tell = _progress()
    from bench.demo.media import REAL_CLIPS
    from bench.pack import CANDIDATES, FFPROBE, candidates, make_files

    directory = scratch / "pack"
    size = make_files(directory / "clips", args.files, tell, REAL_CLIPS)
    names = candidates()
    if FFPROBE not in names:
        print(f"{FFPROBE} is left out: there is no ffprobe on the PATH", file=sys.stderr if args.json else sys.stdout)
    found = alternate([Candidate(name, "bench.pack", (name, str(directory))) for name in names], args.rounds, tell)
    if not args.json:
        real = "made and real" if REAL_CLIPS.is_dir() else "made"
        head = f"Pack: {args.files} files, {size / 1e6:.0f} MB, copies of {real} clips, local disk"
        print(f"\n## {head}\n\n{table(found, _PACK, CANDIDATES[-1])}")
    return found


def _loader(args: argparse.Namespace, scratch: Path) -> Mapping[str, Samples]:
    tell = _progress()
    from bench.demo.media import make_clip
    from bench.loader import CANDIDATES
    from dataio import pack

    clips = scratch / "clips"
    clips.mkdir()
    for number in range(args.clips):
        tell("making clips", number / args.clips)
        make_clip(clips, number * 4, seconds=4, width=320, height=240)
    dataset = str(scratch / "dataset")
    pack([str(clips)], dataset, shard_bytes=4 << 20)
    found = alternate([Candidate(name, "bench.loader", (name, dataset)) for name in CANDIDATES], args.rounds, tell)
    if not args.json:
        print(
            f"\n## Loader: {args.clips} H.264 clips of 4 s, 320x240, local disk\n\n{table(found, _LOADER, CANDIDATES[1])}"
        )
    return found


def _checkpoint(args: argparse.Namespace, scratch: Path) -> Mapping[str, Samples]:
    tell = _progress()
    from bench.checkpoint import CANDIDATES

    directory = str(scratch / "checkpoints")
    found = alternate(
        [Candidate(name, "bench.checkpoint", (name, directory)) for name in CANDIDATES], args.rounds, tell
    )
    if not args.json:
        print(f"\n## Checkpoint: 192 MiB of float32 on local disk\n\n{table(found, _CHECKPOINT, 'dcp.async_save')}")
    return found


def _progress() -> Callable[[str, float], None]:
    """One line that is written over on a terminal; elsewhere a line for every new name."""
    last = ""

    def tell(name: str, share: float) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"\r\x1b[K{share:4.0%} {name}", end="", file=sys.stderr, flush=True)
        elif name != last:
            print(name, file=sys.stderr, flush=True)
        last = name

    return tell
