"""Finds the samples in the sources that the user gives.

Purpose: turn files, folders (recursively), globs, manifests and WebDataset tars, local or in stores, into groups of
files with keys. Paths and URLs are plain strings here.

Invariants:

* The result depends only on names, not on the order in which a file system lists them. Groups are sorted by key.
* A key is the path relative to the source, without the last suffix. For a folder, it is relative to the folder. For a
  glob, it is relative to the folder before the first wildcard. For a file, it is the file's stem.
* `headrace.dataio.shards.ingest.grouping` explains which files are one sample, and what its key is.
* A file that is named twice counts once, under the first source that names it.
* Two groups with the same key are an error. A new name would depend on the other inputs, so the key would not be
  stable.
* A manifest (a `.csv`, `.tsv`, `.jsonl`, `.ndjson` or `.parquet` that the user names or that a glob matches) gives one
  sample per row. The sample is the media file and the `.json`, `.txt` and `.vtt` files with its stem. Its key is the
  row's key, or else the path relative to the manifest.
* A `.parquet` that holds the media themselves (`headrace.dataio.shards.ingest.embedded`) gives one sample per row. Its
  key is the row's key, or else the file's key and the number of the row. Its samples keep the order of the file: they
  are sorted by the latter.
* A `.tar` gives the samples that it holds, under their keys in the tar. Only its headers are read here. The worker
  processes read the members, one sample at a time.
* `exclude` is the URL of the dataset that `pack` writes. `gather` leaves out the files of that dataset, except a file
  that the user names as a source.
* A sample needs at least one media file. In a folder, other files with its stem become its members. Files that belong
  to no media file are reported as `ignored`. Hidden files and symbolic links to folders are ignored without a report.

Failure behaviour: a source that does not exist, or a glob without a match, raises `NotFoundError`. Equal keys raise
`UsageError` with both paths. An invalid manifest raises `UsageError`. Errors of a store pass through.
These inputs are reported as `Skipped`: a file that is not regular, a broken link, a name that is not UTF-8, a row whose
file is missing, a damaged tar, an unreadable folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import re
import stat
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.grouping import (
    FoundFile,
    Group,
    Grouping,
    InputFile,
    divide_into_samples,
    key_of,
    last_suffix,
    make_group,
    row_key,
)
from headrace.dataio.shards.ingest.manifests import DEFAULT_COLUMNS, EXTENSION, EXTENSIONS, Columns, Row, rows
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.source_stores import WILDCARD, FileStat, SourceStores, is_url
from headrace.dataio.shards.ingest.tables import Tables, embedded_group
from headrace.dataio.shards.media.container import KNOWN_EXTENSIONS, SAMPLE_EXTENSIONS, is_named_video, unused_media
from headrace.dataio.shards.media.messages import Span
from headrace.dataio.store.base import check_key

SIDECARS = ("json", "txt", "vtt")
"""The extensions of the files that join a manifest's media file, if they have the same stem."""
_COMPRESSED_TAR = re.compile(r"(?i).*\.(?:tgz|tbz2?|txz|tzst|tar\.\w+)")


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of `gather`: groups, skipped inputs and ignored files."""

    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...]
    ignored: tuple[str, ...]


def gather(
    sources: Iterable[str | os.PathLike[str]],
    columns: Columns = DEFAULT_COLUMNS,
    stores: SourceStores | None = None,
    exclude: str | Sequence[str] = (),
    grouping: Grouping = "stem",
    *,
    in_place: bool = False,
) -> Gathered:
    """Group the files of all sources into samples.

    `columns` names the columns of manifests. `exclude` is the URL of a dataset whose files are left out, or several
    URLs. `grouping` says which files are one sample (`headrace.dataio.shards.ingest.grouping`). With `in_place`, tars are
    skipped, and Parquet files with embedded media raise `UsageError`.
    """
    if stores is None:
        with SourceStores() as opened:
            return gather(sources, columns, opened, exclude, grouping, in_place=in_place)
    input_files: dict[str, InputFile] = {}
    collected = _Collector(stores, grouping, in_place)
    excluded = [_local(one).rstrip("/") for one in ([exclude] if isinstance(exclude, str) else exclude)]
    for source in sources:
        for item in _expand(_local(os.fspath(source)), stores, collected.skipped):
            absolute = item.path if is_url(item.path) else os.path.abspath(item.path)
            if item.is_named or not any(_is_below(folder, absolute) for folder in excluded):
                input_files.setdefault(absolute, item)
    files, tables = list[FoundFile](), list[FoundFile]()
    for item in input_files.values():
        info = item.info or _stat(item.path, collected.skipped)
        if info is None:
            continue
        if last_suffix(item.path) in EXTENSIONS and (item.is_named or item.from_glob):
            tables.append((item, info))
        else:
            files.append((item, info))
    collected.add_tables(tables, columns)
    for members in divide_into_samples(files, grouping):
        collected.add_files(members)
    groups = sorted(collected.groups, key=lambda group: group.order)
    _check_unique_keys(groups)
    skipped = sorted(collected.skipped, key=lambda s: s.path)
    return Gathered(tuple(groups), tuple(skipped), tuple(sorted(collected.ignored)))


def _is_below(folder: str, path: str) -> bool:
    return bool(folder) and (path == folder or path.startswith(f"{folder}/"))


class _Collector:
    """The groups found so far, and the skipped and ignored files."""

    def __init__(self, stores: SourceStores, grouping: Grouping, in_place: bool) -> None:
        self._stores, self._grouping, self._in_place = stores, grouping, in_place
        self.groups: list[Group] = []
        self.skipped: list[Skipped] = []
        self.ignored: list[str] = []

    def add_files(self, files: list[FoundFile]) -> None:
        """Add the files that have one stem in one folder."""
        has_media = any(last_suffix(item.path) in KNOWN_EXTENSIONS for item, _ in files)
        members = [m for m in files if has_media and EXTENSION.fullmatch(m[0].ext)]
        if len(members) > tar.MAX_SAMPLE_MEMBERS:
            first = members[0][0]
            self.skipped.append(Skipped(first.path, UnsupportedError.code, tar.too_many(key_of(first, self._grouping))))
        elif members:
            self.groups.append(make_group(members, self._grouping))
        for item, info in (m for m in files if m not in members):
            if last_suffix(item.path) == "tar" and not self._in_place:
                self._add_tar(item.path, info)
            elif last_suffix(item.path) == "tar":
                reason = "it is a tar, and these are files: index tars by themselves (--layout tars)"
                self.skipped.append(Skipped(item.path, UnsupportedError.code, reason))
            elif item.is_named:
                reason = f"neither a media file nor a file with the same stem as one (media are {_media_list()})"
                if _COMPRESSED_TAR.fullmatch(item.path):
                    reason = "a compressed tar: decompress it first (media are compressed already)"
                self.skipped.append(Skipped(item.path, UnsupportedError.code, reason))
            else:
                self.ignored.append(item.path)

    def _add_tar(self, path: str, info: FileStat) -> None:
        groups = []
        try:
            with _open_tar(path, self._stores) as read_at:
                for key, spans in _tar_samples(path, info.size, read_at):
                    group = _tar_group(key, sorted(spans, key=lambda span: span.ext), info.modified_ns)
                    if len({span.ext for span in spans}) < len(spans):
                        self._skip_in(path, key, "two of its members have the same name")
                    elif not any(span.ext in KNOWN_EXTENSIONS or is_named_video(span.ext) for span in spans):
                        self._skip_in(path, key, _no_media_reason([span.ext for span in spans]))
                    else:
                        groups.append(group)
        except (CorruptionError, UnsupportedError) as error:
            self.skipped.append(Skipped(path, error.code, error.message.removeprefix(f"{path}: ")))
        except OSError as error:
            self.skipped.append(Skipped(path, CorruptionError.code, f"cannot be read: {error.strerror or error}"))
        else:
            self.groups += groups

    def _skip_in(self, path: str, key: str, reason: str) -> None:
        self.skipped.append(Skipped(f"{path}: sample {key!r}", UnsupportedError.code, reason))

    def add_tables(self, tables: Iterable[FoundFile], columns: Columns) -> None:
        """Add one sample for each row of manifests and of Parquet files with embedded media."""
        with Tables(self._stores) as reader:
            for item, info in tables:
                embedded = None
                if last_suffix(item.path) == "parquet":
                    embedded = reader.rows_of(item.path, info, columns, key_of(item), in_place=self._in_place)
                if embedded is None:
                    self.add_manifest(item.path, info, columns)
                elif embedded:
                    self.groups += map(embedded_group, embedded)
                else:
                    self.skipped.append(Skipped(item.path, UnsupportedError.code, "it has no rows"))

    def add_manifest(self, manifest: str, info: FileStat, columns: Columns) -> None:
        """Add one sample for each row of a manifest."""
        if is_url(manifest):
            with self._stores.local_copy(manifest, info.size) as copy:
                listed = list(rows(copy, columns, manifest))
        else:
            listed = list(rows(Path(manifest), columns))
        urls = {path for row in listed for path in _paths_of(row) if is_url(path)}
        existing = self._stores.stat_many(urls)
        for row in listed:
            self._add_row(os.path.dirname(manifest), row, existing)

    def _add_row(self, folder: str, row: Row, existing: Mapping[str, FileStat]) -> None:
        """Add the sample of one row. `existing` holds the objects that rows name, and their sidecar files."""
        if not any(last_suffix(f"x.{ext}" if ext else path) in KNOWN_EXTENSIONS for ext, path in row.media):
            raise UsageError(f"{row.where}: {row.media[0][1]} is not a media file", hint=f"media are {_media_list()}")
        skipped, members = list[Skipped](), list[FoundFile]()
        for ext, path in row.media:
            info = _stat_input(path, skipped, existing)
            if info is not None:
                members.append((InputFile(folder, path, several_dots=ext), info))
        if skipped:
            self.skipped += [Skipped(f"{row.where}: {s.path}", s.code, s.reason) for s in skipped]
            return
        named = {ext for ext, _ in row.files}
        for path in _sidecar_paths(row.path) if row.path else ():
            info = _stat_input(path, [], existing)
            if info is not None and last_suffix(path) not in named:
                members.append((InputFile(folder, path), info))
        group = make_group(members)
        key = row_key(row.where, row.key or group.key)
        self.groups.append(dataclasses.replace(group, key=key, caption=row.caption, fields=row.fields))


@contextlib.contextmanager
def _open_tar(path: str, stores: SourceStores) -> Iterator[tar.ReadAt]:
    """Open the archive at a path or a URL, and yield a function that reads a range of it."""
    if is_url(path):
        yield stores.reader(path)
        return
    with open(path, "rb", buffering=0) as file:

        def read_at(offset: int, length: int) -> bytes:
            data = os.pread(file.fileno(), length, offset)
            if len(data) != length:
                raise CorruptionError(f"{path}: ends before offset {offset + length}")
            return data

        yield read_at


def _tar_samples(path: str, size: int, read_at: tar.ReadAt) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Yield the key and the members of each sample in the tar."""
    program = tar.compressed_by(read_at(0, min(8, size)))
    if program:
        raise UnsupportedError(
            f"{path} is compressed by {program}", hint="decompress it first; media are compressed already"
        )
    for key, members in tar.samples(read_at, size, path):
        yield key.removeprefix("./"), tuple(Span(m.ext, path, m.offset, m.length) for m in members)


def _tar_group(key: str, spans: list[Span], modified_ns: int) -> Group:
    files = tuple((span.ext, span.path) for span in spans)
    ranges = tuple((span.offset, span.length) for span in spans)
    sizes = tuple(span.length for span in spans)
    return Group(key, files, sum(sizes), modified_ns, sizes, ranges)


def _local(source: str) -> str:
    """Convert a file URL to a path. Return any other source as it is."""
    if not source.lower().startswith("file://"):
        return source
    host, _, path = source[7:].partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{source!r} names the host {host!r}", hint="a file URL has three slashes: file:///data/set")
    return "/" + urllib.parse.unquote(path)


def _expand(source: str, stores: SourceStores, skipped: list[Skipped]) -> Iterator[InputFile]:
    path = Path(source)
    if is_url(source):
        yield from _expand_url(source, stores, skipped)
    elif path.is_dir():
        yield from _walk(str(path), str(path), skipped)
    elif os.path.lexists(source):
        yield InputFile(str(path.parent), str(path), True)
    elif WILDCARD.search(source):
        root = WILDCARD.split(source, maxsplit=1)[0].rpartition("/")[0] or ("/" if source[0] == "/" else ".")
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise NotFoundError(f"nothing matches {source!r}", hint="check the pattern; ** goes through folders")
        for match in map(str, map(Path, matches)):
            if os.path.isdir(match):
                yield from _walk(root, match, skipped)
            else:
                yield InputFile(root, match, from_glob=True)
    else:
        raise NotFoundError(f"there is no file or folder {source!r}", hint="check the path")


def _walk(root: str, folder: str, skipped: list[Skipped]) -> Iterator[InputFile]:
    def report_error(error: OSError) -> None:
        reason = f"the folder cannot be read: {error.strerror or error}"
        skipped.append(Skipped(str(error.filename), AccessDeniedError.code, reason))

    for at, folders, files in os.walk(folder, onerror=report_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (InputFile(root, os.path.join(at, name)) for name in sorted(files) if not name.startswith("."))


def _expand_url(source: str, stores: SourceStores, skipped: list[Skipped]) -> Iterator[InputFile]:
    matches = stores.find(source)
    for url, info in matches.objects.items():
        parts = url[len(matches.root) + 1 :].split("/")
        if not parts[-1] or (any(part.startswith(".") for part in parts) and not matches.is_named):
            continue  # a folder marker, or a hidden object
        try:
            check_key(url.partition("://")[2])
        except UsageError:
            skipped.append(Skipped(url, UnsupportedError.code, "its key has an empty part or a forbidden character"))
        else:
            yield InputFile(matches.root, url, matches.is_named, matches.from_glob, info)


def _paths_of(row: Row) -> Iterator[str]:
    """Yield the paths that a row names, and those of the sidecar files that its media file may have."""
    yield from (path for _, path in row.media)
    if row.path:
        yield from _sidecar_paths(row.path)


def _sidecar_paths(path: str) -> list[str]:
    """Return the paths at which a manifest's media file may have sidecar files."""
    return [f"{os.path.splitext(path)[0]}.{ext}" for ext in SIDECARS]


def _stat_input(path: str, skipped: list[Skipped], existing: Mapping[str, FileStat]) -> FileStat | None:
    if not is_url(path):
        return _stat(path, skipped)
    if path not in existing:
        skipped.append(Skipped(path, NotFoundError.code, "there is no such object"))
    return existing.get(path)


def _stat(path: str, skipped: list[Skipped]) -> FileStat | None:
    try:
        path.encode()
        info = os.stat(path)
    except UnicodeEncodeError:
        skipped.append(Skipped(repr(path), UnsupportedError.code, "the file's name is not UTF-8"))
    except OSError as error:
        skipped.append(Skipped(path, CorruptionError.code, f"cannot be read: {error.strerror or error}"))
    else:
        if stat.S_ISREG(info.st_mode):
            return FileStat(info.st_size, info.st_mtime_ns)
        skipped.append(Skipped(path, UnsupportedError.code, "not a regular file"))
    return None


def _no_media_reason(extensions: list[str]) -> str:
    """Return the reason why a sample with these extensions is skipped."""
    if unused := unused_media(extensions):
        names = ", ".join(f".{ext}" for ext in unused)
        return f"none of its media files ({names}) has the sample's own name"
    return f"it has no media file (media are {_media_list()})"


def _media_list() -> str:
    return ", ".join(sorted(SAMPLE_EXTENSIONS))


def _check_unique_keys(groups: list[Group]) -> None:
    for a, b in itertools.pairwise(sorted(groups, key=lambda group: group.key)):
        if a.key == b.key:
            raise UsageError(
                f"{a.display_name} and {b.display_name} would both be the sample {a.key!r}",
                hint="rename one, or give the folder that holds both as the one source",
            )
