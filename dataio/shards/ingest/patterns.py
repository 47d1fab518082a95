"""Finds the tar objects that the user's patterns match: brace patterns, globs, folders and lists, on any store.

Invariants:

* `{000..999}` (with a step: `{0..90..10}`) and `{a,b}` expand as in a shell, also nested. Braces expand before anything
  else.
* `*`, `?` and `[…]` match within one folder, `**` across folders.
* A URL that names a folder rather than an object means every tar below the folder.
* `a::b` is a list.
* Each folder that a pattern names becomes one store. If there are more than `MAX_MOUNTS`, parent folders replace their
  children.
* From a glob or a folder, only objects with a tar's name are taken. The others (Parquet files, statistics) are reported
  as `ignored`. An object that the user names is taken under any name.
* There are at most `MAX_SHARDS` shards. The result depends only on names, and it is sorted.

Failure behaviour: `pipe:` and other addresses that are commands raise `UnsupportedError`. A pattern that finds nothing
raises `NotFoundError`. If only some of a pattern's objects exist, the others are reported as `missing`, since failed
writers leave gaps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.dataio.core.errors import CapacityError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.shards.ingest.grouping import last_suffix
from headrace.dataio.shards.ingest.manifests import EXTENSIONS
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.source_stores import as_regex
from headrace.dataio.shards.media.container import KNOWN_EXTENSIONS
from headrace.dataio.store.base import Location, ObjectInfo, Store
from headrace.dataio.store.mounts import MAX_MOUNTS, url_of

MAX_SHARDS = 1_000_000
_MAX_STATS = 16
"""Up to this many objects are looked up one by one. More objects are looked up in a listing."""
_WILDCARD = re.compile(r"[*?\[]")
_ANY_KEY = re.compile(".*", re.DOTALL)
_RANGE = re.compile(r"(-?\d{1,12})\.\.(-?\d{1,12})(?:\.\.(-?\d{1,12}))?")
_COMMAND = re.compile(r"(?i)\s*(?:pipe|cmd|exec|shell)\s*:|-$|.*\|")
_TAR_NAME = re.compile(r"(?i).*\.(?:tar|tgz|tbz2?|txz|tzst|tar\.\w+)")

_ENDINGS = KNOWN_EXTENSIONS | EXTENSIONS | {"tar"}


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One store and its shards, sorted by key."""

    store: Store
    shards: tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class FoundShards:
    """The result of `find`. The caller closes the stores."""

    sources: tuple[ShardSource, ...]
    missing: tuple[Skipped, ...]
    ignored: tuple[str, ...]

    def close(self) -> None:
        """Close all stores."""
        with contextlib.ExitStack() as stack:
            for source in self.sources:
                stack.callback(source.store.close)


@dataclass(frozen=True, slots=True)
class _ParsedPattern:
    """The objects to find in the store `root`. `name` is a key, a glob, or `""` for every object."""

    root: str
    name: str

    @property
    def is_glob(self) -> bool:
        return _WILDCARD.search(self.name) is not None


def find(patterns: Iterable[str | os.PathLike[str]], opener: Callable[[str], Store]) -> FoundShards:
    """Find the shards that match `patterns`. `opener` opens the store at a URL or a path."""
    texts = [text for pattern in patterns for text in os.fspath(pattern).split("::")]
    parsed_patterns = [(text, [_parsed(url) for url in expanded(text)]) for text in texts]
    if not texts:
        raise UsageError("there is no pattern to index", hint="give the URLs of tar shards")
    store_roots = _store_roots({item.root for _, items in parsed_patterns for item in items})
    searches = dict[str, _StoreSearch]()
    try:
        for root in sorted(set(store_roots.values())):
            searches[root] = _StoreSearch(opener, root)
        for text, items in parsed_patterns:
            _search_all(text, [_relative_to(item, store_roots[item.root]) for item in items], searches)
        return _result(searches)
    except BaseException:
        for search in searches.values():
            search.store.close()
        raise


def match_tar(patterns: Iterable[str], opener: Callable[[str], Store]) -> bool:
    """Return whether the patterns match any object with a tar's name, or name such an object."""
    for item in (_parsed(url) for text in patterns for one in text.split("::") for url in expanded(one)):
        suffix = last_suffix(item.name)
        if suffix and not _WILDCARD.search(suffix) and (item.is_glob or suffix in _ENDINGS):
            if _TAR_NAME.fullmatch(item.name):
                return True
            continue  # it can match no tar
        with opener(item.root) as store:
            pattern = re.compile(as_regex(item.name), re.DOTALL) if item.is_glob else _ANY_KEY
            prefix = _WILDCARD.split(item.name, maxsplit=1)[0] + ("" if item.is_glob or not item.name else "/")
            if any(_TAR_NAME.fullmatch(info.key) and pattern.fullmatch(info.key) for info in store.list(prefix)):
                return True
    return False


def braces(text: str) -> Iterator[str]:
    """Expand the braces in `text` as a shell does. Braces that are neither a range nor a list stay as they are."""
    for start in (match.start() for match in re.finditer(r"\{", text)):
        end = _closing(text, start)
        if end is not None and (choices := _choices(text[start + 1 : end])) is not None:
            for choice in choices:
                for tail in braces(text[end + 1 :]):
                    yield text[:start] + choice + tail
            return
    yield text


def _closing(text: str, start: int) -> int | None:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return at
    return None


def _choices(inner: str) -> Iterator[str] | None:
    if match := _RANGE.fullmatch(inner):
        first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
        padded = any(re.match(r"-?0\d", bound) for bound in (match[1], match[2]))
        width = max(len(match[1]), len(match[2])) if padded else 0
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return (f"{number:0{width}}" for number in numbers)
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(inner):
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            parts.append(inner[begin:at])
            begin = at + 1
    if not parts:
        return None
    return itertools.chain.from_iterable(braces(part) for part in (*parts, inner[begin:]))


def expanded(text: str) -> list[str]:
    """Expand the braces of one pattern. Commands raise `UnsupportedError`."""
    _refuse_commands(text)
    if text.count("{") > 100:  # each brace is a level of recursion
        raise UsageError(f"{text[:80]!r}… has more than 100 braces", hint="use a wildcard, or several patterns")
    urls = list(itertools.islice(braces(text), MAX_SHARDS + 1))
    if len(urls) > MAX_SHARDS:
        raise CapacityError(f"{text!r} expands to more than {MAX_SHARDS} shards", hint="index it in parts")
    return urls


def _refuse_commands(text: str) -> None:
    if not _COMMAND.match(text):
        return
    inside = re.search(r"(?:s3|gs|file|https?)://[^\s|'\"]+", text)
    raise UnsupportedError(
        f"{text!r} is a command, not the address of an object; its output cannot be read at an offset or checked later",
        hint=f"give the address itself, such as {inside[0] if inside else 's3://bucket/shards/{000..999}.tar'}",
    )


def _parsed(url: str) -> _ParsedPattern:
    """Split `url` into the folder before its last part or its first wildcard, and the rest."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() == "file":
        path = _local_path(url, rest if separator else None)
        if not _WILDCARD.search(path) and os.path.isdir(path):
            return _ParsedPattern(path, "")
        head, name = _split(path)
        return _ParsedPattern(head or "/", name)
    bucket, _, key = rest.partition("/")
    head, name = _split(key)
    return _ParsedPattern(f"{scheme.lower()}://{bucket}" + (f"/{head}" if head else ""), name)


def _local_path(url: str, rest: str | None) -> str:
    if not url or "\0" in url:
        raise UsageError("a pattern needs a path or a URL", hint="such as s3://bucket/set/{000..999}.tar")
    if rest is None:
        return os.path.abspath(url)
    host, _, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{url!r} names the host {host!r}", hint="a file URL has three slashes: file:///data/set")
    return os.path.abspath("/" + urllib.parse.unquote(path))


def _split(path: str) -> tuple[str, str]:
    wild = _WILDCARD.search(path)
    head, _, _ = path[: wild.start() if wild else len(path)].rpartition("/")
    return head, path[len(head) + 1 :] if head or path.startswith("/") else path


def _store_roots(roots: set[str]) -> dict[str, str]:
    """Map each root to the root of its store: the root itself, or an ancestor if there are too many roots."""
    store_roots = {root: root for root in roots}
    while len(current := set(store_roots.values())) > MAX_MOUNTS:
        depth = max(root.count("/") for root in current)
        parents = {root: _parent(root) if root.count("/") == depth else root for root in current}
        if parents == {root: root for root in current}:
            raise CapacityError(f"the shards are in more than {MAX_MOUNTS} buckets", hint="index them in parts")
        store_roots = {root: parents[at] for root, at in store_roots.items()}
    return store_roots


def _parent(root: str) -> str:
    scheme, separator, rest = root.partition("://")
    head = rest.rpartition("/")[0] if separator else root.rpartition("/")[0] or "/"
    return (f"{scheme}://{head}" if head else root) if separator else head


def _relative_to(item: _ParsedPattern, store_root: str) -> _ParsedPattern:
    inside = item.root[len(store_root) :].strip("/")
    return _ParsedPattern(store_root, "/".join(filter(None, [inside, item.name])) if inside else item.name)


class _StoreSearch:
    """The shards found so far in one store."""

    def __init__(self, opener: Callable[[str], Store], root: str) -> None:
        self.store = opener(root)
        self.shards: dict[str, ObjectInfo] = {}
        self.ignored: set[str] = set()
        self.missing: dict[str, Skipped] = {}

    def add_matching(self, prefix: str, pattern: re.Pattern[str]) -> int:
        """Add every tar below `prefix` that matches. Return their number."""
        return sum(self._add_tar(info) for info in self.store.list(prefix) if pattern.fullmatch(info.key))

    def _add_tar(self, info: ObjectInfo) -> bool:
        """Add the object if it has a tar's name. Otherwise it is ignored."""
        if not _TAR_NAME.fullmatch(info.key):
            self.ignored.add(url_of(self.store, info.key))
            return False
        self.add(info)
        return True

    def add_named(self, names: Sequence[str]) -> int:
        """Add the objects with these keys, and return the number of tars found.

        A name without an object is also tried as a folder of tars.
        """
        if len(names) <= _MAX_STATS:
            return sum(self._add_one(name) for name in names)
        names_by_key = {name.rstrip("/"): name for name in names}
        existing, below = set[str](), dict[str, list[ObjectInfo]]()
        for info in self.store.list(_common(min(names), max(names))):
            if names_by_key.get(info.key) == info.key:
                existing.add(info.key)
                self.add(info)
            elif (folder := _folder_in(names_by_key, info.key)) is not None:
                below.setdefault(folder, []).append(info)
        count = len(existing)
        for folder, name in names_by_key.items():
            if name not in existing:
                tars = sum(self._add_tar(info) for info in below.get(folder, ()))
                count += tars
                if not tars:
                    self._add_missing(name)
        return count

    def _add_one(self, name: str) -> int:
        try:
            info = self.store.stat(name)
        except NotFoundError:
            if count := self.add_matching(f"{name.rstrip('/')}/", _ANY_KEY):
                return count
            self._add_missing(name)
            return 0
        self.add(info)
        return 1

    def _add_missing(self, name: str) -> None:
        self.missing[name] = Skipped(url_of(self.store, name), NotFoundError.code, "there is no such object")

    def add(self, info: ObjectInfo) -> None:
        self.shards[info.key] = info
        if len(self.shards) > MAX_SHARDS:
            raise CapacityError(f"more than {MAX_SHARDS} shards were found", hint="index them in parts")


def _search_all(text: str, items: Sequence[_ParsedPattern], searches: Mapping[str, _StoreSearch]) -> None:
    count, names = 0, dict[str, list[str]]()
    for item in items:
        if item.is_glob or not item.name:
            pattern = re.compile(as_regex(item.name), re.DOTALL) if item.name else _ANY_KEY
            literal = _WILDCARD.split(item.name, maxsplit=1)[0]
            count += searches[item.root].add_matching(literal, pattern)
        else:
            names.setdefault(item.root, []).append(item.name)
    count += sum(searches[root].add_named(keys) for root, keys in names.items())
    if not count:
        raise NotFoundError(f"{text!r} matches no tar", hint="check the address; quote patterns in a shell")


def _folder_in(folders: Mapping[str, str], key: str) -> str | None:
    """Return the folder in `folders` that holds the key, or None. It is the outermost if there are several."""
    return next((key[:at] for at, character in enumerate(key) if character == "/" and key[:at] in folders), None)


def _common(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _result(searches: Mapping[str, _StoreSearch]) -> FoundShards:
    sources = []
    for search in searches.values():
        shards = tuple(search.shards[key] for key in sorted(search.shards))
        if shards:
            sources.append(ShardSource(search.store, shards))
        else:
            search.store.close()
    missing = [search.missing[name] for search in searches.values() for name in sorted(search.missing)]
    ignored = {name for search in searches.values() for name in search.ignored}
    return FoundShards(tuple(sources), tuple(missing), tuple(sorted(ignored)))


def prefix_in(inner: Location, outer: Location) -> str | None:
    """Return the key prefix of store `inner` within store `outer`, or None if `inner` is elsewhere.

    The prefix is `""` or ends with a slash.
    """
    if dict(inner.options) != dict(outer.options):
        return None
    a, b = (f"{at.url.rstrip('/')}/" for at in (inner, outer))
    return a[len(b) :] if a.startswith(b) else None
