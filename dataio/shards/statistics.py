"""Counts the samples, hours, codecs, sizes and more of a dataset version or a view, for `headrace info`.

Purpose: all figures are sums or counts over columns of the index, so each index part is counted by itself, as a unit of
an engine (`headrace.dataio.shards.units.engine`), and the counts are added.

Invariants:

* Only the needed columns of a part are read. Memory is that of these columns, for all parts that are read concurrently.
* The result does not depend on the engine or the number of workers. Sums of durations are rounded once, at the end of
  each part and at the end of the sum.
* With a journal, a run that was interrupted continues after its last finished unit.

Failure behaviour: a damaged part raises `CorruptionError`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version as package_version
from typing import Any

import blake3
import msgspec

from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.query.open_index import OpenIndex, RowSelection, decode_bitmap, encode_bitmap
from headrace.dataio.shards.units.engine import (
    RemoteTask,
    Step,
    Task,
    UnitRunner,
    check_shareable,
    find_engine,
    run_units,
)
from headrace.dataio.shards.units.journal import Done, JournalFolder, Record, Unit, divide
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history, tags
from headrace.dataio.shards.workers.worker_pool import worker_count
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.joined import JOINED, SHARD_PREFIX
from headrace.dataio.store.open import open_location

FORMAT = 1
_MAX_THREADS = 8
_MAX_TAGS = 200
_UNIT_PARTS = 8
_PLACES = ("shard", "members")
"""The columns that tell which samples share files. They are read only if the dataset has joined shards."""
_ROWS_AT_ONCE = 4096
_COLUMNS = ("duration", "width", "height", "frames", "video_codec", "audio_codec", "sample_rate", "text")
_COLOR = ("color_space", "color_range", "color_primaries", "color_transfer")
_COUNTED: dict[str, tuple[tuple[str, ...], str]] = {
    "video_codecs": (("video_codec",), ""),
    "audio_codecs": (("audio_codec",), ""),
    "sizes": (("width", "height"), "x"),
    "sample_rates": (("sample_rate",), ""),
    "colors": (_COLOR, "/"),
}
"""The columns whose values are counted, and the text that separates the values."""


class _Rows(msgspec.Struct, frozen=True):
    """Rows of a part, as a bitmap (`headrace.dataio.shards.query.open_index`) and their number."""

    bitmap: bytes
    count: int


class _PartsToCount(Unit, frozen=True):
    """Index parts, by their numbers. `rows` holds for each the rows of a view, or None for a version."""

    parts: tuple[int, ...]
    rows: tuple[_Rows | None, ...]


class PartCounts(Record, frozen=True, kw_only=True):
    """The counts of the samples of some index parts."""

    parts: int
    samples: int
    seconds: tuple[float, ...]
    video_seconds: tuple[float, ...]
    frames: int
    with_text: int
    counts: dict[str, dict[str, int]]
    repeated_bytes: int = 0
    """Bytes of files that belong to several samples, without the first time that each is counted."""

    @property
    def done(self) -> Done:
        """The work of the unit."""
        return Done(self.parts, 0, self.samples)


def summary(
    dataset: Dataset,
    *,
    engine: str = "local",
    workers: int | None = None,
    journal: str | os.PathLike[str] | Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the figures that `headrace info` prints, with the most frequent values first.

    Args:
        dataset (Dataset): The version or view.
        engine (str): Where the work runs: "local" or "ray". Default: "local".
        workers (int | None): The number of index parts to read at once. Default: one for each core of this machine, at
            most 8, or one for each core of the Ray cluster.
        journal (str | os.PathLike[str] | Store | None): A folder or URL for the journal of the run. If the same call is
            made again after an interruption, it continues after the last finished unit. The Ray engine needs it.
            Default: None, which records nothing.
        progress (Callable[[int, int], None] | None): A function that is called with the number of finished index parts
            and of all. Default: None.

    Returns:
        dict[str, Any]: Plain JSON types.

    Raises:
        CorruptionError: An index part is damaged.

    Example:
        >>> with Dataset(clips) as dataset:
        ...     figures = summary(dataset, workers=1)
        >>> figures["samples"], figures["sizes"]
        (4, {'64x48': 4})
    """
    records = _count(dataset, engine, workers, journal, progress)
    figures = {**_document_figures(dataset), **_sum_counts(records)}
    return figures | {"member_bytes": dataset.total_bytes - sum(record.repeated_bytes for record in records)}


def _document_figures(dataset: Dataset) -> dict[str, Any]:
    """Return the figures that the version document holds."""
    return {
        "url": dataset.url,
        "name": dataset.name,
        "version": dataset.version,
        "digest": dataset.digest,
        "created": dataset.document.created,
        "message": dataset.document.message,
        "parent": dataset.document.parent,
        "trunk": dataset.document.trunk == dataset.version,
        "made_from": [msgspec.to_builtins(source) for source in dataset.lineage.sources],
        "where": list(dataset.lineage.where),
        "tags": _tags_of(dataset),
        "samples": len(dataset),
        "shards": len(dataset.document.shards),
        "bytes": dataset.document.summary().shard_bytes,
        "member_bytes": dataset.total_bytes,
        "fields": dict(sorted(dataset.document.summary().fields.items())),
    }


def _tags_of(dataset: Dataset) -> list[str]:
    """Return the tags of this version, or for a view, of the version that it filters.

    Only the first `_MAX_TAGS` tags are searched.
    """
    names = sorted(tags.names(dataset.store))[:_MAX_TAGS]
    return [name for name in names if tags.read(dataset.store, name).version == dataset.version]


def _sum_counts(records: Iterable[PartCounts]) -> dict[str, Any]:
    """Add the counts of all parts."""
    seconds, video_seconds, frames, with_text = list[float](), list[float](), 0, 0
    totals = {name: Counter[str]() for name in _COUNTED}
    for record in records:
        seconds += record.seconds
        video_seconds += record.video_seconds
        frames += record.frames
        with_text += record.with_text
        for name, counts in record.counts.items():
            totals[name].update(counts)
    return {
        "seconds": math.fsum(seconds),
        "video_seconds": math.fsum(video_seconds),
        "video_frames": frames,
        "with_text": with_text,
        **{name: dict(sorted(counter.items(), key=lambda row: (-row[1], row[0]))) for name, counter in totals.items()},
    }


# --- units


def _count(
    dataset: Dataset,
    engine: str,
    workers: int | None,
    journal: str | os.PathLike[str] | Store | None,
    progress: Callable[[int, int], None] | None,
) -> list[PartCounts]:
    """Count the samples of all index parts, in units."""
    worker_count(workers)
    chosen, units, done = find_engine(engine), _units(dataset), Done()
    plan = ["info", FORMAT, package_version("headrace"), dataset.url, dataset.digest]

    def step(finished: Done) -> None:
        nonlocal done
        done = done.plus(finished)
        if progress is not None:
            progress(done.items, len(dataset.document.index))

    with JournalFolder(journal) as folder:
        records = folder.open(blake3.blake3(msgspec.json.encode(plan)).hexdigest()[:32], PartCounts)
        run_units(_task(dataset), records, units, engine=chosen, workers=workers, step=step)
        counts = list(records.records(len(units)))
        folder.delete()
    return counts


def _units(dataset: Dataset) -> list[_PartsToCount]:
    parts = dataset.document.index
    runs = divide([part.size for part in parts], unit_bytes=versions.PART_BYTES, unit_items=_UNIT_PARTS)
    return [
        _PartsToCount(number, tuple(run), tuple(_rows_of_view(dataset, part) for part in run))
        for number, run in enumerate(runs)
    ]


def _rows_of_view(dataset: Dataset, part: int) -> _Rows | None:
    rows = None if dataset.view is None else dataset.index.remaining_rows(part)
    return None if rows is None else _Rows(encode_bitmap(rows, dataset.document.index[part].rows), len(rows))


def _task(dataset: Dataset) -> Task[_PartsToCount, PartCounts]:
    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_PartCounter]:
        threads = worker_count(workers, min(_MAX_THREADS, os.cpu_count() or 1))
        yield _PartCounter(dataset.store, dataset.document, threads)

    def remote() -> RemoteTask[_PartsToCount, PartCounts]:
        check_shareable(dataset.store.location)
        settings = _RemoteSettings(dataset.store.location, dataset.version)
        return RemoteTask(_open_remote, msgspec.msgpack.encode(settings))

    return Task("info", _PartsToCount, opener, remote)


class _RemoteSettings(msgspec.Struct, frozen=True):
    store: Location
    version: int


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_PartCounter]:
    task_settings = msgspec.msgpack.decode(settings, type=_RemoteSettings)
    with open_location(task_settings.store) as store:
        yield _PartCounter(store, history.load(store, task_settings.version)[0], 1)


class _PartCounter(UnitRunner[_PartsToCount, PartCounts]):
    """Counts the samples of index parts."""

    def __init__(self, store: Store, document: versions.VersionDocument, threads: int) -> None:
        self._store, self._document, self.threads = store, document, threads
        self._index = OpenIndex(store, document)
        self._has_joined = any(mount.name == JOINED for mount in document.mounts)

    def run(self, units: Iterator[_PartsToCount], step: Step) -> Iterator[tuple[_PartsToCount, PartCounts]]:
        """Count the parts of units in order."""
        for unit in units:
            tables = [self._table(*one) for one in zip(unit.parts, unit.rows, strict=True)]
            record = _count_tables(tables)
            step(record.done)
            yield unit, record

    def _table(self, part: int, rows: _Rows | None) -> Any:
        """Read the columns of the samples of a part."""
        columns = (*_COLUMNS, *_COLOR, *(_PLACES if self._has_joined else ()))
        if rows is None:
            return self._index.part_table(part, columns)
        described = self._document.index[part]
        document = msgspec.structs.replace(self._document, index=(described,))
        chosen = RowSelection()
        chosen.add(decode_bitmap(rows.bitmap, described.rows, rows.count, described.key), described.rows)
        return OpenIndex(self._store, document, chosen).part_table(0, columns)


def _count_tables(tables: list[Any]) -> PartCounts:
    import pyarrow.compute as pc

    counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED}
    seconds, video_seconds, frames, with_text = list[float](), list[float](), 0, 0
    for table in tables:
        video = table["duration"].filter(pc.is_valid(table["video_codec"]))
        seconds.append(pc.sum(table["duration"], min_count=0).as_py())
        video_seconds.append(pc.sum(video, min_count=0).as_py())
        frames += pc.sum(table["frames"], min_count=0).as_py()
        with_text += table.num_rows - table["text"].null_count
        for name, (columns, separator) in _COUNTED.items():
            counts[name].update(_values(table, columns, separator))
    return PartCounts(
        parts=len(tables),
        samples=sum(table.num_rows for table in tables),
        seconds=tuple(seconds),
        video_seconds=tuple(video_seconds),
        frames=frames,
        with_text=with_text,
        counts={name: dict(counter) for name, counter in counts.items()},
        repeated_bytes=sum(_repeated_bytes(table) for table in tables if "members" in table.column_names),
    )


def _repeated_bytes(table: Any) -> int:
    """Return the bytes of members at the same place of a joined shard as another member, such as a shared video."""
    seen, repeated = set[tuple[str, int, int]](), 0
    for batch in table.select(list(_PLACES)).to_batches(max_chunksize=_ROWS_AT_ONCE):
        for shard, members in zip(batch["shard"].to_pylist(), batch["members"].to_pylist(), strict=True):
            if not shard.startswith(SHARD_PREFIX):
                continue
            for member in members:
                place = (shard, member["offset"], member["length"])
                repeated += member["length"] if place in seen else 0
                seen.add(place)
    return repeated


def _values(table: Any, columns: tuple[str, ...], separator: str) -> dict[str, int]:
    import pyarrow.compute as pc

    present = table.select(list(columns)).filter(pc.is_valid(table[columns[0]]))
    grouped = present.group_by(list(columns), use_threads=False).aggregate([([], "count_all")]).to_pylist()
    return {separator.join(str(row[c]) for c in columns): int(row["count_all"]) for row in grouped}
