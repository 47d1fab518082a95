"""From a URL to a store.

Invariant: the back-end is chosen by the URL's scheme alone, imported only then, and wrapped in metrics and the one retry
policy.
Failure behaviour: a scheme that fsspec does not know either raises `UnsupportedError` naming the known ones. Opening
makes no request, so a missing bucket or wrong credentials show at the first operation (or in `headrace doctor URL`).
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.redact import has_secrets
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.url_policy import sendable

_SUPPORTED = "a path, file:///path, s3://bucket/prefix, or a scheme of fsspec"


def open_store(url: str | os.PathLike[str], **storage_options: object) -> Store:
    """The store at `url`: a path, `file:///path`, `s3://bucket/prefix`, or any other scheme of fsspec.

    `storage_options` are for S3 (see `headrace.dataio.store.s3_config`): s3fs's own names, and `endpoint_url`, `region`,
    `path_style`, `client`. What is not given comes from the AWS variables and profiles. A directory takes `direct` (large
    reads past the page cache). For other schemes they are the file system's own, and the store has the limits of
    `headrace.dataio.store.fsspec`. `mounts` adds other stores below `mounts/<name>/` (`headrace.dataio.store.mounts`).
    """
    given: object = url
    if not isinstance(given, (str, os.PathLike)):
        raise UsageError(
            f"{given!r:.200} is no place to store things", hint="give a path, or a URL such as s3://bucket/prefix"
        )
    text = os.fspath(url)
    if "mounts" in storage_options:
        from headrace.dataio.store.mounts import open_mounts

        return open_mounts(open_store(text, **_without_mounts(storage_options)), storage_options["mounts"], open_store)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _posix(text, storage_options)
    if scheme.lower() == "file":
        return _posix(_path_of(rest, text), storage_options)
    with naming_extras():
        if scheme.lower() == "s3":
            return _s3(text, storage_options)
        return _other(scheme.lower(), rest, storage_options)


def open_location(location: Location) -> Store:
    """The store at `location`, with this process's own credentials."""
    if not location.shareable or has_secrets(location.options):
        raise UsageError(
            f"{location.url} was opened with secrets or other options that another process does not get",
            hint="put the credentials into the AWS variables or a profile of both processes",
        )
    _check_sent(location.url, _without_mounts(location.options))
    mounted = location.options.get("mounts")
    for entry in mounted.values() if isinstance(mounted, Mapping) else ():
        if isinstance(entry, Mapping) and isinstance(options := entry.get("options", {}), Mapping):
            _check_sent(str(entry.get("url")), options)
    return open_store(location.url, **location.options)


def _check_sent(url: str, options: Mapping[str, object]) -> None:
    if not sendable(url, options):
        raise UsageError(
            f"{url!r} is not opened for another process: it may name directories, S3, HTTP and remote file systems "
            "without options",
            hint="open it in the process that wants it",
        )


def folder_of(url: str) -> Path:
    """The directory that a `file://` URL names."""
    return Path(_path_of(url.partition("://")[2], url))


def _without_mounts(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name != "mounts"}


def _posix(path: str, options: dict[str, object]) -> Store:
    from headrace.dataio.store.posix import PosixStore
    from headrace.dataio.store.retry import Retry
    from headrace.dataio.store.wrappers import MetricsStore

    if unknown := sorted(options.keys() - {"direct"}):
        raise UsageError(f"unknown storage option {', '.join(unknown)} of a directory", hint="known is direct")
    if not path.strip() or "\0" in path:
        raise UsageError("a store needs a path", hint=f"give {_SUPPORTED}")
    return Retry(MetricsStore(PosixStore(path, direct=bool(options.get("direct"))), "posix"))


def _path_of(rest: str, url: str) -> str:
    host, _, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{url!r} names the host {host!r}", hint="a file URL has three slashes: file:///data/set")
    if not rest:
        raise UsageError(f"{url!r} names no path", hint=f"give {_SUPPORTED}")
    return "/" + urllib.parse.unquote(path, errors="surrogateescape")


def _other(scheme: str, rest: str, options: dict[str, object]) -> Store:
    from fsspec.registry import known_implementations, registry

    from headrace.dataio.store.fsspec import FsspecStore
    from headrace.dataio.store.retry import Retry
    from headrace.dataio.store.wrappers import MetricsStore

    if scheme not in registry and scheme not in known_implementations:
        raise UnsupportedError(f"no store for {scheme}:// URLs", hint=f"give {_SUPPORTED}")
    return Retry(MetricsStore(FsspecStore(f"{scheme}://{rest}", options), "fsspec"))


def _s3(url: str, options: dict[str, object]) -> Store:
    from headrace.dataio.store.retry import Retry
    from headrace.dataio.store.s3 import S3Store
    from headrace.dataio.store.s3_config import parse
    from headrace.dataio.store.wrappers import MetricsStore

    return Retry(MetricsStore(S3Store(parse(url, options)), "s3"))
