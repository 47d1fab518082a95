"""The layout of Parquet files that hold their media themselves, as Hugging Face `datasets` writes them.

Purpose: the features `Image`, `Audio` and `Video` are columns of the type `struct<bytes: binary, path: string>`.
`embedded_columns` finds them. `layout_of` describes such a file for a plan. It runs in the process that also reads the
rows (`headrace.dataio.shards.ingest.row_reader`).

Invariants:

* Only the footer and the column with the keys are read here.
* The schema decides what a column is. Its first column with media has the sample's own medium, unless the user names
  another one. Each further one is a further member of the sample.
* A file with a column of paths is a manifest, unless the user names one of its columns as bytes. If it also has media,
  the user has to decide.
* The footer is hostile input: its size, its row counts and all positions are checked against the file's size.

Failure behaviour: a file that is not Parquet, and a schema that cannot become samples, raise `UsageError`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from headrace.dataio.core import limits
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.shards.ingest.manifests import DEFAULT_COLUMNS
from headrace.dataio.shards.ingest.row_messages import (
    EmbeddedColumn,
    Keys,
    KeysResult,
    KeysTask,
    Layout,
    LayoutResult,
    LayoutTask,
    Manifest,
    RowGroup,
    TableRefused,
)

FOOTER_BYTES = 64 * limits.MIB
"""The largest footer of a Parquet file."""
NOT_PARQUET = "not a readable Parquet file"
_LEAST_ROWS, _BYTES_PER_ROW = 100_000, 64
"""A file may have this many rows, and one more for each 64 bytes: more rows than that hold no media."""
_KEY_BATCH = 4096
_MEMBER_NAME = re.compile(r"[^\w+.-]|^\.+|\.+$|\.(?=\.)")
WRITE_HINT = "write the file again, or copy it again from its source"
PARQUET_LIMITS = {
    "pre_buffer": False,
    "thrift_string_size_limit": FOOTER_BYTES,
    "thrift_container_size_limit": 10_000_000,
}
"""How a Parquet file of others is opened."""


def embedded_columns(source: str | os.PathLike[str] | BinaryIO | Any) -> tuple[str, ...]:
    """Return the names of the columns that hold media, in the order of the schema.

    Args:
        source: the path of a Parquet file, a file that is open for reading, or a `pyarrow.parquet.ParquetFile`.

    Raises:
        UsageError: the file cannot be read as Parquet.
    """
    import pyarrow.parquet as pq

    if isinstance(source, pq.ParquetFile):
        return _media_columns(source.schema_arrow)
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else getattr(source, "name", "the file")
    with _reading(str(name)), pq.ParquetFile(source, **PARQUET_LIMITS) as file:
        return _media_columns(file.schema_arrow)


def answer(task: LayoutTask | KeysTask) -> LayoutResult | KeysResult:
    """Answer a question about a file."""
    path = task.path if isinstance(task, LayoutTask) else task.group.path
    try:
        return layout_of(task) if isinstance(task, LayoutTask) else Keys(tuple(_keys(task)))
    except (UsageError, NotFoundError) as error:
        return TableRefused(error.message, error.hint or "")
    except MemoryError:
        return TableRefused(f"{path}: {NOT_PARQUET}: reading it takes too much memory", WRITE_HINT)


def layout_of(task: LayoutTask) -> Layout | Manifest:
    """Return the row groups of a file with embedded media, or say that the file is a manifest."""
    import pyarrow.parquet as pq

    with _reading(task.path), pq.ParquetFile(task.file, **PARQUET_LIMITS) as file:
        if task.in_place:
            _refuse_media(task, file)
            return Manifest()
        schema, metadata = file.schema_arrow, file.metadata
        media = _choose_media(task, schema, metadata)
        if media is None:
            return Manifest()
        key, caption = _key_column(task, schema), _caption_column(task, schema)
        groups = _row_groups(task, metadata, media, key, caption)
        ranges = [] if key is None else [_key_range(metadata.row_group(one.number), key, task.footer) for one in groups]
        return Layout(tuple(groups), tuple(ranges))


# --- opening a file


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{name}: {NOT_PARQUET}: {reason}", hint=WRITE_HINT) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own, for a footer that cannot be parsed
            reason = " ".join(str(error).split())[:300]
            raise UsageError(f"{name}: {NOT_PARQUET}: {reason}", hint=WRITE_HINT) from error
        raise NotFoundError(f"{name} cannot be read: {error.strerror or error}", hint="check path and mode") from error


# --- the schema


def _media_columns(schema: Any) -> tuple[str, ...]:
    return tuple(field.name for field in schema if _is_embedded(field.type))


def _is_embedded(kind: Any) -> bool:
    """Return whether the type is `struct<bytes: binary, path: string>`."""
    import pyarrow as pa

    if not pa.types.is_struct(kind) or {kind.field(i).name for i in range(kind.num_fields)} != {"bytes", "path"}:
        return False
    path = kind.field("path").type
    return _is_binary(kind.field("bytes").type) and (pa.types.is_string(path) or pa.types.is_large_string(path))


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_bytes(kind: Any) -> bool:
    """Return whether values of the type hold bytes, which no field of a sample can."""
    import pyarrow as pa

    return (
        _is_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
    )


def _choose_media(task: LayoutTask, schema: Any, metadata: Any) -> tuple[EmbeddedColumn, ...] | None:
    """Return the columns with media, the sample's own medium first. None means that the file is a manifest."""
    path = task.path
    named = [name for name in task.bytes_columns if name in schema.names]
    paths = _path_columns(task, schema)
    if paths and not named:
        if embedded := [name for name in _media_columns(schema) if _has_bytes(metadata, name)]:
            raise UsageError(
                f"{path}: it has paths in {paths[0]!r} and media in {embedded[0]!r}",
                hint=f"--bytes-column {embedded[0]} packs these media; as a manifest it may not have them",
            )
        return None
    if missing := [name for name in task.bytes_columns if name not in named]:
        have = ", ".join(map(repr, schema.names)) or "none"
        raise UsageError(f"{path}: there is no column {missing[0]!r}", hint=f"--bytes-column names one; it has {have}")
    media = list(dict.fromkeys([*named, *_media_columns(schema)]))
    _check_types(path, schema, media)
    if not media:
        return None
    members = [_member_name(name) for name in media[1:]]
    if len(set(members)) < len(members):
        raise UsageError(f"{path}: two columns would be the same member of a sample", hint="rename one of them")
    return (EmbeddedColumn(media[0]), *map(EmbeddedColumn, media[1:], members))


def _path_columns(task: LayoutTask, schema: Any) -> list[str]:
    return [name for name in (task.path_column, *task.file_columns) if name in schema.names]


def _refuse_media(task: LayoutTask, file: Any) -> None:
    """Raise `UsageError` if the file holds media itself: only media files can be indexed where they lie."""
    has_paths = bool(_path_columns(task, file.schema_arrow))
    held = [name for name in embedded_columns(file) if _has_bytes(file.metadata, name)]
    is_named = has_paths or not held  # `pack` takes it only if the user names the column
    if not held and not has_paths:
        held = [field.name for field in file.schema_arrow if _is_binary(field.type)]
    if held:
        raise UsageError(
            f"{task.path}: it holds media itself, in {held[0]!r}, and these cannot be indexed in place",
            hint=f"pack it: `headrace pack {task.path} DST{f' --bytes-column {held[0]}' if is_named else ''}`",
        )


def _has_bytes(metadata: Any, column: str) -> bool:
    """Return whether a cell of the column may have bytes. If files are not embedded, all cells have a path only."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema == f"{column}.bytes":
                statistics = chunk.statistics
                nulls = None if statistics is None or not statistics.has_null_count else statistics.null_count
                if nulls is None or nulls < group.num_rows:
                    return True
    return False


def _check_types(path: str, schema: Any, media: list[str]) -> None:
    """Raise `UsageError` if a column can be neither media nor a field."""
    import pyarrow as pa

    if len(set(schema.names)) < len(schema.names):
        raise UsageError(f"{path}: two of its columns have the same name", hint="rename one of them")
    for field in schema:
        is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
        if field.name in media:
            if not (_is_binary(field.type) or _is_embedded(field.type)):
                raise UsageError(
                    f"{path}: the column {field.name!r} holds no bytes: it is {field.type}",
                    hint="--bytes-column names columns of the type binary, or of Hugging Face's media features",
                )
        elif is_list and _is_embedded(field.type.value_type):
            raise UsageError(
                f"{path}: the column {field.name!r} holds lists of media, and a sample has one",
                hint="write one row for each of them, or a column for each, or leave the column out",
            )
        elif _holds_bytes(field.type):
            raise UsageError(
                f"{path}: the column {field.name!r} holds bytes, which no field can",
                hint=f"--bytes-column {field.name} makes files of them; or leave the column out",
            )


def _member_name(column: str) -> str:
    return _MEMBER_NAME.sub("_", column).lower() or "_"


def _key_column(task: LayoutTask, schema: Any) -> str | None:
    import pyarrow as pa

    kind = _value_type(task.path, schema, task.key_column, "key", DEFAULT_COLUMNS.key)
    if kind is not None and not (_is_text(kind) or pa.types.is_integer(kind)):
        raise UsageError(
            f"{task.path}: the column {task.key_column!r} must hold text or integers: it is {kind}",
            hint="--key-column names another column",
        )
    return None if kind is None else task.key_column


def _caption_column(task: LayoutTask, schema: Any) -> str | None:
    """Return the column with the captions. One that is not text, such as a list of captions, is a field."""
    kind = _value_type(task.path, schema, task.caption_column, "caption", DEFAULT_COLUMNS.caption)
    return task.caption_column if kind is not None and _is_text(kind) else None


def _value_type(path: str, schema: Any, column: str, role: str, usual: str) -> Any:
    """Return the type of a column's values, or None if the file lacks the column and the user did not name it."""
    import pyarrow as pa

    if column not in schema.names:
        if column == usual:
            return None
        have = ", ".join(map(repr, schema.names))
        raise UsageError(f"{path}: there is no column {column!r}", hint=f"--{role}-column names one; it has {have}")
    kind = schema.field(column).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# --- the row groups


def _row_groups(
    task: LayoutTask, metadata: Any, media: tuple[EmbeddedColumn, ...], key: str | None, caption: str | None
) -> list[RowGroup]:
    """Return the row groups that have rows. Raise `UsageError` if the footer cannot be true."""
    groups, first = list[RowGroup](), 0
    for number in range(metadata.num_row_groups):
        found = metadata.row_group(number)
        offset, end = _range_of(found, task.footer)
        first += found.num_rows
        too_many = found.num_rows < 0 or first > _LEAST_ROWS + task.size // _BYTES_PER_ROW
        if too_many or (found.num_rows and not 0 < offset <= end <= task.footer):
            raise UsageError(
                f"{task.path}: {NOT_PARQUET}: its footer claims {first} rows, or data outside of the file",
                hint=WRITE_HINT,
            )
        if found.num_rows:
            groups.append(
                RowGroup(
                    path=task.path,
                    size=task.size,
                    modified_ns=task.modified_ns,
                    stem=task.stem,
                    number=number,
                    first=first - found.num_rows,
                    rows=found.num_rows,
                    offset=offset,
                    length=end - offset,
                    footer=task.footer,
                    unpacked=_unpacked_bytes(found, media),
                    media=media,
                    key=key,
                    caption=caption,
                )
            )
    return groups


def _range_of(group: Any, footer: int, column: str | None = None) -> tuple[int, int]:
    """Return where the bytes of a row group, or of one of its columns, begin and end."""
    begins, ends = [], []
    for number in range(group.num_columns):
        chunk = group.column(number)
        if column in (None, chunk.path_in_schema):
            begin = min((at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at), default=0)
            begins.append(begin)
            ends.append(begin + chunk.total_compressed_size)
    return (min(begins), max(ends)) if begins else (footer, footer)


def _key_range(group: Any, key: str, footer: int) -> tuple[int, int]:
    begin, end = _range_of(group, footer, key)
    return begin, end - begin


def _unpacked_bytes(group: Any, media: tuple[EmbeddedColumn, ...]) -> int:
    names = {column.name for column in media}
    names |= {f"{name}.bytes" for name in names}
    chunks = (group.column(number) for number in range(group.num_columns))
    return sum(max(0, chunk.total_uncompressed_size) for chunk in chunks if chunk.path_in_schema in names)


def _keys(task: KeysTask) -> Iterator[str | None]:
    """Yield the key of each row of a row group, or None for a null."""
    import pyarrow.parquet as pq

    path, column = task.group.path, task.group.key
    with _reading(path), pq.ParquetFile(task.file, buffer_size=limits.MIB, **PARQUET_LIMITS) as file:
        for batch in file.iter_batches(_KEY_BATCH, [task.group.number], [column], use_threads=False):
            for value in batch.column(column).to_pylist():
                if value is not None and len(str(value)) > limits.OBJECT_KEY_BYTES:
                    raise UsageError(
                        f"{path}: a key has more than {limits.OBJECT_KEY_BYTES} characters",
                        hint="--key-column names another column",
                    )
                yield None if value is None else str(value)
