"""The records of published names: numbered documents, of which the newest is the version.

    published/<name>/<number>.json       a version, from 1 on
    published/<name>/weights-<digest>    the table of its tensors (`weights`)
    published/<name>/update-<id>         the differences from the version before (`updates`)

Invariant: a record is written with `put_if_absent` and never changed. Its number is one more than that of the newest
record that its publisher saw. So a name moves from one version to the next, and late requests move it nowhere.
Failure behaviour: `NotFoundError` for a name without a version. `UsageError` for an invalid name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Document, ProcessName, encode, read
from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError, UsageError
from headrace.dataio.store.base import ObjectInfo, Store

PUBLISHED = "published/"
TAG_PREFIX = "published."
"""Prefix of the tags that keep the steps of published versions."""
KEPT_VERSIONS = 32
"""Number of the newest versions whose records and updates stay."""
ORPHAN_SECONDS = 24 * 3600.0
"""The age at which an object that no record names is deleted."""
_LOOKS = 10
_NAME_LIMIT = 100
_TAG = re.compile(r"(\d{9})\.[0-9A-Z]{26}", re.ASCII)
_RECORD = re.compile(r"(\d{9})\.json", re.ASCII)


class Stored(msgspec.Struct, frozen=True):
    """An object of a version: its key below the name's folder, its size in bytes, and the BLAKE3 of its table.

    `table`: offset of the table in the object.
    """

    key: str
    size: int
    digest: str
    table: int = 0


class Published(Document, frozen=True, kw_only=True):
    """One version of a published name.

    * `run`, `timeline`, `step`, `attempt`: the committed step.
    * `tag`: the tag that keeps the step.
    * `include`, `exclude`: patterns on the paths of its tensors.
    * `prefix`: the part of the paths that the published names leave out.
    * `dtype`: the dtype to which floating-point tensors are converted; "" keeps each tensor's own.
    * `bytes`: bytes of all published tensors.
    * `weights`: the table of the tensors. `update`: the differences from version `parent`; None if there are none.
    """

    newest: ClassVar[int] = 1
    name: str
    number: int
    run: str
    timeline: int
    step: int
    attempt: str
    tag: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    prefix: str
    dtype: str
    bytes: int
    weights: Stored
    update: Stored | None
    parent: int
    created: float
    process: ProcessName

    @property
    def base(self) -> Base:
        return Base(self.timeline, self.step, self.attempt)

    def key_of(self, stored: Stored) -> str:
        """The key of an object of this version in the repository."""
        return f"{folder(self.name)}{stored.key}"


def folder(name: str) -> str:
    """The common prefix of all objects of a name; `UsageError` for an invalid name."""
    names.check_run(name, "published name")
    if len(name) > _NAME_LIMIT:
        raise UsageError(f"the published name {name!r} is too long", hint=f"at most {_NAME_LIMIT} characters")
    return f"{PUBLISHED}{name}/"


def key_of(name: str, number: int) -> str:
    """The key of the record of this version."""
    return f"{folder(name)}{number:09d}.json"


def tag_of(name: str, number: int, unique: str) -> str:
    """The tag that keeps the step of a version. `unique` keeps the tags of two publishers of one number apart."""
    folder(name)
    return f"{TAG_PREFIX}{name}.{number:09d}.{unique}"


def number_of_tag(name: str, tag: str) -> int | None:
    """The number of the version of `name` that this tag keeps; None if it is another tag."""
    match = _TAG.fullmatch(tag.removeprefix(f"{TAG_PREFIX}{name}."))
    return int(match[1]) if match and tag.startswith(TAG_PREFIX) else None


def published_names(store: Store) -> Iterator[str]:
    """Every name that has a folder, in order."""
    return (name for name in store.list_folders(PUBLISHED) if names.is_run(name))


def listed(store: Store, name: str) -> tuple[dict[int, ObjectInfo], list[ObjectInfo]]:
    """The records of a name by number, and its other objects, from one listing."""
    numbered, others, prefix = dict[int, ObjectInfo](), list[ObjectInfo](), folder(name)
    for info in store.list(prefix):
        match = _RECORD.fullmatch(info.key[len(prefix) :])
        if match:
            numbered[int(match[1])] = info
        else:
            others.append(info)
    return numbered, others


def find(store: Store, name: str) -> Published | None:
    """The newest version of a name; None if it has none."""
    for _ in range(_LOOKS):
        numbered, _ = listed(store, name)
        if not numbered:
            return None
        try:
            return read_record(store, name, max(numbered))
        except NotFoundError:  # the publisher of a newer version deleted it
            continue
    raise TransientError(f"other processes keep publishing {name}", hint="try again")


def require(store: Store, name: str) -> Published:
    """The newest version of a name; `NotFoundError` if it has none."""
    record = find(store, name)
    if record is None:
        known = ", ".join(list(published_names(store))[:8]) or "there are none"
        raise NotFoundError(f"nothing was published as {name}", hint=f"published names: {known}")
    return record


def read_record(store: Store, name: str, number: int) -> Published:
    """The record of one version."""
    key = key_of(name, number)
    record = read(store, key, Published)
    stored = [one for one in (record.weights, record.update) if one is not None]
    fits = all(
        re.fullmatch(r"(weights|update)-[0-9A-Za-z]{1,64}", one.key) and 0 <= one.table <= one.size for one in stored
    )
    if (record.name, record.number) != (name, number) or not fits or not names.is_run(record.run):
        raise CorruptionError(f"{key} contradicts its own key", hint="publish again")
    return record


def write(store: Store, record: Published) -> bool:
    """Write the record. Returns False if the version has another record."""
    return store.put_if_absent(key_of(record.name, record.number), encode(record))
