"""The records of published names: numbered documents, of which the newest is the version.

    published/<name>/<number>.json       a version, from 1 on
    published/<name>/weights-<id>        the table of its tensors (`weights`)
    published/<name>/update-<id>         the differences from the version before (`updates`)

Invariants:

- A record is written with `put_if_absent` and never changed. Its number is one more than that of the newest record that
  its publisher saw. So a name moves from one version to the next, and late requests move it nowhere.
- No two versions share an object, and no key is written again after it was deleted. So a late deletion harms no version.

- A name is withdrawn by a record without a version (`withdrawal`). Numbers go on after it.

Failure behaviour: `NotFoundError` for a name without a version, or a withdrawn one. `UsageError` for an invalid name.
`CorruptionError` for a record whose values cannot be true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import ClassVar

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import ITEM_BYTES, MAX_TENSOR_BYTES
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
_NAME_LIMIT = 80
"""With a prefix, a number and an id, the name is that of a tag, which has at most 128 characters."""
_NUMBER_LIMIT = 10**9
_MAX_PATTERNS = 1000
_LAST_SECOND = 1e11
"""The year 5138. `datetime` refuses much later times."""
_STORED = re.compile(r"(weights|update)-[0-9A-Za-z]{1,64}", re.ASCII)
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
    * `parent_weights`: the digest of the parent's table; "" without an update.
    * `withdrawn`: the record has no version. It ends the name until the next one. Such a record has version 2 and no run.
    """

    newest: ClassVar[int] = 2
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
    parent_weights: str
    created: float
    process: ProcessName
    withdrawn: bool = False

    @property
    def base(self) -> Base:
        return Base(self.timeline, self.step, self.attempt)

    def key_of(self, stored: Stored) -> str:
        """The key of an object of this version in the repository."""
        return f"{folder(self.name)}{stored.key}"


class WithdrawnError(NotFoundError):
    """The newest record withdraws the name."""


def is_float(dtype: str) -> bool:
    """Whether weights can be converted to this type. PyTorch does not convert to types that pack two elements."""
    return dtype in ITEM_BYTES and "float" in dtype and not dtype.endswith("_x2")


def folder(name: str) -> str:
    """The common prefix of all objects of a name; `UsageError` for an invalid name."""
    names.check_run(name, "published name")
    if len(name) > _NAME_LIMIT:
        raise UsageError(f"the published name {name!r} is too long", hint=f"at most {_NAME_LIMIT} characters")
    return f"{PUBLISHED}{name}/"


def never_changes(key: str) -> bool:
    """Whether a subscriber may read the object from a cache: a table, an update, a pack, a manifest or a group.

    They are written once and verified by digests. Records and decisions are small, and are what the others are verified
    by, so they are always read from the store.
    """
    if key.startswith(PUBLISHED):
        return _STORED.fullmatch(key.rpartition("/")[2]) is not None
    parsed = names.parse_step_key(key)
    return key.startswith(names.PACKS) or (parsed is not None and parsed.kind in ("manifest", "group"))


def key_of(name: str, number: int) -> str:
    """The key of the record of this version."""
    if number >= _NUMBER_LIMIT:
        raise UsageError(
            f"{name} has {_NUMBER_LIMIT - 1} versions, the most that a name can have", hint="choose another name"
        )
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


def newest_number(store: Store, name: str) -> int | None:
    """The number of the newest version; None if there is none. Other objects of the name are not listed."""
    prefix = folder(name)
    first = takewhile(lambda key: key[:1] <= "9", (info.key[len(prefix) :] for info in store.list(prefix)))
    return max((int(match[1]) for key in first if (match := _RECORD.fullmatch(key))), default=None)


def find(store: Store, name: str, known: int | None = None) -> Published | None:
    """The newest version of a name. None if it has none, or if it is version `known`, which is not read again.

    A name that was withdrawn has none.
    """
    return find_numbered(store, name, known)[0]


def find_numbered(store: Store, name: str, known: int | None = None) -> tuple[Published | None, int]:
    """The version as `find` returns it, and the number of the newest record; 0 if there is no record."""
    for _ in range(_LOOKS):
        number = newest_number(store, name)
        if number is None or number == known:
            return None, number or 0
        try:
            return read_record(store, name, number), number
        except WithdrawnError:
            return None, number
        except NotFoundError:  # the publisher of a newer version deleted it
            continue
    raise TransientError(f"other processes keep publishing {name}", hint="try again")


def require(store: Store, name: str) -> Published:
    """The newest version of a name; `NotFoundError` if it has none."""
    record = find(store, name)
    if record is None:
        raise nothing_published(store, name)
    return record


def nothing_published(store: Store, name: str) -> NotFoundError:
    """The error for a name without a version. It lists other names."""
    known = ", ".join(list(published_names(store))[:8]) or "there are none"
    return NotFoundError(f"nothing was published as {name}", hint=f"published names: {known}")


def read_record(store: Store, name: str, number: int) -> Published:
    """The record of one version; `WithdrawnError` if it withdraws the name."""
    key = key_of(name, number)
    record = read(store, key, Published)
    is_own = (record.name, record.number) == (name, number)
    if is_own and record.withdrawn:
        raise WithdrawnError(f"{name} was withdrawn", hint="publish a version, or follow another name")
    if not is_own or not _is_valid(record):
        raise CorruptionError(f"{key} contradicts its own key, or has impossible values", hint="publish again")
    return record


def _is_valid(record: Published) -> bool:
    stored = [one for one in (record.weights, record.update) if one is not None]
    return (
        names.is_run(record.run)
        and names.is_id(record.attempt)
        and record.timeline >= 0
        and 0 <= record.step < names.STEP_LIMIT
        and 0 <= record.created < _LAST_SECOND
        and 0 <= record.parent < record.number
        and (not record.dtype or is_float(record.dtype))
        and max(len(record.include), len(record.exclude)) <= _MAX_PATTERNS
        and all((*record.include, *record.exclude))
        and all(_STORED.fullmatch(one.key) and 0 <= one.table <= one.size <= MAX_TENSOR_BYTES for one in stored)
    )


def write(store: Store, record: Published) -> bool:
    """Write the record. Returns False if the version has another record."""
    return store.put_if_absent(key_of(record.name, record.number), encode(record))
