"""From what the user names to the samples that it means: files of the same stem in a folder are one sample.

Purpose: files, folders (recursively), globs, manifests and WebDataset tars become groups of files, each with its key.

Invariants:

* The result depends on names only, not on the order in which a file system lists them. Groups come sorted by key.
* A key is the path relative to the source (a folder: to itself; a glob: to the folder before its first wildcard; a file: to
  its folder) without the last suffix. Dots, backslashes and control characters become `_`, so that a tar reader that cuts at the
  first dot finds the same key. A file named twice counts once, under the first source that names it.
* Two groups with one key are refused rather than renamed: a key that depended on what else is packed would not be stable.
* A manifest (a `.csv`, `.tsv`, `.jsonl`, `.ndjson` or `.parquet` that is named or matched by a glob) gives one sample a row: its
  media file, and the `.json`, `.txt` and `.vtt` of the same stem. Its key is the row's, else the path relative to the manifest.
* A `.tar` gives the samples that it holds, under the keys that they have there.
* A sample needs at least one media file. In a folder, other files of the same stem are its members, and files that belong
  to no media are passed over and reported as `ignored`; hidden files and symbolic links to folders are not looked at.

Failure behaviour: `NotFoundError` for a source that does not exist or a glob without match, `UsageError` for equal keys, with
both paths, and for a manifest that cannot be understood. What cannot be a member (not a regular file, a broken link, a name that
is not UTF-8, a row whose file is missing, a damaged tar) is reported as `Skipped`.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError, UsageError
from dataio.shards.ingest import archives
from dataio.shards.ingest.manifests import EXTENSIONS, USUAL, Columns, rows
from dataio.shards.media.container import SAMPLE_EXTENSIONS
from dataio.shards.media.facts import Span
from dataio.shards.report import Skipped

SIDECARS = ("json", "txt", "vtt")
"""Of a manifest's media file, the files of the same stem that are taken along."""
_WILDCARD = re.compile(r"[*?\[]")
_EXTENSION = re.compile(r"[\w+-]+")
_NOT_IN_KEYS = re.compile(r"[.\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one sample: (extension, path), sorted by extension.

    `bytes` is their size when they were found, `sizes` that of each, and `stamp` their newest time of change, in nanoseconds.
    `spans`, where there are any, say where in its file each lies. `caption` and `fields` (a JSON object) are a manifest's.
    """

    key: str
    files: tuple[tuple[str, Path], ...]
    bytes: int
    stamp: int = 0
    sizes: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    caption: str | None = None
    fields: str | None = None

    def members(self) -> tuple[Span, ...]:
        """The files as a worker is told."""
        spans = self.spans or ((0, -1),) * len(self.files)
        return tuple(Span(ext, str(path), *span) for (ext, path), span in zip(self.files, spans, strict=True))


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
    named: bool = False  # by the user, rather than found in a folder
    matched: bool = False  # by a glob


def gather(sources: Iterable[str | os.PathLike[str]], columns: Columns = USUAL) -> Gathered:
    """Group the files of all sources into samples. `columns` are those of manifests."""
    found: dict[str, _Found] = {}
    for source in sources:
        for item in _expand(os.fspath(source)):
            found.setdefault(os.path.abspath(item.path), item)
    collected = _Collected()
    sets: dict[tuple[str, str], list[tuple[_Found, os.stat_result]]] = {}
    for absolute, item in found.items():
        info = _stat(item.path, collected.skipped)
        if info is None:
            continue
        if _ext(item.path) in EXTENSIONS and (item.named or item.matched):
            collected.add_manifest(item.path, columns)
        else:
            sets.setdefault((os.path.dirname(absolute), item.path.stem), []).append((item, info))
    for files in sets.values():
        collected.add_set(files)
    groups = sorted(collected.groups, key=lambda group: group.key)
    _refuse_equal_keys(groups)
    skipped = sorted(collected.skipped, key=lambda s: s.path)
    return Gathered(tuple(groups), tuple(skipped), tuple(sorted(collected.ignored)))


class _Collected:
    """The groups found so far, and what was left."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.skipped: list[Skipped] = []
        self.ignored: list[str] = []

    def add_set(self, files: list[tuple[_Found, os.stat_result]]) -> None:
        """Files of one stem in one folder."""
        has_media = any(_ext(item.path) in SAMPLE_EXTENSIONS for item, _ in files)
        members = [m for m in files if has_media and _EXTENSION.fullmatch(_ext(m[0].path))]
        if members:
            self.groups.append(_group(members))
        for item, info in (m for m in files if m not in members):
            if _ext(item.path) == "tar":
                self._add_tar(item.path, info)
            elif item.named:
                reason = f"neither a media file nor of the same stem as one (media are {_media()})"
                self.skipped.append(Skipped(str(item.path), UnsupportedError.code, reason))
            else:
                self.ignored.append(str(item.path))

    def _add_tar(self, path: Path, info: os.stat_result) -> None:
        groups = []
        try:
            for key, spans in archives.samples(path):
                group = _archived(key, sorted(spans, key=lambda span: span.ext), info.st_mtime_ns)
                if len({span.ext for span in spans}) < len(spans):
                    self._skip_in(path, key, "two of its members have the same name")
                elif not any(span.ext in SAMPLE_EXTENSIONS for span in spans):
                    self._skip_in(path, key, f"it has no media file (media are {_media()})")
                else:
                    groups.append(group)
        except (CorruptionError, UnsupportedError) as error:
            self.skipped.append(Skipped(str(path), error.code, error.message))
        except OSError as error:
            self.skipped.append(Skipped(str(path), CorruptionError.code, f"cannot be read: {error.strerror or error}"))
        else:
            self.groups += groups

    def _skip_in(self, path: Path, key: str, reason: str) -> None:
        self.skipped.append(Skipped(f"{path}: sample {key!r}", UnsupportedError.code, reason))

    def add_manifest(self, manifest: Path, columns: Columns) -> None:
        """One sample a row."""
        for row in rows(manifest, columns):
            if _ext(row.path) not in SAMPLE_EXTENSIONS:
                raise UsageError(f"{row.where}: {row.path} is not a media file", hint=f"media are {_media()}")
            skipped: list[Skipped] = []
            info = _stat(row.path, skipped)
            if info is None:
                self.skipped += [Skipped(f"{row.where}: {s.path}", s.code, s.reason) for s in skipped]
                continue
            beside = [row.path.with_suffix(f".{ext}") for ext in SIDECARS]
            members = [(_Found(manifest.parent, path), path.stat()) for path in beside if path.is_file()]
            group = _group([(_Found(manifest.parent, row.path), info), *members])
            key = _clean(row.key) if row.key else group.key
            if not key or set(key.split("/")) & {"", ".", ".."}:
                raise UsageError(
                    f"{row.where}: {row.key or key!r} cannot be a key", hint="keys are relative, without '..'"
                )
            self.groups.append(dataclasses.replace(group, key=key, caption=row.caption, fields=row.fields))


def _archived(key: str, spans: list[Span], stamp: int) -> Group:
    files = tuple((span.ext, Path(span.path)) for span in spans)
    places = tuple((span.offset, span.length) for span in spans)
    sizes = tuple(span.length for span in spans)
    return Group(key, files, sum(sizes), stamp, sizes, places)


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
            yield from _walk(root, match) if match.is_dir() else [_Found(root, match, matched=True)]
    else:
        raise NotFoundError(f"there is no file or folder {source!r}", hint="check the path")


def _walk(root: Path, folder: Path) -> Iterator[_Found]:
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (_Found(root, Path(at, name)) for name in sorted(files) if not name.startswith("."))


def _stat(path: Path, skipped: list[Skipped]) -> os.stat_result | None:
    try:
        os.fspath(path).encode()
        info = path.stat()
    except UnicodeEncodeError:
        skipped.append(Skipped(repr(str(path)), UnsupportedError.code, "the file's name is not UTF-8"))
    except OSError as error:
        skipped.append(Skipped(str(path), CorruptionError.code, f"cannot be read: {error.strerror or error}"))
    else:
        if stat.S_ISREG(info.st_mode):
            return info
        skipped.append(Skipped(str(path), UnsupportedError.code, "not a regular file"))
    return None


def _ext(path: Path) -> str:
    return path.suffix[1:].lower()


def _media() -> str:
    return ", ".join(sorted(SAMPLE_EXTENSIONS))


def _group(members: list[tuple[_Found, os.stat_result]]) -> Group:
    files: dict[str, Path] = {}
    for item, _ in members:
        twin = files.setdefault(_ext(item.path), item.path)
        if twin != item.path:
            raise UsageError(f"{twin} and {item.path} would be the same member of a sample", hint="rename one of them")
    first = min((item for item, _ in members), key=lambda item: str(item.path))
    stamp = max(info.st_mtime_ns for _, info in members)
    sizes = {_ext(item.path): info.st_size for item, info in members}
    return Group(
        _key(first),
        tuple(sorted(files.items())),
        sum(sizes.values()),
        stamp,
        tuple(size for _, size in sorted(sizes.items())),
    )


def _key(item: _Found) -> str:
    relative = Path(os.path.relpath(item.path, item.root)).with_suffix("")
    if relative.parts[0] == "..":  # a manifest may name files anywhere
        relative = Path(*Path(os.path.abspath(item.path)).with_suffix("").parts[1:])
    return "/".join(_NOT_IN_KEYS.sub("_", part) for part in relative.parts)


def _clean(key: str) -> str:
    return "/".join(_NOT_IN_KEYS.sub("_", part) for part in key.split("/"))


def _refuse_equal_keys(groups: list[Group]) -> None:
    for a, b in itertools.pairwise(groups):
        if a.key == b.key:
            raise UsageError(
                f"{a.files[0][1]} and {b.files[0][1]} would both be the sample {a.key!r}",
                hint="rename one, or give the folder that holds both as the one source",
            )
