"""Makes new versions of a dataset: saved views, removals and merges.

Purpose: every change of a dataset makes a new version. Shards and index parts are never rewritten or copied.

Invariants:
* All objects that a version names are stored before its document.
* A removal or merge applies to the newest version that is not a saved view, even if another writer made that version in
  the meantime.
* A saved view always has the same samples. It does not change the version that readers open by default.
* The shards and parts of a merged dataset stay in its own store, which becomes a mount. Only the lists of its joined
  shards are copied.

Failure behaviour: a lost race raises `ConflictError` as `history.commit` describes. So does a key that two merged
datasets hold. A key to remove that no sample has raises `NotFoundError`. A change that would remove all samples or none
raises `UsageError`. Read errors are passed on. After an error, no version document names the objects that were stored
before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.dataio.core.errors import ConflictError, CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.core.limits import counted
from headrace.dataio.shards.query import views
from headrace.dataio.shards.query.open_index import OpenIndex, RowNumbers, RowSelection, load_bitmap, store_bitmaps
from headrace.dataio.shards.query.tables import repeated_keys
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.documents import IndexPart, Lineage, Mount, Shard, Source, VersionDocument
from headrace.dataio.shards.versions.mounting import mount_of, mounts_given_to, with_mounts
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.joined import LIST_BYTES, LIST_FOLDER, SHARD_PREFIX, copy_files, is_made
from headrace.dataio.store.mounts import MAX_MOUNTS, OPTION, PREFIX, Mounts

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

_KEYS_IN_ERRORS = 5
_COPIES = 16


def save(dataset: Dataset, message: str) -> VersionDocument:
    """Save the view `dataset` as a version."""
    view = dataset.view
    if view is None:
        raise UsageError(
            f"version {dataset.version} is stored already", hint="narrow it with `where` first, and save the view"
        )
    parts = _narrow_parts(dataset.store, dataset.document, view.rows, view.bytes)
    if not parts:
        raise UsageError(f"no sample meets {' and '.join(view.lineage.where)}", hint="there is nothing to save")
    document = dataset.document
    new_version = versions.new_document(
        document.name,
        document.shards,
        parts,
        version=document.version + 1,
        parent=document.version,
        message=message or f"where {' and '.join(view.lineage.where)}",
        mounts=document.mounts,
        lineage=view.lineage,
    )
    return history.commit(dataset.store, lambda _: new_version, trunk=False)


def remove(dataset: Dataset, keys: Iterable[str] | None, where: str | None, message: str) -> VersionDocument:
    """Make the next version: the newest version without some samples."""
    listed = _keys_to_remove(dataset, keys, where)

    def build(base: VersionDocument) -> VersionDocument:
        with _with_mounts(dataset, base) as store:
            opened = OpenIndex(store, base)
            removed, removed_bytes = _removed_rows(dataset, opened, base, listed, where)
            count = sum(removed.counts)
            remaining = (_without_rows(opened, part, rows) for part, rows in enumerate(removed))
            sizes = [part.sample_bytes - size for part, size in zip(base.index, removed_bytes, strict=True)]
            parts = _narrow_parts(store, base, remaining, sizes)
        lineage = Lineage(operation="remove", where=(where,) if where else ())
        return _next_document(
            base, base.shards, parts, message or f"removed {counted(count, 'sample')}", base.mounts, lineage
        )

    return history.commit(dataset.store, build)


def count_removed(dataset: Dataset, keys: Iterable[str] | None, where: str | None) -> int:
    """Return the number of samples that `remove` would remove from the open version, or raise the same errors."""
    listed = _keys_to_remove(dataset, keys, where)
    with _with_mounts(dataset, dataset.document) as store:
        opened = OpenIndex(store, dataset.document)
        return sum(_removed_rows(dataset, opened, dataset.document, listed, where)[0].counts)


def _keys_to_remove(dataset: Dataset, keys: Iterable[str] | None, where: str | None) -> set[str] | None:
    """Return the keys to remove, or None for a condition."""
    if (keys is None) == (where is None):
        raise UsageError("remove takes either keys or where", hint="give one of them")
    if isinstance(keys, str):
        raise UsageError("keys must be a collection of keys, not one string", hint=f"keys=[{keys!r}]")
    _check_no_view(dataset)
    return None if keys is None else set(keys)


def _removed_rows(
    dataset: Dataset, opened: OpenIndex, base: VersionDocument, listed: set[str] | None, where: str | None
) -> tuple[RowSelection, list[int]]:
    """Return for each index part the rows to remove and the bytes of their members."""
    if listed is not None:
        removed, sizes, missing = views.rows_with_keys(opened, listed)
        if missing:
            raise NotFoundError(f"{dataset.url} has no sample {_list_some(missing)}", hint="nothing was removed")
    else:
        removed, sizes = RowSelection(), []
        for part, (rows, size) in enumerate(views.matching(opened, base, where or "")):
            removed.add(rows, opened.part_rows(part))
            sizes.append(size)
    count = sum(removed.counts)
    if not count or count == len(opened):
        subject = "no sample is" if not count else "all samples are"
        raise UsageError(f"{subject} to be removed from {dataset.url}", hint="no version was made")
    return removed, sizes


def merge(dataset: Dataset, others: Sequence[Dataset], message: str) -> tuple[VersionDocument, list[Mount]]:
    """Make the next version: the newest version and the samples of `others`.

    Also returns the mounts that the caller named by passing `others`.
    """
    if not others:
        raise UsageError("merge takes at least one other dataset", hint="ds.merge(Dataset(url))")
    _check_no_view(dataset)
    for other in others:
        _copy_lists(dataset, other)
    inputs = [_merge_input(dataset, other) for other in others]
    named_mounts = [
        mount
        for other in others
        for mount in (mount_of(Location(*_location(other.store), True)), *mounts_given_to(other.store))
    ]
    sources = tuple(Source(name=o.name, version=o.version, digest=o.digest) for o in others)
    names = ", ".join(f"{o.name} version {o.version}" for o in others)

    def build(base: VersionDocument) -> VersionDocument:
        shards = {shard.key: shard for shard in base.shards}
        mounts = {mount.name: mount for mount in base.mounts}
        for merged in inputs:
            for mount in merged.mounts:
                registered = mounts.setdefault(mount.name, mount)
                if registered != mount:  # a forged name would send readers of one dataset to the other's location
                    raise ConflictError(
                        f"the datasets that are to be merged give two locations the name {mount.name!r:.100}: "
                        f"{registered.url!r:.200} and {mount.url!r:.200}",
                        hint="merge only datasets that Headrace wrote: each of its mounts has a unique name",
                    )
            for shard in merged.shards:
                if shards.setdefault(shard.key, shard).size != shard.size:
                    raise CorruptionError(f"{shard.key} has two sizes in the datasets that are to be merged")
        if len(mounts) > MAX_MOUNTS:
            raise UsageError(f"the datasets lie in {len(mounts)} locations", hint=f"at most {MAX_MOUNTS} can be merged")
        lineage, text = Lineage(operation="merge", sources=sources), message or f"merged {names}"
        parts = [*base.index, *(part for merged in inputs for part in merged.parts)]
        new_version = _next_document(base, tuple(shards.values()), tuple(parts), text, tuple(mounts.values()), lineage)
        with _with_mounts(dataset, new_version, named_mounts) as store:
            new_version = _sort_parts(store, new_version)
            _check_unique_keys(store, new_version)
        return new_version

    return history.commit(dataset.store, build), named_mounts


# --- index parts with fewer rows


def _without_rows(opened: OpenIndex, part: int, removed: RowNumbers) -> RowNumbers:
    remaining = opened.remaining_rows(part)
    rows = np.arange(opened.part_rows(part), dtype=np.uint32) if remaining is None else remaining
    return np.setdiff1d(rows, removed, assume_unique=True)


def _narrow_parts(
    store: Store, document: VersionDocument, rows: Iterable[RowNumbers], sizes: Sequence[int]
) -> tuple[IndexPart, ...]:
    """Return the parts of `document` with only these rows, whose members have `sizes` bytes in total.

    Parts without rows are dropped. The rows of one part are held at a time.
    """
    remaining = list[IndexPart | None]()

    def changed() -> Iterator[tuple[IndexPart, RowNumbers, int]]:
        for part, part_rows, size in zip(document.index, rows, sizes, strict=True):
            if len(part_rows):
                remaining.append(part if len(part_rows) == part.samples else None)
            if 0 < len(part_rows) != part.samples:
                yield part, part_rows, size

    stored = iter(store_bitmaps(store, changed()))
    return tuple(next(stored) if part is None else part for part in remaining)


def _next_document(
    base: VersionDocument,
    shards: Sequence[Shard],
    parts: Sequence[IndexPart],
    message: str,
    mounts: tuple[Mount, ...],
    lineage: Lineage,
) -> VersionDocument:
    return versions.new_document(
        base.name,
        shards,
        parts,
        version=base.version + 1,
        parent=base.version,
        message=message,
        mounts=mounts,
        lineage=lineage,
    )


@contextlib.contextmanager
def _with_mounts(dataset: Dataset, document: VersionDocument, named_mounts: Sequence[Mount] = ()) -> Iterator[Store]:
    store, owned = with_mounts(dataset.store, document, False, {}, dataset.trust_mounts, named_mounts)
    try:
        yield store
    finally:
        if owned and store is not dataset.store:
            store.close()


def _check_no_view(dataset: Dataset) -> None:
    if dataset.view is not None:
        raise UsageError("a view cannot be changed", hint="narrow it with where, or change the dataset it came from")


def _list_some(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return ", ".join(map(repr, listed[:_KEYS_IN_ERRORS])) + (
        f" and {len(listed) - _KEYS_IN_ERRORS} more" if len(listed) > _KEYS_IN_ERRORS else ""
    )


# --- merging


@dataclass(frozen=True)
class _MergeInput:
    """The shards, parts and mounts of a dataset to merge, with their names in the target dataset."""

    shards: tuple[Shard, ...]
    parts: Sequence[IndexPart]
    mounts: tuple[Mount, ...]


def _merge_input(target: Dataset, other: Dataset) -> _MergeInput:
    document, location = other.document, _location(other.store)
    if location == _location(target.store):
        prefix, mounts = "", document.mounts
    else:
        mount = mount_of(Location(location[0], location[1], True))
        prefix, mounts = f"{PREFIX}{mount.name}/", (mount, *document.mounts)

    def rename(key: str) -> str:
        return key if key.startswith(PREFIX) else prefix + key

    def renamed(part: IndexPart) -> IndexPart:
        bitmap = None if part.bitmap is None else msgspec.structs.replace(part.bitmap, key=rename(part.bitmap.key))
        # if the part is in a mount, its prefix already names that mount; rows in other mounts need no prefix
        outer = part.prefix if part.key.startswith(PREFIX) else prefix + part.prefix
        return msgspec.structs.replace(part, key=rename(part.key), prefix=outer, bitmap=bitmap)

    shards = tuple(msgspec.structs.replace(shard, key=rename(shard.key)) for shard in document.shards)
    merged = msgspec.structs.replace(document, index=tuple(map(renamed, document.index)))
    parts = merged.index
    if other.view is not None:
        parts = _narrow_parts(target.store, merged, other.view.rows, other.view.bytes)
    return _MergeInput(shards, parts, mounts)


def _copy_lists(target: Dataset, other: Dataset) -> None:
    """Copy the lists of the joined shards of `other` to the target, with the files that Headrace made for them.

    The names of both hold digests of their contents, so they have the same names in the target.
    """
    shards = [shard.key for shard in other.document.shards if shard.key.startswith(SHARD_PREFIX)]
    if _location(other.store) == _location(target.store) or not shards or not isinstance(other.store, Mounts):
        return
    source, joined = other.store, other.store.joined
    assert joined is not None

    def copy(key: str) -> None:
        shard = key[len(SHARD_PREFIX) :]
        for one in joined.objects(shard).objects:
            if is_made(one.key):
                copy_files(source, target.store, one)
            elif not one.key.startswith(PREFIX):
                raise UnsupportedError(
                    f"{other.url}: {one.key!r:.200} lies in the dataset itself, and another dataset cannot name it",
                    hint="index these files again, into the other dataset (`headrace index --follow`)",
                )
        target.store.put(f"{LIST_FOLDER}{shard}.json", source.get(f"{LIST_FOLDER}{shard}.json", max_bytes=LIST_BYTES))

    with ThreadPoolExecutor(_COPIES, "lists") as threads:
        list(threads.map(copy, shards))


def _location(store: Store) -> tuple[str, dict[str, object]]:
    location = (store.base if isinstance(store, Mounts) else store).location
    return location.url, {name: value for name, value in location.options.items() if name != OPTION}


def _sort_parts(store: Store, document: VersionDocument) -> VersionDocument:
    """Return `document` with each part only once, and with the parts in the order of their samples.

    If several entries name the same part, the union of their rows remains.
    """
    positions = {shard.key: place for place, shard in enumerate(document.shards)}
    groups = dict[tuple[str, str], list[IndexPart]]()
    for part in document.index:
        groups.setdefault((part.key, part.prefix), []).append(part)
    parts = [
        part if len(entries) == 1 else _union_of_rows(store, document, entries)
        for entries in groups.values()
        for part in entries[:1]
    ]
    document = msgspec.structs.replace(document, index=tuple(parts), samples=sum(p.samples for p in parts))
    firsts = [_first_position(OpenIndex(store, document), number, positions) for number in range(len(parts))]
    order = sorted(range(len(parts)), key=firsts.__getitem__)
    return msgspec.structs.replace(document, index=tuple(parts[number] for number in order))


def _union_of_rows(store: Store, document: VersionDocument, entries: Sequence[IndexPart]) -> IndexPart:
    full_part = msgspec.structs.replace(entries[0], bitmap=None)
    if any(part.bitmap is None for part in entries):
        return full_part
    loaded = [rows for part in entries if (rows := load_bitmap(store, part, part.key)) is not None]
    rows = np.unique(np.concatenate(loaded)).astype(np.uint32)
    if len(rows) == full_part.rows:
        return full_part
    for part, part_rows in zip(entries, loaded, strict=True):
        if len(part_rows) == len(rows):
            return part
    table = OpenIndex(store, msgspec.structs.replace(document, index=(full_part,))).part_table(0, ["bytes"])
    size: int = pc.sum(table["bytes"].take(pa.array(rows)), min_count=0).as_py()
    return store_bitmaps(store, [(full_part, rows, size)])[0]


def _first_position(opened: OpenIndex, part: int, positions: Any) -> tuple[int, int]:
    """Return the position of the first row of a part, even if that row was removed."""
    row = opened.first_row(part)
    return positions[row.shard], row.members[0].offset


def _check_unique_keys(store: Store, document: VersionDocument) -> None:
    twice = repeated_keys(OpenIndex(store, document).tables(["key"]))
    if twice:
        raise ConflictError(
            f"{store.location.url}: two of the merged datasets hold {_list_some(twice)}",
            hint="leave the samples of one of them out with where; or, to keep both, index the shards of one of them as "
            "another dataset with --keys shard, and merge that",
        )


# --- comparing versions
