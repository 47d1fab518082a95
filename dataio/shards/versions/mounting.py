"""The mounts of a dataset version: recorded in its document, opened with the dataset.

Purpose: shards that were indexed in place lie in other buckets and folders; the version says where.
Invariants: what is recorded holds no secrets. A mount's name is a digest of what it mounts, so equal places have equal names in
every version and versions can be merged. Credentials that the caller gave for the dataset go to a mounted bucket only when it
is behind the same endpoint as the dataset itself; every other mount is opened with the process's own.
Failure behaviour: `CorruptionError` for mounts that cannot be meant; opening makes no request, so a bucket that is gone shows
when something is read from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import blake3
import msgspec

from dataio.core.errors import CorruptionError, MillraceError
from dataio.core.redact import without_secrets
from dataio.shards.versions.documents import Mount, VersionDocument
from dataio.store.contract import Location, Store
from dataio.store.mounts import Mounts
from dataio.store.open import open_store


def mount_of(location: Location) -> Mount:
    """How a store is recorded."""
    options = without_secrets(location.options)
    content = msgspec.json.encode([location.url, options], order="deterministic")
    return Mount(name=f"m{blake3.blake3(content).hexdigest()[:8]}", url=location.url, options=options)


def with_mounts(
    store: Store, document: VersionDocument, owned: bool, storage_options: Mapping[str, Any]
) -> tuple[Store, bool]:
    """`store` with what `document` mounts, and whether the caller is to close it; `store` itself where nothing is to be added.

    Closing what is returned closes `store` as well when it was `owned`.
    """
    there = store.mounted if isinstance(store, Mounts) else {}
    if all(mount.name in there for mount in document.mounts):
        return store, owned
    base = store.base if isinstance(store, Mounts) else store
    opened = dict[str, Store]()
    try:
        for mount in document.mounts:
            opened[mount.name] = open_store(mount.url, **_options(base.location, mount, storage_options))
        return Mounts(base, opened, owns_base=owned), True
    except MillraceError as error:
        for made in opened.values():
            made.close()
        raise CorruptionError(
            f"{store.location.url}: a mount of version {document.version}: {error.message}"
        ) from error


def _options(base: Location, mount: Mount, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if "mounts" in mount.options:
        raise CorruptionError(f"the mount {mount.name} has mounts itself")
    same = _is_s3(base.url) and _is_s3(mount.url) and _endpoint(base.options) == _endpoint(mount.options)
    return {**mount.options, **given} if same else mount.options


def _is_s3(url: str) -> bool:
    return url.lower().startswith("s3://")


def _endpoint(options: Mapping[str, object]) -> object:
    return options.get("endpoint_url")
