"""`millrace pack`, `info`, `ls` and `cat`.

Invariant: standard output holds results only (with `--json`, JSON only), progress goes to standard error and only to a
terminal. Names from files are printed without control characters.
Failure behaviour: errors are raised for `dataio.cli` to report; `pack` returns 1 when inputs were skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dataio.core import limits
from dataio.core.errors import UsageError

if TYPE_CHECKING:
    from dataio.shards.contract import Sample
    from dataio.shards.dataset import Dataset
    from dataio.shards.report import PackReport, Progress

_LISTED = 50
_SPOOL_BYTES = 64 * limits.MIB

_PACK_HELP = """\
Files of the same stem in one folder are one sample: clip.mp4 with clip.json (fields), clip.txt (text), clip.wav and so on.
DST is a folder or s3://bucket/prefix; S3 credentials and endpoint come from the usual AWS variables and profiles."""
_PACK_CODES = """\
exit codes: 0 all packed · 1 packed, but some files were skipped (they are listed) · 2 wrong use, or a source or bucket that
does not exist · 3 passing trouble, try again · 4 a damaged file, with --strict · 5 DST already holds a dataset"""


def pack(argv: list[str]) -> int:
    """`millrace pack SRC... DST`"""
    parser = _parser("pack", _PACK_HELP, _PACK_CODES)
    parser.add_argument("sources", metavar="SRC", nargs="+", help="a file, a folder or a quoted glob")
    parser.add_argument("destination", metavar="DST", help="where the dataset goes")
    parser.add_argument("--shard-size", metavar="SIZE", default="256MiB", help="size of a shard (default: 256MiB)")
    parser.add_argument("--strict", action="store_true", help="stop at the first file that cannot be packed")
    parser.add_argument("--workers", metavar="N", type=_positive, help="probing processes (default: one a core)")
    parser.add_argument("--name", help="name of the dataset (default: the last part of DST)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args(argv)
    shard_bytes = limits.parse_bytes(args.shard_size)
    from dataio.shards.pack import pack as pack_files

    with _progress(quiet=args.json) as progress:
        dataset = pack_files(
            args.sources,
            args.destination,
            shard_bytes=shard_bytes,
            strict=args.strict,
            progress=progress,
            workers=args.workers,
            name=args.name,
        )
    with dataset:
        report = dataset.report
        assert report is not None
        if args.json:
            _print_json({"url": dataset.url, "version": dataset.version, **dataclasses.asdict(report)})
        else:
            _print_report(report, dataset.url, dataset.version)
    return 1 if report.skipped else 0


def info(argv: list[str]) -> int:
    """`millrace info DATASET`"""
    parser = _parser("info", "Say what a dataset holds: samples, hours, bytes, codecs and sizes.")
    _add_dataset(parser)
    _add_where(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    from dataio.shards.dataset import Dataset
    from dataio.shards.summary import summary

    with Dataset(args.dataset, args.version) as dataset:
        found = summary(_narrowed(dataset, args.where))
    if args.json:
        _print_json(found)
    else:
        _print_info(found)
    return 0


def ls(argv: list[str]) -> int:
    """`millrace ls DATASET`"""
    parser = _parser("ls", "List the samples of a dataset, in the order of their numbers.")
    _add_dataset(parser)
    _add_where(parser)
    parser.add_argument("--limit", metavar="N", type=_positive, help="list only the first N")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args(argv)
    from dataio.shards.dataset import Dataset

    with Dataset(args.dataset, args.version) as dataset:
        for number, sample in enumerate(_narrowed(dataset, args.where)):
            if args.limit is not None and number >= args.limit:
                break
            if args.json:
                print(json.dumps(_sample_json(sample)))
            else:
                print(_sample_line(sample))
    return 0


def cat(argv: list[str]) -> int:
    """`millrace cat DATASET KEY`"""
    parser = _parser("cat", "Write one member of one sample to standard output, after its checksum was verified.")
    _add_dataset(parser)
    parser.add_argument("key", metavar="KEY", help="the sample's key, as `millrace ls` prints it")
    parser.add_argument(
        "--ext", help="which member, such as mp4 (default: the video, else the sound, else the only one)"
    )
    args = parser.parse_args(argv)
    from dataio.shards.dataset import Dataset
    from dataio.shards.members import chunks, find_member

    with Dataset(args.dataset, args.version) as dataset, tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        sample = dataset.find(args.key)
        member = find_member(sample, args.ext or _main_ext(sample))
        for piece in chunks(dataset.store, sample, member):
            spool.write(piece)
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return 0


# --- arguments


def _parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"millrace {name}",
        description=description,
        epilog=epilog or "exit codes: see millrace --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")
    parser.add_argument("--version", metavar="N", type=_version, help="a version or tag (default: the newest)")


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help='only these samples: "duration > 2 and height >= 720" (millrace filter --help)',
    )


def _narrowed(dataset: Dataset, where: str | None) -> Dataset:
    return dataset if where is None else dataset.where(where)


def _version(text: str) -> int | str:
    return _positive(text) if text.isdecimal() else text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _main_ext(sample: Sample) -> str:
    if sample.video or sample.audio:
        return (sample.video or sample.audio).ext  # type: ignore[union-attr]  # one of them is there
    if len(sample.members) == 1:
        return sample.members[0].ext
    have = ", ".join(member.ext for member in sample.members)
    raise UsageError(f"sample {sample.key!r} has several members", hint=f"choose with --ext: {have}")


# --- output


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("packing {task.fields[samples]}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bar(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", samples="…", total=None)

        def show(done: Progress) -> None:
            samples = f"{done.samples}/{done.samples_total}" + (f" ({done.skipped} skipped)" if done.skipped else "")
            bar.update(task, total=done.bytes_total, completed=done.bytes, samples=samples)

        yield show


def _print_report(report: PackReport, url: str, version: int) -> None:
    speed = report.bytes / 1e6 / max(report.seconds, 1e-3)
    print(f"{_printable(url)} version {version}: {report.samples} samples from {report.files} files")
    print(
        f"{_count(report.shards, 'shard')}, {limits.format_bytes(report.bytes)} in {report.seconds:.1f} s ({speed:.1f} MB/s)"
    )
    _print_some("skipped", [f"{item.path}: {item.reason}" for item in report.skipped])
    _print_some("ignored, belonging to no media file", list(report.ignored))
    _print_some("remarks", list(report.notes))


def _print_some(what: str, lines: list[str]) -> None:
    if lines:
        print(f"{what}: {len(lines)}")
    for line in lines[:_LISTED]:
        print(f"  {_printable(line)}")
    if len(lines) > _LISTED:
        print(f"  and {len(lines) - _LISTED} more (--json lists all)")


def _print_info(found: dict[str, Any]) -> None:
    rows = [
        ("dataset", f"{found['url']} ({found['name']})"),
        ("version", f"{found['version']} of {found['created']}, digest {found['digest'][:16]}"),
        ("samples", f"{found['samples']}, {found['with_text']} with text"),
        ("hours", f"{found['seconds'] / 3600:.3f}, {found['video_seconds'] / 3600:.3f} of them video"),
        ("frames", str(found["video_frames"])),
        ("bytes", f"{limits.format_bytes(found['bytes'])} in {_count(found['shards'], 'shard')}"),
    ]
    for label in ("video codecs", "audio codecs", "sizes", "sample rates"):
        counts = list(found[label.replace(" ", "_")].items())
        shown = ", ".join(f"{name} ({n})" for name, n in counts[:12])
        rows.append((label, shown + (f", and {len(counts) - 12} more" if len(counts) > 12 else "") or "none"))
    for label, value in rows:
        print(f"{label:13} {_printable(value)}")


def _sample_line(sample: Sample) -> str:
    parts = [f"{sample.duration:.3f}s"]
    if sample.video:
        v = sample.video
        parts.append(f"{v.codec} {v.width}x{v.height} {v.frames} frames")
    if sample.audio:
        parts.append(f"{sample.audio.codec} {sample.audio.sample_rate} Hz x{sample.audio.channels}")
    members = " ".join(f"{m.ext}:{m.length}" for m in sample.members)
    return _printable(f"{sample.id}\t{sample.key}\t{', '.join(parts)}\t{members}")


def _sample_json(sample: Sample) -> dict[str, Any]:
    found = dataclasses.asdict(sample)
    if sample.video:
        v = sample.video
        found["video"] |= {"fps": str(v.fps), "time_base": str(v.time_base), "key_frames": len(v.key_frames)}
    return found


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in text)
