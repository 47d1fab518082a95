"""Captions, values of JSON files, and files as they are."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.loaders.fields.text import Bytes, Json, Text, tensor_of, value_at
from tests.support.field_input import decode, input_of, sample_of

DOCUMENT = {
    "camera": {"pose": [[1, 2.5], [3, 4]], "focal length": 35},
    "tracks": [{"box": [0, 1, 2, 3], "label": "cat"}, {"box": [], "a.b": {'"': True}}],
    "none": None,
}
DATA = json.dumps(DOCUMENT).encode()


def value(field: Json, document: Any) -> Any:
    return decode(field, json.dumps(document).encode())


# --- text


def test_the_caption_is_that_of_the_index() -> None:
    field = Text()
    assert field.files == ()
    assert field.collate == "list"
    assert field.decode(input_of({}, "a caption")) == "a caption"
    assert field.decode(input_of({}, "")) == ""


def test_a_sample_without_a_caption_is_refused_unless_it_may_lack_one() -> None:
    with pytest.raises(UnsupportedError, match="no caption"):
        Text().decode(input_of({}))
    assert Text(required=False).decode(input_of({})) is None


@given(st.text(max_size=40), st.booleans())
def test_a_text_file_is_read_without_its_byte_order_mark(text: str, mark: bool) -> None:
    found = decode(Text(file="title.txt"), b"\xef\xbb\xbf" * mark + text.encode(), "another")
    assert found == (text if mark else text.removeprefix("\ufeff")).strip()


@pytest.mark.parametrize("data", [b"\xff\xfeh\0", b"caf\xe9", b"ok \xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_other_bytes_than_utf_8_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptionError, match=r"\.txt is not UTF-8 text, at offset \d"):
        decode(Text(file="txt"), data)
    with pytest.raises(CorruptionError, match="UTF-8"):
        decode(Json(), b'{"a": "' + data + b'"}')


def test_a_text_of_more_than_a_mebibyte_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="larger than"):
        decode(Text(file="txt"), b"a" * (limits.MIB + 1))


# --- JSON


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", DOCUMENT),
        ("camera.pose", [[1, 2.5], [3, 4]]),
        ("camera.pose[1][0]", 3),
        ("camera.focal length", 35),
        ("tracks[0].label", "cat"),
        ('tracks[1]["a.b"]["\\""]', True),
        ('["tracks"][0].box', [0, 1, 2, 3]),
        ("none", None),
    ],
)
def test_a_path_leads_to_its_value(path: str, expected: object) -> None:
    field = Json(path)
    assert field.collate == "list"
    assert decode(field, DATA) == expected


names = st.text(max_size=6)


@given(st.lists(st.one_of(names, st.integers(0, 3)), max_size=6))
def test_every_name_can_be_written_in_a_path(steps: list[str | int]) -> None:
    document: Any = "found"
    for step in reversed(steps):
        document = {step: document} if isinstance(step, str) else [None] * step + [document]
    assert value_at(document, "".join(f"[{json.dumps(step)}]" for step in steps)) == "found"


@pytest.mark.parametrize(
    "path",
    [".a", "a.", "a..b", "a.[0]", "[0]a", "a[", "a[]", "a[-1]", "a[x]", "a]", 'a["b]', '["\\x"]', ".", "[1.0]", 'a"b'],
)
def test_an_impossible_path_is_refused_when_the_field_is_made(path: str) -> None:
    with pytest.raises(UsageError, match=r"is not a path in a JSON document \(write"):
        Json(path)


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("lens", "the document has 'camera', 'none', 'tracks'"),
        ("camera.position", "'camera' has 'focal length', 'pose'"),
        ("tracks[2].box", "'tracks' is a list of 2"),
        ("tracks.box", "'tracks' is a list of 2"),
        ("camera[0]", "'camera' has 'focal"),
        ("tracks[0].label.x", "'tracks\\[0\\].label' is one str"),
        ("none.x", "'none' is null"),
    ],
)
def test_a_path_that_the_sample_lacks_is_damage_that_names_what_is_there(path: str, where: str) -> None:
    with pytest.raises(CorruptionError, match=where) as raised:
        decode(Json(path), DATA)
    assert repr(path) in str(raised.value)
    assert decode(Json(path, required=False), DATA) is None
    assert decode(Json(path, dtype="int8", required=False), DATA) is None


def test_the_names_of_an_error_are_few_and_short() -> None:
    document = {f"{number}" * 1000: 0 for number in range(1000)} | {"\ud800": 1}
    with pytest.raises(CorruptionError, match="and 993 more") as raised:
        value(Json("x"), document)
    assert len(str(raised.value)) < 600
    str(raised.value).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 3_000_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"1" * 1000,
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": 1',
        b"",
        b"{'a': 1}",
    ],
)
def test_a_json_bomb_is_damage_and_takes_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="is not JSON"):
            decode(Json(), data)
        assert tracemalloc.get_traced_memory()[1] < len(data) + limits.MIB
    finally:
        tracemalloc.stop()


def test_a_json_file_beyond_the_limit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="larger than 4"):
        decode(Json(), b" " * (limits.SAMPLE_JSON_BYTES + 1))


# --- numbers


nested = st.recursive(st.integers(-100, 100), lambda inner: st.lists(inner, max_size=3), max_leaves=12)


@given(st.one_of(nested, st.lists(st.lists(st.integers(-100, 100), min_size=2, max_size=2), max_size=4)))
def test_nested_lists_become_a_tensor_if_they_are_one(document: Any) -> None:
    try:
        expected = np.array(document, np.int16)
    except ValueError:
        with pytest.raises(CorruptionError, match="not a tensor"):
            value(Json(dtype="int16"), document)
        return
    found = value(Json(dtype="int16"), document)
    assert found.dtype == np.int16
    assert found.shape == expected.shape
    assert (found == expected).all()


@given(
    st.sampled_from(["float16", "float32", "float64", "bfloat16", "float8_e5m2"]),
    st.lists(st.floats(-400, 400), max_size=4),
)
def test_numbers_are_rounded_to_the_dtype(dtype: str, numbers: list[float]) -> None:
    found = torch.as_tensor(value(Json(dtype=dtype), numbers))
    assert found.dtype is getattr(torch, dtype)
    assert torch.equal(found, torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("dtype", "document"),
    [
        ("float32", "1"),
        ("float32", [1, None]),
        ("float32", [1, "2"]),
        ("float32", [True, 2]),
        ("float32", {"a": 1}),
        ("float32", [[1, 2], [3]]),
        ("float32", [[1, 2], 3]),
        ("float32", [1, [2]]),
        ("float32", [[[1]], [2]]),
        ("float32", [[], [1]]),
        ("float32", 1e39),
        ("float16", [65520]),
        ("float8_e4m3fn", [-500]),
        ("uint8", [256]),
        ("uint8", [-1]),
        ("int64", [2**63]),
        ("uint64", [2**64]),
        ("int32", [1.5]),
        ("int32", [1e300]),
        ("bool", [0, 1]),
    ],
)
def test_other_values_than_numbers_of_the_dtype_are_damage(dtype: str, document: Any) -> None:
    with pytest.raises(CorruptionError, match=r"'pose' in \.json is not a tensor"):
        value(Json("pose", dtype=dtype), {"pose": document})


def test_an_integer_beyond_all_floats_is_damage() -> None:
    assert tensor_of(10**299, "float64") == 1e299
    with pytest.raises(CorruptionError, match="not a tensor of dtype float64"):
        tensor_of(10**309, "float64")


def test_exact_numbers_and_booleans_keep_their_value() -> None:
    assert value(Json(dtype="int64"), [2**63 - 1, -(2**63), 3.0]).tolist() == [2**63 - 1, -(2**63), 3]
    assert value(Json(dtype="uint64"), 2**64 - 1).tolist() == 2**64 - 1
    assert value(Json(dtype=torch.bool), [[True], [False]]).tolist() == [[True], [False]]
    assert value(Json(dtype="bool"), []).shape == (0,)
    assert value(Json(dtype="float32"), [[], []]).shape == (2, 0)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=3), st.booleans())
def test_changed_bytes_give_a_value_or_damage(changes: list[tuple[int, int]], numbers: bool) -> None:
    changed = bytearray(DATA)
    for at, number in changes:
        changed[at] = number
    try:
        decode(Json("camera.pose", dtype="float32" if numbers else None), bytes(changed))
    except CorruptionError as error:
        str(error).encode()


def test_the_default_collate_depends_on_the_dtype() -> None:
    assert Json("a").collate == "list"
    assert Json("a", dtype="int32").collate == "stack"
    assert Json("a", dtype=torch.float32, collate="pad").collate == "pad"
    assert Json("a", collate=len).collate is len
    with pytest.raises(UsageError, match="give 'list' or a function"):
        Json("a", collate="stack")
    for dtype in ("complex64", "float", "str"):
        with pytest.raises(UsageError, match="dtype"):
            Json("a", dtype=dtype)


# --- files as they are


@given(st.binary(max_size=20))
def test_a_file_returns_as_it_is(data: bytes) -> None:
    assert decode(Bytes("bin"), data) == data
    assert type(decode(Bytes("bin", collate=len), data)) is bytes
    for collate in ("concat", "pad", "stack"):
        found = decode(Bytes("bin", collate=collate), data)
        assert found.dtype == np.uint8
        assert found.tobytes() == data
        assert not found.flags.writeable


def test_the_memory_of_parsed_files_is_counted() -> None:
    sample = sample_of({"json": bytes(10), "txt": bytes(100)})
    assert Json().nbytes(sample) == 300
    assert Text(file="txt").nbytes(sample) == 400
    assert Text().nbytes(sample) == 0
    assert Bytes("txt").nbytes(sample) == 100
