"""Manifests list media files, as CSV, TSV, JSON lines or Parquet.

Purpose: one row describes one sample. It holds the path of the media file and, optionally, a key and a caption. All
other columns become the sample's fields.

Invariants:

* Rows are read one at a time, and Parquet rows in batches.
* Relative paths are relative to the manifest.
* A CSV or TSV cell that is a JSON number, `true` or `false` becomes that value. An empty cell becomes null. Any other
  cell is text.
* In the other formats, values keep their type. Dates and times become ISO 8601 text, and NaN becomes null.

Failure behaviour: a manifest that cannot be read raises `NotFoundError`. An invalid row raises `UsageError`, which
names the manifest and the row. If a column is missing, the error also lists the columns that exist. The reader guesses
nothing and skips no row, because the user can correct the manifest.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.shards.ingest.source_stores import is_url, join_url

EXTENSIONS = frozenset(["csv", "tsv", "jsonl", "ndjson", "parquet"])
EXTENSION = re.compile(r"[\w+-]+(\.[\w+-]+)*")
"""The extensions that a file of a sample may have."""
_BATCH = 1024
_FIX_HINT = "correct the manifest; `pack` skips no row"
_FIELDS_BYTES = 1 * limits.MIB


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that hold the path, the key, the caption, and further files.

    The column `path` is required, unless there are `files`. The others are required only if you name them. `files` maps
    the extension of a further file of the sample, such as `cam1.mp4`, to the column with its path or URL. An empty cell
    means that the sample has no such file. `bytes` names the columns of Parquet files that hold the media themselves
    (`headrace.dataio.shards.ingest.embedded`). The first of them has the medium of each sample.
    """

    path: str = "path"
    key: str = "key"
    caption: str = "caption"
    files: Mapping[str, str] = field(default_factory=dict)
    bytes: tuple[str, ...] = ()


DEFAULT_COLUMNS = Columns()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a manifest.

    `where` names the row in errors. `path` is that of the media file, "" if the row has only further files. `files` are
    the extensions and the paths of the further files. `fields` holds the other columns as a JSON object, or None if
    there are none.
    """

    where: str
    path: str
    key: str | None
    caption: str | None
    fields: str | None
    files: tuple[tuple[str, str], ...] = ()

    @property
    def media(self) -> tuple[tuple[str, str], ...]:
        """The extension and the path of each file that the row names. An extension of "" stands for the path's own."""
        return (("", self.path), *self.files) if self.path else self.files


def rows(manifest: Path, columns: Columns = DEFAULT_COLUMNS, url: str | None = None) -> Iterator[Row]:
    """Yield the rows of a manifest. Its suffix determines the format.

    Raises `UsageError` for a further file whose extension is none, such as `/a`.

    If `manifest` is a local copy of an object, `url` is the URL of that object.
    """
    for ext in columns.files:
        if not EXTENSION.fullmatch(ext) or ext != ext.lower():
            raise UsageError(f"{ext!r} cannot be the extension of a file", hint="write it as cam1.mp4, in lower case")
    name = url or str(manifest)
    suffix = manifest.suffix[1:].lower()
    reader = {"csv": _csv, "tsv": _csv, "parquet": _parquet}.get(suffix, _json_lines)
    try:
        for where, row in reader(manifest, name):
            yield _row(name, where, row, columns)
    except OSError as error:
        raise NotFoundError(f"{name} cannot be read: {error.strerror or error}", hint="check path and mode") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8", hint="save it as UTF-8") from error


def _row(manifest: str, where: str, row: dict[str, Any], columns: Columns) -> Row:
    _require_columns(where, row, columns)
    files = tuple((ext, row.pop(column)) for ext, column in columns.files.items())
    path = row.pop(columns.path, None)
    if path is not None or not any(value for _, value in files):
        _check_path(where, columns.path, path)
    files = tuple((ext, value) for ext, value in files if value is not None)
    for ext, value in files:
        _check_path(where, columns.files[ext], value)
    key, caption = row.pop(columns.key, None), row.pop(columns.caption, None)
    if isinstance(key, int) and not isinstance(key, bool):
        key = str(key)
    for column, value in ((columns.key, key), (columns.caption, caption)):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{where}: the column {column!r} must hold text, not {value!r}", hint=_FIX_HINT)
    return Row(
        where,
        _resolved(manifest, where, path) if path else "",
        key or None,
        caption or None,
        _fields(where, row),
        tuple((ext, _resolved(manifest, where, value)) for ext, value in files),
    )


def _require_columns(where: str, row: dict[str, Any], columns: Columns) -> None:
    renamed = (c for c, usual in ((columns.key, "key"), (columns.caption, "caption")) if c != usual)
    needs_path = not columns.files or columns.path != "path"
    for column in (*((columns.path,) if needs_path else ()), *renamed, *columns.files.values()):
        if column not in row:
            have = ", ".join(map(repr, row)) or "none"
            hint = f"it has {have}; name yours with --path-column and the like (in Python: columns=Columns(...))"
            raise UsageError(f"{where}: there is no column {column!r}", hint=hint)


def _check_path(where: str, column: str, path: object) -> None:
    if not isinstance(path, str) or not path:
        raise UsageError(f"{where}: the column {column!r} must hold a path, not {path!r}", hint=_FIX_HINT)
    if "\0" in path:
        raise UsageError(f"{where}: {path!r} is not a path: it has a zero byte", hint=_FIX_HINT)


def _resolved(manifest: str, where: str, path: str) -> str:
    """Return the row's path or URL. A relative path is resolved against the manifest.

    Escapes such as `%20` in the URL of a web server are decoded, because the store of the server encodes keys itself.
    """
    if is_url(path):
        try:
            url = join_url(*path.rsplit("/", 1))
            return urllib.parse.unquote(url) if url.startswith(("http://", "https://")) else url
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
    if not is_url(manifest):
        return str(Path(manifest).parent / path)
    if path.startswith("/"):
        raise UsageError(f"{where}: {path!r} is a local path, in a manifest that lies in a store", hint="give URLs")
    return join_url(manifest.rpartition("/")[0], path)


def _fields(where: str, row: dict[str, Any]) -> str | None:
    try:
        return fields_json(row)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def fields_json(values: dict[str, Any]) -> str | None:
    """Return the fields of a row as a JSON object, or None if there are none."""
    if not values:
        return None
    try:
        text = json.dumps(
            {name: _json_value(value) for name, value in values.items()}, ensure_ascii=False, allow_nan=False
        )
        if len(text.encode()) > _FIELDS_BYTES:
            raise ValueError(f"its fields are larger than {limits.format_bytes(_FIELDS_BYTES)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(str(error), hint=_FIX_HINT) from error
    return text


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value


# --- formats


def _csv(manifest: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(_FIELDS_BYTES)
    delimiter = "\t" if manifest.suffix.lower() == ".tsv" else ","
    with manifest.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(file, name), delimiter=delimiter, strict=True)
        try:
            names = next(reader, None)
            if not names or len(set(names)) != len(names):
                raise UsageError(f"{name}: its first line must name the columns, each once", hint=_FIX_HINT)
            for cells in reader:
                where = f"{name}, line {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise UsageError(f"{where}: {len(cells)} cells in a table of {len(names)} columns", hint=_FIX_HINT)
                yield where, {name: _cell(cell) for name, cell in zip(names, cells, strict=True)}
        except csv.Error as error:
            raise UsageError(f"{name}, line {reader.line_num}: {error}", hint=_FIX_HINT) from error


def _lines(file: TextIO, name: str) -> Iterator[str]:
    """Yield the lines of a text file. A line above `_FIELDS_BYTES` raises `UsageError` before it is read completely."""
    for number in itertools.count(1):
        line = file.readline(_FIELDS_BYTES + 1)
        if not line:
            return
        if len(line) > _FIELDS_BYTES:
            raise _too_long(f"{name}, line {number}")
        yield line


def _too_long(where: str) -> UsageError:
    return UsageError(f"{where}: longer than {limits.format_bytes(_FIELDS_BYTES)}", hint=_FIX_HINT)


def _cell(cell: str) -> Any:
    if not cell:
        return None
    if cell[0] in "-0123456789tf":
        try:
            value = json.loads(cell)
        except ValueError:
            return cell
        return value if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)) else cell
    return cell


def _json_lines(manifest: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with manifest.open("rb") as file:
        number = 0
        while line := file.readline(_FIELDS_BYTES + 1):
            number += 1
            where = f"{name}, line {number}"
            if len(line) > _FIELDS_BYTES:
                raise _too_long(where)
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}: not JSON: {error}", hint=_FIX_HINT) from error
            if not isinstance(row, dict):
                raise UsageError(f"{where}: a row must be a JSON object", hint=_FIX_HINT)
            yield where, row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parquet(manifest: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(os.fspath(manifest), pre_buffer=False) as file:
            for batch in file.iter_batches(_BATCH, use_threads=False):
                for row in batch.to_pylist():
                    yield f"{name}, row {number}", row
                    number += 1
    except pa.ArrowException as error:
        raise UsageError(f"{name}: not a readable Parquet file: {error}", hint="write the file again") from error
