"""`headrace quarantine` lists the samples that loaders on this machine skipped, with the reason for each.

Invariants: standard output holds only results; with `--json` it holds only JSON. The command imports no torch.
Failure behaviour: errors are raised, and `headrace.dataio.cli` reports them.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import msgspec

from headrace.dataio.core.cli import apply_option, argument, command, json_option, one_line, print_json_line
from headrace.dataio.core.errors import HeadraceError, NotFoundError, UsageError
from headrace.dataio.core.limits import counted
from headrace.loaders.quarantine import records

_ABOUT = """\
List the samples that loaders on this machine skipped, with the reason. With --clear, delete these records: without --apply,
only print how many would be deleted."""
_MORE = """\
The records are in $HEADRACE_QUARANTINE (`off`: none are kept), or in ~/.local/state/headrace/quarantine.
Loaders never read them. To leave samples out of later runs, make a version without them:
`headrace remove DATASET KEY ... --apply`.

exit codes: 0 none listed, or records deleted · 1 some are listed · 2 wrong use"""


@command(
    "quarantine",
    _ABOUT,
    argument("dataset", nargs="?", help="a dataset's URL or directory (default: all)"),
    argument("--clear", action="store_true", help="delete the records instead of listing them"),
    apply_option("with --clear: delete them"),
    argument(
        "--shared", metavar="URL", help="list the samples that runs share at this address (a loader's quarantine_list)"
    ),
    json_option("one JSON object per line"),
    epilog=_MORE,
)
def quarantine(args: argparse.Namespace) -> int:
    """Run `headrace quarantine [DATASET]`. Returns 1 if samples are listed, else 0."""
    if args.apply and not args.clear:
        raise UsageError("--apply needs --clear", hint="`headrace quarantine --clear --apply` deletes the records")
    if args.shared is not None:
        if args.clear or args.dataset is not None:
            raise UsageError(
                "--shared goes without other arguments: a shared list only grows", hint="begin another list instead"
            )
        return _shared(args.shared, as_json=args.json)
    folder = records.directory()
    if folder is None:
        raise UsageError(
            "no records are kept: HEADRACE_QUARANTINE=off, or this user has no home directory",
            hint="name a directory in HEADRACE_QUARANTINE",
        )
    url = None if args.dataset is None else _url(args.dataset)
    if args.clear:
        return _clear(folder, url, apply=args.apply, as_json=args.json)
    return _list(folder, url, as_json=args.json)


def _url(address: str) -> str:
    """The dataset's URL as the store spells it. A record file is named by a hash of this URL."""
    if "://" in address and not address.startswith("file://"):
        return address.rstrip("/")
    from headrace.dataio.store.open import open_store

    with open_store(address) as store:
        return store.location.url


def _is_missing(url: str) -> bool:
    """Whether no dataset exists at `url`. False if the store cannot tell."""
    from headrace.dataio.store.open import open_store

    try:
        with open_store(url) as store:
            return not store.exists("dataset.json")
    except NotFoundError:
        return True
    except HeadraceError:
        return False


def _clear(folder: Path, url: str | None, *, apply: bool, as_json: bool) -> int:
    if apply:
        count = records.clear(folder, url)
    else:
        count = len({record.skipped.dataset for record in records.distinct(folder, url)[0]})
    if as_json:
        print_json_line({"cleared": count if apply else 0, "applied": apply})
        return 0
    print(f"records of {counted(count, 'dataset')} {'deleted' if apply else 'would be deleted'}")
    if not apply:
        print("nothing was changed; --apply deletes them")
    return 0


def _list(folder: Path, url: str | None, *, as_json: bool) -> int:
    listed, unreadable = records.distinct(folder, url)
    if url is not None and not listed and _is_missing(url):
        raise NotFoundError(f"there is not a dataset at {url}, and nothing is known of one", hint="check the address")
    for record in listed:
        if as_json:
            print(record.to_json())
        else:
            print(_line(record))
    if not as_json:
        print(counted(len(listed), "skipped sample") + (f", {unreadable} unreadable lines" if unreadable else ""))
    return 1 if listed else 0


def _shared(url: str, *, as_json: bool) -> int:
    from headrace.loaders.quarantine.shared_list import QuarantineList

    with contextlib.closing(QuarantineList(url)) as bad:
        numbered = bad.numbered()
    for version, entry in numbered:
        if as_json:
            print_json_line({"version": version, **msgspec.to_builtins(entry)})
        else:
            note = "suspected by one run: " if entry.suspected and not bad.is_lasting(entry.location, version) else ""
            location = f"{entry.dataset}, {entry.shard} at {entry.offset}"
            print(one_line(f"{version}  {entry.key}: {note}{entry.reason}  [{location}]"))
    if not as_json:
        print(f"{counted(len(numbered), 'sample')}, version {max((version for version, _ in numbered), default=0)}")
    return 1 if numbered else 0


def _line(record: records.Record) -> str:
    skipped = record.skipped
    kind = "wrong bytes" if skipped.permanent else "a clip"
    location = f"{skipped.dataset} version {record.version}, {skipped.shard} at {skipped.offset}"
    return one_line(f"{skipped.key}  {kind}: {skipped.reason}  [{location}]")
