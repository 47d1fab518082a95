"""JSON from outside: what Python's parser lets through is refused, quickly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core import limits
from headrace.dataio.core.json import parse_json

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_what_json_writes_is_read(value: object) -> None:
    assert parse_json(json.dumps(value).encode(), unique_names=True) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=True).encode()) == value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"NaN", "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"[1e999]", "out of range"),
        (b"9" * 5000, "5000 digits"),
        (b"[" * 33 + b"]" * 33, "nested deeper than 32 at offset 32"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"[" * 5_000_000, "nested deeper"),
        (b"[" * 40, "nested deeper than 32 at offset 32"),
        (b'"\xff"', "not UTF-8 at offset 1"),
        (b"{", "char 1"),
        (b"", "Expecting value"),
        (b'"' * 1_000_001, "Extra data"),
        (b'["' + b'\\"' * 1_000_000 + b"\\", "Unterminated"),
    ],
)
def test_what_is_not_json_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(data)


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_json(b'["' + b"[" * 100 + rb'\"[[[[\\", {"}": 1}]') == ["[" * 100 + '"[[[[\\', {"}": 1}]
    assert parse_json(b"[" * limits.JSON_DEPTH + b"]" * limits.JSON_DEPTH)


def test_a_name_that_occurs_twice_is_refused_where_asked() -> None:
    data = b'{"x": {"a": 1, "b": 2, "a": 3}}'
    assert parse_json(data) == {"x": {"a": 3, "b": 2}}
    with pytest.raises(ValueError, match="'a' occurs twice"):
        parse_json(data, unique_names=True)


def test_a_document_above_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than 10 B"):
        parse_json(b'"123456789"', max_bytes=10)
