"""Open the store at a URL.

Purpose: `open_store` finds the back end of a URL's scheme in a registry, imports it, opens it, and wraps it in metrics
and retries. A new back end needs one module with an opener, and one `register_back_end` call, or one entry in
`_BACK_ENDS`. fsspec serves every other scheme that it knows.

Invariant: the scheme alone chooses the back end. The back end is imported only when it is chosen.

Failure behaviour: a scheme that neither the registry nor fsspec knows raises `UnsupportedError` with the known ones.
Opening sends no request. The first operation, or `headrace doctor URL`, reports a missing bucket or wrong credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.dataio.core.errors import UnsupportedError, UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.redact import has_secrets
from headrace.dataio.store.base import Location, Store, path_of_url
from headrace.dataio.store.url_policy import scheme_of, sendable

Opener = Callable[[str, Mapping[str, object]], Store]
"""Opens the store at a URL with its storage options, without sending a request."""


@dataclass(frozen=True, slots=True)
class BackEnd:
    """A kind of store.

    `label` is its name in the metrics. `opener` opens a store, or names the function that does (`module:function`).
    """

    label: str
    opener: Opener | str


_BACK_ENDS: dict[str, BackEnd] = {
    "file": BackEnd("posix", "headrace.dataio.store.posix:open_url"),
    "s3": BackEnd("s3", "headrace.dataio.store.s3:open_url"),
    "az": BackEnd("azure", "headrace.dataio.store.azure:open_url"),
}
_ONE_SLASH = re.compile(r"(s3|gs|az|abfs|https?|file):/(?!/)")
"""A mistyped URL, which would otherwise be the path of a local folder."""
_FSSPEC = BackEnd("fsspec", "headrace.dataio.store.fsspec:open_url")


def register_back_end(scheme: str, label: str, opener: Opener | str) -> None:
    """Make `open_store` use this back end for URLs of `scheme`, in place of the present one or of fsspec.

    Args:
        scheme: The URL's scheme, in lower case and without `://`.
        label: The value of the label `backend` in the metrics.
        opener: Called with the URL and its storage options; or `module:function`, which is imported on first use. It
            should refuse unknown options with `UsageError`.

    Example:
        >>> from headrace.dataio.store.posix import PosixStore
        >>> register_back_end("scratch", "posix", lambda url, options: PosixStore("/tmp/" + url.split("://")[1]))
        >>> open_store("scratch://demo").location.url
        'file:///tmp/demo'
    """
    _BACK_ENDS[scheme] = BackEnd(label, opener)


def open_store(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Open the store at a URL, with metrics and retries.

    Args:
        url: A path, `file:///path`, `s3://bucket/prefix`, or a URL of another scheme of fsspec.
        storage_options: A dict of options. For S3: those of s3fs, and `endpoint_url`, `region`, `path_style`, `client`
            (`headrace.dataio.store.s3_config`). The AWS variables and profiles give the rest. For a directory:
            `direct`, to read large ranges without the page cache. For other schemes: the file system's own. For every
            scheme: `mounts`, other stores below `mounts/<name>/` (`headrace.dataio.store.mounts`). Default: None.

    Returns:
        The store. Close it, or use it in a `with` statement.

    Raises:
        UsageError: The URL or an option is malformed or unknown.
        UnsupportedError: No back end for the scheme, or a package of it is not installed.

    Example:
        >>> with open_store("memory://demo") as store:
        ...     store.put("a/key", b"bytes")
        ...     store.get("a/key")
        b'bytes'
    """
    given: object = url
    if not isinstance(given, (str, os.PathLike)):
        raise UsageError(
            f"{given!r:.200} is not a place for objects", hint="give a path or a URL such as s3://bucket/prefix"
        )
    text, options = os.fspath(url), dict(storage_options or {})
    if isinstance(url, str) and (scheme := _ONE_SLASH.match(url)):
        raise UsageError(
            f"{url!r:.200} has one slash after {scheme[1]}:",
            hint=f"write {scheme[1]}://…; for a folder of this name, write ./{scheme[1]}:/…",
        )
    if "mounts" in options:
        from headrace.dataio.store.mounts import open_mounts

        mounts = options.pop("mounts")
        return open_mounts(open_store(text, storage_options=options), mounts, open_store)
    from headrace.dataio.store.retry import Retry
    from headrace.dataio.store.wrappers import MetricsStore

    with naming_extras():
        back_end = _back_end_of(scheme_of(text))
        return Retry(MetricsStore(_opener_of(back_end)(text, options), back_end.label))


def open_location(location: Location) -> Store:
    """Open the store at `location`, with this process's own credentials."""
    if not location.shareable or has_secrets(location.options):
        raise UsageError(
            f"{location.url} was opened with secrets or other options that another process does not get",
            hint="put the credentials into the AWS variables or a profile of both processes",
        )
    _check_sent(location.url, {name: value for name, value in location.options.items() if name != "mounts"})
    mounted = location.options.get("mounts")
    for entry in mounted.values() if isinstance(mounted, Mapping) else ():
        if isinstance(entry, Mapping) and isinstance(options := entry.get("options", {}), Mapping):
            _check_sent(str(entry.get("url")), options)
    return open_store(location.url, storage_options=location.options)


def folder_of(url: str) -> Path:
    """The directory that a `file://` URL names."""
    return Path(path_of_url(url))


def _check_sent(url: str, options: Mapping[str, object]) -> None:
    if not sendable(url, options):
        raise UsageError(
            f"{url!r} is not opened for another process: only directories, S3, HTTP, and remote file systems without "
            "options are",
            hint="open it in the process that needs it",
        )


def _back_end_of(scheme: str) -> BackEnd:
    if scheme in _BACK_ENDS:
        return _BACK_ENDS[scheme]
    from fsspec.registry import known_implementations, registry

    if scheme not in registry and scheme not in known_implementations:
        hint = "a path, file:///path, s3://bucket/prefix, or a scheme of fsspec"
        raise UnsupportedError(f"no store for {scheme}:// URLs", hint=f"give {hint}")
    return _FSSPEC


def _opener_of(back_end: BackEnd) -> Opener:
    if not isinstance(back_end.opener, str):
        return back_end.opener
    module, _, name = back_end.opener.partition(":")
    opener: Opener = getattr(import_module(module), name)
    return opener
