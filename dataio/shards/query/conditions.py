"""Conditions: boolean SQL expressions over the index, which are validated before they run.

Purpose: users write the condition of `Dataset.where` in SQL. `parse` rejects everything that is not a condition.
`matching` lets DuckDB evaluate the condition over Arrow columns. A `View` holds the samples that meet a condition.
Headrace reads the columns through the store and checks them. DuckDB itself reads no files.
Invariants:

* DuckDB parses the text, and `parse` walks the syntax tree. Only the kinds of expressions and the functions listed here
  are allowed. So a condition cannot contain a subquery, a file, a setting or another statement.
* Every column is one of `COLUMNS` or a promoted field.
* DuckDB runs `Predicate.sql` over a table with exactly the columns that the text needs. A few parts are read at a time.
  Apart from a bitmap of the selected rows, memory does not grow with the dataset. The resulting rows are in the order of the
  samples' numbers.
* The digest of a view covers the version's document, the conditions and the selected rows. So equal digests mean equal
  samples.
* A string that a condition builds is at most `GROWTH` times as long as its inputs, because DuckDB's memory limit does
  not count strings.

Failure behaviour: a text that is not a condition, or fails on a value (a cast), raises `UsageError`, which quotes it.
For an unknown column, the error suggests similar names. Read errors are passed on.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query.open_index import OpenIndex, RowNumbers, RowSelection
from headrace.dataio.shards.versions.documents import Lineage, VersionDocument
from headrace.dataio.store.base import Store

TEXT_BYTES = 16 << 10
GROWTH = 64
SPILL_MEMORY = "512MiB"
"""The memory of a connection that may use the disk."""
ROW = "__row"
"""The column with the row numbers. A promoted field with this name is available only as `fields."__row"`."""
_EXAMPLE = "write one SQL expression, such as: duration > 2 and height >= 720 (see headrace filter --help)"

COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    name: ((name,), name)
    for name in (
        *("key", "shard", "bytes", "duration", "width", "height", "frames", "rotation", "pixel_format", "video_codec"),
        *("color_space", "color_range", "color_primaries", "color_transfer"),
        *("video_ext", "audio_codec", "audio_ext", "sample_rate", "channels", "samples", "text"),
    )
} | {
    "codec": (("video_codec",), "video_codec"),
    "caption": (("text",), "text"),
    "fps": (("fps_numerator", "fps_denominator"), "fps_numerator::DOUBLE / fps_denominator"),
    "has_video": (("video_codec",), "video_codec IS NOT NULL"),
    "has_audio": (("audio_codec",), "audio_codec IS NOT NULL"),
    "has_text": (("text",), "text IS NOT NULL"),
}
"""Name → the index columns that it needs, and the SQL expression over them."""

_TYPES = {"integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN", "text": "VARCHAR", "mixed": "VARCHAR"}
_CLASSES = {"COMPARISON", "CONJUNCTION", "CONSTANT", "COLUMN_REF", "FUNCTION", "OPERATOR", "BETWEEN", "CAST", "CASE"}
_OPERATORS = {
    *("COMPARE_IN", "COMPARE_NOT_IN", "OPERATOR_NOT", "OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL"),
    "OPERATOR_COALESCE",
}
_CASTS = {
    *("BOOLEAN", "BOOL", "INTEGER", "INT", "BIGINT", "DOUBLE", "FLOAT", "REAL", "VARCHAR", "TEXT", "STRING", "DATE"),
    "TIMESTAMP",
}
_FUNCTIONS = {
    *("+", "-", "*", "/", "//", "%", "||", "~~", "!~~", "~~*", "!~~*", "~", "!~", "^@", "abs", "ceil", "ceiling"),
    *("like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape", "regexp_matches", "regexp_full_match"),
    *("lower", "upper", "length", "len", "contains", "starts_with", "ends_with", "prefix", "suffix", "trim", "ltrim"),
    *("rtrim", "replace", "substring", "substr", "left", "right", "concat", "round", "floor", "greatest", "least"),
    *("ifnull", "nullif", "strpos", "instr", "split_part", "sqrt", "ln", "log", "mod"),
}


@dataclass(frozen=True)
class Predicate:
    """A validated condition.

    `sql` selects `__row` from the table `part`, which has the columns `columns` and `__row`.
    """

    text: str
    columns: tuple[str, ...]
    sql: str


@dataclass(frozen=True)
class View:
    """The samples of a version that meet its conditions.

    `rows` are the selected rows of each part, and `bytes` the total bytes of their members.
    """

    index: OpenIndex
    rows: RowSelection
    bytes: Sequence[int]
    lineage: Lineage
    ids: str
    """BLAKE3 of the selected rows."""

    @property
    def total_bytes(self) -> int:
        """The total bytes of the samples' members."""
        return sum(self.bytes)

    def numbers(self, version: OpenIndex) -> Iterator[int]:
        """Yield the samples' numbers in the version, whose index is given, in ascending order."""
        start = 0
        for part, rows in enumerate(self.rows):
            remaining = version.remaining_rows(part)
            yield from (start + (rows if remaining is None else np.searchsorted(remaining, rows))).tolist()
            start = int(version.ends[part])

    @property
    def digest(self) -> str:
        """BLAKE3 of the version's digest, the conditions and the rows."""
        source = self.lineage.sources[0]
        identity = msgspec.json.encode([source.digest, self.lineage.where, self.ids])
        return str(blake3.blake3(identity).hexdigest())

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The entries that a view adds to its version's fingerprint."""
        source = self.lineage.sources[0]
        return {"of": source.digest, "where": list(self.lineage.where), "ids": self.ids}


# --- running conditions


def narrow(store: Store, document: VersionDocument, opened: OpenIndex, lineage: Lineage, condition: str) -> View:
    """Make a view of the samples in `opened` that meet `condition`.

    `lineage` is the lineage of the view to filter. To filter a version, pass a lineage that names the version as its
    source and has no conditions.
    """
    rows, sizes, hasher = RowSelection(), list[int](), blake3.blake3()
    for part, (chosen, size) in enumerate(matching(opened, document, condition)):
        rows.add(chosen, opened.part_rows(part))
        sizes.append(size)
        hasher.update(len(chosen).to_bytes(8, "little"))
        hasher.update(chosen.astype("<u4").tobytes())
    return View(
        index=OpenIndex(store, document, rows),
        rows=rows,
        bytes=sizes,
        lineage=msgspec.structs.replace(lineage, where=(*lineage.where, condition)),
        ids=str(hasher.hexdigest()),
    )


def matching(opened: OpenIndex, document: VersionDocument, text: str) -> Iterator[tuple[RowNumbers, int]]:
    """Yield for each part the rows of samples that meet the condition `text`, and the total bytes of their members."""
    connection = connect()
    try:
        predicate = parse(connection, text, document.summary().fields)
        _check_type(connection, predicate)
        columns = [*predicate.columns, *({"bytes"} - set(predicate.columns))]
        for number, table in enumerate(opened.tables(columns)):
            rows = _select_rows(connection, predicate, table)
            size = pc.sum(table["bytes"].take(pa.array(rows)), min_count=0).as_py()
            yield _rows_of_part(opened, number, rows), size
    finally:
        connection.close()


def rows_with_keys(opened: OpenIndex, keys: Iterable[str]) -> tuple[RowSelection, list[int], set[str]]:
    """Return for each part the rows of samples with one of these keys, and the total bytes of their members.

    Also returns the keys that no sample has.
    """
    missing = set(keys)
    sorted_keys, selected, sizes = pa.array(sorted(missing), pa.string()), RowSelection(), list[int]()
    for number, table in enumerate(opened.tables(["key", "bytes"])):
        hits = table.filter(pc.is_in(table["key"], sorted_keys))
        missing.difference_update(hits["key"].to_pylist())
        rows = np.flatnonzero(pc.is_in(table["key"], sorted_keys).to_numpy()).astype(np.uint32)
        selected.add(_rows_of_part(opened, number, rows), opened.part_rows(number))
        sizes.append(pc.sum(hits["bytes"], min_count=0).as_py())
    return selected, sizes, missing


def _rows_of_part(opened: OpenIndex, part: int, rows: RowNumbers) -> RowNumbers:
    remaining = opened.remaining_rows(part)
    return rows if remaining is None else remaining[rows]


def _check_type(connection: Any, predicate: Predicate) -> None:
    """Run the condition over an empty table. This checks its names and types, and that its value is a boolean."""
    connection.register("part", _numbered(index.SCHEMA.empty_table().select(list(predicate.columns))))
    try:
        result = connection.execute(predicate.sql.replace("SELECT __row", f"SELECT (\n{predicate.text}\n)", 1))
        kind = str(result.description[0][1])
        result.fetchall()
    except import_duckdb().Error as error:
        raise _evaluation_error(predicate, error) from error
    if kind not in ("BOOLEAN", "bool"):
        raise UsageError(
            f"{quote(predicate.text)} is not a condition: its value is of type {kind}", hint="compare it with a value"
        )


def _select_rows(connection: Any, predicate: Predicate, table: Any) -> RowNumbers:
    connection.register("part", _numbered(table))
    try:
        columns: Mapping[str, Any] = connection.execute(predicate.sql).fetchnumpy()
    except import_duckdb().Error as error:
        raise _evaluation_error(predicate, error) from error
    return np.sort(np.asarray(columns["__row"], np.uint32))


def _numbered(table: Any) -> Any:
    return table.append_column("__row", pa.array(np.arange(table.num_rows, dtype=np.uint32)))


def _evaluation_error(predicate: Predicate, error: Exception) -> UsageError:
    return UsageError(f"the condition {quote(predicate.text)} fails: {str(error).strip().splitlines()[0]}")


# --- validating conditions


def import_duckdb() -> Any:
    """Import DuckDB, which the extra `sql` installs."""
    with naming_extras():
        import duckdb
    return duckdb


def connect(spill_to: str = "") -> Any:
    """Open an in-memory DuckDB connection without access to files, the network, extensions and Python variables.

    With a folder `spill_to`, DuckDB moves what exceeds `SPILL_MEMORY` to files in it.
    """
    connection = import_duckdb().connect(
        ":memory:",
        config={
            "enable_external_access": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
            "memory_limit": SPILL_MEMORY if spill_to else "1GiB",
            "temp_directory": spill_to,
        },
    )
    connection.execute("SET lock_configuration = true").fetchall()
    return connection


@contextlib.contextmanager
def connect_with_disk() -> Iterator[Any]:
    """Open a connection that uses a temporary folder for what exceeds `SPILL_MEMORY`. The folder is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-keys-", ignore_cleanup_errors=True) as folder:
        connection = connect(folder)
        try:
            yield connection
        finally:
            connection.close()


def parse(connection: Any, text: str, fields: Mapping[str, str]) -> Predicate:
    """Validate the condition `text` over `COLUMNS` and the promoted `fields` (name → type).

    Raises `UsageError` for any other text.
    """
    if len(text.encode(errors="replace")) > TEXT_BYTES:
        raise UsageError(
            f"the condition is longer than {TEXT_BYTES} bytes", hint="shorten it, or narrow in several steps"
        )
    if not text.strip():
        raise UsageError("the condition is empty", hint="for example: duration > 2 and height >= 720")
    tree = _syntax_tree(connection, text)
    references = list(_references(tree, text))
    if _growth(tree) > GROWTH:
        raise UsageError(
            f"the condition {quote(text)} could make values more than {GROWTH} times as long as its inputs",
            hint="use replacement texts that are no longer than the replaced ones, and concatenate fewer texts",
        )
    column_names = {name.lower(): name for name in fields if name.lower() != ROW} | {name: name for name in COLUMNS}
    used, json_fields = dict[str, str](), set[str]()
    for path in references:
        if len(path) == 2 and path[0].lower() == "fields":
            json_fields.add(_find_field(path[1], fields, text))
        elif len(path) == 1 and path[0].lower() in column_names:
            used[path[0].lower()] = column_names[path[0].lower()]
        else:
            raise _unknown_column(".".join(path), fields, text)
    expressions, index_columns = list[str](), set[str]()
    for name in used.values():
        columns, expression = COLUMNS[name] if name in COLUMNS else (("fields",), _extract(name, fields[name]))
        expressions.append(f"{expression} AS {_quoted(name)}")
        index_columns.update(columns)
    if json_fields:
        entries = ", ".join(f"{_quoted(name)} := {_extract(name, fields[name])}" for name in sorted(json_fields))
        expressions.append(f"struct_pack({entries}) AS fields")
        index_columns.add("fields")
    inner = ", ".join([ROW, *expressions])
    return Predicate(
        text, tuple(sorted(index_columns)), f"SELECT __row FROM (SELECT {inner} FROM part) WHERE (\n{text}\n)"
    )


def quote(text: str) -> str:
    """Return the condition as errors quote it, cut to 200 characters."""
    return repr(text if len(text) <= 200 else text[:200] + "…")


def _parse_error(text: str, why: str) -> UsageError:
    return UsageError(f"the condition {quote(text)} cannot be read: {why}", hint=_EXAMPLE)


def _syntax_tree(connection: Any, text: str) -> Mapping[str, Any]:
    """Parse the condition inside a fixed statement. Raise `UsageError` if the text adds more to it than a condition."""
    wrapped = f"SELECT 1 FROM part WHERE (\n{text}\n)"
    try:
        parsed = json.loads(connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [wrapped]).fetchall()[0][0])
    except (import_duckdb().Error, ValueError, RecursionError, UnicodeError) as error:
        raise _parse_error(text, _first_line(error)) from error
    if parsed.get("error"):
        raise _parse_error(text, str(parsed.get("error_message")))
    node = parsed["statements"][0]["node"]
    plain = (
        len(parsed["statements"]) == 1
        and node["type"] == "SELECT_NODE"
        and not any(node.get(part) for part in ("modifiers", "group_expressions", "having", "qualify", "sample"))
        and not node["cte_map"]["map"]
        and node["from_table"].get("table_name") == "part"
    )
    if not plain or not node["where_clause"]:
        raise UsageError(f"the condition {quote(text)} is more than one boolean expression", hint=_EXAMPLE)
    clause: Mapping[str, Any] = node["where_clause"]
    return clause


def _references(tree: Mapping[str, Any], text: str) -> Iterator[list[str]]:
    """Yield the columns that the tree names, as paths.

    Raise `UsageError` if the tree contains an expression that is not allowed.
    """
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if "class" in node:
                _check_allowed(node, text)
            if node.get("class") == "COLUMN_REF":
                yield node["column_names"]
            waiting += [value for name, value in node.items() if name != "type_expr"]


def _check_allowed(node: Mapping[str, Any], text: str) -> None:
    kind, forbidden = node["class"], ""
    if kind not in _CLASSES:
        forbidden = {"SUBQUERY": "a sub-query", "STAR": "a star", "WINDOW": "a window function"}.get(kind, kind.lower())
    elif kind == "FUNCTION":
        name = node["function_name"].lower()
        modifiers = (
            node["schema"] or node["catalog"] or node["filter"] or node["distinct"] or node["order_bys"]["orders"]
        )
        forbidden = "" if name in _FUNCTIONS and not modifiers else f"the function {name}"
    elif kind == "OPERATOR" and node["type"] not in _OPERATORS:
        forbidden = node["type"].lower()
    elif kind == "CAST":
        target = node["type_expr"]
        simple = target.get("class") == "TYPE" and not target["children"] and not target["schema"]
        forbidden = "" if simple and target["type_name"].upper() in _CASTS else "such a cast"
    if forbidden:
        raise UsageError(
            f"the condition {quote(text)} contains {forbidden}, which conditions may not contain",
            hint="compare columns with values, and join comparisons with and, or, not",
        )


def _growth(tree: Mapping[str, Any]) -> float:
    """Return an upper bound for the length of a built string divided by the total length of its inputs."""
    longer, joined, waiting = 1.0, 0, [tree]
    while waiting:
        node: Any = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
            name = node["function_name"].lower() if node.get("class") == "FUNCTION" else ""
            if name in ("concat", "||"):
                joined += len(node["arguments"])
            elif name == "replace":
                longer *= _replace_growth(*(one["expression"] for one in node["arguments"][1:]))
    return longer * max(joined, 1)


def _replace_growth(*arguments: Mapping[str, Any]) -> float:
    """Return the growth factor of `replace` in the worst case, a text that consists only of the replaced string."""
    old, new = (
        [str(one["literal"]["text"]) if "literal" in one else None for one in arguments]
        if len(arguments) == 2
        else ("", "")
    )
    if old is None or new is None:
        return 1 if new == "" else GROWTH + 1
    return max(1.0, len(new) / len(old)) if old else 1.0


def _find_field(name: str, fields: Mapping[str, str], text: str) -> str:
    for field in fields:
        if field.lower() == name.lower():
            return field
    raise _unknown_column(f"fields.{name}", fields, text)


def _unknown_column(name: str, fields: Mapping[str, str], text: str) -> UsageError:
    names = [*COLUMNS, *(field if field.lower() != ROW else f'fields."{field}"' for field in fields)]
    similar = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"there are {', '.join(sorted(COLUMNS))}"
    if not similar and fields:
        hint += f"; and of the samples' JSON {', '.join(sorted(fields)[:30])}"
    return UsageError(f"the condition {quote(text)} names the column {name!r}, which does not exist", hint=hint)


def _extract(name: str, kind: str) -> str:
    pointer = "/" + name.replace("~", "~0").replace("/", "~1")
    literal = "'" + pointer.replace("'", "''") + "'"
    return f"TRY_CAST(json_extract_string(fields, {literal}) AS {_TYPES.get(kind, 'VARCHAR')})"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
