"""`headrace export` and `preview`.

Invariant: as in `headrace.dataio.shards.cli`: standard output holds results only, progress goes to a terminal's standard error.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.dataio.core import limits
from headrace.dataio.core.cli import positive_int
from headrace.dataio.shards.cli import (
    _add_dataset,
    _add_json,
    _add_where,
    _add_workers,
    _narrowed,
    _parser,
    _print_json,
    _printable,
)


def export(argv: list[str]) -> int:
    """`headrace export DATASET KEY... DIR`"""
    parser = _parser(
        "export", "Write the members of samples as files into one folder, after their checksums were verified."
    )
    _add_dataset(parser)
    parser.add_argument("keys", metavar="KEY", nargs="+", help="samples' keys, as `headrace ls` prints them")
    parser.add_argument(
        "folder", metavar="DIR", help="where the files go; a / of a key becomes %%2F in the file's name"
    )
    parser.add_argument("--ext", help="only this member, such as mp4 (default: all)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    _add_json(parser, "one JSON object a line: member and path")
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.look.export import export as export_members

    with Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as dataset:
        for name, path in export_members(dataset, args.keys, args.folder, ext=args.ext, force=args.force):
            if args.json:
                print(json.dumps({"member": name, "path": str(path)}))
            else:
                print(_printable(f"{name} -> {path}"))
    return 0


_PREVIEW = """\
Make one page of HTML that shows what a dataset holds: pictures of samples spread evenly over it, durations, sizes, codecs,
captions. The page needs nothing else and no network; it is opened with any browser."""


def preview(argv: list[str]) -> int:
    """`headrace preview DATASET -o PAGE`"""
    parser = _parser("preview", _PREVIEW)
    _add_dataset(parser)
    _add_where(parser)
    parser.add_argument(
        "--limit", metavar="N", type=positive_int, default=48, help="samples with pictures (default: 48)"
    )
    parser.add_argument("--frames", metavar="N", type=positive_int, default=4, help="pictures of a sample (default: 4)")
    _add_workers(parser, "decoding processes")
    parser.add_argument("-o", "--output", metavar="PAGE", required=True, help="the file to write, such as page.html")
    _add_json(parser, "one JSON object: the page, its size, and what it is of")
    args = parser.parse_args(argv)
    from headrace.dataio.core.files import write_output
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.look.export import said
    from headrace.dataio.shards.look.preview import preview as make

    path = Path(args.output)
    with (
        Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as opened,
        _progress(quiet=args.json) as progress,
    ):
        dataset = _narrowed(opened, args.where)
        with said(path), write_output(path) as file:  # opened before the work, which may take long
            page = make(
                dataset,
                limit=args.limit,
                frames=args.frames,
                workers=args.workers,
                progress=progress,
            )
            file.write(page.encode())
        found = {
            "page": str(path),
            "bytes": path.stat().st_size,
            "url": dataset.url,
            "version": dataset.version,
            "samples": len(dataset),
            "shown": min(args.limit, len(dataset)),
        }
    if args.json:
        _print_json(found)
    else:
        print(_printable(f"{path}: {limits.format_bytes(path.stat().st_size)}"))
    return 0


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("looking at samples"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
