"""Conditions: boolean SQL expressions over the index, which are validated before they run.

Purpose: users write the condition of `Dataset.where` in SQL. `parse` rejects everything that is not a condition. `connect`
opens the DuckDB connections that evaluate conditions (`headrace.dataio.shards.query.views`).

Invariants:
* DuckDB parses the text, and `parse` walks the syntax tree. Only the kinds of expressions and the functions listed here
  are allowed. So a condition cannot contain a subquery, a file, a setting or another statement.
* Every column is one of `COLUMNS` or a promoted field.
* A string that a condition builds is at most `GROWTH` times as long as its inputs, because DuckDB's memory limit does
  not count strings.

Failure behaviour: a text that is not a condition raises `UsageError`, which quotes it. For an unknown column, the error
suggests similar names. A name of both a column and a field means the column, and one warning names `fields.NAME`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.log import get_logger, warn_once

TEXT_BYTES = 16 << 10
GROWTH = 64
SPILL_MEMORY = "512MiB"
"""The memory of a connection that may use the disk."""
ROW = "__row"
"""The column with the row numbers. A promoted field with this name is available only as `fields."__row"`."""
_SIMILAR = 0.75
"""The least similarity of a name that an error suggests, from 0 to 1."""
_TWO_MEANINGS = "a condition names {0!r}, which is the index's column; the field of the samples' JSON is 'fields.{1}'"
_log = get_logger(__name__)
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


# --- running conditions


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
    _warn_of_two_meanings(used, fields)
    inner = ", ".join([ROW, *expressions])
    return Predicate(
        text, tuple(sorted(index_columns)), f"SELECT __row FROM (SELECT {inner} FROM part) WHERE (\n{text}\n)"
    )


def _warn_of_two_meanings(used: Iterable[str], fields: Mapping[str, str]) -> None:
    """Log once for each of these columns that a field of the samples' JSON has its name.

    `used` are names in lower case. `caption` has its own rule: it is the sample's text, which is often that field.
    """
    for name in sorted(COLUMNS.keys() & set(used) - {"caption"}):
        for field in fields:
            if field.lower() == name:
                warn_once(_log, _TWO_MEANINGS.format(name, field), per="job")


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
    similar = difflib.get_close_matches(name.lower(), names, n=3, cutoff=_SIMILAR)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"there are {', '.join(sorted(COLUMNS))}"
    if not similar and fields:
        hint += f"; and of the samples' JSON {', '.join(sorted(fields)[:30])}"
    elif not fields:
        hint += "; the index has no entries of the samples' JSON"
    return UsageError(f"the condition {quote(text)} names the column {name!r}, which does not exist", hint=hint)


def _extract(name: str, kind: str) -> str:
    pointer = "/" + name.replace("~", "~0").replace("/", "~1")
    literal = "'" + pointer.replace("'", "''") + "'"
    return f"TRY_CAST(json_extract_string(fields, {literal}) AS {_TYPES.get(kind, 'VARCHAR')})"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
