"""The stores of a pack's inputs: finding objects, and copying them to the worker's machine.

Purpose: `pack` accepts folders, globs, manifests and tars in stores like local ones. It accepts `s3://bucket/folder`
and every other URL that `open_store` opens.

Invariants:

* `SourceStores` opens one store per bucket, at first use, with this process's own credentials or `options`.
* It copies an object in parts of `_COPY_BYTES`, at most `_COPIES` at once, so memory is bounded regardless of the
  object's size.

Failure behaviour: errors of a store pass through, since no input is at fault if a store cannot be reached. An object
that shrinks or disappears while it is copied raises `ChangedError`.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, RangeError, TransientError, UnsupportedError, UsageError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.store.base import ObjectInfo, Store, check_key
from headrace.dataio.store.open import open_store

_COPY_BYTES = 4 * limits.MIB
_RETRY_HINT = "pack again when nothing writes to the input"
_COPIES = 8
"""The parts of one row group that are copied at the same time."""
_MAX_STATS = 16
"""Up to this many objects are looked up one by one. More objects are looked up in a listing."""
_URL = re.compile(r"(?i)(?!file:)[a-z][a-z0-9+.-]*://")
WILDCARD = re.compile(r"[*?\[]")


class ChangedError(TransientError):
    """An input changed while it was read."""


def is_url(text: str) -> bool:
    """Return whether `text` is a URL of an object in a store, rather than a local path or a file URL."""
    return _URL.match(text) is not None


@dataclass(frozen=True, slots=True)
class FileStat:
    """An object's size in bytes, and its modification time in nanoseconds."""

    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Matches:
    """The objects that a source matches. Sample keys are relative to `root`.

    `is_named` means that the source is one object, `from_glob` that it has wildcards.
    """

    root: str
    objects: Mapping[str, FileStat]
    is_named: bool = False
    from_glob: bool = False


class SourceStores:
    """The stores of a pack's inputs. It is a context manager, and threads can share it."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self._stores: dict[str, Store] = {}
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def check_shareable(self) -> None:
        """Raise `UnsupportedError` if other machines cannot open the same stores."""
        if self.options:
            raise UnsupportedError(
                "sources with options cannot be opened on other machines",
                hint="give credentials by environment variables or profiles on every machine",
            )

    def find(self, source: str) -> Matches:
        """Return the objects that `source` matches: one object, all objects below a folder, or all that match a glob.

        If there is none, raise `NotFoundError`.
        """
        bucket, key = _split_url(source)
        if WILDCARD.search(key):
            return self._matching(source, bucket, key)
        folder = f"{key.rstrip('/')}/" if key else ""
        if key and not key.endswith("/"):
            with contextlib.suppress(NotFoundError):
                return Matches(
                    posixpath.dirname(source), {source: _file_stat(self._store(bucket).stat(check_key(key)))}, True
                )
        objects = {f"{bucket}/{one.key}": _file_stat(one) for one in self._store(bucket).list(folder)}
        if not objects:
            raise NotFoundError(f"there is no object and no folder {source}", hint="check the address")
        return Matches(f"{bucket}/{folder}".rstrip("/"), objects)

    def _matching(self, source: str, bucket: str, key: str) -> Matches:
        literal = WILDCARD.split(key, maxsplit=1)[0]
        pattern = re.compile(as_regex(key), re.DOTALL)
        listed = self._store(bucket).list(literal)
        objects = {f"{bucket}/{one.key}": _file_stat(one) for one in listed if pattern.fullmatch(one.key)}
        if not objects:
            raise NotFoundError(f"nothing matches {source!r}", hint="check the pattern; ** goes through folders")
        return Matches(f"{bucket}/{literal.rpartition('/')[0]}".rstrip("/"), objects, from_glob=True)

    def stat_many(self, urls: Iterable[str]) -> dict[str, FileStat]:
        """Return the size and the modification time of those objects that exist."""
        by_bucket: dict[str, set[str]] = {}
        for url in urls:
            bucket, key = _split_url(url)
            by_bucket.setdefault(bucket, set()).add(check_key(key))
        stats = {}
        for bucket, keys in by_bucket.items():
            for info in self._stat_each(self._store(bucket), keys):
                stats[f"{bucket}/{info.key}"] = _file_stat(info)
        return stats

    def _stat_each(self, store: Store, keys: set[str]) -> Iterator[ObjectInfo]:
        if len(keys) > _MAX_STATS:
            yield from (one for one in store.list(posixpath.commonprefix([min(keys), max(keys)])) if one.key in keys)
            return
        for key in sorted(keys):
            with contextlib.suppress(NotFoundError):
                yield store.stat(key)

    def reader(self, url: str) -> Callable[[int, int], bytes]:
        """Return a function of an offset and a length that reads these bytes of the object."""
        bucket, key = _split_url(url)
        store = self._store(bucket)

        def read_at(offset: int, length: int) -> bytes:
            data = bytearray(length)
            if length:
                store.get_into(key, offset, memoryview(data))
            return bytes(data)

        return read_at

    def copy_whole(self, url: str, size: int, path: str) -> None:
        """Copy the object to a new file. `size` is the size that it had when it was found."""
        self.check_unchanged(url, size)
        self.copy(url, 0, size, path)

    def check_unchanged(self, url: str, size: int) -> None:
        """Raise `ChangedError` unless the object exists and has this size."""
        info = self.stat_many([url]).get(url)
        if info is None or info.size != size:
            raise ChangedError(f"{url} changed while it was being packed", hint=_RETRY_HINT)

    def copy(self, url: str, offset: int, length: int, path: str) -> None:
        """Copy `length` bytes of the object, from `offset`, to a new file."""
        with open(path, "wb") as file:  # buffered: writes all or raises, also on a disk that becomes full
            for at in range(0, length, _COPY_BYTES):
                file.write(self._part(url, offset + at, min(_COPY_BYTES, length - at)))

    def copy_ranges(self, url: str, size: int, ranges: Iterable[tuple[int, int]], path: str) -> None:
        """Copy ranges (offset, length) of the object to their own positions in a file of its size.

        The rest of a new file is a hole. An existing file keeps what it has. `_COPIES` parts are copied concurrently.
        """
        parts = [
            (at, min(_COPY_BYTES, offset + length - at))
            for offset, length in ranges
            for at in range(offset, offset + length, _COPY_BYTES)
        ]
        with open(path, "r+b" if os.path.exists(path) else "wb") as file, ThreadPoolExecutor(_COPIES) as threads:
            file.truncate(size)
            for _ in threads.map(lambda part: _write_at(file.fileno(), part[0], self._part(url, *part)), parts):
                pass

    def _part(self, url: str, offset: int, length: int) -> bytes:
        """Read a part of an object that is being copied."""
        if self._stopped.is_set():
            raise TransientError(f"copying {url} was cancelled", hint=_RETRY_HINT)
        try:
            return self.reader(url)(offset, length)
        except (NotFoundError, RangeError) as error:  # the object disappeared or shrank
            raise ChangedError(f"{url} changed while it was being packed: {error.message}", hint=_RETRY_HINT) from error

    @contextlib.contextmanager
    def local_copy(self, url: str, size: int) -> Iterator[Path]:
        """Copy the object to a local file with the same suffix. The copy exists until the `with` block ends."""
        with scratch_folder("headrace-pack-") as folder:
            path = Path(folder, "copy" + posixpath.splitext(url)[1])
            self.copy_whole(url, size, str(path))
            yield path

    def _store(self, bucket: str) -> Store:
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = open_store(bucket, storage_options=self.options)
            return self._stores[bucket]

    def stop(self) -> None:
        """Abort the copies in progress, each after its current part."""
        self._stopped.set()

    def close(self) -> None:
        """Close all stores."""
        with contextlib.ExitStack() as stack:
            for store in self._stores.values():
                stack.callback(store.close)
            self._stores = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_at(descriptor: int, offset: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(descriptor, remaining, offset)
        remaining, offset = remaining[written:], offset + written


def _split_url(url: str) -> tuple[str, str]:
    """Split a URL into the bucket's URL, such as `s3://bucket`, and the key."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UsageError(f"{url!r} names no bucket", hint="write s3://bucket/folder")
    return f"{scheme.lower()}://{bucket}", key


def join_url(folder: str, name: str) -> str:
    """Return the URL of `name`, which is relative to the URL `folder`."""
    bucket, key = _split_url(f"{folder}/")
    path = posixpath.normpath(posixpath.join("/", key, name))
    return f"{bucket}{path}"


def as_regex(glob: str) -> str:
    """Convert a glob to a regular expression. `*`, `?` and `[…]` match within a folder, `**` across folders."""
    out, at = [], 0
    while at < len(glob):
        if glob.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 3
        elif glob.startswith("**", at):
            out.append(".*")
            at += 2
        elif glob[at] == "[" and (end := glob.find("]", at + 2)) > 0:
            inner = re.escape(glob[at + 1 : end].lstrip("!")).replace(r"\-", "-")
            out.append(f"[{'^/' if glob[at + 1] == '!' else ''}{inner}]")
            at = end + 1
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(glob[at]) or re.escape(glob[at]))
            at += 1
    return "".join(out)


def _file_stat(info: ObjectInfo) -> FileStat:
    return FileStat(info.size, int(info.modified * 1e9))
