"""`Rows`: the row of a table that holds at each instant of a clip."""

from __future__ import annotations

import io
import json
from datetime import date
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError, HeadraceError, MissingValueError, UnsupportedError, UsageError
from headrace.dataio.shards.sample import Member, Sample
from headrace.loaders.clip import ClipTimes
from headrace.loaders.fields import arrays, parquet_columns, rows
from headrace.loaders.fields.base import FieldInput
from headrace.loaders.fields.registry import field_from
from headrace.loaders.fields.rows import Rows
from headrace.loaders.interfaces import SampleRef
from tests.support.indexed_datasets import video

VALUES = np.arange(20, dtype=np.float32).reshape(10, 2)
TIMES = np.arange(10) / 5
VIDEO = video(1, time_base=Fraction(1, 1000), start_pts=0, duration_pts=2000, frames=50)


def given_input(field: Rows, data: bytes, *milliseconds: int) -> FieldInput:
    sample = Sample(0, "k", "s", (Member(field.file, 0, len(data), 0),), 1.0, VIDEO)
    times = {"front": ClipTimes(VIDEO, milliseconds)}
    return FieldInput(sample, {field.file: memoryview(data)}, SampleRef(0, 0, sample), times)


def npy(values: Any) -> bytes:
    target = io.BytesIO()
    np.save(target, values)
    return target.getvalue()


def tensors(**values: Any) -> bytes:
    kinds = {"float32": "F32", "float64": "F64", "int64": "I64"}
    header, data = {}, b""
    for name, value in values.items():
        end = len(data) + value.nbytes
        header[name] = {
            "dtype": kinds[str(value.dtype)],
            "shape": list(value.shape),
            "data_offsets": [len(data), end],
        }
        data += value.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def parquet(table: Any, **options: Any) -> bytes:
    target = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), target, **options)
    return target.getvalue()


LISTS = pa.array(VALUES.tolist(), pa.list_(pa.float32(), 2))
TABLES: dict[str, tuple[Rows, bytes]] = {
    "npy": (Rows("r.npy", like="front", rate=5), npy(VALUES)),
    "safetensors": (
        Rows("r.safetensors", "state", like="front"),
        tensors(state=VALUES, timestamp=TIMES, other=np.arange(3)),
    ),
    "safetensors with a rate": (Rows("r.safetensors", "state", like="front", rate=5), tensors(state=VALUES)),
    "parquet": (
        Rows("r.parquet", "state", like="front", time="t"),
        parquet({"state": LISTS, "t": TIMES, "s": ["a"] * 10}),
    ),
    "parquet with lists": (
        Rows("r.parquet", "state", like="front", time="t"),
        parquet({"state": pa.array(VALUES.tolist()), "t": TIMES.astype(np.float32)}, row_group_size=3),
    ),
    "parquet with a rate": (
        Rows("r.parquet", "state", like="front", rate=5),
        parquet({"state": LISTS}, compression="zstd", data_page_version="2.0", use_dictionary=False),
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_each_instant_has_the_row_that_holds_then(kind: str) -> None:
    field, data = TABLES[kind]
    # 199 ms lies within the tolerance of the row at 200 ms
    value = field.decode(given_input(field, data, 0, 40, 198, 199, 200, 399, 1800, 1960))
    assert np.array_equal(value, VALUES[[0, 0, 0, 1, 1, 2, 9, 9]])


@pytest.mark.parametrize("kind", TABLES)
def test_offsets_follow_the_last_frame_and_mark_what_is_beyond_the_ends(kind: str) -> None:
    field, data = TABLES[kind]
    field = Rows(
        field.file,
        field.column,
        like="front",
        rate=field.rate,
        time=field.time,
        offsets=[-2.0, -0.2, 0, 0.2, 0.4, 5],
        dtype="float64",
    )
    value, entries = field.decode(given_input(field, data, 0, 1400))
    assert np.array_equal(value, VALUES[[0, 6, 7, 8, 9, 9]])
    assert value.dtype == np.float64
    assert entries["pad"].tolist() == [True, False, False, False, False, True]


def test_scalars_and_matrices_are_rows_too() -> None:
    field = Rows("r.npy", like="front", rate=5)
    assert field.decode(given_input(field, npy(np.arange(10)), 0, 400)).tolist() == [0, 2]
    assert field.decode(given_input(field, npy(np.zeros((10, 2, 3))), 0, 400)).shape == (2, 2, 3)
    nested = pa.array([[[n, 1], [2, 3]] for n in range(10)])
    field = Rows("r.parquet", "m", like="front", rate=5)
    assert field.decode(given_input(field, parquet({"m": nested}), 0, 400))[:, 0, 0].tolist() == [0, 2]
    field = Rows("r.parquet", "b", like="front", rate=5, dtype=torch.float32)
    flags = parquet({"b": [True, False] * 5})
    assert field.decode(given_input(field, flags, 0, 200)).tolist() == [1, 0]


def test_rows_of_a_rate_are_exact_after_a_long_time() -> None:
    field = Rows("r.npy", like="front", rate=30)
    wanted = [1000 * n // 30 for n in range(0, 100_000, 999)]
    assert field.decode(given_input(field, npy(np.arange(100_000)), *wanted)).tolist() == list(range(0, 100_000, 999))


@pytest.mark.parametrize(("instant", "good"), [(2190, True), (2210, False), (2900, False)])
def test_a_clip_outside_the_rows_makes_a_bad_sample(instant: int, good: bool) -> None:
    for field, data in TABLES.values():
        asked = given_input(field, data, 1900, instant)
        if good:
            assert np.array_equal(field.decode(asked), VALUES[[9, 9]])
        else:
            with pytest.raises(
                UnsupportedError, match=r"rows from 0.000 s to 2.000 s, and the clip has frames from 1.900"
            ):
                field.decode(asked)


def test_a_clip_before_the_first_row_makes_a_bad_sample() -> None:
    field = Rows("r.safetensors", "state", like="front")
    data = tensors(state=VALUES, timestamp=TIMES + 1)
    assert np.array_equal(field.decode(given_input(field, data, 850, 1000)), VALUES[[0, 0]])
    with pytest.raises(UnsupportedError, match=r"rows from 1\.000 s"):
        field.decode(given_input(field, data, 700, 1000))


NAN = np.where(TIMES > 1, np.nan, TIMES)


def test_a_table_without_the_column_has_no_value_if_the_field_is_optional() -> None:
    for data, file in ((tensors(s=VALUES), "r.safetensors"), (parquet({"s": TIMES}), "r.parquet")):
        given = given_input(field := Rows(file, "state", like="front", required=False), data, 0, 200)
        assert field.decode(given) is None
        field = Rows(file, "state", like="front", required=False, offsets=[0, 1])
        value, entries = field.decode(given)
        assert value is None
        assert entries["pad"].tolist() == [True, True]
        with pytest.raises(MissingValueError, match="it has 's'"):
            Rows(file, "state", like="front", rate=5).decode(given)


def test_two_columns_of_one_name_are_damage() -> None:
    table = pa.Table.from_arrays([pa.array(TIMES)] * 2, ["state", "state"])
    field = Rows("r.parquet", "state", like="front", rate=5, required=False)
    with pytest.raises(CorruptionError, match="has several columns 'state'"):
        field.decode(given_input(field, parquet(table), 0))


DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "no such tensor": ("safetensors", tensors(s=VALUES), "has no tensor 'state'"),
    "no times": ("safetensors", tensors(state=VALUES), "has no tensor 'timestamp'"),
    "too few times": (
        "safetensors",
        tensors(state=VALUES, timestamp=TIMES[:9]),
        "not a number for each of its 10 rows",
    ),
    "times of two axes": ("safetensors", tensors(state=VALUES, timestamp=VALUES), "not a number for each"),
    "times that are not numbers": ("safetensors", tensors(state=VALUES, timestamp=NAN), "times that are not finite"),
    "infinite times": (
        "safetensors",
        tensors(state=VALUES, timestamp=np.full(10, np.inf)),
        "times that are not finite",
    ),
    "unsorted times": (
        "safetensors",
        tensors(state=VALUES, timestamp=TIMES[::-1].copy()),
        "times that are not in order",
    ),
    "no rows": ("safetensors", tensors(state=VALUES[:0], timestamp=TIMES[:0]), "has no rows"),
    "a single number": ("safetensors", tensors(state=np.array(1.0), timestamp=TIMES), "a single number, and not rows"),
    "no such column": ("parquet", parquet({"s": LISTS, "timestamp": TIMES}), "has no column 'state'"),
    "texts": ("parquet", parquet({"state": ["a"] * 10, "timestamp": TIMES}), "are not numbers"),
    "bytes": ("parquet", parquet({"state": [b"a"] * 10, "timestamp": TIMES}), "are not numbers"),
    "objects": ("parquet", parquet({"state": [{"a": 1}] * 10, "timestamp": TIMES}), "are not numbers"),
    "dates": ("parquet", parquet({"state": pa.array(range(10), pa.timestamp("s")), "timestamp": TIMES}), "not numbers"),
    "categories": (
        "parquet",
        parquet({"state": pa.array(["a"] * 10).dictionary_encode(), "timestamp": TIMES}),
        "not numbers",
    ),
    "nulls": ("parquet", parquet({"state": [1, None] * 5, "timestamp": TIMES}), "has nulls"),
    "nulls in lists": ("parquet", parquet({"state": [[1, None]] * 10, "timestamp": TIMES}), "has nulls"),
    "null lists": ("parquet", parquet({"state": [[1, 2], None] * 5, "timestamp": TIMES}), "has nulls"),
    "lists of other lengths": (
        "parquet",
        parquet({"state": [[1, 2], [1]] * 5, "timestamp": TIMES}),
        "different lengths",
    ),
    "null times": ("parquet", parquet({"state": LISTS, "timestamp": [None] * 10}), "has nulls|not numbers"),
    "unsorted times in parquet": ("parquet", parquet({"state": LISTS, "timestamp": -TIMES}), "not in order"),
    "an empty file": ("parquet", b"", "is not a Parquet file"),
    "another file": ("parquet", b"PAR1" + bytes(100), "is not a Parquet file"),
    "a footer longer than the file": ("parquet", b"PAR1" + b"\xff\xff\xff\x00PAR1", "footer is longer"),
    "no footer": ("parquet", b"PAR1" + b"\x00\x00\x00\x00PAR1", "not a readable Parquet file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tables_are_refused(case: str) -> None:
    kind, data, reason = DAMAGED[case]
    field = Rows(f"r.{kind}", "state", like="front")
    with pytest.raises((CorruptionError, UnsupportedError), match=reason):
        field.decode(given_input(field, data, 0, 200))


def test_a_large_footer_is_refused_before_it_is_read() -> None:
    data = b"PAR1" + bytes(5 << 20) + (5 << 20).to_bytes(4, "little") + b"PAR1"
    field = Rows("r.parquet", "state", like="front", rate=5)
    with pytest.raises(UnsupportedError, match=r"has a footer of 5\.0 MiB"):
        field.decode(given_input(field, data, 0))


@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "zstd"}, {"data_page_version": "2.0"}, {"use_dictionary": False, "compression": "gzip"}],
)
def test_columns_above_the_limit_are_refused_from_the_headers_of_their_pages(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = parquet({"state": np.zeros(100_000)}, **options)  # some hundred bytes
    field = Rows("r.parquet", "state", like="front", rate=1)
    assert len(field.decode(given_input(field, zeros, 0))) == 1
    monkeypatch.setattr(parquet_columns, "TABLE_BYTES", 700_000)
    with pytest.raises(UnsupportedError, match=r"has a column( 'state')? of 7"):
        field.decode(given_input(field, zeros, 0))


def test_nulls_in_place_of_long_lists_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow makes a million zeros of each such null, from a file of some hundred bytes."""
    nulls = parquet({"state": pa.array([None] * 4, pa.list_(pa.float32(), 1 << 20))})
    field = Rows("r.parquet", "state", like="front", rate=5)
    with pytest.raises(CorruptionError, match="has nulls"):
        field.decode(given_input(field, nulls, 0))
    monkeypatch.setattr(parquet_columns, "TABLE_BYTES", 16 << 20)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(UnsupportedError, match="has a column 'state' of 32"):
        field.decode(given_input(field, nulls, 0))
    assert pa.default_memory_pool().max_memory() == before


def test_texts_are_refused_before_they_are_read() -> None:
    """A dictionary may hold one long text that all rows name."""
    texts = pa.DictionaryArray.from_arrays(np.zeros(50_000, np.int32), ["x" * 100_000])
    data = parquet({"state": texts}, store_schema=False)
    assert len(data) < 300_000
    field, before = Rows("r.parquet", "state", like="front", rate=5), pa.default_memory_pool().max_memory()
    with pytest.raises(MissingValueError, match="has a column 'state' of string, which are not numbers"):
        field.decode(given_input(field, data, 0))
    assert pa.default_memory_pool().max_memory() == before


def test_a_column_of_texts_names_the_columns_of_numbers_and_the_fields_that_read_texts() -> None:
    data = parquet({"task": ["lift"] * 10, "when": [date(2026, 1, 1)] * 10, "state": LISTS, "timestamp": TIMES})
    field = Rows("r.parquet", "task", like="front")
    with pytest.raises(MissingValueError) as caught:
        field.decode(given_input(field, data, 0))
    assert caught.value.message == ".r.parquet has a column 'task' of string, which are not numbers"
    assert caught.value.hint == (
        "its columns of numbers are 'state', 'timestamp'; "
        "the fields Text and Json read texts, from a .txt or .json file of the sample"
    )
    with pytest.raises(
        MissingValueError, match=r"'when' of date32.* .its columns of numbers are 'state', 'timestamp'.$"
    ):
        Rows("r.parquet", "when", like="front").decode(given_input(field, data, 0))
    with pytest.raises(MissingValueError, match=r"'task' of string.*which are not numbers"):
        Rows("r.parquet", "state", time="task", like="front").decode(given_input(field, data, 0))


def test_few_columns_of_many_are_read() -> None:
    many = parquet({f"c{n}": np.arange(10) for n in range(300)} | {"observation.state": LISTS, "observation": LISTS})
    field = Rows("r.parquet", "observation.state", like="front", rate=5)
    assert np.array_equal(field.decode(given_input(field, many, 0, 200)), VALUES[:2])
    field = Rows("r.parquet", "observation", like="front", rate=5)
    with pytest.raises(UnsupportedError, match=r"has the columns 'observation' and 'observation\.state'"):
        field.decode(given_input(field, many, 0, 200))


@settings(derandomize=True, max_examples=300)
@given(st.data())
def test_damaged_bytes_of_parquet_raise_nothing_but_damage(data: st.DataObject) -> None:
    field, good = TABLES[data.draw(st.sampled_from(["parquet", "parquet with lists", "parquet with a rate"]))]
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        field.decode(given_input(field, bytes(broken), 0, 400))
    except (CorruptionError, UnsupportedError):
        return


def test_a_loader_without_the_field_is_told_which_there_are() -> None:
    field, data = TABLES["npy"]
    other = Rows(field.file, like="side", rate=5)
    with pytest.raises(UsageError, match="no clip of a Video field 'side' for sample 'k'") as caught:
        other.decode(given_input(other, data, 0))
    assert "'front'" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"file": "r.npz", "rate": 5}, "Rows cannot read 'r.npz'"),
        ({"file": "r.csv", "column": "a"}, "Rows cannot read"),
        ({"file": "r.npy"}, "one array and no times"),
        ({"file": "r.npy", "column": "a", "rate": 5}, "one array and no times"),
        ({"file": "r.parquet"}, "Rows's column cannot be None"),
        ({"file": "r.parquet", "column": ""}, "Rows's column cannot be ''"),
        ({"file": "r.parquet", "column": "a", "rate": 0}, "Rows's rate cannot be 0"),
        ({"file": "r.parquet", "column": "a", "rate": float("nan")}, "Rows's rate cannot be nan"),
        ({"file": "r.parquet", "column": "a", "offsets": ()}, "are not some seconds"),
        ({"file": "r.parquet", "column": "a", "offsets": 3}, "are not some seconds"),
        ({"file": "r.parquet", "column": "a", "offsets": (float("inf"),)}, "are not finite"),
        ({"file": "r.parquet", "column": "a", "offsets": ("1",)}, "an offset"),
        ({"file": "r.parquet", "column": "a", "dtype": "float99"}, "Rows's dtype cannot be"),
        ({"file": "r.parquet", "column": "a", "like": 3}, "Rows's like cannot be 3"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Rows(**({"like": "front"} | options))


def test_rows_come_from_configuration_files_too() -> None:
    described = {"field": "rows", "file": "r.parquet", "column": "action", "like": "front", "offsets": [0, 0.5]}
    assert field_from(described) == Rows("r.parquet", "action", like="front", offsets=(0.0, 0.5))


def test_the_memory_of_rows_is_bounded() -> None:
    sample = Sample(0, "k", "s", (Member("r.parquet", 0, 1 << 40, 0),), 1.0, VIDEO)
    assert Rows("r.parquet", "a", like="front").nbytes(sample) == 2 * parquet_columns.TABLE_BYTES


def test_errors_are_of_headrace() -> None:
    assert issubclass(CorruptionError, HeadraceError)


@pytest.mark.parametrize("file", ["rows.parquet", "rows.safetensors"])
def test_two_fields_of_one_file_parse_it_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, read = list[str](), list[Any]()
    reader, entries, tensor = parquet_columns.ColumnReader, arrays.read_entries, arrays.read_tensor

    class Counted(reader):  # type: ignore[misc, valid-type]
        def __init__(self, data: memoryview, what: str) -> None:
            parsed.append(what)
            super().__init__(data, what)

        def read(self, names: Any) -> Any:
            read.extend(names)
            return super().read(names)

    monkeypatch.setattr(rows, "ColumnReader", Counted)
    monkeypatch.setattr(rows, "read_entries", lambda data, what: (parsed.append(what), entries(data, what))[1])
    monkeypatch.setattr(rows, "read_tensor", lambda *given: (read.append(given[2]), tensor(*given))[1])
    table = {"state": np.arange(8.0), "action": np.arange(8.0) * 2, "timestamp": np.arange(8) / 4}
    data = parquet(table) if file.endswith("parquet") else tensors(**table)
    state, action = (Rows(file, column, like="front") for column in ("state", "action"))
    asked = given_input(state, data, 0, 500)
    assert state.decode(asked).tolist() == [0.0, 2.0]
    assert action.decode(asked).tolist() == [0.0, 4.0]
    assert len(parsed) == 1
    assert len(read) == 3, "the times are read once"
