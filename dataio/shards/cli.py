"""The commands that read a dataset: `headrace info`, `ls`, `cat`, `export` and `preview`.

Invariants: standard output holds only results (with `--json`, only JSON). Names from files are printed without control
characters. A member is written only after its checksum was verified.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.cli import (
    argument,
    command,
    count_progress,
    dataset,
    engine,
    journal,
    json_option,
    one_line,
    positive_int,
    print_json,
    print_json_line,
    print_rows,
    trust_mounts,
    version,
    where,
    workers,
)
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import counted

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.sample import Sample

_TEXT = {"txt", "json", "vtt", "srt", "csv", "tsv", "xml", "cls"}
_SPOOL_BYTES = 64 * limits.MIB
_CODECS_SHOWN = 12
_FIELDS_SHOWN = 50
_PREVIEW = """\
Make one HTML page about a dataset: pictures of samples spread evenly over it, durations, sizes, codecs and
captions. The page is one file, needs no network, and opens in any browser."""


@command(
    "info",
    "Show the samples, hours, bytes, codecs and sizes of a dataset.",
    dataset(),
    version(),
    trust_mounts(),
    where(),
    engine(),
    workers("index parts to read at once"),
    journal(),
    json_option(),
)
def info(args: Namespace) -> int:
    """`headrace info DATASET`"""
    from headrace.dataio.shards.statistics import summary

    with open_dataset(args) as opened, count_progress("reading index parts", quiet=args.json) as progress:
        chosen = _narrowed(opened, args.where)
        figures = summary(chosen, engine=args.engine, workers=args.workers, journal=args.journal, progress=progress)
    if args.json:
        print_json(figures)
    else:
        print_rows(_info_rows(figures))
    return 0


@command(
    "ls",
    "List the samples of a dataset, in the order of their numbers. With --where, numbers stay those of the dataset.",
    dataset(),
    version(),
    trust_mounts(),
    where(),
    argument("--limit", metavar="N", type=positive_int, help="list only the first N samples"),
    json_option("one JSON object per line"),
)
def ls(args: Namespace) -> int:
    """`headrace ls DATASET`"""
    with open_dataset(args) as opened:
        chosen = _narrowed(opened, args.where)
        numbers = range(len(opened)) if chosen.view is None else chosen.view.numbers(opened.index)
        for number, numbered in zip(islice(numbers, args.limit), chosen, strict=False):
            sample = msgspec.structs.replace(numbered, id=number)  # a view counts from 0
            if args.json:
                print_json_line(_sample_json(sample))
            else:
                print(_sample_line(sample))
    return 0


@command(
    "cat",
    "Write one member of one sample to standard output, after its checksum was verified.",
    dataset(),
    argument("key", metavar="KEY", help="the sample's key, as `headrace ls` prints it"),
    version(),
    trust_mounts(),
    argument(
        "--ext", help="the member's extension, such as mp4 (default: the video, else the audio, else the only member)"
    ),
)
def cat(args: Namespace) -> int:
    """`headrace cat DATASET KEY`"""
    from headrace.dataio.shards.member_reader import find_member, read_chunks

    with open_dataset(args) as opened, tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        sample = opened.find(args.key)
        member = find_member(sample, args.ext or _main_ext(sample))
        if sys.stdout.isatty() and member.ext not in _TEXT:
            raise UsageError(
                f"{member.ext} of {args.key!r} is not text, so it is not written to a terminal",
                hint="redirect it to a file or a program (> file), or use `headrace export`",
            )
        for piece in read_chunks(opened.store, sample, member):
            spool.write(piece)
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return 0


@command(
    "export",
    "Write the members of samples as files into one folder, after their checksums were verified.",
    dataset(),
    argument("keys", metavar="KEY", nargs="+", help="the samples' keys, as `headrace ls` prints them"),
    argument("folder", metavar="DIR", help="the folder to write to; a / in a key becomes %%2F in the file's name"),
    version(),
    trust_mounts(),
    argument("--ext", help="write only this member, such as mp4 (default: all)"),
    argument("--force", action="store_true", help="replace files that exist"),
    json_option("one JSON object per line, with member and path,"),
)
def export(args: Namespace) -> int:
    """`headrace export DATASET KEY... DIR`"""
    from headrace.dataio.shards.export import export as export_members

    with open_dataset(args) as opened:
        for name, path in export_members(opened, args.keys, args.folder, ext=args.ext, force=args.force):
            if args.json:
                print_json_line({"member": name, "path": str(path)})
            else:
                print(one_line(f"{name} -> {path}"))
    return 0


@command(
    "preview",
    _PREVIEW,
    dataset(),
    version(),
    trust_mounts(),
    where(),
    argument("--limit", metavar="N", type=positive_int, default=48, help="samples to show pictures of (default: 48)"),
    argument("--frames", metavar="N", type=positive_int, default=4, help="pictures per sample (default: 4)"),
    workers("decoding processes"),
    argument("-o", "--output", metavar="PAGE", required=True, help="the file to write, such as page.html"),
    json_option("one JSON object about the page"),
)
def preview(args: Namespace) -> int:
    """`headrace preview DATASET -o PAGE`"""
    from headrace.dataio.core.files import write_output
    from headrace.dataio.shards.export import name_path_in_errors
    from headrace.dataio.shards.preview import preview as make

    path = Path(args.output)
    with open_dataset(args) as opened, count_progress("decoding samples", quiet=args.json) as progress:
        chosen = _narrowed(opened, args.where)
        with name_path_in_errors(path), write_output(path) as file:  # an unwritable path fails before the decoding
            page = make(chosen, limit=args.limit, frames=args.frames, workers=args.workers, progress=progress)
            file.write(page.encode())
        report = {
            "page": str(path),
            "bytes": path.stat().st_size,
            "url": chosen.url,
            "version": chosen.version,
            "samples": len(chosen),
            "shown": min(args.limit, len(chosen)),
        }
    if args.json:
        print_json(report)
    else:
        print(one_line(f"{path}: {limits.format_bytes(path.stat().st_size)}"))
    return 0


def open_dataset(args: Namespace) -> Dataset:
    """Open the dataset given by the arguments `dataset`, `version` and `trust_mounts`."""
    from headrace.dataio.shards.dataset import Dataset

    return Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts)


def _narrowed(opened: Dataset, condition: str | None) -> Dataset:
    return opened if condition is None else opened.where(condition)


def _main_ext(sample: Sample) -> str:
    if sample.video or sample.audio:
        return (sample.video or sample.audio).ext  # type: ignore[union-attr]  # one of them is there
    if len(sample.members) == 1:
        return sample.members[0].ext
    have = ", ".join(member.ext for member in sample.members)
    raise UsageError(f"sample {sample.key!r} has several members", hint=f"choose one with --ext: {have}")


# --- statistics


# --- output


def _info_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("dataset", f"{figures['url']} ({figures['name']})"),
        ("version", f"{figures['version']} of {figures['created']}, digest {figures['digest'][:16]}"),
        *_origin(figures),
        ("samples", f"{figures['samples']}, {figures['with_text']} with text"),
        ("hours", f"{figures['seconds'] / 3600:.3f}, {figures['video_seconds'] / 3600:.3f} of them video"),
        ("frames", str(figures["video_frames"])),
        ("bytes", f"{limits.format_bytes(figures['member_bytes'])} of {_bytes_in_shards(figures)}"),
    ]
    for label in ("video codecs", "audio codecs", "sizes (width x height)", "sample rates", "colors"):
        counts = list(figures[label.partition(" (")[0].replace(" ", "_")].items())
        shown = ", ".join(f"{name} ({n})" for name, n in counts[:_CODECS_SHOWN])
        more = f", and {len(counts) - _CODECS_SHOWN} more" if len(counts) > _CODECS_SHOWN else ""
        rows.append((label, shown + more or "none"))
    fields = [f"{name} ({kind})" for name, kind in figures["fields"].items()]
    more = f", and {len(fields) - _FIELDS_SHOWN} more: --json lists all" if len(fields) > _FIELDS_SHOWN else ""
    rows.append(("JSON fields", ", ".join(fields[:_FIELDS_SHOWN]) + more or "none"))
    return rows


def _bytes_in_shards(figures: dict[str, Any]) -> str:
    return f"{limits.format_bytes(figures['bytes'])} in {counted(figures['shards'], 'shard')}"


def _origin(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that say how the version was made, as far as its document records it."""
    sources = ", ".join(f"{source['name']} version {source['version']}" for source in figures["made_from"])
    rows = [
        ("message", figures["message"]),
        ("made from", sources),
        ("view", "" if figures["trunk"] else "a saved view"),
        ("where", " and ".join(figures["where"])),
        ("tags", ", ".join(figures["tags"])),
    ]
    return [row for row in rows if row[1]]


def _sample_line(sample: Sample) -> str:
    parts = [f"{sample.duration:.3f}s"]
    if sample.video:
        v = sample.video
        parts.append(f"{v.codec} {v.width}x{v.height} {v.frames} frames")
    if sample.audio:
        parts.append(f"{sample.audio.codec} {sample.audio.sample_rate} Hz x{sample.audio.channels}")
    members = " ".join(f"{m.ext}:{m.length}" for m in sample.members)
    return one_line(f"{sample.id}\t{sample.key}\t{', '.join(parts)}\t{members}")


def _sample_json(sample: Sample) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(sample, enc_hook=str)  # str: msgspec does not know fractions
    if sample.video:
        values["video"]["key_frames"] = len(sample.video.key_frames)
    for shown_video, video in zip(values["videos"], sample.videos, strict=True):
        shown_video["key_frames"] = len(video.key_frames)
    for shown, member in zip(values["members"], sample.members, strict=True):
        pieces = shown.pop("pieces")
        if member.pieces is not None:  # only counts, because the digests are binary
            counts = {"digests": len(member.pieces.digests) // 8, "marks": len(member.pieces.marks)}
            shown["pieces"] = {**pieces, **counts}
    return values
