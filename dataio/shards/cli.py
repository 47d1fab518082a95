"""`headrace info`, `ls` and `cat`, and what other commands print with.

Invariant: standard output holds results only (with `--json`, JSON only), progress goes to standard error and only to a
terminal. Names from files are printed without control characters.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.cli import Parser, positive_int
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import counted

if TYPE_CHECKING:
    from headrace.dataio.shards.contract import Sample
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.report import PackReport

_LISTED = 50
_TEXT = {"txt", "json", "vtt", "srt", "csv", "tsv", "xml", "cls"}
_SPOOL_BYTES = 64 * limits.MIB


def info(argv: list[str]) -> int:
    """`headrace info DATASET`"""
    parser = _parser("info", "Say what a dataset holds: samples, hours, bytes, codecs and sizes.")
    _add_dataset(parser)
    _add_where(parser)
    _add_json(parser)
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.summary import summary

    with Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as dataset:
        found = summary(_narrowed(dataset, args.where))
    if args.json:
        _print_json(found)
    else:
        _print_info(found)
    return 0


def ls(argv: list[str]) -> int:
    """`headrace ls DATASET`"""
    parser = _parser("ls", "List the samples of a dataset, in the order of their numbers.")
    _add_dataset(parser)
    _add_where(parser)
    parser.add_argument("--limit", metavar="N", type=positive_int, help="list only the first N")
    _add_json(parser, "one JSON object a line")
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset

    with Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as dataset:
        for number, sample in enumerate(_narrowed(dataset, args.where)):
            if args.limit is not None and number >= args.limit:
                break
            if args.json:
                print(json.dumps(_sample_json(sample)))
            else:
                print(_sample_line(sample))
    return 0


def cat(argv: list[str]) -> int:
    """`headrace cat DATASET KEY`"""
    parser = _parser("cat", "Write one member of one sample to standard output, after its checksum was verified.")
    _add_dataset(parser)
    parser.add_argument("key", metavar="KEY", help="the sample's key, as `headrace ls` prints it")
    parser.add_argument(
        "--ext", help="which member, such as mp4 (default: the video, else the sound, else the only one)"
    )
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.members import chunks, find_member

    with (
        Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as dataset,
        tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool,
    ):
        sample = dataset.find(args.key)
        member = find_member(sample, args.ext or _main_ext(sample))
        if sys.stdout.isatty() and member.ext not in _TEXT:
            raise UsageError(
                f"{member.ext} of {args.key!r} is no text for a terminal",
                hint="send it to a file or a program (> file), or use `headrace export`",
            )
        for piece in chunks(dataset.store, sample, member):
            spool.write(piece)
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return 0


# --- arguments


def _parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return Parser(
        prog=f"headrace {name}",
        description=description,
        epilog=epilog or "exit codes: see headrace --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")
    parser.add_argument("--version", metavar="N", type=_version, help="a version or tag (default: the newest)")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-mounts",
        action="store_true",
        help="let the dataset name folders of this machine, private hosts and other S3 endpoints",
    )


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help='only these samples: "duration > 2 and height >= 720" (headrace filter --help)',
    )


def _add_json(parser: argparse.ArgumentParser, what: str = "one JSON object") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what}")


def _add_workers(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--workers", metavar="N", type=_workers, help=f"{what} (default: one a core)")


def _add_making(parser: argparse.ArgumentParser, strict: str, workers: str) -> None:
    """What `pack` and `index` have in common."""
    parser.add_argument("--strict", action="store_true", help=f"stop at the first {strict}")
    _add_workers(parser, workers)
    parser.add_argument("--name", help="name of the dataset (default: the last part of DST)")
    _add_json(parser, "the report as one JSON object")


def _narrowed(dataset: Dataset, where: str | None) -> Dataset:
    return dataset if where is None else dataset.where(where)


def _version(text: str) -> int | str:
    return positive_int(text) if text.isdecimal() else text


def _workers(text: str) -> int:
    return positive_int(text, limits.WORKERS)


def _main_ext(sample: Sample) -> str:
    if sample.video or sample.audio:
        return (sample.video or sample.audio).ext  # type: ignore[union-attr]  # one of them is there
    if len(sample.members) == 1:
        return sample.members[0].ext
    have = ", ".join(member.ext for member in sample.members)
    raise UsageError(f"sample {sample.key!r} has several members", hint=f"choose with --ext: {have}")


# --- output


def _print_report(report: PackReport, url: str, version: int) -> None:
    speed = report.bytes / 1e6 / max(report.seconds, 1e-3)
    print(
        f"{_printable(url)} version {version}: {counted(report.samples, 'sample')} from {counted(report.files, 'file')}"
    )
    print(
        f"{counted(report.shards, 'shard')}, {limits.format_bytes(report.bytes)} in {report.seconds:.1f} s ({speed:.1f} MB/s)"
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
        *_origin(found),
        ("samples", f"{found['samples']}, {found['with_text']} with text"),
        ("hours", f"{found['seconds'] / 3600:.3f}, {found['video_seconds'] / 3600:.3f} of them video"),
        ("frames", str(found["video_frames"])),
        ("bytes", f"{limits.format_bytes(found['member_bytes'])} of {_bytes_in_shards(found)}"),
    ]
    for label in ("video codecs", "audio codecs", "sizes", "sample rates", "colors"):
        counts = list(found[label.replace(" ", "_")].items())
        shown = ", ".join(f"{name} ({n})" for name, n in counts[:12])
        rows.append((label, shown + (f", and {len(counts) - 12} more" if len(counts) > 12 else "") or "none"))
    for label, value in rows:
        print(f"{label:13} {_printable(value)}")


def _bytes_in_shards(found: dict[str, Any]) -> str:
    return f"{limits.format_bytes(found['bytes'])} in {counted(found['shards'], 'shard')}"


def _origin(found: dict[str, Any]) -> list[tuple[str, str]]:
    """How the version came to be, as far as there is something to say."""
    sources = ", ".join(f"{source['name']} version {source['version']}" for source in found["made_from"])
    made = [found["message"], f"from {sources}" if sources else "", "" if found["trunk"] else "a saved view"]
    rows = [("made by", ", ".join(filter(None, made))), ("where", " and ".join(found["where"]))]
    return [row for row in (*rows, ("tags", ", ".join(found["tags"]))) if row[1]]


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
    found: dict[str, Any] = msgspec.to_builtins(sample, enc_hook=str)  # fractions are what it does not know
    if sample.video:
        found["video"]["key_frames"] = len(sample.video.key_frames)
    for shown, member in zip(found["members"], sample.members, strict=True):
        pieces = shown.pop("pieces")
        if member.pieces is not None:  # the digests themselves are nothing to look at
            counts = {"digests": len(member.pieces.digests) // 8, "marks": len(member.pieces.marks)}
            shown["pieces"] = {**pieces, **counts}
    return found


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in text)


class _Bytes(Protocol):
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_total(self) -> int | None: ...


Done = TypeVar("Done", bound=_Bytes)


@contextlib.contextmanager
def _byte_bar(verb: str, words: Callable[[Done], str], *, quiet: bool) -> Iterator[Callable[[Done], None] | None]:
    """Shows what is done as a bar over bytes on a terminal's standard error; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(verb + " {task.fields[what]}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", what="…", total=None)

        def show(done: Done) -> None:
            bar.update(task, total=done.bytes_total, completed=done.bytes, what=words(done))

        yield show
