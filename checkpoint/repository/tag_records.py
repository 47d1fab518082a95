"""The records of tags, and the steps that they name. `headrace.checkpoint.repository.tags` writes them.

    tags/<name>.json                the first record of a tag, number 0
    tags/_<name>.<number>.json      records of its moves and its removal, version 2

Invariant: a record is written with `put_if_absent` and never changed. The newest record of a tag counts, so a late
request that writes an older record does not move the tag. A record names one attempt of one run, in any timeline. If
the step was removed before the move was confirmed, the previous record counts.
Failure behaviour: `NotFoundError` for a tag that does not exist or whose step was removed; `UsageError` for a tag of
another run.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Document, ProcessName, read
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import Attempt
from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError, UnsupportedError, UsageError
from headrace.dataio.store.base import ObjectInfo, Store

TAGS = "tags/"
PREFIX = "tag:"
"""Prefix of a tag's name where a step is given, as in `--step tag:best` of the command line."""
OF_PUBLISHED = "published.*"
"""Tags of published versions (`headrace.checkpoint.publishing`), whose steps every policy keeps."""
MAX_NUMBER = 10**9
"""Numbers of records are smaller than this."""
_KEY = re.compile(r"tags/(?:_([^/]+)\.(\d{9})|([^_/][^/]*))\.json")
_LOOKS = 10
"""The maximum number of times that the records are read while other processes replace them."""


class Tag(Document, frozen=True, kw_only=True):
    """A record of the tag `name`: it names this step. With `removed` the tag names no step from this record on."""

    newest: ClassVar[int] = 2
    name: str
    run: str
    timeline: int
    step: int
    attempt: str
    created: float
    process: ProcessName = msgspec.field(name="who")
    removed: bool = False

    @property
    def base(self) -> Base:
        return Base(self.timeline, self.step, self.attempt)


def key_of(name: str, number: int = 0) -> str:
    """Key of the tag's record with this number; `UsageError` for an invalid name."""
    names.check_run(name, "tag")
    if number >= MAX_NUMBER:
        raise UsageError(f"tag {name} has been moved {MAX_NUMBER} times", hint="choose another name")
    return f"{TAGS}_{name}.{number:09d}.json" if number else f"{TAGS}{name}.json"


def listed(store: Store, name: str = "") -> dict[str, list[tuple[int, ObjectInfo]]]:
    """List the records of all tags, or of one: (number, object) by name, newest first."""
    records: dict[str, list[tuple[int, ObjectInfo]]] = defaultdict(list)
    for info in store.list(TAGS):
        match = _KEY.fullmatch(info.key)
        if match and name in ("", match[1] or match[3]):
            records[match[1] or match[3]].append((int(match[2] or 0), info))
    return {each: sorted(records[each], key=lambda record: -record[0]) for each in sorted(records)}


def current_records(store: Store, name: str = "") -> dict[str, list[Tag]]:
    """The current records of all tags, or of one, by name: the records since the tag's last removal, newest first.

    The first record is the tag. The others are earlier values, which stay until the move is confirmed. A policy keeps
    their steps, too.
    """
    for _ in range(_LOOKS):
        records = listed(store, name)
        try:
            current = {each: list(_read_current(store, (info for _, info in records[each]))) for each in records}
        except NotFoundError:  # another process moved the tag and deleted this record
            continue
        return {each: tags for each, tags in current.items() if tags}
    raise TransientError(f"other processes keep moving the tags of {store.location.url}", hint="try again")


def _read_current(store: Store, records: Iterator[ObjectInfo]) -> Iterator[Tag]:
    for info in records:
        tag = read(store, info.key, Tag)
        if tag.removed:
            return
        yield tag


def newest(store: Store, limit: int, without: str) -> list[Tag]:
    """The tags by name, at most `limit`, but for those whose names begin with `without`. One request for each tag."""
    infos = [records[0][1] for name, records in listed(store).items() if not name.startswith(without)]
    found = list[Tag]()
    for info in infos[:limit]:
        with suppress(NotFoundError):  # another process moved the tag
            found.append(read(store, info.key, Tag))
    return [tag for tag in found if not tag.removed]


def find(store: Store, name: str) -> Tag:
    """The tag's newest record. The caller checks whether the step still exists."""
    return _records_of(store, name)[0]


def _records_of(store: Store, name: str) -> list[Tag]:
    key_of(name)
    records = current_records(store, name) or current_records(store, name)  # a listing may miss both records of a move
    if not records:
        raise NotFoundError(f"no tag {name}", hint="`headrace ckpt tags` lists them")
    return records[name]


def all_tags(store: Store) -> Iterator[Tag]:
    """Every tag, by name."""
    for records in current_records(store).values():
        yield records[0]


def keeps_published(store: Store, name: str, run: str, base: Base) -> bool:
    """Whether `name` is the tag of a published version that names this step. Such a tag is written once, and not moved."""
    if not fnmatch.fnmatchcase(name, OF_PUBLISHED) or not names.is_run(name):
        return False
    try:
        tag = read(store, key_of(name), Tag)
    except (NotFoundError, CorruptionError, UnsupportedError):
        return False
    return (tag.name, tag.run, tag.base) == (name, run, base) and not tag.removed


def step_of(store: Store, run: str, name: str) -> Base:
    """The committed step of `run` that the tag names, in any timeline."""
    records = _records_of(store, name)
    existing = next((tag for tag in records if exists(store, tag)), None)
    tag = existing or records[0]
    if tag.run != run:
        raise UsageError(f"tag {name} is step {tag.step} of run {tag.run}, not of {run}", hint=f"give run={tag.run!r}")
    if existing is None:
        raise NotFoundError(f"step {tag.step} of run {run}, which tag {name} names, was removed", hint="move the tag")
    return tag.base


def exists(store: Store, tag: Tag) -> bool:
    """Whether the tag's step is committed."""
    committed = commit.recognise(store, Attempt(tag.run, tag.timeline, tag.step, tag.attempt, 0))
    return committed is not None and committed.commits(tag.attempt)


def outdated(store: Store, replaced: float, removed: float) -> list[str]:
    """Keys of records that are no longer needed, for a collector to delete.

    - If a tag's last move or removal is older than the time `replaced`: the earlier records. After a move, the new
      step must exist.
    - If a tag was removed before the time `removed`: the record of the removal, in a later collection than the others.
    """
    keys: list[str] = []
    for records in listed(store).values():
        (number, newest), older = records[0], [info.key for _, info in records[1:]]
        if not number or newest.modified >= replaced:
            continue
        try:
            tag = read(store, newest.key, Tag)
        except NotFoundError:
            continue
        if older and (tag.removed or exists(store, tag)):
            keys += older
        elif tag.removed and newest.modified < removed:
            keys.append(newest.key)
    return keys
