"""The metadata and the description of a step: what is stored is what was given, exactly, and within limits."""

from __future__ import annotations

import math
import struct
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.format import artifacts, description, names
from headrace.checkpoint.format import metadata as step_metadata
from headrace.checkpoint.format.documents import Decision, Totals, decode, encode
from headrace.checkpoint.format.group import Group
from headrace.checkpoint.format.manifest import Manifest
from headrace.dataio.core.errors import CorruptionError, UsageError
from tests.support.checkpoint_states import RUN

FLOATS = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack(">d", bits)[0])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | TEXTS
MAPPINGS = st.dictionaries(TEXTS.filter(lambda name: name.isprintable() and name), VALUES, max_size=12)


def exact(metadata: dict[str, Any]) -> dict[str, Any]:
    """With every float as its bits, and the type of every value."""
    return {
        name: (type(value), struct.pack(">d", value) if isinstance(value, float) else value)
        for name, value in metadata.items()
    }


@given(MAPPINGS)
def test_every_value_survives_a_decision_and_a_manifest_with_its_type_and_its_bits(metadata: dict[str, Any]) -> None:
    checked = step_metadata.check(metadata)
    assert exact(checked) == exact(metadata)
    document = Decision(attempt=names.new_id(), outcome="commit", metadata=step_metadata.to_json(checked))
    assert exact(decode(encode(document), Decision, "fate").values()) == exact(metadata)
    as_stored = msgspec.msgpack.decode(msgspec.msgpack.encode(checked), type=dict[str, step_metadata.Value])
    assert exact(as_stored) == exact(metadata)


@pytest.mark.parametrize(
    "bad",
    [
        {"": 1},
        {"a\nb": 1},
        {"x" * 129: 1},
        {3: 1},
        {"big": 2**63},
        {"list": [1]},
        {"array": np.zeros(1)},
        {"text": "\ud800"},
        {"text": "x" * 17_000},
        {str(i): i for i in range(65)},
        [("loss", 1)],
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(UsageError, match="metadata") as caught:
        step_metadata.check(bad)
    assert caught.value.hint or "Unicode" in str(caught.value)


def test_numbers_of_numpy_become_plain_and_nothing_is_empty() -> None:
    checked = step_metadata.check({"loss": np.float64(2.5)})
    assert type(checked["loss"]) is float
    assert step_metadata.check(None) == {}


@pytest.mark.parametrize("bits", ["7ff8", "zz00000000000000", "7ff80000000000001"])
def test_bits_that_are_no_float_are_damage(bits: str) -> None:
    document = Decision(
        attempt=names.new_id(), outcome="commit", metadata={"loss": step_metadata.Bits("7ff8000000000000")}
    )
    data = msgspec.json.encode(document).replace(b"7ff8000000000000", bits.encode())
    with pytest.raises(CorruptionError, match="readable document"):
        decode(data, Decision, "fate")


@pytest.mark.parametrize("field", ["metadata", "bytes_state", "negative"])
def test_a_decision_with_a_number_that_no_page_could_draw_is_damage(field: str) -> None:
    totals = Totals(ranks=1, tensors=1, packs=1, attempts=(), bytes_state=99, bytes_written=1, bytes_deduplicated=1)
    document = Decision(attempt=names.new_id(), outcome="commit", metadata={"tokens": 77}, totals=totals)
    huge = b"1" + b"0" * 400
    before, after = {
        "metadata": (b'"tokens":77', b'"tokens":' + huge),
        "bytes_state": (b'"bytes_state":99', b'"bytes_state":' + huge),
        "negative": (b'"bytes_state":99', b'"bytes_state":-9'),
    }[field]
    data = msgspec.json.encode(document)
    assert decode(data, Decision, "fate") == document
    assert before in data
    with pytest.raises(CorruptionError, match="readable document"):
        decode(data.replace(before, after), Decision, "fate")


def test_an_object_with_too_much_metadata_is_refused() -> None:
    assert step_metadata.flaw_of({"x": "y" * 20_000}, "")
    assert step_metadata.flaw_of({}, "../../secret")
    assert not step_metadata.flaw_of({"x": 1}, "0" * 64)


def test_only_finite_comparable_numbers_count() -> None:
    values: dict[str, Any] = {"a": 1, "b": True, "c": math.nan, "d": math.inf, "e": "1", "f": None, "g": -2.5}
    assert step_metadata.numbers(values) == {"a": 1, "d": math.inf, "g": -2.5}
    assert [step_metadata.printable(values[name]) for name in "acd"] == [1, "nan", "inf"]


def test_older_readers_ignore_the_new_fields() -> None:
    """A reader of the version before has structs without them; unknown fields of a known version are ignored."""
    for kind in (Manifest, Group, Decision):
        older = [
            (field.name, field.type)
            for field in msgspec.structs.fields(kind)
            if field.name not in ("metadata", "description") and field.required
        ]
        assert msgspec.defstruct("Older", older, kw_only=True).__struct_config__.forbid_unknown_fields is False


def test_a_description_is_named_by_its_content() -> None:
    one = description.encode({"config": {"lr": 1e-3, "layers": (1, 2)}, "code": "abc"})
    two = description.encode({"code": "abc", "config": {"layers": [1, 2], "lr": 1e-3}})
    assert one == two
    name = description.name_of(one)
    assert description.decode(one, name, "key") == {"config": {"lr": 1e-3, "layers": [1, 2]}, "code": "abc"}
    with pytest.raises(CorruptionError):
        description.decode(one.replace(b"abc", b"abd"), name, "key")
    assert names.description(RUN, name).endswith(f"/descriptions/{name}.json")


@pytest.mark.parametrize(
    "bad", [{"config": object()}, {"config": {"x": {1.5: 2}}}, {"config": "x" * 300_000}, {"config": {True: 1}}]
)
def test_a_description_that_cannot_be_stored_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError):
        description.encode(bad)


def test_a_description_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(UsageError, match="nested deeper"):
        description.encode({"config": loop})


@pytest.mark.parametrize("name", ["a", "samples/0.png", "log 1.txt", "a+b_c-d"])
def test_names_of_artifacts(name: str) -> None:
    assert artifacts.check_name(name) == name


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a//b", "a/../b", ".hidden", "a\n", "x" * 201, 3])
def test_other_names_of_artifacts_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="cannot name an artifact"):
        artifacts.check_name(name)


def test_the_time_of_an_id_is_when_it_was_made() -> None:
    before = time.time()
    assert before - 0.002 <= names.time_of(names.new_id()) <= time.time()
