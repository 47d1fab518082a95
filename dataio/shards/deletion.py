"""Deletes a dataset: all its versions, and the objects that only these versions name.

Purpose: `headrace delete`. `plan` finds out what belongs to a dataset, and `Deletion.apply` deletes it.

Invariants:

* An object is deleted if a version names it and its key is one that Headrace gives to such objects. So a document that
  names the user's own files deletes none of them. Media that were indexed in place, and objects below mounts, stay.
* Objects that no version names stay, and are listed. They may belong to a writer that is still running.
* The documents are deleted last. So an interrupted deletion is continued by the same command.

Datasets have no leases: jobs that read a dataset do not announce themselves, so the caller must stop them first.
Failure behaviour: `CorruptionError` or `UnsupportedError` if a version cannot be read, since it may name any object. Then
nothing is deleted. `ConflictError` if another writer makes a version in the meantime. Its documents then stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.dataio.core.errors import ConflictError
from headrace.dataio.shards.versions import history, tags
from headrace.dataio.shards.versions.documents import DATASET_KEY, VersionDocument, version_key
from headrace.dataio.shards.versions.mounting import JOINED_MOUNT
from headrace.dataio.shards.versions.paging import Entry, PagedList
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import FILES_FOLDER, LIST_FOLDER, SHARD_PREFIX, JoinedObjects, is_made

_DATA = re.compile(r"shards/\d{8,}-[0-9a-f]{16}\.tar|index/(\d{8,}-[0-9a-f]{16}\.parquet|[0-9a-f]{32}\.kept)")
_LISTS = re.compile(rf"index/[0-9a-f]{{32}}\.(shards|parts)|{LIST_FOLDER}\d{{8,12}}-[0-9a-f]{{32}}\.json")
T = TypeVar("T", bound=Entry)
_FOLDERS = ("shards/", "index/", LIST_FOLDER, FILES_FOLDER)


@dataclass(frozen=True, slots=True)
class Deletion:
    """What belongs to a dataset.

    - `versions`: the numbers of its versions. `bytes`: the size of the data and lists.
    - `data`, `lists`, `documents`: the keys of objects, in the order in which they are deleted.
    - `left`: the keys of objects in the folders of the dataset that stay. `mounts`: the URLs of media that stay.
    """

    store: Store
    versions: tuple[int, ...]
    data: tuple[str, ...]
    lists: tuple[str, ...]
    documents: tuple[str, ...]
    bytes: int
    left: tuple[str, ...]
    mounts: tuple[str, ...]

    @property
    def objects(self) -> int:
        """The number of objects that are deleted."""
        return len(self.data) + len(self.lists) + len(self.documents)

    def apply(self) -> None:
        """Delete the objects."""
        for keys in (self.data, self.lists, self.documents):
            self._require_same_versions()
            self.store.delete_many(keys)

    def _require_same_versions(self) -> None:
        new = set(history.list_versions(self.store)) - set(self.versions)
        if new:
            raise ConflictError(
                f"{self.store.location.url}: another writer made version {max(new)}",
                hint="stop the writers and readers of this dataset, and give the command again",
            )


def plan(store: Store) -> Deletion:
    """Find out what belongs to the dataset in this store. Raises `NotFoundError` if there is none."""
    numbers = history.list_versions(store)
    if not numbers and not store.exists(DATASET_KEY):
        history.load(store)  # raises the error that says what is there
    named, mounts = set[str](), dict[str, None]()
    for number in numbers:
        document, _ = history.load(store, number)
        named.update(_named(store, document))
        mounts |= dict.fromkeys(mount.url for mount in document.mounts if mount != JOINED_MOUNT)
    found = {info.key: info.size for folder in _FOLDERS for info in store.list(folder)}
    data = tuple(key for key in found if key in named and (_DATA.fullmatch(key) or is_made(key)))
    lists = tuple(key for key in found if key in named and _LISTS.fullmatch(key))
    deleted = {*data, *lists}
    documents = [*(f"tags/{name}.json" for name in tags.names(store)), *map(version_key, numbers)]
    return Deletion(
        store=store,
        versions=tuple(numbers),
        data=data,
        lists=lists,
        documents=(*documents, *([DATASET_KEY] if store.exists(DATASET_KEY) else [])),
        bytes=sum(found[key] for key in deleted),
        left=tuple(key for key in found if key not in deleted),
        mounts=tuple(mounts),
    )


def _named(store: Store, document: VersionDocument) -> Iterator[str]:
    """The keys of the objects that a version names, also of those below mounts."""
    for entries in (document.shards, document.index):
        yield from (page.key for page in entries.pages) if isinstance(entries, PagedList) else ()
    for part in _present(store, document.index):
        yield part.key
        if part.bitmap is not None:
            yield part.bitmap.key
    joined = JoinedObjects(lambda key: (store, key))
    for shard in _present(store, document.shards):
        yield shard.key
        if shard.key.startswith(SHARD_PREFIX):
            name = shard.key.removeprefix(SHARD_PREFIX)
            yield f"{LIST_FOLDER}{name}.json"
            if store.exists(f"{LIST_FOLDER}{name}.json"):
                yield from (one.key for one in joined.objects(name).objects)


def _present(store: Store, entries: Sequence[T]) -> Iterator[T]:
    """The entries, except those of pages that an interrupted deletion has deleted, after what they name."""
    if not isinstance(entries, PagedList):
        yield from entries
        return
    for number, page in enumerate(entries.pages):
        if store.exists(page.key):
            yield from entries.read_page(number)
