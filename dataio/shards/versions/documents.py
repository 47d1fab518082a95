"""Dataset versions: the documents that make shards and index parts a dataset.

Purpose: `dataset.json` names a dataset; `versions/00000042.json` is one immutable snapshot of it.
Invariants: a version exists when, and only when, its document does. It is written last, by `put_if_absent` with a nonce,
so of several writers exactly one makes a version, and everything that it names was stored before. Numbers have no gaps that
later fill: a writer takes the number after the highest. Documents hold no secrets and say nothing of who wrote them.
`commit` is how every version after the first is made: who loses a race builds again on what the winner made, a bounded
number of times.
Failure behaviour: `NotFoundError` lists the versions that exist; `ConflictError` says who won; `CorruptionError` for a document
that cannot be parsed or contradicts itself; `UnsupportedError` for a newer format.
"""

from __future__ import annotations

import random
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.json import is_sealed, parse_json, seal, unseal
from headrace.dataio.shards.index.digests import digest
from headrace.dataio.shards.index.lookup import Section
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import MAX_MOUNTS, PREFIX

FORMAT = 1
DATASET_KEY = "dataset.json"
COMMIT_TRIES = 64
"""Races that `commit` may lose before it gives up."""
PART_BYTES = 256 * limits.MIB
"""The largest index part that is read; those written here are smaller, whatever they hold
(`headrace.dataio.shards.query.parts`)."""
_VERSION_KEY = re.compile(r"versions/(\d{8})\.json")


class DatasetDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`dataset.json`."""

    format: int
    name: str
    nonce: str


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One tar of a version; `size` in bytes. `samples` counts those that it was written with, also after some were removed."""

    key: str
    size: int
    samples: int


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of an index part are left: `size` bytes of object `key` from `offset`, `digest` being their BLAKE3.

    They hold a bitmap (`headrace.dataio.shards.query.kept`). `rows` are left, whose members have `bytes` bytes.
    """

    key: str
    offset: int
    size: int
    digest: str
    rows: int
    bytes: int


class IndexPart(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file of a version, of `rows` rows; `bytes` have the members of all of them.

    `digest` is the file's BLAKE3, `footer_digest` that of its last `footer` bytes, which hold the digests of what comes before;
    so parts of it can be read and checked. `pages` is where samples are looked up in it; parts written before there was such a
    thing have none, and are looked up in as tables. `prefix` goes in front of the shards' names that the rows hold, where the
    part was written for another dataset. `fields` says of what type the promoted fields are: integer, number, text,
    boolean or mixed. `only` names columns in which all rows have the same value, and that value; `files` are the extensions
    of which each has a file. Without `kept`, all rows are samples of the version.
    """

    key: str
    size: int
    rows: int
    bytes: int
    digest: str
    footer: int
    footer_digest: str
    pages: Section | None = None
    fields: dict[str, str] = {}
    only: dict[str, str] = {}
    files: tuple[str, ...] = ()
    prefix: str = ""
    kept: Kept | None = None

    @property
    def left(self) -> int:
        """Samples of the version in this part."""
        return self.rows if self.kept is None else self.kept.rows

    @property
    def left_bytes(self) -> int:
        """Bytes of those samples' members."""
        return self.bytes if self.kept is None else self.kept.bytes


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """Where shards lie whose keys begin with `mounts/<name>/`: a store's URL and its options without secrets."""

    name: str
    url: str
    options: dict[str, Any] = {}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A version that another one was made from; `digest` is that of its document."""

    name: str
    version: int
    digest: str


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """How a version came to be: an operation on sources. `where` holds the predicates of a saved view, in their order."""

    operation: str
    sources: tuple[Source, ...] = ()
    where: tuple[str, ...] = ()


class VersionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`versions/<version>.json`. Shards and parts are in the order of their samples' numbers.

    `parent` is the version that this one was made from. `trunk` is the version that opening the dataset means while this one is
    the newest: itself, but for a saved view the one that it would be without the view. `mounts` are the stores of shards
    that were indexed in place; whoever makes a version out of others carries them over.
    """

    format: int
    version: int
    parent: int | None
    trunk: int
    name: str
    created: str
    nonce: str
    message: str
    samples: int
    shards: tuple[Shard, ...]
    index: tuple[IndexPart, ...]
    mounts: tuple[Mount, ...] = ()
    lineage: Lineage | None = None

    def shard_sizes(self) -> Mapping[str, int]:
        """Shard key → bytes."""
        return {shard.key: shard.size for shard in self.shards}


def version_key(version: int) -> str:
    """The object key of a version's document."""
    return f"versions/{version:08}.json"


def new_document(
    name: str,
    shards: tuple[Shard, ...],
    index: tuple[IndexPart, ...],
    *,
    version: int,
    parent: int | None,
    message: str,
    mounts: tuple[Mount, ...] = (),
    lineage: Lineage | None = None,
) -> VersionDocument:
    """A document ready to be published or returned to `commit`, with a fresh nonce and today's date."""
    return VersionDocument(
        format=FORMAT,
        version=version,
        parent=parent,
        trunk=version,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(16),
        message=message,
        samples=sum(part.left for part in index),
        shards=shards,
        index=index,
        mounts=mounts,
        lineage=lineage,
    )


def encode(document: msgspec.Struct) -> bytes:
    """The document as it is stored: JSON for people too, with its own digest at the end."""
    data = seal(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if len(data) > limits.JSON_DOCUMENT_BYTES:
        raise CapacityError(
            f"the version's document would have {len(data)} bytes, above the limit of {limits.JSON_DOCUMENT_BYTES}",
            hint="use larger shards (shard_bytes=, --shard-size)",
        )
    return data


def list_versions(store: Store) -> list[int]:
    """The versions that exist, ascending."""
    matches = (_VERSION_KEY.fullmatch(info.key) for info in store.list("versions/"))
    return sorted(int(match[1]) for match in matches if match)


def name_of(store: Store) -> str:
    """What a dataset is called that nobody named: the last part of its place, as people write it."""
    return urllib.parse.unquote(store.location.url.rstrip("/").rpartition("/")[2]) or "dataset"


def claim(store: Store, name: str) -> None:
    """Write `dataset.json` unless a writer did before; what it says does not make a dataset visible."""
    store.put_if_absent(DATASET_KEY, encode(DatasetDocument(format=FORMAT, name=name, nonce=secrets.token_hex(16))))


def refuse_existing(store: Store) -> None:
    """`ConflictError` when the store already holds a dataset."""
    existing = list_versions(store)
    if existing:
        raise ConflictError(
            f"{store.location.url} already holds a dataset (version {existing[-1]})",
            hint="pack into an empty place; a stored version never changes",
        )


def publish(store: Store, document: VersionDocument) -> None:
    """Make the version exist, or raise `ConflictError` when another writer did."""
    if not store.put_if_absent(version_key(document.version), encode(document)):
        winner, _ = load(store, document.version)
        raise ConflictError(
            f"{store.location.url}: another writer made version {document.version}, "
            f"{winner.samples} samples at {winner.created}",
            hint="open that version, or pack into another place",
        )


def commit(store: Store, build: Callable[[VersionDocument], VersionDocument], *, trunk: bool = True) -> VersionDocument:
    """Make the next version of a dataset and return its document.

    `build` is given the newest version's document and returns the next one's; what it names must be stored by then. Number,
    nonce and trunk are filled in here. When another writer takes the number first, `build` is called again with what that
    one made; it may raise `UsageError` or `ConflictError` when it cannot go on from there, which becomes a `ConflictError`
    naming the winner. With `trunk=False` the new version is not what opening the dataset means. `NotFoundError` without a
    dataset, `ConflictError` after `COMMIT_TRIES` lost races.
    """
    for lost in range(COMMIT_TRIES):
        newest, _ = load(store, _newest(store))
        base = newest if newest.trunk == newest.version else load(store, newest.trunk)[0]
        try:
            built = build(base)
        except (UsageError, ConflictError) as error:
            if not lost:
                raise
            raise ConflictError(f"{_won(store, newest)}: {error.message}", hint=error.hint) from error
        number = newest.version + 1
        document = msgspec.structs.replace(
            built, version=number, trunk=number if trunk else newest.trunk, nonce=secrets.token_hex(16)
        )
        if store.put_if_absent(version_key(number), encode(document)):
            return document
        time.sleep(random.uniform(0, 0.01 * min(lost + 1, 20)))
    winner, _ = load(store, _newest(store))
    raise ConflictError(f"{_won(store, winner)}, and {COMMIT_TRIES} attempts lost such races", hint="try again")


def _won(store: Store, winner: VersionDocument) -> str:
    what = f" ({winner.message})" if winner.message else ""
    return f"{store.location.url}: another writer made version {winner.version}{what} at {winner.created}"


def _newest(store: Store) -> int:
    newest = max(list_versions(store), default=None)
    if newest is None:
        url = store.location.url
        raise NotFoundError(f"there is no dataset at {url}", hint="check the address, or make one with `headrace pack`")
    return newest


def load(store: Store, version: int | None = None) -> tuple[VersionDocument, str]:
    """The document of `version` and the BLAKE3 of its bytes; without a number, of the newest that is no saved view."""
    if version is not None:
        return _load(store, version)
    document, found = _load(store, _newest(store))
    return (document, found) if document.trunk == document.version else _load(store, document.trunk)


def _load(store: Store, version: int) -> tuple[VersionDocument, str]:
    url = store.location.url
    try:
        data = store.get(version_key(version), max_bytes=limits.JSON_DOCUMENT_BYTES)
    except NotFoundError as error:
        existing = list_versions(store)
        if not existing:
            raise NotFoundError(f"there is no dataset at {url}", hint="check the address") from error
        raise NotFoundError(
            f"{url} has no version {version}", hint=f"it has {', '.join(map(str, existing[-20:]))}"
        ) from error
    return decode(data, version, f"{url}: {version_key(version)}"), digest(data)


def decode_dataset(data: bytes, name: str) -> DatasetDocument:
    """The checked `dataset.json`; `name` names it in errors."""
    check_bytes(data, name)
    try:
        return msgspec.json.decode(data, type=DatasetDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a dataset document: {error}") from error


class _Format(msgspec.Struct):
    format: int


def check_bytes(data: bytes, name: str) -> None:
    if is_sealed(data):
        unseal(data, name)
    try:
        parse_json(data, unique_names=True)
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise UnsupportedError(f"{name} has format {found}; this Headrace reads {FORMAT}", hint="upgrade Headrace")
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptionError(f"{name} is not a version document or dataset.json: {error}") from error
    unseal(data, name)


def decode(data: bytes, version: int, name: str) -> VersionDocument:
    """The checked document of `version`; `name` names it in errors."""
    check_bytes(data, name)
    try:
        document = msgspec.json.decode(data, type=VersionDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a version document: {error}") from error
    _check(document, version, name)
    return document


def _check(document: VersionDocument, version: int, name: str) -> None:
    keys = [s.key for s in document.shards]
    consistent = (
        document.version == version
        and 1 <= document.trunk <= version
        and all(s.size >= 0 and s.samples >= 0 for s in document.shards)
        and all(map(_part_agrees, document.index))
        and document.samples == sum(p.left for p in document.index) <= sum(s.samples for s in document.shards)
        and len(keys) == len(set(keys))
        and _mounts_agree(document, [*keys, *(p.key for p in document.index)])
    )
    if not consistent:
        raise CorruptionError(f"{name} contradicts itself: version, counts or shards do not agree")


def _part_agrees(part: IndexPart) -> bool:
    kept = part.kept
    return (
        part.rows >= 0
        and part.bytes >= 0
        and 0 <= part.footer <= part.size <= PART_BYTES
        and (part.pages is None or (part.pages.sound and part.pages.end <= part.size - part.footer))
        and (kept is None or (0 <= kept.rows <= part.rows and 0 <= kept.bytes <= part.bytes))
        and (kept is None or (kept.offset >= 0 and 0 <= kept.size <= part.rows + 1024))
    )


def _mounts_agree(document: VersionDocument, keys: list[str]) -> bool:
    """Whether every shard and part below `mounts/` names one of at most `MAX_MOUNTS` mounts."""
    names = [mount.name for mount in document.mounts]
    used = {key.split("/")[1] for key in keys if key.startswith(PREFIX)}
    return len(set(names)) == len(names) <= MAX_MOUNTS and used <= set(names)
