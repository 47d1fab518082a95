"""Chooses the mounts for files that stay where they are, and the key of each file in the dataset's store.

Invariants:

* A file below the dataset itself has its key there, and needs no mount.
* A file below a mount that the dataset has already belongs to that mount.
* The other files of a bucket get one mount, at the deepest folder that holds all files of this bucket. The other local
  files get one mount, too.
* A symbolic link stands for the file that it points to, because stores follow no links.

Failure behaviour: a file that a store cannot name is returned as `Skipped`, with its sample. More than `MAX_MOUNTS`
locations raise `CapacityError`.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.dataio.core.errors import CapacityError, UnsupportedError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.file_units import MAX_FILES
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.source_stores import is_url
from headrace.dataio.shards.versions.documents import Mount
from headrace.dataio.shards.versions.mounting import mount_of
from headrace.dataio.store.base import Location, Store, is_key
from headrace.dataio.store.joined import JOINED
from headrace.dataio.store.mounts import MAX_MOUNTS, OPTION, PREFIX
from headrace.dataio.store.open import folder_of
from headrace.dataio.store.url_policy import scheme_of

Opener = Callable[[str], Store]
"""Opens the store of a folder, at a URL or a path."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The groups that can be used in place, the key of each of their files, the stores to mount, and the others."""

    groups: tuple[Group, ...]
    keys: Mapping[str, str]
    mounted: Mapping[str, Store]
    skipped: tuple[Skipped, ...]

    def close(self) -> None:
        """Close the mounted stores."""
        for store in self.mounted.values():
            store.close()


def place(groups: Sequence[Group], store: Store, mounts: Sequence[Mount], opener: Opener) -> Placement:
    """Place the files of `groups`, for the dataset in `store`, which has `mounts` already."""
    usable, skipped, addresses = list[Group](), list[Skipped](), dict[str, str]()
    resolve = _Resolver()
    for group in groups:
        found = {path: resolve(path) for _, path in group.files}
        problem = _problem(group, found)
        if problem is None:
            usable.append(group)
            addresses.update(found)
        else:
            skipped.append(problem)
    opened = dict[str, Store]()
    try:
        keys = dict[str, str]()
        for paths in _by_bucket(addresses):
            keys.update(_place_bucket(paths, addresses, store, mounts, opener, opened))
        names = opened.keys() | {mount.name for mount in mounts if mount.name != JOINED}
        if len(names) >= MAX_MOUNTS:
            raise CapacityError(
                f"the files are in {len(names)} buckets or folders, and a dataset can name {MAX_MOUNTS - 1}",
                hint="index them in parts, or copy them into fewer buckets",
            )
    except BaseException:
        for one in opened.values():
            one.close()
        raise
    return Placement(tuple(usable), keys, opened, tuple(skipped))


class _Resolver:
    """Returns the address of a path: its URL, or its real path without symbolic links."""

    def __init__(self) -> None:
        self._folders = dict[str, str]()

    def __call__(self, path: str) -> str:
        if is_url(path):
            return path
        folder, name = os.path.split(os.path.abspath(path))
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        real = os.path.join(self._folders[folder], name)
        return os.path.realpath(real) if os.path.islink(real) else real


def _problem(group: Group, addresses: Mapping[str, str]) -> Skipped | None:
    """Return why a group cannot be used in place, or None."""
    first = group.files[0][1]
    if len(group.files) > MAX_FILES:
        reason = f"{tar.too_many(group.key).partition(' has ')[0]} has {len(group.files)} files, more than {MAX_FILES}"
        return Skipped(first, UnsupportedError.code, reason)
    for path, address in addresses.items():
        if scheme_of(address) in ("http", "https") and ("?" in address or "#" in address):
            return Skipped(path.partition("?")[0], UnsupportedError.code, "a URL with a query may hold a secret")
        if not is_key(address.partition("://")[2] if is_url(address) else address.lstrip("/")):
            reason = "its name has a control character or is too long: rename it, or pack it"
            return Skipped(repr(path)[1:-1], UnsupportedError.code, reason)
    return None


def _by_bucket(addresses: Mapping[str, str]) -> Iterable[list[str]]:
    """Yield the paths of each bucket. Local files are one bucket."""
    buckets = dict[str, list[str]]()
    for path, address in addresses.items():
        scheme, separator, rest = address.partition("://")
        bucket = f"{scheme}://{rest.partition('/')[0]}" if separator and is_url(address) else ""
        buckets.setdefault(bucket, []).append(path)
    return buckets.values()


def _place_bucket(
    paths: Sequence[str],
    addresses: Mapping[str, str],
    store: Store,
    mounts: Sequence[Mount],
    opener: Opener,
    opened: dict[str, Store],
) -> dict[str, str]:
    """Return the keys of the files of one bucket, and add the stores of the mounts that they need to `opened`."""
    root = _common_folder([addresses[path] for path in paths])
    source = opener(root)
    roots = _Roots(store.location, mounts, source.location)
    keys, own = dict[str, str](), mount_of(source.location)
    for path in paths:
        prefix, folder, mount = roots.find(addresses[path])
        keys[path] = prefix + addresses[path][len(folder) :]
        if mount is not None and mount.name != own.name and mount.name not in opened:
            opened[mount.name] = opener(folder.rstrip("/") or "/")
        elif mount is not None and mount.name == own.name:
            opened[own.name] = source
    if source not in opened.values():
        source.close()
    return keys


def _common_folder(addresses: Sequence[str]) -> str:
    folders = {address.rpartition("/")[0] for address in addresses}
    if not is_url(addresses[0]):
        return os.path.commonpath([folder or "/" for folder in folders])
    scheme, _, _ = addresses[0].partition("://")
    return f"{scheme}://{posixpath.commonpath([folder.partition('://')[2] for folder in folders])}"


class _Roots:
    """The folders that a dataset can name, longest first: its own, those of its mounts, and the new one."""

    def __init__(self, base: Location, mounts: Sequence[Mount], source: Location) -> None:
        own = mount_of(source)
        options = {name: value for name, value in base.options.items() if name != OPTION}
        roots: list[tuple[str, str, Mount | None]] = []
        if mount_of(Location(base.url, options, True)).options == own.options:
            roots.append((_folder(base.url), "", None))
        known = [mount for mount in mounts if mount.name != JOINED and mount.options == own.options]
        roots += [(_folder(mount.url), f"{PREFIX}{mount.name}/", mount) for mount in known]
        roots.append((_folder(source.url), f"{PREFIX}{own.name}/", own))
        self._roots = sorted(roots, key=lambda root: (root[2] is not None, -len(root[0])))
        self._new = roots[-1]

    def find(self, address: str) -> tuple[str, str, Mount | None]:
        """Return the prefix of the keys below the root that holds this file, the root's folder, and its mount."""
        folder, prefix, mount = next((root for root in self._roots if address.startswith(root[0])), self._new)
        return prefix, folder, mount


def _folder(url: str) -> str:
    """Return a URL, or the real path of a local folder, with a slash at its end."""
    path = os.path.realpath(folder_of(url)) if scheme_of(url) == "file" else url
    return path.rstrip("/") + "/"
