"""The command `headrace verify`.

Invariants: standard output holds only results. Progress is printed to standard error if that is a terminal. The command
writes nothing without `--repair` and `--apply`.
Failure behaviour: the command lists damage and returns 1. If nothing can be checked, an error is raised for
`headrace.dataio.cli` to report.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.cli import (
    LISTED,
    apply_option,
    argument,
    byte_progress,
    byte_rate,
    command,
    dataset,
    engine,
    journal,
    json_option,
    one_line,
    print_json,
    trust_mounts,
    version,
    workers,
)
from headrace.dataio.core.errors import UsageError

if TYPE_CHECKING:
    from headrace.dataio.shards.verify.report import ObjectReport, VerifyProgress, VerifyReport

_LISTED_OF_ONE = 10
_CHANGED = "headrace verify DATASET --repair FROM-URL --apply replaces damaged objects from a second copy"
_NOT_APPLIED = "--apply replaces the damaged objects by those of the copy, where the copy is right"
_NOT_DECODED = "only the stored bytes were checked; --decode 1% also finds media that were damaged before packing"
_AS_PACKED = (
    "these files are as they were packed; headrace remove DATASET KEY --apply leaves them out of the next version"
)

_HELP = """\
Read every byte of a dataset version and report what differs from what was written: documents, index parts and shards are
checked by their digests and sizes, tar headers and members by the index. --decode also decodes some samples to their end,
always the same ones. --repair with --apply replaces damaged objects from a second copy, where the copy is right, and checks
them again. With --journal URL, the same command continues an interrupted run."""
_CODES = """\
exit codes: 0 everything is right, or was repaired · 1 damage was found and is listed (also when only a part of it could be
repaired) · 2 wrong use, or no dataset there · 3 temporary failure, try again · 4 the version's own document is damaged, so
there is nothing to check against: give another --version, or --repair"""


@command(
    "verify",
    _HELP,
    dataset(),
    version(),
    trust_mounts(),
    argument(
        "--decode", metavar="SHARE|N", default="0", help="decode this many samples, such as 1%% or 100 (default: none)"
    ),
    argument("--repair", metavar="FROM-URL", help="a second copy of the dataset, to repair damaged objects from"),
    apply_option("with --repair: replace damaged objects"),
    engine(),
    workers("shards to read at once"),
    journal(),
    json_option("the report as one JSON object"),
    epilog=_CODES,
)
def verify(args: Namespace) -> int:
    """`headrace verify DATASET`"""
    if args.apply and args.repair is None:
        raise UsageError("--apply needs --repair", hint="name a second copy of the dataset: --repair FROM-URL")
    from headrace.dataio.shards.verify.dataset_check import verify as verify_dataset

    with byte_progress("verifying", _progress_text, quiet=args.json) as progress:
        report = verify_dataset(
            args.dataset,
            args.version,
            decode=args.decode,
            repair=args.repair if args.apply else None,
            engine=args.engine,
            workers=args.workers,
            journal=args.journal,
            progress=progress,
            trust_mounts=args.trust_mounts,
        )
    if args.json:
        counts = {"damaged": len(report.damaged), "repaired": len(report.repaired), "bytes": report.bytes}
        print_json(counts | msgspec.to_builtins(report))
    else:
        _print_report(report, planned=args.repair is not None and not args.apply)
    return 1 if report.damaged else 0


def _print_report(report: VerifyReport, *, planned: bool) -> None:
    print(f"{one_line(report.url)} version {report.version}: {limits.counted(report.samples, 'sample')}")
    _print_table(report)
    for damaged in report.damaged:
        _print_findings(damaged)
    if report.orphans_found:
        print(f"objects that no version names (a writer may be at work): {report.orphans_found}")
        for key in report.orphans[:LISTED]:
            print(f"  {one_line(key)}")
    verdict = f"{limits.counted(len(report.damaged), 'damaged object')}" if report.damaged else "everything is right"
    fixed = f", {len(report.repaired)} repaired" if report.repaired else ""
    print(f"{verdict}{fixed}; {byte_rate(report.bytes, report.seconds)}")
    if report.resumed:
        print(f"continued an interrupted run: {report.resumed} units were already done")
    if report.damaged and not report.repaired and not any(damaged.unrepaired for damaged in report.damaged):
        as_packed = all(finding.code == "decode" for damaged in report.damaged for finding in damaged.findings)
        print(f"  next: {_AS_PACKED if as_packed else _NOT_APPLIED if planned else _CHANGED}")
    elif not report.damaged and report.samples and not any(o.decoded for o in report.objects):
        print(f"  next: {_NOT_DECODED}")


def _print_table(report: VerifyReport) -> None:
    """Print one line per object. Damaged and repaired objects come first, then others up to a limit."""
    notable = [o for o in report.objects if o.found or o.repaired]
    plain = [o for o in report.objects if not (o.found or o.repaired)]
    shown = notable[:LISTED] + plain[: max(0, LISTED - len(notable))]
    width = max(len(one_line(o.object)) for o in shown)
    print(f"  {'object':{width}}  {'kind':8}  {'size':>9}  {'members':>7}  {'decoded':>7}  state")
    for o in shown:
        state = f"DAMAGED ({o.found})" if o.found else "repaired" if o.repaired else "ok"
        size = limits.format_bytes(o.bytes)
        members, decoded = (str(o.members), str(o.decoded)) if o.kind == "shard" else ("", "")
        print(f"  {one_line(o.object):{width}}  {o.kind:8}  {size:>9}  {members:>7}  {decoded:>7}  {state}")
    if len(report.objects) > len(shown):
        print(f"  and {len(report.objects) - len(shown)} more (--json lists all)")


def _print_findings(damaged: ObjectReport) -> None:
    print(f"{one_line(damaged.object)}:")
    for finding in damaged.findings[:_LISTED_OF_ONE]:
        of = f"{finding.key}.{finding.ext}: " if finding.ext else f"{finding.key}: " if finding.key else ""
        print(f"  {finding.code}: {one_line(of + finding.message)}")
    if damaged.found > _LISTED_OF_ONE:
        print(f"  and {damaged.found - _LISTED_OF_ONE} more (--json lists more)")
    if damaged.unrepaired:
        print(f"  not repaired: {one_line(damaged.unrepaired)}")


def _progress_text(progress: VerifyProgress) -> str:
    damaged = f" ({progress.damaged} damaged)" if progress.damaged else ""
    return f"{progress.shards}/{progress.shards_total} shards{damaged}"
