"""`headrace index`.

Invariant: as in `headrace.dataio.shards.cli`: standard output holds results only, progress goes to a terminal's standard error.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report; 1 is returned when samples or shards were skipped.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from headrace.dataio.shards.cli import (
    _add_making,
    _byte_bar,
    _parser,
    _print_json,
    _print_report,
    _print_some,
    _printable,
)

if TYPE_CHECKING:
    from headrace.dataio.shards.in_place.tally import IndexProgress

_HELP = """\
Make a dataset over WebDataset tars that exist, where they are. Nothing is copied: DST gets an index and a version only.
URL-PATTERN is a tar, a folder of tars, or a quoted pattern: 's3://bucket/set/{00000..09999}.tar', '/data/{train,extra}/*.tar'.
Every shard is read once, to hash its members and to probe its media. S3 credentials and endpoint come from the usual AWS
variables and profiles. Commands (pipe:…) and compressed tars are refused."""
_CODES = """\
exit codes: 0 all indexed · 1 indexed, but samples or shards were skipped (they are listed) · 2 wrong use, or nothing to
index · 3 passing trouble, try again · 4 a damaged shard, with --strict · 5 DST already holds a dataset"""


def index(argv: list[str]) -> int:
    """`headrace index URL-PATTERN... DST`"""
    parser = _parser("index", _HELP, _CODES)
    parser.add_argument("patterns", metavar="URL-PATTERN", nargs="+", help="which tars")
    parser.add_argument("destination", metavar="DST", help="where the dataset goes: a folder or s3://bucket/prefix")
    parser.add_argument(
        "--keys",
        choices=("member", "shard"),
        default="member",
        help="a sample's key: its members' name, or that with the shard's path in front (default: member)",
    )
    _add_making(parser, "sample or shard that cannot be used", "probing processes")
    args = parser.parse_args(argv)
    from headrace.dataio.shards.in_place.indexing import index as index_in_place

    with _byte_bar("indexing", _words, quiet=args.json) as progress:
        dataset = index_in_place(
            args.patterns,
            args.destination,
            name=args.name,
            strict=args.strict,
            keys=args.keys,
            progress=progress,
            workers=args.workers,
        )
    with dataset:
        report = dataset.report
        assert report is not None
        if args.json:
            mounts = {mount.name: mount.url for mount in dataset.document.mounts}
            _print_json(
                {"url": dataset.url, "version": dataset.version, "mounts": mounts, **dataclasses.asdict(report)}
            )
        else:
            _print_report(dataclasses.replace(report, ignored=()), dataset.url, dataset.version)
            _print_some("ignored, not called like a tar", list(report.ignored))
            for mount in dataset.document.mounts:
                print(f"shards stay in {_printable(mount.url)}")
    return 1 if report.skipped else 0


def _words(done: IndexProgress) -> str:
    skipped = f" ({done.skipped} skipped)" if done.skipped else ""
    return f"shard {done.shards}/{done.shards_total}, {done.samples} samples{skipped}"
