"""Opens a folder whose files are symbolic links, such as a data set in the cache of the Hub.

Purpose: stores follow no links. `open_source` opens a store at the deepest folder that has the folder and all files to
which its links lead, and knows the key of each file there. Other sources are opened as they are.

Invariants: links to folders are not followed. The folder is read once, when it is opened. A name that is no valid key
is left out. Nothing is written.

Failure behaviour: a link that leads nowhere is left out, so its file does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, UnsupportedError
from headrace.dataio.shards.ingest.source_stores import is_url
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store, is_key, path_of_url
from headrace.dataio.store.open import open_store


class Source(NamedTuple):
    """A folder. `named` has its files by their names, and `store` the same files by the keys in `keys`.

    If no file is a link, both are one store, and `keys` is empty.
    """

    named: Store
    store: Store
    keys: Mapping[str, str]

    def key(self, name: str) -> str:
        """Return the key in `store` of the file with this name."""
        return self.keys.get(name, name)


def open_source(source: str, options: Mapping[str, Any] | None = None) -> Source:
    """Open the folder at a path or a URL. The caller closes `store`."""
    if is_url(source):
        opened = open_store(source, storage_options=options)
        return Source(opened, opened, {})
    folder = os.path.realpath(path_of_url(source) if source.lower().startswith("file://") else source)
    files = dict(_files(folder))
    if all(real == os.path.join(folder, name) for name, real in files.items()):
        opened = open_store(folder)
        return Source(opened, opened, {})
    root = os.path.commonpath([folder, *(os.path.dirname(real) for real in files.values())])
    keys = {name: os.path.relpath(real, root) for name, real in files.items()}
    store = open_store(root)
    return Source(
        _NamedFiles(Path(folder), store, {name: key for name, key in keys.items() if is_key(key)}), store, keys
    )


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each file and its real path."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield os.path.relpath(path, folder), os.path.realpath(path) if os.path.islink(path) else path


class _NamedFiles(Store):
    """The files of a folder by their names. It only reads."""

    def __init__(self, folder: Path, store: Store, keys: Mapping[str, str]) -> None:
        self._folder, self._store, self._keys = folder, store, keys

    @property
    def location(self) -> Location:
        return Location(self._folder.as_uri(), {}, True)

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        return self._store.get(self._real(key), max_bytes=max_bytes)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._store.get_into(self._real(key), offset, buffer)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key in sorted(self._keys):
            if key.startswith(prefix):
                yield self.stat(key)

    def stat(self, key: str) -> ObjectInfo:
        info = self._store.stat(self._real(key))
        return ObjectInfo(key, info.size, info.modified)

    def _real(self, key: str) -> str:
        if key not in self._keys:
            raise NotFoundError(f"there is no file {self._folder / key}")
        return self._keys[key]

    def put(self, key: str, data: Buffer) -> None:
        _refuse(key)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        _refuse(key)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        _refuse(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            _refuse(key)


def _refuse(key: str) -> NoReturn:
    raise UnsupportedError(f"{key} belongs to a source, which is only read", hint="write to another folder")
