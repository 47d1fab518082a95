"""An open dataset version: which samples there are and where they lie.

Purpose: `Dataset` answers "what is sample i" from the index; it reads no media.
Invariants: everything about one version is fixed, so `digest` stands for all of it. Samples are numbered 0 … N-1 in the order
(shard, offset of the first member). Memory is that of the index's columns; `Sample` objects are made when asked for.
Failure behaviour: opening raises `NotFoundError`, `AccessDeniedError` or `CorruptionError` naming the object; a dataset that
opened answers without I/O and without errors, but for numbers and keys that do not exist; only `read` goes to the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc

from dataio.core import limits
from dataio.core.errors import CorruptionError, NotFoundError, UsageError
from dataio.shards import index, members, versions
from dataio.shards.contract import Sample
from dataio.shards.mounting import with_mounts
from dataio.shards.report import PackReport
from dataio.store.contract import Store
from dataio.store.open import open_store

_PART_BYTES = 1 * limits.GIB
_ROWS_AT_ONCE = 1024


class Dataset:
    """Version `version` (None: the newest) of the dataset at a URL or in an open store.

    `storage_options` go to `open_store`; a store that was opened here is closed by `close` or the `with` statement.
    `report` is what `pack` has to say about a dataset that it just made.
    """

    def __init__(
        self, url_or_store: str | os.PathLike[str] | Store, version: int | None = None, **storage_options: Any
    ) -> None:
        if isinstance(url_or_store, Store) and storage_options:
            raise UsageError("storage options go with a URL, not with a store that is open already")
        self.owns_store = not isinstance(url_or_store, Store)
        self.report: PackReport | None = None
        self.store = url_or_store if isinstance(url_or_store, Store) else open_store(url_or_store, **storage_options)
        try:
            self.document, self.digest = versions.load(self.store, version)
            self.store, self.owns_store = with_mounts(self.store, self.document, self.owns_store, storage_options)
            self._table = _load_table(self.store, self.document)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where the dataset is, without secrets."""
        return self.store.location.url

    @property
    def version(self) -> int:
        """The number of the open version."""
        return self.document.version

    @property
    def name(self) -> str:
        """What the dataset is called."""
        return self.document.name

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.document.shards)

    @property
    def keys(self) -> Sequence[str]:
        """The samples' keys, by number."""
        return _Keys(self._table["key"])

    @property
    def table(self) -> pa.Table:
        """The index's columns (`dataio.shards.index.SCHEMA`), one row a sample."""
        return self._table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            rows = self._table.slice(start, _ROWS_AT_ONCE).to_pylist()
            yield from (index.from_row(row, start + i) for i, row in enumerate(rows))

    def sample(self, i: int) -> Sample:
        """Sample number `i`, 0 <= i < len(self)."""
        return self.samples([i])[0]

    def samples(self, ids: Sequence[int]) -> list[Sample]:
        """The samples of these numbers, in this order."""
        for i in ids:
            if not 0 <= i < len(self):
                raise UsageError(
                    f"{self.url}: there is no sample {i}", hint=f"samples are numbered 0 to {len(self) - 1}"
                )
        rows = self._table.take(pa.array(ids, pa.int64())).to_pylist()
        return [index.from_row(row, i) for row, i in zip(rows, ids, strict=True)]

    def find(self, key: str) -> Sample:
        """The sample of this key, or `NotFoundError`."""
        number = pc.index(self._table["key"], key).as_py()
        if number < 0:
            raise NotFoundError(f"{self.url} has no sample {key!r}", hint="`millrace ls` lists the keys")
        return self.sample(number)

    def read(self, sample: Sample, ext: str) -> bytes:
        """The bytes of one member, straight from the store, their checksum verified."""
        return members.read(self.store, sample, ext)

    def close(self) -> None:
        """Close the store if this dataset opened it."""
        if self.owns_store:
            self.store.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Dataset({self.url!r}, version={self.version}, samples={len(self)})"


class _Keys(Sequence[str]):
    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return str(self._column[i].as_py())

    def __iter__(self) -> Iterator[str]:
        for chunk in self._column.iterchunks():
            yield from (key.as_py() for key in chunk)


def _load_table(store: Store, document: versions.VersionDocument) -> pa.Table:
    sizes = document.shard_sizes()
    parts = [_load_part(store, part, sizes) for part in document.index]
    table = pa.concat_tables(parts) if parts else index.SCHEMA.empty_table()
    _check_order(table, f"{store.location.url}: version {document.version}")
    return table


def _load_part(store: Store, part: versions.IndexPart, sizes: Any) -> pa.Table:
    name = f"{store.location.url}: {part.key}"
    try:
        data = store.get(part.key, max_bytes=_PART_BYTES)
    except NotFoundError as error:
        raise CorruptionError(f"{name} is missing, though the dataset version names it") from error
    return index.read_part(data, name=name, expected_digest=part.digest, rows=part.rows, shards=sizes)


def _check_order(table: pa.Table, name: str) -> None:
    """Numbers are places in (shard, offset) order, and keys are unique."""
    if pc.count_distinct(table["key"]).as_py() != table.num_rows:
        raise CorruptionError(f"{name}: two samples have the same key")
    offset = pc.struct_field(pc.list_element(table["members"], 0), "offset")
    places = pa.table({"shard": table["shard"], "offset": offset}).combine_chunks()
    before, after = places.slice(0, max(0, table.num_rows - 1)), places.slice(1)
    same = pc.equal(before["shard"], after["shard"])
    ordered = pc.or_(
        pc.less(before["shard"], after["shard"]), pc.and_(same, pc.less(before["offset"], after["offset"]))
    )
    if not pc.all(ordered, min_count=0).as_py():
        raise CorruptionError(f"{name}: the samples are not in the order of their shards and offsets")
