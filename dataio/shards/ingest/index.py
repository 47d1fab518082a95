"""`index` makes a dataset over existing data without copying it: media files, or WebDataset tars.

Invariant: one call takes either files or tars. With `layout="auto"`, it takes tars if the patterns match any tar.

Failure behaviour: that of `index_files` and `index_tars`. Options for files are refused for tars, and the reverse.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from headrace.dataio.core.errors import ConflictError, CorruptionError, UsageError
from headrace.dataio.shards.dataset import Dataset, use_or_open
from headrace.dataio.shards.ingest import index_tars, patterns
from headrace.dataio.shards.ingest.grouping import Grouping, check_grouping
from headrace.dataio.shards.ingest.index_files import FOLLOW_TRIES, FileIndexer, FileMemory, FileOptions, Indexed
from headrace.dataio.shards.ingest.index_lerobot import LeRobotIndexer, is_lerobot_source
from headrace.dataio.shards.ingest.manifests import DEFAULT_COLUMNS, Columns
from headrace.dataio.shards.ingest.source_stores import FileStat
from headrace.dataio.shards.media.messages import check_text_field
from headrace.dataio.shards.units.engine import find_engine
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.mounting import with_mounts
from headrace.dataio.shards.workers.worker_pool import worker_count
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import JOINED
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store

Layout = Literal["auto", "tars", "files", "lerobot"]
Keys = Literal["member", "shard"]


@dataclass(frozen=True, slots=True)
class FollowMemory:
    """What calls of `index` with `follow` found, so that later calls for the same dataset do not read it again."""

    files: FileMemory = field(default_factory=FileMemory)
    tars: index_tars.Bad = field(default_factory=dict)
    episodes: dict[int, FileStat] = field(default_factory=dict)


_LAYOUTS: tuple[Layout, ...] = ("tars", "files", "lerobot")
Patterns = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]


def index(
    patterns: Patterns,
    url: str | os.PathLike[str] | Store,
    *,
    layout: Layout = "auto",
    follow: bool = False,
    group: Grouping = "stem",
    columns: Columns = DEFAULT_COLUMNS,
    keys: Keys = "member",
    name: str | None = None,
    strict: bool = False,
    text_field: str | None = None,
    engine: str = "local",
    progress: Callable[[Any], None] | None = None,
    workers: int | None = None,
    memory: FollowMemory | None = None,
    trust_mounts: bool = False,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Make a dataset at `url` over the files or tars that match `patterns`, where they lie, and open it.

    Args:
        patterns: for files: files, folders, globs and manifests, local or in stores, as for `pack`. For tars: one or
            more patterns (`headrace.dataio.shards.ingest.patterns`). Both may have braces, such as `{000..999}`.
        url: where to write the dataset, or an open store.
        layout (str): "files" takes media files, "tars" takes WebDataset tars, "lerobot" takes the episodes of a LeRobot
            data set. "auto" (the default) takes a LeRobot data set if the pattern is the folder of one, tars if the
            patterns match any, and otherwise files.
        follow (bool): add what is new to the dataset at `url`, as its next version. If there is no dataset, make one.
            If nothing is new, open the newest version. The default is False.
        group (str): which files are one sample: "stem" (the default), "dot" or "folder"
            (`headrace.dataio.shards.ingest.grouping`). Only for files.
        columns (Columns): the names of the columns in manifests, without `bytes`. Only for files.
        keys (str): "member" (the default) takes WebDataset's keys. "shard" puts the shard's path in front of them. Only
            for tars.
        name (str): the dataset's name. None derives it from `url`.
        strict (bool): raise the error of the first sample or shard that cannot be used. By default, it is skipped.
        text_field (str): the field of the samples' JSON that holds the text of samples without a `.txt`. None means
            "caption".
        engine (str): where the work runs: "local" (the default) or "ray".
        progress: a function that is called while the data are read, with a `Progress` for files and an `IndexProgress`
            for tars. None reports nothing.
        workers (int): the number of probing processes. None means one per core of this machine, or of the Ray cluster.
        memory (FollowMemory): with `follow`, what earlier calls for the same dataset found. Files and tars that could
            not be used are then read again only after they changed. None (the default) reads everything again.
        trust_mounts (bool): with `follow`, let the dataset refer to other locations, as for `Dataset`. The locations
            of `patterns` need no trust. The default is False.
        source_options: options for the stores of the files or tars, unless they are directories. The version records
            all options except secrets, so readers need their own credentials.
        storage_options: options for the dataset's store, as for `open_store`. Not with an open store.

    Returns:
        The dataset. Its `report` lists what was indexed, what was skipped, and what changed since.

    Raises:
        NotFoundError: nothing matches a pattern.
        UnsupportedError: a pattern is a command rather than an address.
        UsageError: two samples have the same key, there is nothing to index, or a Parquet file holds its media itself.
        CapacityError: the files are in too many buckets.
        ConflictError: a dataset exists at `url`, and `follow` is False.
        TransientError: a store cannot be reached, or a tar changes while it is read.

    Example:
        >>> with index(folder, f"{scratch}/in-place", workers=1) as dataset:
        ...     list(dataset.keys)
        ['tone']
        >>> with index(folder, f"{scratch}/in-place", follow=True, workers=1) as dataset:
        ...     dataset.version, dataset.report.samples
        (1, 0)
    """
    if columns.bytes:
        raise UsageError(
            "Parquet files with embedded media cannot be indexed in place, so index takes no bytes columns",
            hint="pack them: `headrace pack --bytes-column NAME` (in Python: pack(..., columns=Columns(bytes=...)))",
        )
    listed, memory = as_list(patterns), memory or FollowMemory()
    chosen = choose_layout(layout, listed, source_options)
    if chosen == "tars":
        _check_tar_options(group, columns)
        make = partial(
            index_tars.index,
            listed,
            name=name,
            strict=strict,
            keys=keys,
            text_field=text_field,
            engine=engine,
            progress=progress,
            workers=workers,
            trust_mounts=trust_mounts,
            source_options=source_options,
        )
        if not follow:
            return make(url=url, storage_options=storage_options)
        return _follow_tars(partial(make, follow=True, bad=memory.tars), url, storage_options)
    if keys != "member":
        raise UsageError("keys is for tars, and these are files", hint="the key of a file is its path: leave keys out")
    options = FileOptions(
        strict=strict,
        columns=columns,
        group=check_grouping(group),
        text_field=check_text_field(text_field),
        engine=engine,
        progress=progress,
        workers=workers,
        source_options=source_options,
        trust_mounts=trust_mounts,
    )
    worker_count(workers)
    find_engine(engine)
    store, owned = use_or_open(url, storage_options)
    with contextlib.ExitStack() as undo:
        if owned:
            undo.enter_context(store)
        history.refuse_checkpoints(store)
        with _indexer(chosen, listed, store, options, memory) as indexer:
            is_new = not (follow and history.list_versions(store))
            dataset = open_indexed(store, indexer.index(name) if is_new else indexer.follow(), owned, trust_mounts)
        undo.pop_all()
    return dataset


def _follow_tars(
    make: Callable[..., Dataset], url: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None
) -> Dataset:
    """Add the new tars. If another follower made a version meanwhile, look again what is new."""
    store, owned = use_or_open(url, storage_options)
    try:
        for _ in range(FOLLOW_TRIES - 1):
            before = history.list_versions(store)
            try:
                return make(url=url, storage_options=storage_options)
            except (ConflictError, CorruptionError):
                if history.list_versions(store) == before:
                    raise
        return make(url=url, storage_options=storage_options)
    finally:
        if owned:
            store.close()


def open_indexed(store: Store, indexed: Indexed, owned: bool, trust_mounts: bool) -> Dataset:
    """Open the version that an indexer made. Closing the dataset closes its mounts, and `store` if `owned`."""
    document, _ = history.load(store, indexed.version)
    names = {mount.name for mount in document.mounts}
    mounted = {name: one for name, one in indexed.mounted.items() if name in names}
    for name, one in indexed.mounted.items():
        if name not in names:
            one.close()
    base = Mounts(store, mounted, owns_base=owned, joined=JOINED in names)
    with contextlib.ExitStack() as undo:
        for one in mounted.values():
            undo.callback(one.close)
        opened, _ = with_mounts(base, document, owned, {}, trust_mounts)
        dataset = Dataset(opened, indexed.version, trust_mounts=trust_mounts)
        undo.pop_all()
    dataset.report, dataset.owns_store = indexed.report, True
    return dataset


def as_list(given: Patterns) -> list[str]:
    """Return the patterns as a list of text."""
    return [os.fspath(one) for one in ([given] if isinstance(given, str | os.PathLike) else given)]


def choose_layout(layout: str, listed: Sequence[str], source_options: Mapping[str, Any] | None) -> Layout:
    """Return "tars", "files" or "lerobot"."""
    for one in _LAYOUTS:
        if layout == one:
            return one
    if layout != "auto":
        raise UsageError(
            f"layout must be 'auto', 'tars', 'files' or 'lerobot', not {layout!r:.100}", hint="the default is auto"
        )
    if is_lerobot_source(listed, source_options):
        return "lerobot"
    options = dict(source_options or {})
    has_tar = patterns.match_tar(
        listed, lambda root: open_store(root, storage_options=options if "://" in root else {})
    )
    return "tars" if has_tar else "files"


def _indexer(
    chosen: Layout, listed: Sequence[str], store: Store, options: FileOptions, memory: FollowMemory
) -> FileIndexer | LeRobotIndexer:
    if chosen != "lerobot":
        return FileIndexer(file_sources(listed), store, options, memory.files)
    if len(listed) != 1:
        raise UsageError(f"one LeRobot data set can be indexed, not {len(listed)}", hint="`headrace merge` the results")
    if options.group != "stem" or options.columns != DEFAULT_COLUMNS:
        raise UsageError("group and columns are for files, and this is a LeRobot data set", hint="leave them out")
    return LeRobotIndexer(listed[0], store, options, memory.episodes, memory.files)


def file_sources(listed: Sequence[str]) -> list[str]:
    """Expand the lists and braces in patterns for files. The name of an existing file or folder stays as it is."""
    if not listed:
        raise UsageError("there is no pattern to index", hint="give files, folders, globs or manifests")
    return [
        source
        for text in listed
        for source in (
            [text] if os.path.lexists(text) else (url for one in text.split("::") for url in patterns.expanded(one))
        )
    ]


def _check_tar_options(group: str, columns: Columns) -> None:
    if group != "stem" or columns != DEFAULT_COLUMNS:
        raise UsageError(
            "group and columns are for files, and these are tars",
            hint="leave them out, or take the files by layout='files' (--layout files)",
        )
