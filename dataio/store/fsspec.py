"""A store on any other file system of fsspec, with as much of the contract as that file system guarantees.

Purpose: to read a dataset from HTTP, HDFS, SFTP or a model hub, and to write where a write is one atomic request.

Invariants:

* Only the file systems of `_ATOMIC` are written to. Their `pipe_file` is one atomic request.
* A body is collected up to `WRITE_BYTES` and sent at once. fsspec's `open(..., "wb")` is never used, because it
  publishes a truncated file after an exception.
* Nothing is cached.
* `put_if_absent` works only in `memory://`, within its process.
* Host and port come from the URL unless `options` contains them.
* With the option `public_only`, HTTP connects to public addresses only (`url_policy`).

Failure behaviour: an operation that the file system lacks is an `UnsupportedError`. A listing is collected and sorted;
above `LISTED` keys it raises `CapacityError`. Errors are translated by their Python class. A library's own class
becomes a plain `HeadraceError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import itertools
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    HeadraceError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
    from_os_error,
)
from headrace.dataio.core.redact import has_secrets, without_secrets
from headrace.dataio.store.base import (
    Buffer,
    Location,
    ObjectInfo,
    Store,
    check_conditional_size,
    check_folder,
    check_key,
    check_prefix,
    check_range,
    is_after,
    too_large,
    writable_bytes,
)
from headrace.dataio.store.url_policy import PrivateAddressError, public_socket, sendable

WRITE_BYTES = 256 * limits.MIB
LISTED = 1_000_000
_ATOMIC = {"memory", "gs", "gcs", "abfs", "abfss", "az"}
_HTTP = {"http", "https"}
_READ_BYTES = 8 * limits.MIB
_REQUEST_SECONDS = 65.0 + _READ_BYTES / limits.LEAST_RATE
"""The time limit of a request, or of a call of an asynchronous file system that sends a few."""
_LISTING_SECONDS = 3600.0
"""The time limit of a listing, which may be many requests."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_create_lock = threading.Lock()  # makes a create in memory:// atomic; it exists in this process only


class FsspecStore(Store):
    """Objects below `url` of an fsspec file system. `options` are the file system's own."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._protocol, _, path = url.partition("://")
        self._url, self._options = url.rstrip("/"), dict(options)
        _check_url(url, path)
        self._fs = _file_system(self._protocol, url, options)
        self._root = self._url if self._protocol in _HTTP else str(self._fs._strip_protocol(self._url)).rstrip("/")

    @property
    def location(self) -> Location:
        shareable = sendable(self._url, self._options) and not has_secrets(self._options)
        return Location(self._url, without_secrets(self._options), shareable)

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        size = self.stat(key).size
        if size > max_bytes:
            raise too_large(self._name(key), size, max_bytes)
        data = bytearray(size)
        self._fill(key, 0, memoryview(data))
        return bytes(data)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        target = writable_bytes(buffer)
        check_range(self._name(key), offset, len(target), self.stat(key).size)
        self._fill(key, offset, target)

    def put(self, key: str, data: Buffer) -> None:
        self.put_multipart(key, [data])

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        path = self._path(key)
        check_conditional_size(self._name(key), data)
        if self._protocol != "memory":
            raise UnsupportedError(
                f"{self._url} has no conditional write that is known to have one winner",
                hint="keep datasets and checkpoints with several writers on S3 or in a directory",
            )
        with self._translated(key), _create_lock:
            if self._fs.isfile(path):
                return bool(self._call("cat_file", path) == bytes(data))
            self._fs.pipe_file(path, bytes(data))
            return True

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        path, body = self._writable(key), bytearray()
        for part in parts:
            body += part
            if len(body) > WRITE_BYTES:
                raise CapacityError(
                    f"{self._name(key)}: this store writes an object in one request, of at most "
                    f"{limits.format_bytes(WRITE_BYTES)}",
                    hint="write several, or use S3 or a directory",
                )
        with self._translated(key):
            self._call("pipe_file", path, bytes(body), seconds=_REQUEST_SECONDS + len(body) / limits.LEAST_RATE)
        return len(body)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not check_prefix(prefix):
            return
        with self._translated(prefix):
            entries = self._list_entries(self._folder(prefix))
        entry_of = {self._key(path): entry for path, entry in entries.items()}
        for key in sorted(key for key in entry_of if key is not None and key.startswith(prefix)):
            yield _info(key, entry_of[key]) if entry_of[key].get("size") is not None else self.stat(key)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        if not check_folder(prefix):
            return
        entries: list[Mapping[str, Any]] = []
        with self._translated(prefix), contextlib.suppress(FileNotFoundError):
            entries = self._call("ls", self._folder(prefix), seconds=_LISTING_SECONDS, detail=True)
        names = {name for entry in entries if (name := self._folder_of(entry, prefix)) and is_after(name, after)}
        yield from sorted(names, key=lambda name: name + "/")

    def _folder_of(self, entry: Mapping[str, Any], prefix: str) -> str | None:
        """The name of the listed folder directly below `prefix`; None if the entry is an object, or is elsewhere."""
        key = self._key(entry["name"].rstrip("/"))
        if key is None or not key.startswith(prefix):
            return None
        name, deeper, _ = key[len(prefix) :].partition("/")  # an index page may have a link to an object below a folder
        return name if deeper or entry["type"] == "directory" else None

    def _folder(self, prefix: str) -> str:
        """The path of the last folder that `prefix` names."""
        name = prefix.rpartition("/")[0]
        path = f"{self._root}/{name}".rstrip("/")
        return path + "/" if self._protocol in _HTTP else path

    def _list_entries(self, top: str) -> dict[str, Mapping[str, Any]]:
        """Return the entries below the folder `top`, by path.

        It does not use fsspec's own walk, which silently skips folders that cannot be listed.
        """
        if not _uses_generic_walk(self._fs):
            with contextlib.suppress(FileNotFoundError):
                return self._check_count(self._call("find", top, seconds=_LISTING_SECONDS, detail=True))
            return {}
        entries: dict[str, Mapping[str, Any]] = {}
        folders = [top]
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                for entry in self._call("ls", folder, seconds=_LISTING_SECONDS, detail=True):
                    if entry["type"] != "directory":
                        entries[entry["name"]] = entry
                    elif entry["name"].rstrip("/") != folder.rstrip("/"):
                        folders.append(entry["name"])
            self._check_count(entries, len(folders) - 1)
        return entries

    def _check_count(self, entries: dict[str, Mapping[str, Any]], folders: int = 0) -> dict[str, Mapping[str, Any]]:
        if len(entries) + folders > LISTED:
            raise CapacityError(
                f"{self._url}: more than {LISTED:,} keys cannot be sorted in memory", hint="list by a longer prefix"
            )
        return entries

    def stat(self, key: str) -> ObjectInfo:
        with self._translated(key):
            entry = self._call("info", self._path(key))
        if entry.get("type") == "directory":
            raise NotFoundError(f"{self._name(key)} does not exist", hint="check the URL and the key")
        if entry.get("size") is None:
            raise UnsupportedError(f"{self._name(key)}: the server does not say how large it is")
        return _info(key, entry)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._writable(key)
            with contextlib.suppress(NotFoundError), self._translated(key):
                if self._call("isfile", path):
                    self._call("rm_file", path)

    def _call(self, method: str, *arguments: object, seconds: float = _REQUEST_SECONDS, **options: object) -> Any:
        """Call the file system, with a time limit if it is asynchronous; others have their own limit, or none."""
        call = getattr(self._fs, method)
        if inspect.iscoroutinefunction(
            getattr(call, "__wrapped__", None)
        ):  # fsspec then waits for the coroutine, and accepts a time limit
            options["timeout"] = seconds
        return call(*arguments, **options)

    def close(self) -> None:
        session = getattr(self._fs, "_session", None)
        if self._protocol in _HTTP and session is not None:
            self._fs.close_session(self._fs.loop, session)

    def _fill(self, key: str, offset: int, target: memoryview) -> None:
        """Fill `target` in bounded pieces. Raises `UnsupportedError` if the file system returns too many bytes."""
        for at in range(0, len(target), _READ_BYTES):
            piece = target[at : at + _READ_BYTES]
            start = offset + at
            with self._translated(key):
                data = self._read(self._path(key), start, start + len(piece))
            if len(data) < len(piece):
                raise TransientError(f"{self._name(key)} ended at byte {start + len(data)} while it was read")
            if len(data) > len(piece):
                raise _no_ranges(self._name(key))
            piece[:] = data

    def _read(self, path: str, start: int, stop: int) -> bytes:
        if self._protocol not in _HTTP:
            return bytes(self._call("cat_file", path, start=start, end=stop))
        with self._fs.open(path, "rb", cache_type="none") as file:  # stops reading if a server ignores the range
            if not file.seekable():
                raise _no_ranges(path)
            file.seek(start)
            return bytes(file.read(stop - start))

    # names

    def _name(self, key: str) -> str:
        return f"{self._url}/{key}"

    def _path(self, key: str) -> str:
        name = check_key(key)
        return f"{self._root}/{urllib.parse.quote(name) if self._protocol in _HTTP else name}"

    def _writable(self, key: str) -> str:
        path = self._path(key)
        if self._protocol not in _ATOMIC:
            raise UnsupportedError(
                f"{self._url} is read-only: fsspec does not say whether a write to {self._protocol}:// is atomic",
                hint="write to S3 or a directory; a local path is opened as such, without fsspec",
            )
        return path

    def _key(self, path: str) -> str | None:
        """The key of a listed path; None if it is outside the root or no valid key."""
        if not path.startswith(self._root + "/"):
            return None
        key = path[len(self._root) + 1 :]
        try:
            return check_key(urllib.parse.unquote(key) if self._protocol in _HTTP else key)
        except UsageError:
            return None

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        doing = f"at {self._name(key)}"
        try:
            yield
        except HeadraceError:
            raise
        except Exception as error:
            raise _translate(_cause(error), doing) from error


def open_url(url: str, options: Mapping[str, object]) -> FsspecStore:
    """Open the file system of the URL's scheme, with its own options."""
    scheme, _, path = url.partition("://")
    return FsspecStore(f"{scheme.lower()}://{path}", options)


def _check_url(url: str, path: str) -> None:
    if "::" in url:
        raise UnsupportedError(f"{url!r}: chained URLs are not supported", hint="open the inner URL")
    if "@" in path.partition("/")[0]:
        raise UsageError("the URL contains credentials", hint="give them as storage options")
    if "?" in url or "#" in url:
        place = re.split("[?#]", url)[0]  # the rest may be a signature
        raise UsageError(
            f"{place!r} is followed by a query or a fragment", hint="give a URL without query and fragment"
        )


def _file_system(protocol: str, url: str, options: Mapping[str, object]) -> Any:
    extra: dict[str, object] = {}
    if protocol in _HTTP:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS, sock_connect=5, sock_read=60)
        extra = {"encoded": True, "client_kwargs": {"timeout": timeout}}
        if options.get("public_only"):
            extra["get_client"] = _public_client
        options = {name: value for name, value in options.items() if name != "public_only"}
    try:
        file_system_class = fsspec.get_filesystem_class(protocol)
        arguments = {**extra, **file_system_class._get_kwargs_from_urls(url), **options}
        inspect.signature(file_system_class.__init__).bind(
            None, **arguments
        )  # first, because some raise in __del__ after a failed init
        return fsspec.filesystem(protocol, **{**arguments, "skip_instance_cache": True, "use_listings_cache": False})
    except ImportError as error:
        raise UnsupportedError(f"{url}: {error}", hint=f"install what fsspec needs for {protocol}://") from error
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{url}: fsspec refused it: {error}", hint="check the scheme and the storage options"
        ) from error
    except Exception as error:  # those that connect at once
        raise _translate(error, f"opening {url}") from error


async def _public_client(**arguments: Any) -> Any:
    """fsspec's HTTP client, limited to public addresses."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=public_socket), **arguments)


def _uses_generic_walk(fs: Any) -> bool:
    """Whether `find` is fsspec's generic walk, folder by folder, and not this file system's own implementation."""
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is AsyncFileSystem._find
    return type(fs).find is AbstractFileSystem.find


def _info(key: str, entry: Mapping[str, Any]) -> ObjectInfo:
    stamp = next((entry[name] for name in _TIMES if entry.get(name) is not None), 0.0)
    if isinstance(stamp, datetime.datetime):
        stamp = stamp.timestamp()
    return ObjectInfo(key, int(entry["size"]), float(stamp) if isinstance(stamp, int | float) else 0.0)


def _no_ranges(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: the server answered a request for a range with the whole object",
        hint="Headrace needs a server that supports ranged reads; see `headrace doctor URL`",
    )


def _cause(error: BaseException) -> BaseException:
    """The real error: fsspec raises FileNotFoundError for every failed HTTP request, with the real one as its cause."""
    chain = itertools.islice(_error_chain(error), 8)
    kinds = (TimeoutError, ConnectionError)
    return next((e for e in chain if isinstance(e, kinds) or type(e).__module__.startswith("aiohttp")), error)


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _translate(error: BaseException, doing: str) -> HeadraceError:
    status = getattr(error, "status", None)
    if isinstance(getattr(error, "os_error", None), PrivateAddressError):
        return AccessDeniedError(
            f"{error.os_error} ({doing})",  # type: ignore[attr-defined]
            hint="a dataset names this server; trust_mounts=True (--trust-mounts) lets it name private ones",
        )
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return NotFoundError(f"{doing}: it does not exist", hint="check the URL and the key")
    if isinstance(error, PermissionError) or status in (401, 403):
        return AccessDeniedError(f"{doing}: access is denied", hint="check the storage options and their permissions")
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"{doing}: the file system cannot do this")
    if isinstance(error, socket.gaierror):
        return TransientError(f"{doing}: {error.strerror}", hint="check the host's name and the network")
    if isinstance(error, asyncio.TimeoutError | TimeoutError | ConnectionError) or (
        isinstance(status, int) and status >= 500
    ):
        return TransientError(f"{doing}: {error or type(error).__name__}", hint="check the server and the network")
    if type(error).__module__.startswith("aiohttp"):
        return TransientError(f"{doing}: {type(error).__name__}: {error}", hint="check the server and the network")
    if isinstance(error, OSError):
        return from_os_error(error, doing)
    if isinstance(error, ValueError) and "range request" in str(error):
        return _no_ranges(doing)
    return HeadraceError(f"{doing}: {type(error).__name__}: {error}")
