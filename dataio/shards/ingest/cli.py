"""`headrace pack`, also with `--append`.

Invariant: as in `headrace.dataio.shards.cli`: standard output holds results only, progress goes to a terminal's standard error.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report; 1 is returned when inputs were skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from functools import partial
from typing import TYPE_CHECKING

from headrace.dataio.core import limits
from headrace.dataio.core.cli import positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.cli import _add_making, _add_trust, _byte_bar, _parser, _print_json, _print_report

if TYPE_CHECKING:
    from headrace.dataio.shards.media.facts import Recipe
    from headrace.dataio.shards.report import PackReport, Progress

_HELP = """\
SRC is a file, a folder, a quoted glob, a manifest (.csv .tsv .jsonl .parquet) or a WebDataset .tar, local or s3://bucket/….
Files of the same stem in one folder are one sample: clip.mp4 with clip.json (fields), clip.txt or clip.vtt (text), and so on.
DST is a folder or s3://bucket/prefix; S3 credentials and endpoint come from the usual AWS variables and profiles.
A pack that was interrupted goes on where it was when the same command is given again."""
_CODES = """\
exit codes: 0 all packed · 1 packed, but some files were skipped (they are listed) · 2 wrong use, or a source or bucket that
does not exist · 3 passing trouble, try again · 4 a damaged file, with --strict · 5 DST already holds a dataset, or with
--append a sample of the same key"""
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min)?")


def pack(argv: list[str]) -> int:
    """`headrace pack SRC... DST`"""
    args = _arguments().parse_args(argv)
    if args.append and args.name:
        raise UsageError("--name is for a new dataset, not for --append", hint="leave one of them out")
    if args.trust_mounts and not args.append:
        raise UsageError("--trust-mounts is for --append: a new dataset has no mounts", hint="leave it out")
    from headrace.dataio.shards.ingest.manifests import Columns
    from headrace.dataio.shards.ingest.pack import append
    from headrace.dataio.shards.ingest.pack import pack as pack_files

    call = partial(append, trust_mounts=args.trust_mounts) if args.append else partial(pack_files, name=args.name)
    with _byte_bar("packing", _words, quiet=args.json) as progress:
        dataset = call(
            args.sources,
            args.destination,
            shard_bytes=limits.parse_bytes(args.shard_size),
            strict=args.strict,
            columns=Columns(path=args.path_column, key=args.key_column, caption=args.caption_column),
            recipe=_recipe(args),
            engine=args.engine,
            progress=progress,
            workers=args.workers,
        )
    with dataset:
        report = dataset.report
        assert report is not None
        if args.json:
            _print_json({"url": dataset.url, "version": dataset.version, **dataclasses.asdict(report)})
        else:
            _print_report(report, dataset.url, dataset.version)
            _print_engine(report)
    return 1 if report.skipped else 0


def _arguments() -> argparse.ArgumentParser:
    parser = _parser("pack", _HELP, _CODES)
    parser.add_argument("sources", metavar="SRC", nargs="+", help="what to pack")
    parser.add_argument("destination", metavar="DST", help="where the dataset goes")
    parser.add_argument("--shard-size", metavar="SIZE", default="256MiB", help="size of a shard (default: 256MiB)")
    parser.add_argument("--append", action="store_true", help="add to the dataset that DST holds, as its next version")
    _add_trust(parser)
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where to work (default: local)")
    _add_making(parser, "file that cannot be packed", "media processes")
    media = parser.add_argument_group("media", "files with pictures can be changed on the way")
    media.add_argument("--transcode", choices=("h264",), help="re-encode the pictures, upright and with square pixels")
    media.add_argument(
        "--gop", metavar="N", type=positive_int, default=32, help="a key frame every N frames (default: 32)"
    )
    media.add_argument("--height", metavar="ROWS", type=positive_int, help="scale down to so many rows")
    media.add_argument("--remux", choices=("mp4", "mov", "mkv", "webm"), help="copy the streams into this container")
    media.add_argument("--faststart", action="store_true", help="put the index of MP4 files in front")
    media.add_argument(
        "--split", metavar="TIME", type=_seconds, help="cut at key frames into clips this long, e.g. 10s"
    )
    columns = parser.add_argument_group("manifests")
    columns.add_argument("--path-column", metavar="NAME", default="path", help="default: path")
    columns.add_argument("--key-column", metavar="NAME", default="key", help="default: key")
    columns.add_argument("--caption-column", metavar="NAME", default="caption", help="default: caption")
    return parser


def _recipe(args: argparse.Namespace) -> Recipe:
    from headrace.dataio.shards.media.facts import Recipe

    return Recipe(
        codec=args.transcode,
        gop=args.gop,
        height=args.height,
        container=args.remux,
        faststart=args.faststart,
        split=args.split,
    )


def _seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 10s, 1.5s or 2m")
    return float(match[1]) * {"ms": 1e-3, "m": 60.0, "min": 60.0}.get(match[2], 1.0)


def _print_engine(report: PackReport) -> None:
    if report.resumed:
        print(f"went on after an interrupted start: {report.resumed} units were done already")
    for worker in report.workers if len(report.workers) > 1 else ():
        speed = worker.bytes / 1e6 / max(worker.seconds, 1e-3)
        print(f"  {worker.name}: {worker.groups} inputs in {worker.seconds:.1f} s ({speed:.1f} MB/s)")


def _words(done: Progress) -> str:
    skipped = f" ({done.skipped} skipped)" if done.skipped else ""
    return f"{done.samples}/{done.samples_total}{skipped}"
