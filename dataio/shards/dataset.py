"""An open dataset version, or a view of one.

Purpose: `Dataset` looks up samples in the index. Only `read` reads media. `where` returns a view with fewer samples.
`remove`, `merge` and `save` make a new version and return it as an open `Dataset`.
Invariants:

* A version or view never changes, so `digest` identifies all of it.
* Samples are numbered 0 … N-1 in the order (position of their shard in the version, offset of the first member).
* Memory does not grow with the number of samples, except for queries over all samples (`columns`, `table`, `keys`).
  `Sample` objects are made on demand.

Failure behaviour: opening raises `NotFoundError`, `AccessDeniedError` or `CorruptionError` naming the object. An index
of up to `CHECKED_AT_OPEN` bytes is read and checked completely when the dataset is opened. The rows of a larger index,
or of a dataset opened with `open_lazy`, are checked when they are read. So `CorruptionError` may be raised later.
`check` reads and checks everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, overload

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.core.suggestions import did_you_mean
from headrace.dataio.shards import member_reader
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.sample import Files, Sample
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import tags
from headrace.dataio.shards.versions.mounting import with_mounts
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.dataio.shards.diff import Diff
    from headrace.dataio.shards.ingest.report import PackReport
    from headrace.dataio.shards.query.views import View

CHECKED_AT_OPEN = 16 * limits.MIB
_ROWS_PER_READ = 1024


class Dataset:
    """One version of a dataset, open for reading.

    Use it in a `with` statement, or call `close`. Either closes the store if the `Dataset` opened it. Datasets made
    from this one (`where`, `remove`, …) share its store. Closing one of them closes the store for all.

    Args:
        url_or_store (str | os.PathLike[str] | Store): The dataset: a path, `s3://bucket/prefix`, another URL of
            `open_store`, or an open store.
        version (int | str | None): A version number or a tag. None opens the newest version. Default: None.
        trust_mounts (bool): Whether the dataset may name local folders, private hosts and other S3 endpoints
            (`headrace.dataio.shards.versions.mounting`). Default: False.
        storage_options (Mapping[str, Any] | None): Options of the store, as for `open_store`. Not with an open store.
            Default: None.

    Attributes:
        store (Store): The store of the dataset, with its mounts.
        document (VersionDocument): The version document.
        digest (str): BLAKE3 of the version, or of the view.
        report (PackReport | None): The report of `pack` or `index`, if it just made this dataset.

    Raises:
        NotFoundError: There is no dataset at the URL, or no such version.
        CorruptionError: The version document or the index is damaged.
        UsageError: The version has mounts that need `trust_mounts`.

    Example:
        >>> with Dataset(clips) as dataset:
        ...     len(dataset), dataset.version, dataset.sample(0).key
        (4, 1, '0')
    """

    def __init__(
        self,
        url_or_store: str | os.PathLike[str] | Store,
        version: int | str | None = None,
        *,
        trust_mounts: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._open(url_or_store, version, storage_options, trust_mounts)
        self._check_small()

    @classmethod
    def open_lazy(
        cls,
        url: str | os.PathLike[str],
        version: int | str | None = None,
        *,
        trust_mounts: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Open a dataset like `Dataset(...)`, but never read the whole index first.

        The arguments are those of `Dataset`. Rows are checked when they are read, as with a large index. Call `check`
        to check all of them.
        """
        dataset = cls.__new__(cls)
        dataset._open(url, version, storage_options, trust_mounts)
        return dataset

    def _open(
        self,
        url_or_store: str | os.PathLike[str] | Store,
        version: int | str | None,
        storage_options: Mapping[str, Any] | None,
        trust_mounts: bool,
        named_mounts: Sequence[versions.Mount] = (),
    ) -> None:
        if type(trust_mounts) is not bool:
            raise UsageError(f"trust_mounts={trust_mounts!r:.100} is neither True nor False")
        self.trust_mounts = trust_mounts
        self.report: PackReport | None = None
        self.view: View | None = None
        self.store, self.owns_store = use_or_open(url_or_store, storage_options)
        try:
            self.document, self.digest = tags.load(self.store, version)
            self.store, self.owns_store = with_mounts(
                self.store, self.document, self.owns_store, storage_options or {}, trust_mounts, named_mounts
            )
            self.index = OpenIndex(self.store, self.document)
        except BaseException:
            self.close()
            raise

    def _check_small(self) -> None:
        try:
            if self.document.summary().part_bytes <= CHECKED_AT_OPEN:
                self.index.check()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL of the dataset, without secrets."""
        return self.store.location.url

    @property
    def version(self) -> int:
        """The number of the open version. For a view, the number of the version that it filters."""
        return self.document.version

    @property
    def name(self) -> str:
        """The name in the version document."""
        return self.document.name

    @property
    def lineage(self) -> versions.Lineage:
        """The operation and the sources that made this version or view."""
        if self.view is not None:
            return self.view.lineage
        return self.document.lineage or versions.Lineage(operation=self.document.message)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """A dictionary of plain JSON types that identifies these samples. Store it with the logs of a training run."""
        identity = {"name": self.name, "version": self.version, "digest": self.digest, "samples": len(self)}
        return identity if self.view is None else identity | self.view.fingerprint

    @property
    def total_bytes(self) -> int:
        """The total bytes of the samples' members."""
        return self.document.summary().sample_bytes if self.view is None else self.view.total_bytes

    @property
    def keys(self) -> Sequence[str]:
        """The samples' keys, ordered by number. This reads the keys of all samples into memory."""
        return _Keys(self.columns(["key"])["key"])

    @property
    def table(self) -> pa.Table:
        """The whole index (`headrace.dataio.shards.index.rows.SCHEMA`), one row for each sample.

        `columns` reads only some columns.
        """
        return self.index.columns()

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Read columns of the index.

        Args:
            names (Sequence[str]): Names of columns of `headrace.dataio.shards.index.rows.SCHEMA`. "caption" is another
                name of "text".

        Returns:
            pyarrow.Table: One row for each sample, ordered by number.

        Raises:
            UsageError: The index has no such column.

        Example:
            >>> with Dataset(clips) as dataset:
            ...     dataset.columns(["key"])["key"].to_pylist()
            ['0', '1', '2', '3']
        """
        from headrace.dataio.shards.index import rows as index  # imports Arrow, which sample lookup does not need

        known = [*index.SCHEMA.names, "caption"]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(
                f"the index has no column {unknown[0]!r}{did_you_mean(unknown[0], known)}",
                hint=f"it has {', '.join(known)}",
            )
        if "caption" not in names:
            return self.index.columns(names)
        stored = ["text" if name == "caption" else name for name in names]
        return self.index.columns(list(dict.fromkeys(stored))).select(stored).rename_columns(list(names))

    def constant_value(self, column: str) -> str | None:
        """Return the value that all samples have in this column, or None if the version document records none.

        This reads nothing from the store.
        """
        return self.index.constant_value(column)

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), _ROWS_PER_READ):
            yield from self.samples(range(start, min(start + _ROWS_PER_READ, len(self))))

    def sample(self, i: int) -> Sample:
        """Look up one sample.

        Args:
            i (int): The sample's number, 0 <= i < len(self).

        Raises:
            UsageError: There is no such number.
        """
        return self.samples([i])[0]

    def samples(self, ids: Sequence[int]) -> list[Sample]:
        """Look up samples. This is faster than one call of `sample` for each.

        Args:
            ids (Sequence[int]): The samples' numbers, in any order.

        Returns:
            list[Sample]: The samples, in the order of `ids`.
        """
        self._check_numbers(ids)
        return self.index.samples(ids)

    def files(self, ids: Sequence[int]) -> list[Files]:
        """Look up only the positions of these samples' files, in this order.

        This takes a fifth of the time that `samples` takes. Use it if you need only the bytes of files.
        """
        self._check_numbers(ids)
        return self.index.files(ids)

    def _check_numbers(self, ids: Sequence[int]) -> None:
        end = len(self)
        for i in ids:
            if not 0 <= i < end:
                raise UsageError(f"{self.url}: there is no sample {i}", hint=f"samples are numbered 0 to {end - 1}")

    def find(self, key: str) -> Sample:
        """Find a sample by its key. This reads the key column part by part until it finds the key.

        Args:
            key (str): The sample's key.

        Raises:
            NotFoundError: No sample has this key.
        """
        from headrace.dataio.shards.index import arrow as pc

        start = 0
        for table in self.index.tables(["key"]):
            number = pc.index(table["key"], key).as_py()
            if number >= 0:
                return self.sample(start + number)
            start += table.num_rows
        raise NotFoundError(f"{self.url} has no sample {key!r}", hint="`headrace ls` lists the keys")

    def read(self, sample: Sample, ext: str) -> bytes:
        """Read one file of a sample directly from the store, and verify its checksum.

        Args:
            sample (Sample): A sample of this dataset.
            ext (str): The extension of the file, such as "mp4".

        Returns:
            bytes: The file's contents.

        Raises:
            NotFoundError: The sample has no file with this extension.
            CorruptionError: The shard does not hold the bytes that were packed.
            CapacityError: The file is larger than 1 GiB.

        Example:
            >>> with Dataset(clips) as dataset:
            ...     sample = dataset.find("0")
            ...     len(dataset.read(sample, "mp4")) == sample.member("mp4").length
            True
        """
        return member_reader.read_member(self.store, sample, ext)

    def check(self) -> None:
        """Read and check the whole index. Raises `CorruptionError` for the first problem."""
        self.index.check()

    # -- views and further versions

    def where(self, condition: str) -> Dataset:
        """Return a view of the samples that meet a condition, renumbered from 0.

        The view leaves out samples for which the condition is null. It does not change when later versions are made.

        Args:
            condition (str): One boolean SQL expression over the columns of `ds.table`, a few aliases
                (`headrace.dataio.shards.query.conditions.COLUMNS`) and the promoted fields of the samples' JSON, such
                as `"duration between 2 and 20 and caption ilike '%dog%'"`.

        Returns:
            Dataset: The view. It shares the store of this dataset.

        Raises:
            UsageError: The text is not such an expression, or it names an unknown column.

        Example:
            >>> with Dataset(clips) as dataset:
            ...     list(dataset.where("key in ('1', '3')").keys)
            ['1', '3']
        """
        from headrace.dataio.shards.query import views  # imports DuckDB and Arrow

        lineage = (
            self.view.lineage
            if self.view is not None
            else versions.Lineage(
                operation="where",
                sources=(versions.Source(name=self.name, version=self.version, digest=self.digest),),
            )
        )
        return self._open_view(views.narrow(self.store, self.document, self.index, lineage, condition))

    def save(self, message: str = "", *, tag: str | None = None) -> Dataset:
        """Save this view as a version. Readers open it by its number or a tag, and never by default.

        Args:
            message (str): The message of the new version. Default: the conditions of the view.
            tag (str | None): A permanent name, as for the method `tag`. Default: None, no name.

        Returns:
            Dataset: The new version.

        Raises:
            ConflictError: Another version has this tag. No version is made.
            UsageError: This is not a view, no sample meets its conditions, or the tag is not valid.

        Example:
            >>> with Dataset(clips) as dataset:
            ...     saved = dataset.where("key in ('1', '3')").save("two samples", tag="two")
            >>> len(saved)
            2
        """
        from headrace.dataio.shards import changes

        if tag is not None:
            tags.check_free(self.store, tag)  # before a version is made that cannot get this tag
        new_version = self._open_version(changes.save(self, message))
        if tag is not None:
            new_version.tag(tag)
        return new_version

    def remove(self, keys: Iterable[str] | None = None, *, where: str | None = None, message: str = "") -> Dataset:
        """Make the next version: the newest version without some of its samples. Give either `keys` or `where`.

        No shard is rewritten and no bytes are freed.

        Args:
            keys (Iterable[str] | None): The keys of the samples to remove. Default: None.
            where (str | None): A condition, as for the method `where`. Default: None.
            message (str): The message of the new version. Default: the number of removed samples.

        Returns:
            Dataset: The new version.

        Raises:
            NotFoundError: No sample has one of the keys.
            UsageError: All samples would be removed, or none.
        """
        from headrace.dataio.shards import changes

        return self._open_version(changes.remove(self, keys, where, message))

    def merge(self, *others: Dataset, message: str = "") -> Dataset:
        """Make the next version: the newest version and all samples of other datasets.

        The shards and indexes of the other datasets stay where they are, so they must not be deleted.

        Args:
            *others (Dataset): The datasets to add, in this order. They may be other versions of this dataset: samples
                that exist already are not added again.
            message (str): The message of the new version. Default: the names and versions of `others`.

        Returns:
            Dataset: The new version.

        Raises:
            ConflictError: Two datasets hold different samples with the same key.
        """
        from headrace.dataio.shards import changes

        return self._open_version(*changes.merge(self, others, message))

    def tag(self, name: str) -> None:
        """Give this version a permanent name.

        Args:
            name (str): Letters, digits, ".", "_" and "-", at most 128. It does not begin with a digit.

        Raises:
            ConflictError: Another version has this name.
            UsageError: The name is not valid, or this is a view.
        """
        if self.view is not None:
            raise UsageError("a view has no version to be tagged", hint="save it, and tag what that returns")
        tags.create(self.store, name, self.document.version, self.digest)

    def diff(self, other: Dataset) -> Diff:
        """Compare this version with another one, by key.

        Args:
            other (Dataset): The newer version or view.

        Returns:
            Diff: The numbers of added, removed and changed samples, and an iterator of their keys. Use it in a `with`
            statement.
        """
        from headrace.dataio.shards.diff import diff

        return diff(self, other)

    def _open_view(self, view: View) -> Dataset:
        dataset = object.__new__(Dataset)
        dataset.__dict__.update(self.__dict__)
        dataset.view, dataset.index, dataset.digest, dataset.report = view, view.index, view.digest, None
        return dataset

    def _open_version(self, document: versions.VersionDocument, named_mounts: Sequence[versions.Mount] = ()) -> Dataset:
        dataset = object.__new__(Dataset)
        dataset._open(self.store, document.version, None, self.trust_mounts, named_mounts)
        dataset._check_small()
        dataset.owns_store = dataset.owns_store or self.owns_store
        return dataset

    def close(self) -> None:
        """Close the store if this dataset opened it."""
        if self.owns_store:
            self.store.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        narrowed = "" if self.view is None else f", where={' and '.join(self.view.lineage.where)!r}"
        return f"Dataset({self.url!r}, version={self.version}{narrowed}, samples={len(self)})"


def use_or_open(
    url_or_store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None
) -> tuple[Store, bool]:
    """Return the given store, or open the store at the URL. The second value is whether the caller must close it.

    Raises:
        UsageError: Options were given together with an open store.
    """
    if not isinstance(url_or_store, Store):
        return open_store(url_or_store, storage_options=storage_options), True
    if storage_options:
        raise UsageError(
            "storage_options go with a URL, and this store is open already",
            hint="give them to open_store, or leave them out",
        )
    return url_or_store, False


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
