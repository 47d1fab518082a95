"""`headrace verify`.

Invariant: as in `headrace.dataio.shards.cli`: standard output holds results only, progress goes to a terminal's standard error.
Failure behaviour: damage is listed and returns 1; what makes it impossible to check anything is raised for `headrace.dataio.cli`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core import limits
from headrace.dataio.shards.cli import (
    _add_dataset,
    _add_json,
    _add_workers,
    _byte_bar,
    _parser,
    _print_json,
    _printable,
)

if TYPE_CHECKING:
    from headrace.dataio.shards.verify.findings import ObjectReport, VerifyProgress, VerifyReport

_LISTED = 50
_LISTED_OF_ONE = 10
_CHANGED = "headrace verify --repair FROM-URL takes right bytes from a second copy"
_AS_PACKED = "these files are as they were packed; headrace remove DATASET KEY leaves them out of the next version"

_HELP = """\
Read every byte of a dataset version and say what is not as it was written: documents, index parts and shards by their
digests and sizes, tar headers and members by the index. --decode also decodes some samples to their end, always the same.
--repair replaces what is damaged by what a second copy has, if that is right, and checks it again."""
_CODES = """\
exit codes: 0 everything is right, or was put right · 1 damage was found and is listed (also when only a part of it could be
repaired) · 2 wrong use, or no dataset there · 3 passing trouble, try again · 4 the version's own document is damaged, so
there is nothing to check against: give another --version, or --repair"""


def verify(argv: list[str]) -> int:
    """`headrace verify DATASET`"""
    parser = _parser("verify", _HELP, _CODES)
    _add_dataset(parser)
    parser.add_argument(
        "--decode", metavar="SHARE|N", default="0", help="decode that many samples, such as 1%% or 100 (default: none)"
    )
    parser.add_argument("--repair", metavar="FROM-URL", help="put damage right from this copy of the dataset")
    _add_workers(parser, "shards read at once")
    _add_json(parser, "the report as one JSON object")
    args = parser.parse_args(argv)
    from headrace.dataio.shards.verify.run import verify as verify_dataset

    with _byte_bar("verifying", _words, quiet=args.json) as progress:
        report = verify_dataset(
            args.dataset,
            args.version,
            decode=args.decode,
            repair=args.repair,
            workers=args.workers,
            progress=progress,
            trust_mounts=args.trust_mounts,
        )
    if args.json:
        _print_report_json(report)
    else:
        _print_report(report)
    return 1 if report.damaged else 0


def _print_report_json(report: VerifyReport) -> None:
    import msgspec

    found = msgspec.to_builtins(report)
    _print_json({"damaged": len(report.damaged), "repaired": len(report.repaired), "bytes": report.bytes} | found)


def _print_report(report: VerifyReport) -> None:
    speed = report.bytes / 1e6 / max(report.seconds, 1e-3)
    print(f"{_printable(report.url)} version {report.version}: {limits.counted(report.samples, 'sample')}")
    _print_table(report)
    for found in report.damaged:
        _print_findings(found)
    if report.orphans_found:
        print(f"named by no version (a writer may be at work): {report.orphans_found}")
        for key in report.orphans[:_LISTED]:
            print(f"  {_printable(key)}")
    done = f"{limits.format_bytes(report.bytes)} in {report.seconds:.1f} s ({speed:.1f} MB/s)"
    verdict = f"{limits.counted(len(report.damaged), 'damaged object')}" if report.damaged else "everything is right"
    fixed = f", {len(report.repaired)} repaired" if report.repaired else ""
    print(f"{verdict}{fixed}; {done}")
    if report.damaged and not report.repaired and not any(found.unrepaired for found in report.damaged):
        as_packed = all(finding.code == "decode" for found in report.damaged for finding in found.findings)
        print(f"  next: {_AS_PACKED if as_packed else _CHANGED}")


def _print_table(report: VerifyReport) -> None:
    """One line an object: those that say something, then others up to a limit."""
    notable = [o for o in report.objects if o.found or o.repaired]
    plain = [o for o in report.objects if not (o.found or o.repaired)]
    shown = notable[:_LISTED] + plain[: max(0, _LISTED - len(notable))]
    width = max(len(_printable(o.object)) for o in shown)
    print(f"  {'object':{width}}  {'kind':8}  {'size':>9}  {'members':>7}  {'decoded':>7}  state")
    for o in shown:
        state = f"DAMAGED ({o.found})" if o.found else "repaired" if o.repaired else "ok"
        size = limits.format_bytes(o.bytes)
        members, decoded = (str(o.members), str(o.decoded)) if o.kind == "shard" else ("", "")
        print(f"  {_printable(o.object):{width}}  {o.kind:8}  {size:>9}  {members:>7}  {decoded:>7}  {state}")
    if len(report.objects) > len(shown):
        print(f"  and {len(report.objects) - len(shown)} more (--json lists all)")


def _print_findings(found: ObjectReport) -> None:
    print(f"{_printable(found.object)}:")
    for finding in found.findings[:_LISTED_OF_ONE]:
        of = f"{finding.key}.{finding.ext}: " if finding.ext else f"{finding.key}: " if finding.key else ""
        print(f"  {finding.code}: {_printable(of + finding.message)}")
    if found.found > _LISTED_OF_ONE:
        print(f"  and {found.found - _LISTED_OF_ONE} more (--json lists more)")
    if found.unrepaired:
        print(f"  not repaired: {_printable(found.unrepaired)}")


def _words(done: VerifyProgress) -> str:
    damaged = f" ({done.damaged} damaged)" if done.damaged else ""
    return f"{done.shards}/{done.shards_total} shards{damaged}"
