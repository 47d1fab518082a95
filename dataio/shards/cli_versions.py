"""`headrace log`, `tag`, `diff`, `filter`, `remove` and `merge`.

Invariant: as in `headrace.dataio.shards.cli`: standard output holds results only.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report; `diff` returns 1 when the versions differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.cli import positive_int
from headrace.dataio.core.errors import CapacityError, NotFoundError, UsageError
from headrace.dataio.core.limits import counted
from headrace.dataio.shards.cli import _add_dataset, _add_json, _add_trust, _parser, _print_json, _printable, _version

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_KEYS_BYTES = limits.GIB
_CONDITION = """\
CONDITION is one boolean expression in SQL over the columns key, shard, bytes, duration, width, height, fps, frames, codec,
audio_codec, sample_rate, channels, samples, rotation, pixel_format, color_space, color_range, color_primaries,
color_transfer, caption (or text), has_video, has_audio, has_text and the promoted fields of the samples' JSON:
"duration between 2 and 20 and height >= 720 and caption ilike '%dog%'"."""


def log(argv: list[str]) -> int:
    """`headrace log DATASET`"""
    parser = _parser("log", "List the versions of a dataset, newest first. An asterisk marks saved views.")
    parser.add_argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")
    parser.add_argument("--limit", metavar="N", type=positive_int, help="list only the newest N")
    _add_json(parser, "one JSON object a line")
    args = parser.parse_args(argv)
    from headrace.dataio.shards.versions.history import history
    from headrace.dataio.store.open import open_store

    number = 0
    with open_store(args.dataset) as store:
        for number, entry in enumerate(history(store), 1):
            if args.json:
                print(json.dumps(msgspec.to_builtins(entry)))
            else:
                names = f" [{', '.join(entry.tags)}]" if entry.tags else ""
                mark = " " if entry.trunk else "*"
                print(
                    _printable(
                        f"{entry.version:>6}{mark} {entry.created}  {counted(entry.samples, 'sample'):>16}  "
                        f"{entry.message}{names}"
                    )
                )
            if number == args.limit:
                break
    if not number:
        raise NotFoundError(
            f"there is no dataset at {args.dataset}", hint="check the address, or make one with `headrace pack`"
        )
    return 0


def tag(argv: list[str]) -> int:
    """`headrace tag DATASET [NAME]`"""
    parser = _parser("tag", "Give a version a name, which never moves; without NAME, list the names.")
    _add_dataset(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="letters, digits, '.', '_' and '-'; not a digit first")
    _add_json(parser)
    args = parser.parse_args(argv)
    from headrace.dataio.shards.versions import tags
    from headrace.dataio.store.open import open_store

    with open_store(args.dataset) as store:
        if args.name:
            document, digest = tags.load(store, args.version)
            tags.create(store, args.name, document.version, digest)
            listed = {args.name: document.version}
        else:
            listed = {name: tags.read(store, name).version for name in sorted(tags.names(store))}
    if args.json:
        _print_json(listed)
    else:
        for name, version in listed.items():
            print(f"{name}\tversion {version}")
    return 0


def diff(argv: list[str]) -> int:
    """`headrace diff DATASET OLD [NEW]`"""
    parser = _parser(
        "diff",
        "Say which samples were added (+), removed (-) or changed (~) from version OLD to version NEW, by key.\n"
        "A sample changed when its members, its text or its fields did, not when it only lies elsewhere.",
        "exit codes: 0 no difference · 1 they differ · others as in headrace --help",
    )
    parser.add_argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")
    parser.add_argument("old", metavar="OLD", type=_version, help="a version or tag")
    parser.add_argument("new", metavar="NEW", type=_version, nargs="?", help="a version or tag (default: the newest)")
    parser.add_argument("--other", metavar="DATASET", help="NEW is a version of this dataset")
    parser.add_argument("--summary", action="store_true", help="print only the counts")
    _add_trust(parser)
    _add_json(parser, "one JSON object a line, the counts last")
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset

    with (
        Dataset(args.dataset, args.old, trust_mounts=args.trust_mounts) as old,
        Dataset(args.other or args.dataset, args.new, trust_mounts=args.trust_mounts) as new,
        old.diff(new) as found,
    ):
        for change in () if args.summary else found:
            if args.json:
                print(json.dumps({"change": change.kind, "key": change.key}))
            else:
                print(_printable(f"{_SIGNS[change.kind]} {change.key}"))
        counts = {name: getattr(found, name) for name in ("added", "removed", "changed", "unchanged")}
        if args.json:
            print(json.dumps({"old": old.version, "new": new.version, **counts}))
        else:
            print(", ".join(f"{n} {name}" for name, n in counts.items()))
        return int(bool(found))


def filter_(argv: list[str]) -> int:
    """`headrace filter DATASET CONDITION`"""
    parser = _parser(
        "filter",
        "Save the samples that meet a condition as a version of their own, for others to open by its number or a tag.\n"
        f"The newest version stays what it is. To look before saving, use `headrace ls --where`.\n{_CONDITION}",
    )
    _add_dataset(parser)
    parser.add_argument("condition", metavar="CONDITION", help="which samples")
    parser.add_argument("--tag", metavar="NAME", help="give the version this name")
    _add_message(parser)
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset
    from headrace.dataio.shards.versions import tags

    with Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as dataset:
        if args.tag:
            tags.check_free(dataset.store, args.tag)  # before there is a version that would have no name
        made = dataset.where(args.condition).save(args.message)
        if args.tag:
            made.tag(args.tag)
        _print_made(made, args.json)
    return 0


def remove(argv: list[str]) -> int:
    """`headrace remove DATASET [KEY...]`"""
    parser = _parser(
        "remove",
        f"Make a version without some samples. Older versions keep them, and no bytes are freed.\n{_CONDITION}",
    )
    parser.add_argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")
    parser.add_argument("keys", metavar="KEY", nargs="*", help="the samples' keys, as `headrace ls` prints them")
    parser.add_argument("--keys-from", metavar="FILE", help="a file with a key on every line; - for standard input")
    parser.add_argument("--where", metavar="CONDITION", help="the samples that meet this")
    _add_trust(parser)
    _add_message(parser)
    args = parser.parse_args(argv)
    keys = [*args.keys, *(_keys_from(args.keys_from) if args.keys_from else ())]
    if bool(keys) == bool(args.where):
        raise UsageError("say which samples: either keys or --where", hint="`headrace ls --where` shows them first")
    from headrace.dataio.shards.dataset import Dataset

    with Dataset(args.dataset, trust_mounts=args.trust_mounts) as dataset:
        if args.where:
            made = dataset.remove(where=args.where, message=args.message)
        else:
            made = dataset.remove(keys, message=args.message)
        _print_made(made, args.json, before=dataset)
    return 0


def merge(argv: list[str]) -> int:
    """`headrace merge DATASET OTHER...`"""
    parser = _parser(
        "merge",
        "Make a version of DATASET that also holds the samples of other datasets. Their shards and indexes stay where they are,\n"
        "so they must not be deleted. No two samples may have the same key.",
    )
    parser.add_argument("dataset", metavar="DATASET", help="a folder or s3://bucket/prefix")
    parser.add_argument("others", metavar="OTHER", nargs="+", help="the datasets to add, their newest versions")
    _add_trust(parser)
    _add_message(parser)
    args = parser.parse_args(argv)
    from headrace.dataio.shards.dataset import Dataset

    with contextlib.ExitStack() as stack:
        dataset = stack.enter_context(Dataset(args.dataset, trust_mounts=args.trust_mounts))
        others = [stack.enter_context(Dataset(o, trust_mounts=args.trust_mounts)) for o in args.others]
        _print_made(dataset.merge(*others, message=args.message), args.json, before=dataset)
    return 0


def _add_message(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--message", metavar="TEXT", default="", help="what the version is, for `headrace log`")
    _add_json(parser)


def _keys_from(path: str) -> Iterator[str]:
    try:
        with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
            text = file.read(_KEYS_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise UsageError(f"{path} cannot be read: {why}", hint="give a text file with a key on every line") from error
    if len(text) > _KEYS_BYTES:
        raise CapacityError(f"{path} is larger than {limits.format_bytes(_KEYS_BYTES)}", hint="use --where")
    return iter([line for line in text.splitlines() if line])


def _print_made(made: Dataset, as_json: bool, before: Dataset | None = None) -> None:
    document = made.document
    found: dict[str, Any] = {
        "url": made.url,
        "version": made.version,
        "parent": document.parent,
        "samples": len(made),
        "message": document.message,
        "digest": made.digest,
    }
    if as_json:
        _print_json(found)
        return
    change = f" (version {before.version}: {len(before)})" if before is not None else ""
    print(_printable(f"{made.url} version {made.version}: {counted(len(made), 'sample')}{change}, {document.message}"))
