"""The mounts of a dataset version: the other stores that hold some of its shards.

Purpose: shards that were indexed in place stay in other buckets and folders. A version document records these locations
as mounts. `with_mounts` opens them when the dataset is opened.

Invariants:

* A document may record only the schemes and options that `headrace.dataio.store.url_policy` allows. These include no
  secrets.
* The name of a mount is a digest of its URL and options. Equal locations therefore have equal names in every version,
  and versions can be merged.

A reader may open a document that an untrusted author wrote. Without `trust`, a mount must therefore be one of these:

* a folder below the dataset's own folder
* a bucket at the dataset's own endpoint, or at the endpoint in the process's environment variables (AWS if they give
  none)
* a web server with a public address, or the server from which the dataset itself is read

Without `trust`, requester-pays requests are allowed only for the dataset's own bucket.

With `trust`, a mount may also be any folder, web server or S3 endpoint.

* Credentials are not sent to other S3 endpoints: requests to these are not signed. The exception is a location that the
  caller named.
* Credentials that the caller gave for the dataset are used only for buckets at the same endpoint. Other buckets are
  read with the process's own credentials.
* Joined shards (`headrace.dataio.store.joined`) name only objects of the dataset and of its mounts. They need no
  trust.
* A store that the caller mounted (the option `mounts` of `open_store`) takes precedence over the document's mount of
  the same name. The other mounts are checked and opened.
* Locations that the caller named (by merging another dataset) need no trust.

Failure behaviour: a mount that needs trust raises `UsageError`. A scheme that a document may not record raises
`UnsupportedError`. An invalid mount raises `CorruptionError`. Opening makes no request, so a missing bucket, or a web
server with a private address, raises an error only at the first read.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import blake3
import msgspec

from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.versions.documents import Mount, VersionDocument
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.joined import JOINED
from headrace.dataio.store.mounts import OPTION, Mounts, check_mount
from headrace.dataio.store.open import folder_of, open_store
from headrace.dataio.store.s3_config import parse
from headrace.dataio.store.url_policy import JOINED_URL, allowed_options, mountable, scheme_of

JOINED_MOUNT = Mount(name=JOINED, url=JOINED_URL)
"""The mount that records that a version has joined shards (`headrace.dataio.store.joined`)."""


def mount_of(location: Location) -> Mount:
    """Return the mount that records a store at `location`."""
    if location.url == JOINED_URL:
        return JOINED_MOUNT
    options = allowed_options(location.url, location.options) if mountable(location.url) else {}
    content = msgspec.json.encode([location.url, options], order="deterministic")
    return Mount(name=f"m{blake3.blake3(content).hexdigest()[:8]}", url=location.url, options=options)


def mounts_given_to(store: Store) -> list[Mount]:
    """Return the mounts that `store` was opened with. The caller that opened it named or trusted them."""
    return [mount_of(one.location) for one in store.mounted.values()] if isinstance(store, Mounts) else []


def with_mounts(
    store: Store,
    document: VersionDocument,
    owned: bool,
    storage_options: Mapping[str, Any],
    trust: bool = False,
    named_mounts: Sequence[Mount] = (),
) -> tuple[Store, bool]:
    """Open the mounts of `document`, and return a store that includes them and whether the caller must close it.

    If there is no mount to add, return `store` itself and `owned`. Closing the returned store also closes `store` if
    `owned` is True. `named_mounts` lists the mounts that the caller named.
    """
    mounted = store.mounted if isinstance(store, Mounts) else {}
    missing = [mount for mount in document.mounts if mount.name not in mounted]
    if not missing:
        return store, owned
    base = store.base if isinstance(store, Mounts) else store
    named_locations = [(mount.url, mount.options) for mount in (*named_mounts, *mounts_given_to(store))]
    policy = _MountPolicy(base.location, storage_options=storage_options, trust=trust, named_locations=named_locations)
    allowed = [(mount, policy.options(mount, document.version)) for mount in missing]
    opened = dict[str, Store]()
    try:
        for mount, options in allowed:
            if mount == JOINED_MOUNT:
                continue
            opened[mount.name] = open_store(mount.url, storage_options=options)
        every, borrowed = {**mounted, **opened}, () if owned else tuple(mounted)
        return Mounts(base, every, owns_base=owned, borrowed=borrowed, joined=JOINED_MOUNT in missing), True
    except BaseException as error:
        for mounted_store in opened.values():
            mounted_store.close()
        if not isinstance(error, HeadraceError):
            raise
        raise CorruptionError(
            f"{store.location.url}: a mount of version {document.version}: {error.message}"
        ) from error


def how_to_open(base: Location, mount: Mount) -> str:
    """Return what a reader of the dataset at `base` must do to open this mount; "" if nothing."""
    try:
        _MountPolicy(base, storage_options={}, trust=False, named_locations=()).options(mount, 0)
    except HeadraceError as error:
        return error.hint
    return ""


class _MountPolicy:
    """Checks mounts for one dataset: its location, the options given for it, and the mounts that the reader trusts."""

    def __init__(
        self,
        base: Location,
        *,
        storage_options: Mapping[str, Any],
        trust: bool,
        named_locations: Sequence[tuple[str, Mapping[str, Any]]],
    ) -> None:
        self._base, self._trust, self._named_locations = base, trust, named_locations
        self._storage_options = {name: value for name, value in storage_options.items() if name != OPTION}

    def options(self, mount: Mount, version: int) -> dict[str, Any]:
        """Return the options for opening `mount`, or raise an error if it may not be opened."""
        place = f"{self._base.url} version {version}: a mount, {mount.url!r:.300},"
        if not mountable(mount.url):
            if (mount.url, mount.options) in self._named_locations:
                return {}
            raise UnsupportedError(
                f"{place} is of a kind that a dataset may not name",
                hint=f'open it yourself: Dataset(url, storage_options={{"mounts": {{"{mount.name}": {{"url": ...}}}}}})',
            )
        try:
            check_mount(mount.name, mount.url, {})
            if mount == JOINED_MOUNT:
                return {}
            if OPTION in mount.options:
                raise CorruptionError(f"{place} has mounts of its own")
            options = allowed_options(mount.url, mount.options)
            is_named = (mount.url, options) in self._named_locations
            reason, options = self._check(mount.url, options, is_named)
        except UsageError as error:
            raise CorruptionError(f"{place} is invalid: {error.message}") from error
        if reason and not self._trust and not is_named:
            raise UsageError(
                f"{place} {reason}",
                hint="if you made the dataset, or trust its author, pass trust_mounts=True (--trust-mounts on the command line)",
            )
        return options

    def _check(self, url: str, options: dict[str, Any], is_named: bool) -> tuple[str, dict[str, Any]]:
        """Return the reason why this mount needs trust ("" if it needs none), and the options for opening it."""
        scheme = scheme_of(url)
        if scheme == "file":
            return ("" if self._is_below_dataset(url) else "is a folder on this machine outside the dataset"), options
        if scheme == "s3":
            return self._check_bucket(url, options, is_named)
        if not (self._trust or is_named or _origin(url) == _origin(self._base.url)):
            options["public_only"] = True
        return "", options

    def _check_bucket(self, url: str, options: dict[str, Any], is_named: bool) -> tuple[str, dict[str, Any]]:
        endpoint, is_s3 = _endpoint(url, options), scheme_of(self._base.url) == "s3"
        if is_s3 and endpoint == _endpoint(self._base.url, self._base.options):
            reason, options = "", {**options, **self._storage_options}
        elif is_named or endpoint == _endpoint(url, {}):
            reason = ""
        else:
            reason, options = f"is behind another endpoint ({endpoint or 'AWS'})", {**options, "anon": True}
        if options.get("requester_pays") and not (is_s3 and _bucket(url) == _bucket(self._base.url)):
            reason = reason or "would make the reader pay for requests to another bucket"
        return reason, options

    def _is_below_dataset(self, url: str) -> bool:
        """Return whether `url` is a folder below the dataset's own folder, after resolving symbolic links."""
        if scheme_of(self._base.url) != "file":
            return False
        folder = os.path.realpath(folder_of(url) if "://" in url else url)
        root = os.path.realpath(folder_of(self._base.url))
        return folder.startswith(root.rstrip("/") + "/")


def _endpoint(url: str, options: Mapping[str, Any]) -> str | None:
    """Return the S3 endpoint of `url`, which may come from the process's environment variables. None means AWS."""
    endpoint = parse(url, {"endpoint_url": options.get("endpoint_url")}).endpoint_url
    return endpoint and endpoint.rstrip("/").lower()


def _bucket(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _origin(url: str) -> tuple[str, str]:
    """Return the scheme and the host with port of a web server."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme.lower(), parts.netloc.lower()
