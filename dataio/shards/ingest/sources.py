"""Finds the samples in the sources that the user gives. Files with the same stem in one folder are one sample.

Purpose: turn files, folders (recursively), globs, manifests and WebDataset tars, local or in stores, into groups of
files with keys. Paths and URLs are plain strings here.

Invariants:

* The result depends only on names, not on the order in which a file system lists them. Groups are sorted by key.
* A key is the path relative to the source, without the last suffix. For a folder, it is relative to the folder. For a
  glob, it is relative to the folder before the first wildcard. For a file, it is the file's stem.
* In keys, dots, backslashes and control characters become `_`. A tar reader that cuts at the first dot then finds the
  same key.
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
import functools
import glob
import itertools
import os
import re
import stat
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.manifests import DEFAULT_COLUMNS, EXTENSIONS, Columns, Row, rows
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.row_messages import RowRef
from headrace.dataio.shards.ingest.source_stores import WILDCARD, FileStat, SourceStores, is_url
from headrace.dataio.shards.ingest.tables import EmbeddedRow, Tables
from headrace.dataio.shards.media.container import KNOWN_EXTENSIONS, SAMPLE_EXTENSIONS, unused_media
from headrace.dataio.shards.media.messages import Span
from headrace.dataio.store.base import check_key

SIDECARS = ("json", "txt", "vtt")
"""The extensions of the files that join a manifest's media file, if they have the same stem."""
_EXTENSION = re.compile(r"[\w+-]+(\.[\w+-]+)*")
_COMPRESSED_TAR = re.compile(r"(?i).*\.(?:tgz|tbz2?|txz|tzst|tar\.\w+)")
_FORBIDDEN_IN_KEYS = re.compile(r"[.\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one sample: (extension, path), sorted by extension.

    `sizes` holds the size of each file when it was found, and `bytes` their sum. `stamp` is the newest modification
    time in nanoseconds. `spans`, if there are any, give the offset and length of each member in its file. `caption` and
    `fields` (a JSON object) come from a manifest. `row`, if there is one, is a row with embedded media: its files are
    found when it is read, so `files` has the table, and the size is an estimate.
    """

    key: str
    files: tuple[tuple[str, str], ...]
    bytes: int
    stamp: int = 0
    sizes: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    caption: str | None = None
    fields: str | None = None
    row: RowRef | None = None

    @property
    def order(self) -> str:
        """Groups are sorted by this."""
        return self.row.default_key if self.row else self.key

    @property
    def display_name(self) -> str:
        """The name in messages to the user."""
        return self.row.display_name if self.row else self.files[0][1]

    def members(self) -> tuple[Span, ...]:
        """Return the files as the spans that a worker takes."""
        spans = self.spans or ((0, -1),) * len(self.files)
        return tuple(Span(ext, path, *span) for (ext, path), span in zip(self.files, spans, strict=True))

    @property
    def is_remote(self) -> bool:
        """Whether any of the files lies in a store."""
        return any(is_url(path) for _, path in self.files)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of `gather`: groups, skipped inputs and ignored files."""

    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _InputFile:
    """A file or an object found in a source. Its key is relative to `root`."""

    root: str
    path: str
    is_named: bool = False  # the user named this file; it was not found in a folder
    from_glob: bool = False  # a glob matched this file
    info: FileStat | None = None  # set if the listing gave it
    several_dots: str = ""  # the extension, if it has dots: `latent.npy`

    @property
    def ext(self) -> str:
        """The extension by which the sample names the file."""
        return self.several_dots or _ext(self.path)

    @property
    def stem(self) -> tuple[str, str]:
        """The folder and the stem."""
        folder, name = os.path.split(self.path if is_url(self.path) else os.path.abspath(self.path))
        return folder, Path(name).stem


def gather(
    sources: Iterable[str | os.PathLike[str]],
    columns: Columns = DEFAULT_COLUMNS,
    stores: SourceStores | None = None,
    exclude: str | None = None,
) -> Gathered:
    """Group the files of all sources into samples.

    `columns` names the columns of manifests. `exclude` is the URL of a dataset whose files are left out.
    """
    if stores is None:
        with SourceStores() as opened:
            return gather(sources, columns, opened, exclude)
    input_files: dict[str, _InputFile] = {}
    collected = _Collector(stores)
    is_excluded = functools.partial(_is_below, _local(exclude or "").rstrip("/"))
    for source in sources:
        for item in _expand(_local(os.fspath(source)), stores, collected.skipped):
            absolute = item.path if is_url(item.path) else os.path.abspath(item.path)
            if item.is_named or not is_excluded(absolute):
                input_files.setdefault(absolute, item)
    by_stem: dict[tuple[str, str], list[tuple[_InputFile, FileStat]]] = {}
    tables = list[tuple[_InputFile, FileStat]]()
    for item in input_files.values():
        info = item.info or _stat(item.path, collected.skipped)
        if info is None:
            continue
        if _ext(item.path) in EXTENSIONS and (item.is_named or item.from_glob):
            tables.append((item, info))
        else:
            by_stem.setdefault(item.stem, []).append((item, info))
    collected.add_tables(tables, columns)
    _join_to_media(by_stem)
    for files in by_stem.values():
        collected.add_files(files)
    groups = sorted(collected.groups, key=lambda group: group.order)
    _check_unique_keys(groups)
    skipped = sorted(collected.skipped, key=lambda s: s.path)
    return Gathered(tuple(groups), tuple(skipped), tuple(sorted(collected.ignored)))


def _join_to_media(by_stem: dict[tuple[str, str], list[tuple[_InputFile, FileStat]]]) -> None:
    """Join files such as `clip.latent.npy` to the files of the media file with the shorter stem, `clip.mp4`.

    A file that has the extension of a medium in its name, such as `clip.mp4.part`, joins none.
    """
    with_media = {
        stem for stem, files in by_stem.items() if any(_ext(item.path) in KNOWN_EXTENSIONS for item, _ in files)
    }
    for folder, stem in [one for one in by_stem if one not in with_media and "." in one[1]]:
        parts = stem.split(".")
        for count in range(len(parts) - 1, 0, -1):
            shorter = folder, ".".join(parts[:count])
            if shorter in with_media and not KNOWN_EXTENSIONS & {part.lower() for part in parts[count:]}:
                middle = ".".join(parts[count:])
                by_stem[shorter] += [
                    (dataclasses.replace(item, several_dots=f"{middle}.{_ext(item.path)}".lower()), info)
                    for item, info in by_stem.pop((folder, stem))
                ]
                break


def _is_below(folder: str, path: str) -> bool:
    return bool(folder) and (path == folder or path.startswith(f"{folder}/"))


class _Collector:
    """The groups found so far, and the skipped and ignored files."""

    def __init__(self, stores: SourceStores) -> None:
        self._stores = stores
        self.groups: list[Group] = []
        self.skipped: list[Skipped] = []
        self.ignored: list[str] = []

    def add_files(self, files: list[tuple[_InputFile, FileStat]]) -> None:
        """Add the files that have one stem in one folder."""
        has_media = any(_ext(item.path) in KNOWN_EXTENSIONS for item, _ in files)
        members = [m for m in files if has_media and _EXTENSION.fullmatch(m[0].ext)]
        if len(members) > tar.MAX_SAMPLE_MEMBERS:
            first = members[0][0]
            self.skipped.append(Skipped(first.path, UnsupportedError.code, tar.too_many(_key(first))))
        elif members:
            self.groups.append(_group(members))
        for item, info in (m for m in files if m not in members):
            if _ext(item.path) == "tar":
                self._add_tar(item.path, info)
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
                    elif not any(span.ext in KNOWN_EXTENSIONS for span in spans):
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

    def add_tables(self, tables: Iterable[tuple[_InputFile, FileStat]], columns: Columns) -> None:
        """Add one sample for each row of manifests and of Parquet files with embedded media."""
        with Tables(self._stores) as reader:
            for item, info in tables:
                embedded = None
                if _ext(item.path) == "parquet":
                    embedded = reader.rows_of(item.path, info, columns, _key(item))
                if embedded is None:
                    self.add_manifest(item.path, info, columns)
                elif embedded:
                    self.groups += map(_embedded_group, embedded)
                else:
                    self.skipped.append(Skipped(item.path, UnsupportedError.code, "it has no rows"))

    def add_manifest(self, manifest: str, info: FileStat, columns: Columns) -> None:
        """Add one sample for each row of a manifest."""
        if is_url(manifest):
            with self._stores.local_copy(manifest, info.size) as copy:
                listed = list(rows(copy, columns, manifest))
        else:
            listed = list(rows(Path(manifest), columns))
        urls = {path for row in listed if is_url(row.path) for path in (row.path, *_sidecar_paths(row.path))}
        existing = self._stores.stat_many(urls)
        for row in listed:
            self._add_row(os.path.dirname(manifest), row, existing)

    def _add_row(self, folder: str, row: Row, existing: Mapping[str, FileStat]) -> None:
        """Add the sample of one row. `existing` holds the objects that rows name, and their sidecar files."""
        if _ext(row.path) not in KNOWN_EXTENSIONS:
            raise UsageError(f"{row.where}: {row.path} is not a media file", hint=f"media are {_media_list()}")
        skipped: list[Skipped] = []
        info = _stat_input(row.path, skipped, existing)
        if info is None:
            self.skipped += [Skipped(f"{row.where}: {s.path}", s.code, s.reason) for s in skipped]
            return
        sidecars = [(path, _stat_input(path, [], existing)) for path in _sidecar_paths(row.path)]
        members = [(_InputFile(folder, path), info) for path, info in ((row.path, info), *sidecars) if info is not None]
        group = _group(members)
        key = _row_key(row.where, row.key or group.key)
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


def _expand(source: str, stores: SourceStores, skipped: list[Skipped]) -> Iterator[_InputFile]:
    path = Path(source)
    if is_url(source):
        yield from _expand_url(source, stores, skipped)
    elif path.is_dir():
        yield from _walk(str(path), str(path), skipped)
    elif os.path.lexists(source):
        yield _InputFile(str(path.parent), str(path), True)
    elif WILDCARD.search(source):
        root = WILDCARD.split(source, maxsplit=1)[0].rpartition("/")[0] or ("/" if source[0] == "/" else ".")
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise NotFoundError(f"nothing matches {source!r}", hint="check the pattern; ** goes through folders")
        for match in map(str, map(Path, matches)):
            if os.path.isdir(match):
                yield from _walk(root, match, skipped)
            else:
                yield _InputFile(root, match, from_glob=True)
    else:
        raise NotFoundError(f"there is no file or folder {source!r}", hint="check the path")


def _walk(root: str, folder: str, skipped: list[Skipped]) -> Iterator[_InputFile]:
    def report_error(error: OSError) -> None:
        reason = f"the folder cannot be read: {error.strerror or error}"
        skipped.append(Skipped(str(error.filename), AccessDeniedError.code, reason))

    for at, folders, files in os.walk(folder, onerror=report_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (_InputFile(root, os.path.join(at, name)) for name in sorted(files) if not name.startswith("."))


def _expand_url(source: str, stores: SourceStores, skipped: list[Skipped]) -> Iterator[_InputFile]:
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
            yield _InputFile(matches.root, url, matches.is_named, matches.from_glob, info)


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


def _ext(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower()


def _no_media_reason(extensions: list[str]) -> str:
    """Return the reason why a sample with these extensions is skipped."""
    if unused := unused_media(extensions):
        names = ", ".join(f".{ext}" for ext in unused)
        return f"none of its media files ({names}) has the sample's own name; a sample has one video, so make one sample of each"
    return f"it has no media file (media are {_media_list()})"


def _media_list() -> str:
    return ", ".join(sorted(SAMPLE_EXTENSIONS))


def _group(members: list[tuple[_InputFile, FileStat]]) -> Group:
    files: dict[str, str] = {}
    for item, _ in members:
        existing = files.setdefault(item.ext, item.path)
        if existing != item.path:
            raise UsageError(
                f"{existing} and {item.path} would be the same member of a sample", hint="rename one of them"
            )
    first = min((item for item, _ in members if not item.several_dots), key=lambda item: item.path)
    stamp = max(info.modified_ns for _, info in members)
    sizes = {item.ext: info.size for item, info in members}
    return Group(
        _key(first),
        tuple(sorted(files.items())),
        sum(sizes.values()),
        stamp,
        tuple(size for _, size in sorted(sizes.items())),
    )


def _key(item: _InputFile) -> str:
    if is_url(item.path):
        below = item.path.startswith(f"{item.root}/")
        inside = item.path[len(item.root) + 1 :] if below else item.path.partition("://")[2]
        return _clean_key(os.path.splitext(inside)[0])
    relative = Path(os.path.relpath(item.path, item.root)).with_suffix("")
    if relative.parts[0] == "..":  # a manifest may name files anywhere
        relative = Path(*Path(os.path.abspath(item.path)).with_suffix("").parts[1:])
    return "/".join(_FORBIDDEN_IN_KEYS.sub("_", part) for part in relative.parts)


def _row_key(where: str, text: str) -> str:
    """Return the key of a row whose table calls it `text`."""
    key = _clean_key(text)
    if set(key.split("/")) & {"", ".", ".."}:
        raise UsageError(f"{where}: {text!r} cannot be a key", hint="keys are relative, without '..'")
    return key


def _embedded_group(row: EmbeddedRow) -> Group:
    """Return the group of a row with embedded media."""
    ref = row.ref
    key = _row_key(ref.display_name, row.key or ref.default_key)
    return Group(key, (("parquet", ref.group.path),), row.bytes, ref.group.modified_ns, (row.bytes,), row=ref)


def _clean_key(key: str) -> str:
    return "/".join(_FORBIDDEN_IN_KEYS.sub("_", part) for part in key.split("/"))


def _check_unique_keys(groups: list[Group]) -> None:
    for a, b in itertools.pairwise(sorted(groups, key=lambda group: group.key)):
        if a.key == b.key:
            raise UsageError(
                f"{a.display_name} and {b.display_name} would both be the sample {a.key!r}",
                hint="rename one, or give the folder that holds both as the one source",
            )
