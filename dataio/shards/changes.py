"""Making versions from versions: saved views, removals, merges.

Purpose: every change of a dataset makes a further version. Shards and index parts are never rewritten or copied.
Invariants:

* All objects that a version names are stored before its document.
* A removal or merge applies to the newest version on the trunk, even if another writer made that version in the
  meantime.
* A saved view keeps its samples. It does not change the version that readers open by default.
* The shards and parts of a merged dataset stay in its own store, which becomes a mount.

Failure behaviour: `ConflictError` as described in `versions.commit`, and for a key that two merged datasets hold.
`NotFoundError` for keys to remove that no sample has. `UsageError` for a change that would remove all samples or no
sample. After an error, no version document names the objects that were stored before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.dataio.core.errors import ConflictError, CorruptionError, NotFoundError, UsageError
from headrace.dataio.core.limits import counted
from headrace.dataio.shards.query import conditions as query
from headrace.dataio.shards.query.open_index import OpenIndex, RowNumbers, load_bitmap, store_bitmaps
from headrace.dataio.shards.query.tables import repeated_keys
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions.documents import IndexPart, Lineage, Mount, Shard, Source, VersionDocument
from headrace.dataio.shards.versions.mounting import mount_of, named_by, with_mounts
from headrace.dataio.shards.view import Opened
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.mounts import MAX_MOUNTS, OPTION, PREFIX, Mounts

_NAMED = 5


def save(dataset: Opened, message: str) -> VersionDocument:
    """Save the view `dataset` as a version."""
    view = dataset.view
    if view is None:
        raise UsageError(f"version {dataset.version} is stored already", hint="`save` is for what `where` returns")
    parts = _narrowed(dataset.store, dataset.document, view.rows, view.bytes)
    if not parts:
        raise UsageError(f"no sample meets {' and '.join(view.lineage.where)}", hint="there is nothing to save")
    document = dataset.document
    made = versions.new_document(
        document.name,
        document.shards,
        parts,
        version=document.version + 1,
        parent=document.version,
        message=message or f"where {' and '.join(view.lineage.where)}",
        mounts=document.mounts,
        lineage=view.lineage,
    )
    return versions.commit(dataset.store, lambda _: made, trunk=False)


def remove(dataset: Opened, keys: Iterable[str] | None, where: str | None, message: str) -> VersionDocument:
    """Make the next version: the newest version without some samples."""
    listed = _listed(dataset, keys, where)

    def build(base: VersionDocument) -> VersionDocument:
        with _mounted(dataset, base) as store:
            opened = OpenIndex(store, base)
            gone = _removed_rows(dataset, opened, base, listed, where)
            count = sum(len(rows) for rows, _ in gone)
            left = [_without(opened, part, rows) for part, (rows, _) in enumerate(gone)]
            sizes = [part.left_bytes - size for part, (_, size) in zip(base.index, gone, strict=True)]
            parts = _narrowed(store, base, left, sizes)
        how = Lineage(operation="remove", where=(where,) if where else ())
        return _next(base, base.shards, parts, message or f"removed {counted(count, 'sample')}", base.mounts, how)

    return versions.commit(dataset.store, build)


def count_removed(dataset: Opened, keys: Iterable[str] | None, where: str | None) -> int:
    """The number of samples that `remove` would remove from the open version. Raises the same errors for `keys` and `where`."""
    listed = _listed(dataset, keys, where)
    with _mounted(dataset, dataset.document) as store:
        opened = OpenIndex(store, dataset.document)
        return sum(len(rows) for rows, _ in _removed_rows(dataset, opened, dataset.document, listed, where))


def _listed(dataset: Opened, keys: Iterable[str] | None, where: str | None) -> set[str] | None:
    """The keys to remove, or None for a condition."""
    if (keys is None) == (where is None):
        raise UsageError("remove takes either keys or where", hint="give one of them")
    if isinstance(keys, str):
        raise UsageError("keys must be a collection of keys, not one string", hint=f"keys=[{keys!r}]")
    _refuse_view(dataset)
    return None if keys is None else set(keys)


def _removed_rows(
    dataset: Opened, opened: OpenIndex, base: VersionDocument, listed: set[str] | None, where: str | None
) -> list[tuple[RowNumbers, int]]:
    """For each index part, the rows to remove and the bytes of their members."""
    if listed is not None:
        gone, missing = query.rows_with_keys(opened, listed)
        if missing:
            raise NotFoundError(f"{dataset.url} has no sample {_some(missing)}", hint="nothing was removed")
    else:
        gone = list(query.matching(opened, base, where or ""))
    count = sum(len(rows) for rows, _ in gone)
    if not count or count == len(opened):
        which = "no sample is" if not count else "all samples are"
        raise UsageError(f"{which} to be removed from {dataset.url}", hint="no version was made")
    return gone


def merge(dataset: Opened, others: Sequence[Opened], message: str) -> tuple[VersionDocument, list[Mount]]:
    """Make the next version: the newest version and the samples of `others`.

    Also returns the mounts that the caller named by passing `others`.
    """
    if not others:
        raise UsageError("merge takes at least one other dataset", hint="ds.merge(Dataset(url))")
    _refuse_view(dataset)
    guests = [_guest(dataset, other) for other in others]
    named = [
        mount for other in others for mount in (mount_of(Location(*_place(other.store), True)), *named_by(other.store))
    ]
    sources = tuple(Source(name=o.name, version=o.version, digest=o.digest) for o in others)
    names = ", ".join(f"{o.name} version {o.version}" for o in others)

    def build(base: VersionDocument) -> VersionDocument:
        shards = {shard.key: shard for shard in base.shards}
        mounts = {mount.name: mount for mount in base.mounts}
        for guest in guests:
            for mount in guest.mounts:
                known = mounts.setdefault(mount.name, mount)
                if known != mount:  # a forged name would send readers of one dataset to the other's location
                    raise ConflictError(
                        f"the datasets that are to be merged call two places {mount.name!r:.100}: {known.url!r:.200} and "
                        f"{mount.url!r:.200}",
                        hint="merge only datasets that Headrace wrote: it gives each place a name of its own",
                    )
            for shard in guest.shards:
                if shards.setdefault(shard.key, shard).size != shard.size:
                    raise CorruptionError(f"{shard.key} has two sizes in the datasets that are to be merged")
        if len(mounts) > MAX_MOUNTS:
            raise UsageError(f"the datasets lie in {len(mounts)} places", hint=f"at most {MAX_MOUNTS} can be joined")
        how, text = Lineage(operation="merge", sources=sources), message or f"merged {names}"
        parts = [*base.index, *(part for guest in guests for part in guest.parts)]
        made = _next(base, tuple(shards.values()), tuple(parts), text, tuple(mounts.values()), how)
        with _mounted(dataset, made, named) as store:
            made = _joined(store, made)
            _refuse_repeated(store, made)
        return made

    return versions.commit(dataset.store, build), named


# --- what is left of a part


def _without(opened: OpenIndex, part: int, gone: RowNumbers) -> RowNumbers:
    left = opened.kept(part)
    before = np.arange(opened.part_rows(part), dtype=np.uint32) if left is None else left
    return np.setdiff1d(before, gone, assume_unique=True)


def _narrowed(
    store: Store, document: VersionDocument, rows: Sequence[RowNumbers], sizes: Sequence[int]
) -> tuple[IndexPart, ...]:
    """The parts of `document` with only these rows, whose members have `sizes` bytes. Parts without rows are
    dropped."""
    there = [(p, r, s) for p, r, s in zip(document.index, rows, sizes, strict=True) if len(r)]
    changed = iter(store_bitmaps(store, [item for item in there if len(item[1]) != item[0].left]))
    return tuple(part if len(r) == part.left else next(changed) for part, r, _ in there)


def _next(
    base: VersionDocument,
    shards: tuple[Shard, ...],
    parts: tuple[IndexPart, ...],
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
def _mounted(dataset: Opened, document: VersionDocument, named: Sequence[Mount] = ()) -> Iterator[Store]:
    whole, owned = with_mounts(dataset.store, document, False, {}, dataset.trust_mounts, named)
    try:
        yield whole
    finally:
        if owned and whole is not dataset.store:
            whole.close()


def _refuse_view(dataset: Opened) -> None:
    if dataset.view is not None:
        raise UsageError("a view cannot be changed", hint="narrow it with where, or change the dataset it came from")


def _some(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return ", ".join(map(repr, listed[:_NAMED])) + (f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")


# --- merging


@dataclass(frozen=True)
class _Guest:
    """The shards, parts and mounts of a merged dataset, with their names in the dataset that it is merged into."""

    shards: tuple[Shard, ...]
    parts: tuple[IndexPart, ...]
    mounts: tuple[Mount, ...]


def _guest(host: Opened, other: Opened) -> _Guest:
    document, place = other.document, _place(other.store)
    if place == _place(host.store):
        prefix, mounts = "", document.mounts
    else:
        mount = mount_of(Location(place[0], place[1], True))
        prefix, mounts = f"{PREFIX}{mount.name}/", (mount, *document.mounts)

    def here(key: str) -> str:
        return key if key.startswith(PREFIX) else prefix + key

    def moved(part: IndexPart) -> IndexPart:
        left = None if part.kept is None else msgspec.structs.replace(part.kept, key=here(part.kept.key))
        # if the part is in a mount, its prefix already names that mount; rows in other mounts need no prefix
        outer = part.prefix if part.key.startswith(PREFIX) else prefix + part.prefix
        return msgspec.structs.replace(part, key=here(part.key), prefix=outer, kept=left)

    shards = tuple(msgspec.structs.replace(shard, key=here(shard.key)) for shard in document.shards)
    guest = msgspec.structs.replace(document, index=tuple(map(moved, document.index)))
    parts = guest.index
    if other.view is not None:
        parts = _narrowed(host.store, guest, other.view.rows, other.view.bytes)
    return _Guest(shards, parts, mounts)


def _place(store: Store) -> tuple[str, dict[str, object]]:
    location = (store.base if isinstance(store, Mounts) else store).location
    return location.url, {name: value for name, value in location.options.items() if name != OPTION}


def _joined(store: Store, document: VersionDocument) -> VersionDocument:
    """`document` with each part only once, in the order of their samples.

    If several entries name the same part, the union of their rows remains.
    """
    places = {shard.key: place for place, shard in enumerate(document.shards)}
    groups = dict[tuple[str, str], list[IndexPart]]()
    for part in document.index:
        groups.setdefault((part.key, part.prefix), []).append(part)
    parts = [part if len(same) == 1 else _union(store, document, same) for same in groups.values() for part in same[:1]]
    document = msgspec.structs.replace(document, index=tuple(parts), samples=sum(p.left for p in parts))
    firsts = [_first(OpenIndex(store, document), number, places) for number in range(len(parts))]
    order = sorted(range(len(parts)), key=firsts.__getitem__)
    return msgspec.structs.replace(document, index=tuple(parts[number] for number in order))


def _union(store: Store, document: VersionDocument, same: Sequence[IndexPart]) -> IndexPart:
    whole = msgspec.structs.replace(same[0], kept=None)
    if any(part.kept is None for part in same):
        return whole
    loaded = [rows for part in same if (rows := load_bitmap(store, part, part.key)) is not None]
    rows = np.unique(np.concatenate(loaded)).astype(np.uint32)
    if len(rows) == whole.rows:
        return whole
    for part, its in zip(same, loaded, strict=True):
        if len(its) == len(rows):
            return part
    table = OpenIndex(store, msgspec.structs.replace(document, index=(whole,))).part_table(0, ["bytes"])
    size: int = pc.sum(table["bytes"].take(pa.array(rows)), min_count=0).as_py()
    return store_bitmaps(store, [(whole, rows, size)])[0]


def _first(opened: OpenIndex, part: int, places: Any) -> tuple[int, int]:
    """The position of the first row of a part, even if that row was removed."""
    row = opened.first_row(part)
    return places[row.shard], row.members[0].offset


def _refuse_repeated(store: Store, document: VersionDocument) -> None:
    twice = repeated_keys(OpenIndex(store, document).tables(["key"]))
    if twice:
        raise ConflictError(
            f"{store.location.url}: two of the merged datasets hold {_some(twice)}",
            hint="leave the samples of one of them out with where, or remove them first",
        )
