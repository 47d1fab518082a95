"""The commands about versions: `headrace log`, `tag`, `diff`, `filter`, `remove`, `merge` and `delete`.

Invariants: standard output holds only results. Without `--apply`, `remove` makes no version and `delete` deletes nothing.
Failure behaviour: errors are raised for `headrace.dataio.cli` to report. `diff` returns 1 if the versions differ.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.cli import (
    apply_option,
    argument,
    command,
    dataset,
    json_option,
    one_line,
    positive_int,
    print_json,
    print_json_line,
    print_list,
    trust_mounts,
    version,
    version_or_tag,
)
from headrace.dataio.core.errors import CapacityError, NotFoundError, UsageError
from headrace.dataio.core.limits import counted

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_KEYS_BYTES = limits.GIB
_CONDITION = """\
CONDITION is one boolean expression in SQL over the columns key, shard, bytes, duration, width, height, fps, frames, codec,
audio_codec, sample_rate, channels, samples, rotation, pixel_format, color_space, color_range, color_primaries,
color_transfer, caption (or text), has_video, has_audio, has_text and the fields of the samples' JSON, which `headrace info`
lists:
"duration between 2 and 20 and height >= 720 and caption ilike '%dog%'"."""
_MESSAGE = argument(
    "-m", "--message", metavar="TEXT", default="", help="a description of the version, which `headrace log` shows"
)


@command(
    "log",
    "List the versions of a dataset, newest first. An asterisk marks saved views.",
    dataset(),
    argument("--limit", metavar="N", type=positive_int, help="list only the newest N versions"),
    json_option("one JSON object per line"),
)
def log(args: Namespace) -> int:
    """`headrace log DATASET`"""
    from headrace.dataio.shards.versions.tags import list_described
    from headrace.dataio.store.open import open_store

    number = 0
    with open_store(args.dataset) as store:
        for number, entry in enumerate(list_described(store), 1):
            if args.json:
                print_json_line(msgspec.to_builtins(entry))
            else:
                names = f" [{', '.join(entry.tags)}]" if entry.tags else ""
                mark = " " if entry.trunk else "*"
                samples = f"{counted(entry.samples, 'sample'):>16}"
                print(one_line(f"{entry.version:>6}{mark} {entry.created}  {samples}  {entry.message}{names}"))
            if number == args.limit:
                break
    if not number:
        raise NotFoundError(
            f"there is no dataset at {args.dataset}", hint="check the address, or make one with `headrace pack`"
        )
    return 0


@command(
    "tag",
    "Give a version a name, which never moves. Without NAME, list the names.",
    dataset(),
    argument("name", metavar="NAME", nargs="?", help="letters, digits, '.', '_' and '-'; not a digit first"),
    version(),
    trust_mounts(),
    json_option(),
)
def tag(args: Namespace) -> int:
    """`headrace tag DATASET [NAME]`"""
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
        print_json(listed)
    else:
        for name, number in listed.items():
            print(f"{name}\tversion {number}")
    return 0


@command(
    "diff",
    "Show which samples were added (+), removed (-) or changed (~) from version OLD to version NEW, by key.\n"
    "A sample has changed when its members, its text or its fields differ, not when it was only moved.",
    dataset(),
    argument("old", metavar="OLD", type=version_or_tag, help="a version number or tag"),
    argument(
        "new", metavar="NEW", type=version_or_tag, nargs="?", help="a version number or tag (default: the newest)"
    ),
    argument("--other", metavar="DATASET", help="NEW is a version of this dataset"),
    argument("--summary", action="store_true", help="print only the counts"),
    trust_mounts(),
    json_option("one JSON object per line, the counts last,"),
    epilog="exit codes: 0 no difference · 1 they differ · others as in headrace --help",
)
def diff(args: Namespace) -> int:
    """`headrace diff DATASET OLD [NEW]`"""
    from headrace.dataio.shards.dataset import Dataset

    with (
        Dataset(args.dataset, args.old, trust_mounts=args.trust_mounts) as old,
        Dataset(args.other or args.dataset, args.new, trust_mounts=args.trust_mounts) as new,
        old.diff(new) as difference,
    ):
        for change in () if args.summary else difference:
            if args.json:
                print_json_line({"change": change.kind, "key": change.key})
            else:
                print(one_line(f"{_SIGNS[change.kind]} {change.key}"))
        counts = {name: getattr(difference, name) for name in ("added", "removed", "changed", "unchanged")}
        if args.json:
            print_json_line({"old": old.version, "new": new.version, **counts})
        else:
            print(", ".join(f"{n} {name}" for name, n in counts.items()))
        return int(bool(difference))


@command(
    "filter",
    "Save the samples that meet a condition as a version of their own, which others open by its number or tag.\n"
    f"The newest version stays the newest. To see the samples first, use `headrace ls --where`.\n{_CONDITION}",
    dataset(),
    argument("condition", metavar="CONDITION", help="which samples"),
    version(),
    trust_mounts(),
    argument("--tag", metavar="NAME", help="give the version this name"),
    _MESSAGE,
    json_option(),
)
def filter_(args: Namespace) -> int:
    """`headrace filter DATASET CONDITION`"""
    from headrace.dataio.shards.dataset import Dataset

    with Dataset(args.dataset, args.version, trust_mounts=args.trust_mounts) as opened:
        new_version = opened.where(args.condition).save(args.message, tag=args.tag)
        _print_new_version(new_version, args.json)
    return 0


@command(
    "remove",
    "Make a version without some samples. Older versions keep them, and no bytes are freed.\n"
    f"Without --apply, print how many samples would be removed, and change nothing.\n{_CONDITION}",
    dataset(),
    argument("keys", metavar="KEY", nargs="*", help="the samples' keys, as `headrace ls` prints them"),
    argument("--keys-from", metavar="FILE", help="a file with one key per line; - for standard input"),
    argument("--where", metavar="CONDITION", help="the samples that meet this condition"),
    apply_option("make the version"),
    trust_mounts(),
    _MESSAGE,
    json_option(),
)
def remove(args: Namespace) -> int:
    """`headrace remove DATASET [KEY...]`"""
    keys = [*args.keys, *(_read_keys(args.keys_from) if args.keys_from else ())]
    if bool(keys) == bool(args.where):
        raise UsageError("say which samples: either keys or --where", hint="`headrace ls --where` shows them first")
    from headrace.dataio.shards.changes import count_removed
    from headrace.dataio.shards.dataset import Dataset

    with Dataset(args.dataset, trust_mounts=args.trust_mounts) as opened:
        if args.apply:
            new_version = opened.remove(keys or None, where=args.where, message=args.message)
            _print_new_version(new_version, args.json, before=opened)
            return 0
        count = count_removed(opened, keys or None, args.where)
    if args.json:
        print_json({"url": opened.url, "version": opened.version, "samples": count, "applied": False})
    else:
        print(one_line(f"{opened.url} version {opened.version}: {counted(count, 'sample')} would be removed"))
        print("nothing was changed; --apply makes the version without them")
    return 0


@command(
    "merge",
    "Make a version of DATASET that also holds the samples of other datasets. Their shards and indexes stay where they are,\n"
    "so they must not be deleted. OTHER does not change. No two samples may have the same key.",
    dataset(),
    argument("others", metavar="OTHER", nargs="+", help="the datasets to add; their newest versions are taken"),
    trust_mounts(),
    _MESSAGE,
    json_option(),
)
def merge(args: Namespace) -> int:
    """`headrace merge DATASET OTHER...`"""
    from headrace.dataio.shards.dataset import Dataset

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(Dataset(args.dataset, trust_mounts=args.trust_mounts))
        others = [stack.enter_context(Dataset(o, trust_mounts=args.trust_mounts)) for o in args.others]
        _print_new_version(opened.merge(*others, message=args.message), args.json, before=opened)
    return 0


@command(
    "delete",
    "Delete a dataset: all versions and tags, and the shards and indexes that only they name. This cannot be undone.\n"
    "Media that were indexed in place stay. First stop the jobs that read or write the dataset: they do not announce\n"
    "themselves. Datasets that were merged with this one need its shards, and cannot be read afterwards.\n"
    "Without --apply, print what would be deleted, and change nothing.",
    dataset(),
    apply_option("delete it"),
    json_option(),
)
def delete(args: Namespace) -> int:
    """`headrace delete DATASET`"""
    from headrace.dataio.shards import deletion
    from headrace.dataio.store.open import open_store

    with open_store(args.dataset) as store:
        found = deletion.plan(store)
        if args.apply:
            found.apply()
        url = store.location.url
    if args.json:
        listed = {"left": found.left, "mounts": found.mounts, "applied": args.apply}
        print_json({"url": url, "versions": found.versions, "objects": found.objects, "bytes": found.bytes, **listed})
        return 0
    done = "deleted" if args.apply else "would be deleted"
    print(one_line(f"{url}: {counted(len(found.versions), 'version')}"))
    print(f"{counted(found.objects, 'object')} with {limits.format_bytes(found.bytes)} {done}")
    print_list("media that stay where they are", found.mounts)
    print_list("objects that stay, because no version names them", found.left)
    if not args.apply:
        print("nothing was changed; --apply deletes them, after you have stopped the jobs that use the dataset")
    return 0


def _read_keys(path: str) -> list[str]:
    """Read keys from a text file with one key per line. `-` means standard input."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
            data = file.read(_KEYS_BYTES + 1)
        if len(data) > _KEYS_BYTES:
            raise CapacityError(f"{path} is larger than {limits.format_bytes(_KEYS_BYTES)}", hint="use --where")
        return [line for line in data.decode().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise UsageError(f"{path} cannot be read: {why}", hint="give a text file with one key per line") from error


def _print_new_version(new_version: Dataset, as_json: bool, before: Dataset | None = None) -> None:
    document = new_version.document
    report: dict[str, Any] = {
        "url": new_version.url,
        "version": new_version.version,
        "parent": document.parent,
        "samples": len(new_version),
        "message": document.message,
        "digest": new_version.digest,
    }
    if as_json:
        print_json(report)
        return
    change = f" (version {before.version}: {len(before)})" if before is not None else ""
    print(
        one_line(
            f"{new_version.url} version {new_version.version}: {counted(len(new_version), 'sample')}{change}, {document.message}"
        )
    )
