"""Mounts other stores as folders of one store, for datasets that have shards in several stores.

Purpose: `Mounts` reads keys under `mounts/<name>/` from the store that is mounted under that name. It reads all other
keys from its base. Loaders, the cache and the sidecar see one store and need no special case.

Invariants: mounted stores are read-only. `location` has the URL of the base. Its option `mounts` lists every mounted
store with its options, without secrets, so `open_location` opens the same stores again. The location is shareable only
if all of the stores are. Objects of the base under `mounts/` are hidden. A mounted store must not have `mounts` itself,
so there is only one level. The name `joined` is reserved for joined shards (`headrace.dataio.store.joined`), whose
objects are in the base and in the mounted stores.

Failure behaviour: writing below `mounts/` raises `UnsupportedError`. An unknown mount raises `NotFoundError`. Other
errors are those of the store that has the key.
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    check_folder,
    check_key,
    is_after,
)
from headrace.dataio.store.joined import JOINED, SHARD_PREFIX, JoinedObjects
from headrace.dataio.store.url_policy import JOINED_URL, scheme_of
from headrace.dataio.store.wrappers import Wrapper

_FOLDER = "mounts"
PREFIX = _FOLDER + "/"
OPTION = "mounts"
MAX_MOUNTS = 64
_NAME = re.compile(r"[0-9a-z]{1,32}")


class Mounts(Store):
    """A store that adds the `mounted` stores, by name, to `base`.

    `close` closes the mounted stores, except those named in `borrowed`. It closes the base only if `owns_base`. With
    `joined`, or if `mounted` has joined shards of another store, the store has the joined shards of `base`.
    """

    def __init__(
        self,
        base: Store,
        mounted: Mapping[str, Store],
        *,
        owns_base: bool = True,
        borrowed: Collection[str] = (),
        joined: bool = False,
    ) -> None:
        for name, store in mounted.items():
            check_mount(name, store.location.url, store.location.options)
        if len(mounted) > MAX_MOUNTS or isinstance(base, Mounts):
            raise UsageError(f"one level of at most {MAX_MOUNTS} stores can be mounted, not {len(mounted)}")
        self.base, self._owns_base, self._borrowed = base, owns_base, frozenset(borrowed) - {JOINED}
        self.joined = JoinedObjects(self.route) if joined or JOINED in mounted else None
        self.mounted = {name: store for name, store in mounted.items() if name != JOINED}
        if self.joined is not None:
            self.mounted[JOINED] = self.joined

    @property
    def location(self) -> Location:
        base, mounted = self.base.location, {name: store.location for name, store in sorted(self.mounted.items())}
        described = {name: {"url": at.url, "options": dict(at.options)} for name, at in mounted.items()}
        shareable = base.shareable and all(at.shareable for at in mounted.values())
        return Location(base.url, {**base.options, OPTION: described}, shareable)

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        store, inner = self.route(key)
        return store.get(inner, max_bytes=max_bytes)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        store, inner = self.route(key)
        store.get_into(inner, offset, buffer)

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        store, inner = self.route(key)
        store.get_pieces(inner, offset, buffer, take)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        store, inner = self.route(key)
        store.get_ranges_into(inner, ranges)

    def open_file(self, key: str) -> int | None:
        store, inner = self.route(key)
        return store.open_file(inner)

    def put(self, key: str, data: Buffer) -> None:
        self.base.put(self._writable(key), data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self.base.put_if_absent(self._writable(key), data)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self.base.put_multipart(self._writable(key), parts)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        from_base = (info for info in self.base.list(prefix) if not info.key.startswith(PREFIX))
        return heapq.merge(from_base, *self._list_mounted(prefix), key=lambda info: info.key)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        """List folders. `mounts` and the name of every mount are listed even if the mounted store is empty."""
        if not check_folder(prefix):
            return iter(())
        if prefix.startswith(PREFIX):
            return self._mounted_folders(prefix[len(PREFIX) :], after)
        from_base = self.base.list_folders(prefix, after=after)
        if prefix:
            return from_base
        mounts = [_FOLDER] if self.mounted and is_after(OPTION, after) else []
        return heapq.merge((name for name in from_base if name != _FOLDER), mounts, key=lambda name: name + "/")

    def _mounted_folders(self, below: str, after: str) -> Iterator[str]:
        name, _, prefix = below.partition("/")
        if not below:
            return (name for name in sorted(self.mounted) if is_after(name, after))
        return self.mounted[name].list_folders(prefix, after=after) if name in self.mounted else iter(())

    def stat(self, key: str) -> ObjectInfo:
        store, inner = self.route(key)
        info = store.stat(inner)
        return ObjectInfo(key, info.size, info.modified)

    def delete_many(self, keys: Iterable[str]) -> None:
        self.base.delete_many(self._writable(key) for key in keys)

    def reconnect(self) -> None:
        for store in (self.base, *self.mounted.values()):
            store.reconnect()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for name in self.mounted.keys() - self._borrowed:
                stack.callback(self.mounted[name].close)
            if self._owns_base:
                stack.callback(self.base.close)

    def url_of(self, key: str, offset: int | None = None) -> str:
        """The object's own URL, for messages. Of a joined shard, that of the object at `offset`."""
        store, inner = self.route(key)
        if store is self.joined:
            if offset is None:
                return f"{self.base.location.url.rstrip('/')}/{key}"
            found, _ = self.joined.objects(inner).find(offset)
            store, inner = self.route(found.key)
        return f"{store.location.url.rstrip('/')}/{inner}"

    def describe_change(self, key: str, offset: int) -> str:
        """How the object at `offset` of a joined shard differs from the shard's list; "" if it does not."""
        store, inner = self.route(key)
        return self.joined.describe_change(inner, offset) if self.joined is not None and store is self.joined else ""

    def _list_mounted(self, prefix: str) -> Iterator[Iterator[ObjectInfo]]:
        for name, store in self.mounted.items():
            root = f"{PREFIX}{name}/"
            if root.startswith(prefix) or prefix.startswith(root):
                yield _list_below(store, root, prefix[len(root) :])

    def route(self, key: str) -> tuple[Store, str]:
        """Return the store that holds this key, and its key there."""
        if not check_key(key).startswith(PREFIX):
            return self.base, key
        name, _, inner = key[len(PREFIX) :].partition("/")
        if name not in self.mounted or not inner:
            raise NotFoundError(f"{key!r}: no store is mounted as {name!r} in {self.base.location.url}")
        return self.mounted[name], inner

    def _writable(self, key: str) -> str:
        if key.startswith(PREFIX):
            raise UnsupportedError(f"{key!r} is in a mounted store, which is read-only")
        return key


def _list_below(store: Store, root: str, prefix: str) -> Iterator[ObjectInfo]:
    for info in store.list(prefix):
        yield ObjectInfo(root + info.key, info.size, info.modified)


def url_of(store: Store, key: str, offset: int | None = None) -> str:
    """The object's own URL, through mounts, for messages. Of a joined shard, that of the object at `offset`."""
    store = _unwrapped(store)
    return store.url_of(key, offset) if isinstance(store, Mounts) else f"{store.location.url.rstrip('/')}/{key}"


def describe_damage(store: Store, key: str, *offsets: int) -> str:
    """Name the object that holds one of these bytes of `key`, and say how it changed since it was indexed.

    Prefers an object that changed. This is for messages. It sends requests only if `key` is a joined shard. The result
    is `key` itself if it is not.
    """
    store = _unwrapped(store)
    description = key
    try:
        if not isinstance(store, Mounts) or store.route(key)[0] is not store.joined:
            return key
        for offset in offsets:
            url, change = store.url_of(key, offset), store.describe_change(key, offset)
            description = f"{url} ({change})" if change else url
            if change:
                break
    except HeadraceError:
        pass  # the list itself is missing or damaged, which the caller's error says
    return description


def all_local(store: Store, shard: str) -> bool:
    """Whether all objects of the joined shard `shard` are in local folders."""
    store = _unwrapped(store)
    if not isinstance(store, Mounts) or store.joined is None:
        return False
    return store.joined.is_local(shard[len(SHARD_PREFIX) :])


def locate(store: Store, key: str, offset: int) -> tuple[str, int]:
    """Return the key of the object that holds this byte, and the byte's offset in it. Only joined shards differ."""
    store = _unwrapped(store)
    if not key.startswith(SHARD_PREFIX) or not isinstance(store, Mounts) or store.joined is None:
        return key, offset
    found, at = store.joined.objects(key[len(SHARD_PREFIX) :]).find(offset)
    return found.key, at


def _unwrapped(store: Store) -> Store:
    while isinstance(store, Wrapper):
        store = store.inner
    return store


def check_mount(name: str, url: str, options: Mapping[str, object]) -> None:
    """Raise `UsageError` for a name that cannot be mounted, or for a store that has mounts itself."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a mount", hint="up to 32 of the characters a-z and 0-9")
    if (name == JOINED) != (scheme_of(url) == JOINED):
        raise UsageError(f"the mount {name!r} has the URL {url!r:.200}", hint=f"only {JOINED!r} has {JOINED_URL!r}")
    if OPTION in options:
        raise UsageError(f"the store mounted as {name!r} has mounts itself", hint="there is one level of mounts")


def open_mounts(base: Store, described: object, opener: Callable[..., Store]) -> Mounts:
    """Mount the stores that the option `mounts` of a location describes on `base`.

    `opener(url, storage_options=options)` opens each of them. If one fails, all stores are closed, `base` included.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(base.close)
        mounted, joined = dict[str, Store](), False
        for name, url, options in _parse_mounts(described):
            check_mount(name, url, options)
            if name == JOINED:
                joined = True
                continue
            mounted[name] = opener(url, storage_options=options)
            undo.callback(mounted[name].close)
        mounts = Mounts(base, mounted, joined=joined)
        undo.pop_all()
        return mounts


def _parse_mounts(described: object) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    for name, entry in described.items() if isinstance(described, Mapping) else [("", described)]:
        url = entry.get("url") if isinstance(entry, Mapping) else None
        options = entry.get("options", {}) if isinstance(entry, Mapping) else None
        if not isinstance(url, str) or not isinstance(options, Mapping) or not isinstance(name, str):
            raise UsageError(f"the option {OPTION} must map names to a url and options")
        yield name, url, options
