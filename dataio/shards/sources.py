"""From what the user names to the samples that it means: files of the same stem in a folder are one sample.

Purpose: files, folders (recursively) and globs become groups of files, each with its key.

Invariants:

* The result depends on names only, not on the order in which a file system lists them. Groups come sorted by key.
* A key is the path relative to the source (a folder: to itself; a glob: to the folder before its first wildcard; a file: to
  its folder) without the last suffix. Dots, backslashes and control characters become `_`, so that a tar reader that cuts at the
  first dot finds the same key. A file named twice counts once, under the first source that names it.
* Two groups with one key are refused rather than renamed: a key that depended on what else is packed would not be stable.
* A sample needs at least one media file. In a folder, other files of the same stem are its members, and files that belong
  to no media are passed over and reported as `ignored`; hidden files and symbolic links to folders are not looked at.

Failure behaviour: `NotFoundError` for a source that does not exist or a glob without match, `UsageError` for equal keys, with
both paths. What cannot be a member (not a regular file, a broken link, a name that is not UTF-8) is reported as `Skipped`.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError, UsageError
from dataio.shards.container import MEDIA_EXTENSIONS
from dataio.shards.report import Skipped

_WILDCARD = re.compile(r"[*?\[]")
_EXTENSION = re.compile(r"[\w+-]+")
_NOT_IN_KEYS = re.compile(r"[.\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one sample: (extension, path), sorted by extension. `bytes` is their size when they were found."""

    key: str
    files: tuple[tuple[str, Path], ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the sources mean."""

    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    root: Path
    path: Path
    named: bool  # by the user, rather than found in a folder


def gather(sources: Iterable[str | os.PathLike[str]]) -> Gathered:
    """Group the files of all sources into samples."""
    found: dict[str, _Found] = {}
    for source in sources:
        for item in _expand(os.fspath(source)):
            found.setdefault(os.path.abspath(item.path), item)
    sets: dict[tuple[str, str], list[tuple[_Found, int]]] = {}
    skipped: list[Skipped] = []
    for absolute, item in found.items():
        size = _size(item.path, skipped)
        if size is not None:
            sets.setdefault((os.path.dirname(absolute), item.path.stem), []).append((item, size))
    groups, ignored = [], list[str]()
    for files in sets.values():
        has_media = any(_ext(item.path) in MEDIA_EXTENSIONS for item, _ in files)
        members = [m for m in files if has_media and _EXTENSION.fullmatch(_ext(m[0].path))]
        if members:
            groups.append(_group(members))
        for item, _ in (m for m in files if m not in members):
            if item.named:
                reason = f"neither a media file nor of the same stem as one (media are {_media()})"
                skipped.append(Skipped(str(item.path), UnsupportedError.code, reason))
            else:
                ignored.append(str(item.path))
    groups.sort(key=lambda group: group.key)
    _refuse_equal_keys(groups)
    return Gathered(tuple(groups), tuple(sorted(skipped, key=lambda s: s.path)), tuple(sorted(ignored)))


def _expand(source: str) -> Iterator[_Found]:
    path = Path(source)
    if path.is_dir():
        yield from _walk(path, path)
    elif os.path.lexists(source):
        yield _Found(path.parent, path, True)
    elif _WILDCARD.search(source):
        root = Path(_WILDCARD.split(source, maxsplit=1)[0].rpartition("/")[0] or ("/" if source[0] == "/" else "."))
        matches = [Path(match) for match in sorted(glob.glob(source, recursive=True))]
        if not matches:
            raise NotFoundError(f"nothing matches {source!r}", hint="check the pattern; ** goes through folders")
        for match in matches:
            yield from _walk(root, match) if match.is_dir() else [_Found(root, match, False)]
    else:
        raise NotFoundError(f"there is no file or folder {source!r}", hint="check the path")


def _walk(root: Path, folder: Path) -> Iterator[_Found]:
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (_Found(root, Path(at, name), False) for name in sorted(files) if not name.startswith("."))


def _size(path: Path, skipped: list[Skipped]) -> int | None:
    try:
        os.fspath(path).encode()
        info = path.stat()
    except UnicodeEncodeError:
        skipped.append(Skipped(repr(str(path)), UnsupportedError.code, "the file's name is not UTF-8"))
    except OSError as error:
        skipped.append(Skipped(str(path), CorruptionError.code, f"cannot be read: {error.strerror or error}"))
    else:
        if stat.S_ISREG(info.st_mode):
            return info.st_size
        skipped.append(Skipped(str(path), UnsupportedError.code, "not a regular file"))
    return None


def _ext(path: Path) -> str:
    return path.suffix[1:].lower()


def _media() -> str:
    return ", ".join(sorted(MEDIA_EXTENSIONS))


def _group(members: list[tuple[_Found, int]]) -> Group:
    files: dict[str, Path] = {}
    for item, _ in members:
        twin = files.setdefault(_ext(item.path), item.path)
        if twin != item.path:
            raise UsageError(f"{twin} and {item.path} would be the same member of a sample", hint="rename one of them")
    first = min((item for item, _ in members), key=lambda item: str(item.path))
    return Group(_key(first), tuple(sorted(files.items())), sum(size for _, size in members))


def _key(item: _Found) -> str:
    relative = Path(os.path.relpath(item.path, item.root)).with_suffix("")
    return "/".join(_NOT_IN_KEYS.sub("_", part) for part in relative.parts)


def _refuse_equal_keys(groups: list[Group]) -> None:
    for a, b in itertools.pairwise(groups):
        if a.key == b.key:
            raise UsageError(
                f"{a.files[0][1]} and {b.files[0][1]} would both be the sample {a.key!r}",
                hint="rename one, or give the folder that holds both as the one source",
            )
