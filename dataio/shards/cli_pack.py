"""The commands that make a dataset: `headrace pack` (also with `--append`) and `headrace index`.

Invariant: standard output holds only results. Progress is printed to standard error if that is a terminal.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report. The exit code is 1 if inputs were skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable
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
from headrace.dataio.core.errors import TransientError, UsageError
from headrace.dataio.core.limits import counted

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.ingest.index_tars import IndexProgress
    from headrace.dataio.shards.ingest.manifests import Columns
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
Make a dataset over media files or WebDataset tars where they lie. Nothing is copied: DST gets only an index and a version.
PATTERN is a file, a folder, a quoted glob or a manifest: 's3://bucket/**/*.mp4', /data/clips, clips.csv. If it matches any
tar, the tars are indexed: 's3://bucket/set/{00000..09999}.tar' (see --layout). If it is the folder of a LeRobot data set, each
episode is a sample.
Files with the same stem in one folder are one sample: clip.mp4 with clip.json (fields), clip.txt (text), and so on (see --group).
The text of a sample is its .txt, or the "caption" of its .json (see --text-field), or the words of its .vtt.
Every file is read once, to hash it and to probe its media. S3 credentials and endpoint come from the usual AWS variables and
profiles. Commands (pipe:…) and compressed tars are not supported.
To continue an interrupted run, give the same command again."""
_INDEX_CODES = """\
exit codes: 0 all indexed · 1 indexed, but samples or shards were skipped, or changed since (they are listed) · 2 wrong use, or
nothing to index · 3 temporary failure, try again · 4 a damaged file, with --strict · 5 DST already holds a dataset"""
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min)?")


def _seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 10s, 1.5s or 2m")
    return float(match[1]) * {"ms": 1e-3, "m": 60.0, "min": 60.0}.get(match[2], 1.0)


def _file_column(text: str) -> tuple[str, str]:
    ext, separator, column = text.partition("=")
    if not separator or not ext or not column:
        raise argparse.ArgumentTypeError(f"{text!r} is not EXT=NAME, such as cam1.mp4=left_url")
    return ext, column


def _grouping() -> Argument:
    return argument(
        "--group",
        choices=("stem", "dot", "folder"),
        default="stem",
        help="which files are one sample: those with one stem, with one name up to the first dot (ep1.cam0.mp4, "
        "ep1.cam1.mp4), or of one folder (default: stem)",
    )


def _manifest_columns() -> Argument:
    return group(
        "manifests",
        argument("--path-column", metavar="NAME", default="path", help="default: path"),
        argument("--key-column", metavar="NAME", default="key", help="default: key"),
        argument("--caption-column", metavar="NAME", default="caption", help="default: caption"),
        argument(
            "--file-column",
            metavar="EXT=NAME",
            type=_file_column,
            action="append",
            default=[],
            help="a column with a further file of each sample, and its extension: cam1.mp4=left_url (repeatable)",
        ),
        argument(
            "--bytes-column",
            metavar="NAME",
            action="append",
            default=[],
            help="Parquet column with the media themselves; the first has the medium of a sample (repeatable; only pack)",
        ),
    )


def _columns(args: argparse.Namespace) -> Columns:
    from headrace.dataio.shards.ingest.manifests import Columns

    return Columns(
        path=args.path_column,
        key=args.key_column,
        caption=args.caption_column,
        files=dict(args.file_column),
        bytes=tuple(args.bytes_column),
    )


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
    _grouping(),
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
    _manifest_columns(),
    epilog=_PACK_CODES,
)
def pack(args: argparse.Namespace) -> int:
    """`headrace pack SRC... DST`"""
    if args.append and args.name:
        raise UsageError("--name is for a new dataset, not for --append", hint="leave one of them out")
    if args.trust_mounts and not args.append:
        raise UsageError("--trust-mounts is for --append: a new dataset has no mounts", hint="leave it out")
    from headrace.dataio.shards.ingest.pack import append
    from headrace.dataio.shards.ingest.pack import pack as pack_files

    call = partial(append, trust_mounts=args.trust_mounts) if args.append else partial(pack_files, name=args.name)
    with byte_progress("packing", _pack_progress, quiet=args.json) as progress:
        dataset = call(
            args.sources,
            args.destination,
            shard_bytes=limits.parse_bytes(args.shard_size),
            strict=args.strict,
            columns=_columns(args),
            group=args.group,
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
    argument("patterns", metavar="PATTERN", nargs="+", help="which files or tars"),
    argument("destination", metavar="DST", help="where the dataset is written: a folder or s3://bucket/prefix"),
    argument(
        "--layout",
        choices=("auto", "tars", "files", "lerobot"),
        default="auto",
        help="take media files, tars, or the episodes of a LeRobot data set (default: what the patterns match)",
    ),
    argument("--follow", action="store_true", help="add what is new to the dataset at DST, as its next version"),
    argument(
        "--every",
        metavar="TIME",
        type=_seconds,
        help="repeat --follow at this interval, such as 60s, until interrupted",
    ),
    trust_mounts(),
    _grouping(),
    argument(
        "--keys",
        choices=("member", "shard"),
        default="member",
        help="the key of a sample in a tar: the name of its members, or that with the shard's path before it "
        "(default: member)",
    ),
    *_common_options("sample or shard that cannot be used", "probing processes"),
    _manifest_columns(),
    epilog=_INDEX_CODES,
)
def index(args: argparse.Namespace) -> int:
    """`headrace index PATTERN... DST`"""
    if args.every is not None and args.every < 1:
        raise UsageError("--every must be at least 1s", hint="such as --every 60s")
    from headrace.dataio.shards.ingest.index import FollowMemory
    from headrace.dataio.shards.ingest.index import index as index_in_place

    with byte_progress("indexing", _index_progress, quiet=args.json) as progress:
        run = partial(
            index_in_place,
            args.patterns,
            args.destination,
            layout=args.layout,
            follow=args.follow or args.every is not None,
            group=args.group,
            columns=_columns(args),
            name=args.name,
            strict=args.strict,
            keys=args.keys,
            text_field=args.text_field,
            engine=args.engine,
            progress=progress,
            workers=args.workers,
            memory=FollowMemory(),
            trust_mounts=args.trust_mounts,
        )
        if args.every is not None:
            return _repeat(run, args)
        dataset = run()
    with dataset:
        return _print_indexed(dataset, args)


def _repeat(run: Callable[[], Dataset], args: argparse.Namespace) -> int:
    """Follow until interrupted. A temporary failure is printed, and the next pass tries again."""
    shown: tuple[object, ...] = ()
    try:
        while True:
            try:
                with run() as dataset:
                    report = dataset.report
                    assert report is not None
                    state = (dataset.version, report.skipped, report.changed)
                    if state != shown:
                        _print_indexed(dataset, args)
                        shown = state
            except TransientError as error:
                print(f"headrace: {one_line(str(error))}; the next pass tries again", file=sys.stderr)
            sys.stdout.flush()
            time.sleep(args.every)
    except KeyboardInterrupt:
        return 0


def _print_indexed(dataset: Dataset, args: argparse.Namespace) -> int:
    from headrace.dataio.shards.versions.mounting import JOINED_MOUNT, how_to_open

    report = dataset.report
    assert report is not None
    mounts = [mount for mount in dataset.document.mounts if mount != JOINED_MOUNT]
    if args.json:
        urls = {mount.name: mount.url for mount in mounts}
        print_json({"url": dataset.url, "version": dataset.version, "mounts": urls, **dataclasses.asdict(report)})
    else:
        _print_report(report, dataset.url, dataset.version, ignored="ignored")
        _print_engine(report)
        print_list("changed since they were indexed", list(report.changed))
        data = "files" if JOINED_MOUNT in dataset.document.mounts else "shards"
        for mount in mounts:
            instruction = how_to_open(dataset.store.location, mount)
            print(f"{data} stay in {one_line(mount.url)}{f'; to open them, {instruction}' if instruction else ''}")
    return 1 if report.skipped or report.changed else 0


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


def _index_progress(progress: IndexProgress | Progress) -> str:
    from headrace.dataio.shards.ingest.report import Progress

    if isinstance(progress, Progress):
        return _pack_progress(progress)
    skipped = f" ({progress.skipped} skipped)" if progress.skipped else ""
    return f"{progress.shards}/{progress.shards_total} shards, {progress.samples} samples{skipped}"
