"""The JSON documents of a dataset, which list the shards and index parts of each version.

`dataset.json` holds the name of a dataset. `versions/00000042.json` is one immutable snapshot of it.
Invariants:

* A document never changes. It holds no secrets and does not identify its writer.
* A document has format 1 while it fits into `WHOLE_BYTES`. A larger one has format 2: its shards and parts are in pages
  (`headrace.dataio.shards.versions.paging`), which are stored before the document.

`headrace.dataio.shards.versions.history` reads and writes documents.
Failure behaviour: a document that cannot be parsed or contradicts itself raises `CorruptionError`. A document of a
newer format raises `UnsupportedError`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    UnsupportedError,
)
from headrace.dataio.core.json import is_sealed, parse_json, seal, unseal
from headrace.dataio.shards.index.pages import Section
from headrace.dataio.shards.versions import paging
from headrace.dataio.shards.versions.paging import Entry, Page, PagedList, Summary
from headrace.dataio.store.base import Store, is_key
from headrace.dataio.store.mounts import MAX_MOUNTS, PREFIX

FORMAT = 1
"""The format of `dataset.json`, of tags, and of version documents that list all shards and parts."""
PAGED_FORMAT = 2
"""The format of version documents that name pages of shards and parts."""
WHOLE_BYTES = limits.JSON_DOCUMENT_BYTES
"""The largest version document of format 1."""
DATASET_KEY = "dataset.json"
PART_BYTES = 256 * limits.MIB
"""The largest index part that readers accept.

Writers always make smaller parts (`headrace.dataio.shards.query.part_writer`).
"""
T = TypeVar("T", bound=Entry)


class DatasetDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`dataset.json`."""

    format: int
    name: str
    nonce: str


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One tar file of a version.

    `size` is in bytes. `samples` is the number of samples that the tar holds, including removed samples.
    """

    key: str
    size: int
    samples: int


class RowBitmap(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an index part that remain, as a bitmap (`headrace.dataio.shards.query.open_index`).

    * `key`, `offset`, `size`: the bitmap is the `size` bytes from `offset` in the object `key`.
    * `digest`: the BLAKE3 of these bytes.
    * `rows`: the number of rows that remain.
    * `bytes`: the total bytes of the members of these rows.
    """

    key: str
    offset: int
    size: int
    digest: str
    rows: int
    bytes: int


class IndexPart(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file of a version, with `rows` rows.

    * `size`: the size of the file in bytes.
    * `bytes`: the total bytes of the members of all rows.
    * `digest`: the BLAKE3 of the file.
    * `footer`, `footer_digest`: the size of the footer and its BLAKE3. The footer holds the digests of the blocks
      before it, so readers can read and check ranges of the file.
    * `pages`: the position of the pages, in which readers look up samples (`headrace.dataio.shards.index.pages`).
      Older parts have none. Readers look up their samples in the Parquet row groups.
    * `fields`: the type of each promoted field, which is a field of the samples' JSON that the index stores: integer,
      number, text, boolean or mixed.
    * `constant_values`: the columns in which all rows have the same value, and that value.
    * `files`: the extensions for which each row has a file.
    * `prefix`: readers put this before the shard names in the rows. It is empty unless the part was written for another
      dataset.
    * `bitmap`: the rows that are samples of the version. None means all rows.
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
    constant_values: dict[str, str] = msgspec.field(default_factory=dict, name="only")
    files: tuple[str, ...] = ()
    prefix: str = ""
    bitmap: RowBitmap | None = msgspec.field(default=None, name="kept")

    @property
    def samples(self) -> int:
        """The number of samples of the version in this part."""
        return self.rows if self.bitmap is None else self.bitmap.rows

    @property
    def sample_bytes(self) -> int:
        """The total bytes of these samples' members."""
        return self.bytes if self.bitmap is None else self.bitmap.bytes


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """The store of the shards whose keys begin with `mounts/<name>/`: its URL, and its options without secrets."""

    name: str
    url: str
    options: dict[str, Any] = {}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A version that another version was made from. `digest` is the BLAKE3 of its document."""

    name: str
    version: int
    digest: str


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The operation and the sources that made a version.

    `where` holds the conditions of a view or a removal, in the order in which they were applied.
    """

    operation: str
    sources: tuple[Source, ...] = ()
    where: tuple[str, ...] = ()


class VersionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`versions/<version>.json`. Shards and parts are in the order of their samples' numbers.

    * `parent`: the version that this version was made from.
    * `trunk`: the version that readers open by default while this version is the newest. It is the version's own
      number, except for a saved view. A saved view copies the `trunk` of the version before it.
    * `mounts`: the stores of shards that were indexed in place or merged. An operation that makes a version from others
      copies their mounts.
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
    shards: Sequence[Shard]
    index: Sequence[IndexPart]
    mounts: tuple[Mount, ...] = ()
    lineage: Lineage | None = None

    def shard_sizes(self) -> Mapping[str, int]:
        """Return the size in bytes of each shard, by key."""
        if isinstance(self.shards, PagedList):
            return paging.ShardSizes(self.shards)
        return {shard.key: shard.size for shard in self.shards}

    def summary(self) -> Summary:
        """Return what readers need of all shards and parts. Of a stored document of format 2, this reads no page."""
        if isinstance(self.index, _Parts) and not self.index.tail:
            return self.index.summary
        return paging.summarize(self.shards, self.index)


class _WholeDocument(VersionDocument, frozen=True, kw_only=True):
    """A version document of format 1."""

    shards: tuple[Shard, ...]
    index: tuple[IndexPart, ...]


class _PagedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A version document of format 2."""

    format: int
    version: int
    parent: int | None
    trunk: int
    name: str
    created: str
    nonce: str
    message: str
    samples: int
    summary: Summary
    shard_pages: tuple[Page, ...]
    part_pages: tuple[Page, ...]
    mounts: tuple[Mount, ...] = ()
    lineage: Lineage | None = None


class _Parts(PagedList[IndexPart]):
    """The parts of a document of format 2, with the document's summary."""

    summary: Summary


_COMMON = tuple(name for name in _PagedDocument.__struct_fields__ if name in VersionDocument.__struct_fields__)


def joined(entries: Sequence[T], more: Sequence[T]) -> Sequence[T]:
    """Return the entries of both. The result keeps the pages of `entries`."""
    return entries.with_more(more) if isinstance(entries, PagedList) else (*entries, *more)


def version_key(version: int) -> str:
    """Return the object key of the document of `version`."""
    return f"versions/{version:08}.json"


def new_document(
    name: str,
    shards: Sequence[Shard],
    index: Sequence[IndexPart],
    *,
    version: int,
    parent: int | None,
    message: str,
    mounts: tuple[Mount, ...] = (),
    lineage: Lineage | None = None,
) -> VersionDocument:
    """Make a document for `publish` or `commit`, with a new nonce and the current time."""
    return VersionDocument(
        format=FORMAT,
        version=version,
        parent=parent,
        trunk=version,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(16),
        message=message,
        samples=sum(index.summary.part_samples)
        if isinstance(index, _Parts) and not index.tail
        else sum(part.samples for part in index),
        shards=shards,
        index=index,
        mounts=mounts,
        lineage=lineage,
    )


def encode(document: msgspec.Struct) -> bytes:
    """Encode a document for storage: indented JSON with its own digest at the end.

    Raises `CapacityError` above `limits.JSON_DOCUMENT_BYTES`.
    """
    data = _sealed(document)
    if len(data) > limits.JSON_DOCUMENT_BYTES:
        raise CapacityError(
            f"the version's document would have {len(data)} bytes, above the limit of {limits.JSON_DOCUMENT_BYTES}",
            hint="use larger shards (shard_bytes=, --shard-size)",
        )
    return data


def encode_version(store: Store, document: VersionDocument) -> bytes:
    """Encode a version document for storage. If it does not fit into one document, store its pages."""
    if not isinstance(document.shards, PagedList) and not isinstance(document.index, PagedList):
        data = _sealed(document)
        if len(data) <= WHOLE_BYTES:
            return data
    shards, parts = _as_paged_list(store, document.shards, Shard), _as_paged_list(store, document.index, IndexPart)
    common = {name: getattr(document, name) for name in _COMMON} | {"format": PAGED_FORMAT}
    shard_pages = shards.stored(store, paging.PAGE_SHARDS, "shards")
    part_pages = parts.stored(store, paging.PAGE_PARTS, "parts")
    return encode(_PagedDocument(**common, summary=document.summary(), shard_pages=shard_pages, part_pages=part_pages))


def _as_paged_list(store: Store, entries: Sequence[T], kind: type[T]) -> PagedList[T]:
    if isinstance(entries, PagedList):
        return entries
    return PagedList(store, (), kind=kind, check=lambda *_: None, cached=1, tail=tuple(entries))


def _sealed(document: msgspec.Struct) -> bytes:
    return seal(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def decode_dataset(data: bytes, name: str) -> DatasetDocument:
    """Decode and check a `dataset.json`. Errors call it `name`."""
    check_bytes(data, name)
    try:
        return msgspec.json.decode(data, type=DatasetDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a dataset document: {error}") from error


class _Format(msgspec.Struct):
    format: int


def check_bytes(data: bytes, name: str, newest: int = FORMAT) -> int:
    """Check the digest, the JSON syntax and the format of a stored document, and return the format.

    `newest` is the newest format of such a document. Errors call the document `name`. A document without a digest is
    parsed first, so that the error says what is wrong with it.
    """
    if is_sealed(data):
        unseal(data, name)
    try:
        parse_json(data, unique_names=True)
        stored_format = msgspec.json.decode(data, type=_Format).format
        if stored_format > newest:
            raise UnsupportedError(
                f"{name} has format {stored_format}; this Headrace reads {newest}", hint="upgrade Headrace"
            )
        if stored_format < FORMAT:
            raise CorruptionError(
                f"{name} has format {stored_format}, which does not exist", hint="restore it from a copy"
            )
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptionError(f"{name} is not a version document or dataset.json: {error}") from error
    unseal(data, name)
    return stored_format


def decode(data: bytes, version: int, name: str, store: Store) -> VersionDocument:
    """Decode and check the document of `version` in `store`. Errors call it `name`.

    Pages of shards and parts are checked when they are read.
    """
    paged = check_bytes(data, name, PAGED_FORMAT) == PAGED_FORMAT
    try:
        if paged:
            return _open_pages(msgspec.json.decode(data, type=_PagedDocument), version, name, store)
        stored = msgspec.json.decode(data, type=_WholeDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a version document: {error}") from error
    document = VersionDocument(**{field: getattr(stored, field) for field in VersionDocument.__struct_fields__})
    _check(document, version, name)
    return document


def _require_keys(entries: Iterable[Shard | IndexPart | Page], name: str) -> None:
    """Raise `CorruptionError` if an entry contains a key that no object can have."""
    for entry in entries:
        bitmap = entry.bitmap if isinstance(entry, IndexPart) else None
        for key in (entry.key,) if bitmap is None else (entry.key, bitmap.key):
            if not is_key(key):
                raise CorruptionError(f"{name} names {key!r:.200}, which is not an object's key")


def _open_pages(stored: _PagedDocument, version: int, name: str, store: Store) -> VersionDocument:
    _require_keys((*stored.shard_pages, *stored.part_pages), name)
    samples, parts = stored.summary.part_samples, sum(page.count for page in stored.part_pages)
    consistent = (
        stored.version == version
        and 1 <= stored.trunk <= version
        and all(page.is_consistent for page in (*stored.shard_pages, *stored.part_pages))
        and min((stored.summary.shard_bytes, stored.summary.part_bytes, stored.summary.sample_bytes, *samples)) >= 0
        and (len(samples), sum(samples)) == (parts, stored.samples)
        and _mounts_agree(stored.mounts, [page.key for page in (*stored.shard_pages, *stored.part_pages)])
    )
    if not consistent:
        raise CorruptionError(f"{name} contradicts itself: version, counts, pages or mounts do not agree")

    def check(entry: Shard | IndexPart, page: str) -> None:
        _require_keys((entry,), page)
        fits = entry.size >= 0 and entry.samples >= 0 if isinstance(entry, Shard) else _part_agrees(entry)
        if not fits or not _mounts_agree(stored.mounts, [entry.key]):
            raise CorruptionError(f"{page}: the entry of {entry.key} contradicts itself, or names an unknown mount")

    shards = PagedList(store, stored.shard_pages, kind=Shard, check=check, cached=paging.CACHED_SHARDS)
    index = _Parts(store, stored.part_pages, kind=IndexPart, check=check, cached=paging.CACHED_PARTS)
    index.summary = stored.summary
    return VersionDocument(**{field: getattr(stored, field) for field in _COMMON}, shards=shards, index=index)


def _check(document: VersionDocument, version: int, name: str) -> None:
    _require_keys((*document.shards, *document.index), name)
    keys = [s.key for s in document.shards]
    consistent = (
        document.version == version
        and 1 <= document.trunk <= version
        and all(s.size >= 0 and s.samples >= 0 for s in document.shards)
        and all(map(_part_agrees, document.index))
        and document.samples == sum(p.samples for p in document.index) <= sum(s.samples for s in document.shards)
        and len(keys) == len(set(keys))
        and _mounts_agree(document.mounts, [*keys, *(p.key for p in document.index)])
    )
    if not consistent:
        raise CorruptionError(f"{name} contradicts itself: version, counts or shards do not agree")


def _part_agrees(part: IndexPart) -> bool:
    bitmap = part.bitmap
    return (
        part.rows >= 0
        and part.bytes >= 0
        and 0 <= part.footer <= part.size <= PART_BYTES
        and (part.pages is None or (part.pages.is_consistent and part.pages.end <= part.size - part.footer))
        and (bitmap is None or (0 <= bitmap.rows <= part.rows and 0 <= bitmap.bytes <= part.bytes))
        and (bitmap is None or (bitmap.offset >= 0 and 0 <= bitmap.size <= part.rows + 1024))
    )


def _mounts_agree(mounts: Sequence[Mount], keys: list[str]) -> bool:
    """Return whether the mounts are unique, at most `MAX_MOUNTS`, and include all mounts that keys name."""
    names = [mount.name for mount in mounts]
    used = {key.split("/")[1] for key in keys if key.startswith(PREFIX)}
    return len(set(names)) == len(names) <= MAX_MOUNTS and used <= set(names)
