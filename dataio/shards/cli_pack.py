"""The commands that make a dataset: `headrace pack` (also with `--append`) and `headrace index`.

Invariant: standard output holds only results. Progress is printed to standard error if that is a terminal.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report. The exit code is 1 if inputs were skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from functools import partial
from typing import TYPE_CHECKING

from headrace.dataio.core import limits
from headrace.dataio.core.cli import (
    Argument,
    argument,
    byte_progress,
    byte_rate,
    command,
    engine,
    group,
    json_option,
    one_line,
    positive_int,
    print_json,
    print_list,
    trust_mounts,
    workers,
)
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import counted

if TYPE_CHECKING:
    from headrace.dataio.shards.ingest.index_tars import IndexProgress
    from headrace.dataio.shards.ingest.report import PackReport, Progress
    from headrace.dataio.shards.media.messages import Recipe

_PACK = """\
SRC is a file, a folder, a quoted glob, a manifest (.csv .tsv .jsonl .parquet), a .parquet with embedded media or a WebDataset
.tar, local or s3://bucket/….
Files with the same stem in one folder are one sample: clip.mp4 with clip.json (fields), clip.txt (text), and so on.
The text of a sample is its .txt, or the "caption" of its .json (see --text-field), or the words of its .vtt.
DST is a folder or s3://bucket/prefix; S3 credentials and endpoint come from the usual AWS variables and profiles.
To continue an interrupted pack, give the same command again."""
_PACK_CODES = """\
exit codes: 0 all packed · 1 packed, but some files were skipped (they are listed) · 2 wrong use, or a source or bucket that
does not exist · 3 temporary failure, try again · 4 a damaged file, with --strict · 5 DST already holds a dataset, or with
--append a sample with the same key"""
_INDEX = """\
Make a dataset over existing WebDataset tars without moving them. Nothing is copied: DST gets only an index and a version.
URL-PATTERN is a tar, a folder of tars, or a quoted pattern: 's3://bucket/set/{00000..09999}.tar', '/data/{train,extra}/*.tar'.
The text of a sample is its .txt, or the "caption" of its .json (see --text-field), or the words of its .vtt.
Every shard is read once, to hash its members and to probe its media. S3 credentials and endpoint come from the usual AWS
variables and profiles. Commands (pipe:…) and compressed tars are not supported.
To continue an interrupted run, give the same command again."""
_INDEX_CODES = """\
exit codes: 0 all indexed · 1 indexed, but samples or shards were skipped (they are listed) · 2 wrong use, or nothing to
index · 3 temporary failure, try again · 4 a damaged shard, with --strict · 5 DST already holds a dataset"""
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min)?")


def _seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 10s, 1.5s or 2m")
    return float(match[1]) * {"ms": 1e-3, "m": 60.0, "min": 60.0}.get(match[2], 1.0)


def _common_options(strict: str, processes: str) -> tuple[Argument, ...]:
    """Return the options that `pack` and `index` have in common."""
    return (
        argument(
            "--text-field",
            metavar="NAME",
            help="field of the samples' JSON that is the text of samples without a .txt (default: caption)",
        ),
        argument("--strict", action="store_true", help=f"stop at the first {strict}"),
        engine(),
        workers(processes),
        argument("--name", help="name of the dataset (default: the last part of DST)"),
        json_option("the report as one JSON object"),
    )


@command(
    "pack",
    _PACK,
    argument("sources", metavar="SRC", nargs="+", help="what to pack"),
    argument("destination", metavar="DST", help="where the dataset is written"),
    argument("--shard-size", metavar="SIZE", default="256MiB", help="size of a shard (default: 256MiB)"),
    argument("--append", action="store_true", help="add to the dataset at DST, as its next version"),
    trust_mounts(),
    *_common_options("file that cannot be packed", "media processes"),
    group(
        "media",
        argument("--transcode", choices=("h264",), help="re-encode the video, upright and with square pixels"),
        argument("--gop", metavar="N", type=positive_int, default=32, help="a key frame every N frames (default: 32)"),
        argument("--height", metavar="ROWS", type=positive_int, help="scale down to this many rows"),
        argument("--remux", choices=("mp4", "mov", "mkv", "webm"), help="copy the streams into this container"),
        argument("--faststart", action="store_true", help="put the index of MP4 files at the front"),
        argument("--split", metavar="TIME", type=_seconds, help="cut at key frames into clips this long, e.g. 10s"),
        description="convert video files while packing",
    ),
    group(
        "manifests",
        argument("--path-column", metavar="NAME", default="path", help="default: path"),
        argument("--key-column", metavar="NAME", default="key", help="default: key"),
        argument("--caption-column", metavar="NAME", default="caption", help="default: caption"),
        argument(
            "--bytes-column",
            metavar="NAME",
            action="append",
            default=[],
            help="Parquet column with the media themselves; the first has the medium of a sample (repeatable)",
        ),
    ),
    epilog=_PACK_CODES,
)
def pack(args: argparse.Namespace) -> int:
    """`headrace pack SRC... DST`"""
    if args.append and args.name:
        raise UsageError("--name is for a new dataset, not for --append", hint="leave one of them out")
    if args.trust_mounts and not args.append:
        raise UsageError("--trust-mounts is for --append: a new dataset has no mounts", hint="leave it out")
    from headrace.dataio.shards.ingest.manifests import Columns
    from headrace.dataio.shards.ingest.pack import append
    from headrace.dataio.shards.ingest.pack import pack as pack_files

    call = partial(append, trust_mounts=args.trust_mounts) if args.append else partial(pack_files, name=args.name)
    with byte_progress("packing", _pack_progress, quiet=args.json) as progress:
        dataset = call(
            args.sources,
            args.destination,
            shard_bytes=limits.parse_bytes(args.shard_size),
            strict=args.strict,
            columns=Columns(
                path=args.path_column,
                key=args.key_column,
                caption=args.caption_column,
                bytes=tuple(args.bytes_column),
            ),
            recipe=_recipe(args),
            text_field=args.text_field,
            engine=args.engine,
            progress=progress,
            workers=args.workers,
        )
    with dataset:
        report = dataset.report
        assert report is not None
        if args.json:
            print_json({"url": dataset.url, "version": dataset.version, **dataclasses.asdict(report)})
        else:
            _print_report(report, dataset.url, dataset.version, ignored="ignored, belonging to no media file")
            _print_engine(report)
    return 1 if report.skipped else 0


@command(
    "index",
    _INDEX,
    argument("patterns", metavar="URL-PATTERN", nargs="+", help="which tars"),
    argument("destination", metavar="DST", help="where the dataset is written: a folder or s3://bucket/prefix"),
    argument(
        "--keys",
        choices=("member", "shard"),
        default="member",
        help="a sample's key: the name of its members, or that with the shard's path before it (default: member)",
    ),
    *_common_options("sample or shard that cannot be used", "probing processes"),
    epilog=_INDEX_CODES,
)
def index(args: argparse.Namespace) -> int:
    """`headrace index URL-PATTERN... DST`"""
    from headrace.dataio.shards.ingest.index_tars import index as index_tars
    from headrace.dataio.shards.versions.mounting import how_to_open

    with byte_progress("indexing", _index_progress, quiet=args.json) as progress:
        dataset = index_tars(
            args.patterns,
            args.destination,
            name=args.name,
            strict=args.strict,
            keys=args.keys,
            text_field=args.text_field,
            engine=args.engine,
            progress=progress,
            workers=args.workers,
        )
    with dataset:
        report = dataset.report
        assert report is not None
        if args.json:
            mounts = {mount.name: mount.url for mount in dataset.document.mounts}
            print_json({"url": dataset.url, "version": dataset.version, "mounts": mounts, **dataclasses.asdict(report)})
        else:
            _print_report(report, dataset.url, dataset.version, ignored="ignored, not named like a tar")
            _print_engine(report)
            for mount in dataset.document.mounts:
                instruction = how_to_open(dataset.store.location, mount)
                print(f"shards stay in {one_line(mount.url)}{f'; to open them, {instruction}' if instruction else ''}")
    return 1 if report.skipped else 0


def _recipe(args: argparse.Namespace) -> Recipe:
    from headrace.dataio.shards.media.messages import Recipe

    return Recipe(
        codec=args.transcode,
        gop=args.gop,
        height=args.height,
        container=args.remux,
        faststart=args.faststart,
        split=args.split,
    )


# --- output


def _print_report(report: PackReport, url: str, version: int, *, ignored: str) -> None:
    print(
        f"{one_line(url)} version {version}: {counted(report.samples, 'sample')} from {counted(report.files, 'file')}"
    )
    print(f"{counted(report.shards, 'shard')}, {byte_rate(report.bytes, report.seconds)}")
    print_list("skipped", [f"{item.path}: {item.reason}" for item in report.skipped])
    print_list(ignored, list(report.ignored))
    print_list("remarks", list(report.notes))


def _print_engine(report: PackReport) -> None:
    if report.resumed:
        print(f"continued an interrupted run: {report.resumed} units were already done")
    for worker in report.workers if len(report.workers) > 1 else ():
        speed = worker.bytes / 1e6 / max(worker.seconds, 1e-3)
        print(f"  {worker.name}: {worker.groups} inputs in {worker.seconds:.1f} s ({speed:.1f} MB/s)")


def _pack_progress(progress: Progress) -> str:
    skipped = f" ({progress.skipped} skipped)" if progress.skipped else ""
    return f"{progress.samples}/{progress.samples_total}{skipped}"


def _index_progress(progress: IndexProgress) -> str:
    skipped = f" ({progress.skipped} skipped)" if progress.skipped else ""
    return f"{progress.shards}/{progress.shards_total} shards, {progress.samples} samples{skipped}"
