"""Samples survive the conversion to rows and back, and an invalid table is refused with the row and the column."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.sample import AudioInfo, Files, KeyFrame, Member, Sample, VideoInfo
from tests.support.sample_strategies import SHARD, SIZE, samples, without_overlaps


def read(data: bytes, rows: int, **changes: Any) -> Any:
    expected: dict[str, Any] = {
        "expected_digest": digest(data),
        "rows": rows,
        "shards": {SHARD: SIZE},
        "name": "index/x",
    }
    return index.read_part(data, **(expected | changes))


@given(st.lists(samples, max_size=4).map(without_overlaps))
def test_samples_come_back_as_they_were_written(written: list[Sample]) -> None:
    rows = read(part_writer.write_part(written).data, len(written)).to_pylist()
    assert [index.from_row(row, 0) for row in rows] == written


@given(st.lists(samples, min_size=1, max_size=4).map(without_overlaps))
def test_whole_columns_give_the_samples_that_single_rows_give(written: list[Sample]) -> None:
    table = read(part_writer.write_part(written).data, len(written))
    filled = table.select([name for name in table.column_names if table[name].null_count < table.num_rows])
    numbers = list(range(7, 7 + len(written)))
    alone = [index.from_row(row, n) for n, row in zip(numbers, table.to_pylist(), strict=True)]
    assert list(index.samples_of(table, numbers)) == list(index.samples_of(filled, numbers)) == alone
    assert list(index.files_of(filled)) == [Files(one.shard, list(one.members)) for one in alone]


@given(st.lists(samples, max_size=3))
def test_the_same_samples_give_the_same_bytes(written: list[Sample]) -> None:
    assert part_writer.write_part(written) == part_writer.write_part(list(written))


VIDEO = VideoInfo(
    "mp4",
    0,
    "h264",
    64,
    48,
    Fraction(30),
    12,
    Fraction(1, 15360),
    0,
    6144,
    "yuv420p",
    0,
    (KeyFrame(0, 0), KeyFrame(3072, 6)),
)
AUDIO = AudioInfo("wav", 0, "pcm_s16le", 8000, 1, 4000)
SAMPLE = Sample(
    0, "a", SHARD, (Member("mp4", 512, 100, 1), Member("wav", 1536, 10, 2)), 0.4, VIDEO, AUDIO, "text", {"a": 1}
)


def table_with(**columns: Any) -> bytes:
    """Two rows like SAMPLE, the second one changed in these columns."""
    rows = [index.to_row(SAMPLE), index.to_row(SAMPLE) | columns]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=index.SCHEMA), sink)
    return sink.getvalue().to_pybytes()


def test_the_valid_table_is_accepted() -> None:
    assert read(table_with(), 2).num_rows == 2


def members(offset: int, length: int) -> list[dict[str, Any]]:
    return [{"ext": "mp4", "offset": offset, "length": length, "xxh3": 0}]


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "a member behind the end": ({"members": members(SIZE - 5, 6)}, "members lies outside"),
    "a member that starts behind the end": ({"members": members(SIZE + 1, 0)}, "members lies outside"),
    "a negative offset": ({"members": members(-1, 6)}, "members lies outside"),
    "a negative length": ({"members": members(512, -6)}, "members lies outside"),
    "an overflow": ({"members": members(2**63 - 1, 2**63 - 1)}, "members lies outside"),
    "no members": ({"members": []}, "members is empty"),
    "an unknown shard": ({"shard": "shards/other.tar"}, "shard is not a shard"),
    "no key": ({"key": ""}, "key is empty"),
    "a negative duration": ({"duration": -1.0}, "duration is negative"),
    "an endless duration": ({"duration": math.inf}, "duration is not finite"),
    "no frames": ({"frames": 0}, "frames is not positive"),
    "a rate over zero": ({"fps_denominator": 0}, "fps_denominator is not positive"),
    "a negative width": ({"width": -4}, "width is not positive"),
    "a codec without width": ({"width": None}, "width is present without its stream, or missing"),
    "a width without codec": ({"video_codec": None}, "video_ext is present without its stream, or missing"),
    "no sample rate": ({"sample_rate": None}, "sample_rate is present without"),
    "no key frames": ({"key_frames": []}, "key_frames is empty"),
    "a key frame behind the end": ({"key_frames": [{"pts": 0, "index": 13}]}, "key_frames lies outside"),
    "a negative key frame": ({"key_frames": [{"pts": 0, "index": -1}]}, "key_frames lies outside"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_value_is_refused_with_its_row_and_column(fault: str) -> None:
    columns, words = INVALID[fault]
    with pytest.raises(CorruptionError, match=rf"index/x: row 1: {words}"):
        read(table_with(**columns), 2)


def test_members_of_two_samples_may_have_the_same_range_and_may_not_overlap_in_part() -> None:
    def part(*ranges: list[tuple[int, int]]) -> tuple[bytes, int]:
        rows = [
            replace(SAMPLE, members=tuple(Member(f"m{n}", *one, 1) for n, one in enumerate(members)))
            for members in ranges
        ]
        return part_writer.write_part(rows).data, len(rows)

    read(*part([(512, 100)], [(512, 100)], [(512, 100), (1024, 10)]))
    read(*part([(512, 100), (1024, 10)], [(512, 100), (1024, 10)]))
    for wrong in (
        ([(512, 100)], [(512, 101)]),
        ([(512, 100)], [(513, 100)]),
        ([(512, 100)], [(512, 100), (512, 100)]),
        ([(512, 100)], [(520, 10)]),
    ):
        with pytest.raises(CorruptionError, match="members overlaps the next member"):
            read(*part(*wrong))


def test_other_bytes_than_the_version_names_are_refused() -> None:
    data = table_with()
    with pytest.raises(CorruptionError, match="BLAKE3"):
        read(data, 2, expected_digest=digest(data + b"x"))


def test_a_wrong_count_is_refused() -> None:
    with pytest.raises(CorruptionError, match="holds 2 rows"):
        read(table_with(), 3)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all", table_with()[:-20]])
def test_bytes_that_are_not_a_parquet_file_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="Parquet"):
        read(data, 2)


@pytest.mark.parametrize("change", ["missing", "other type", "extra"])
def test_another_schema_is_refused(change: str) -> None:
    table = pa.Table.from_pylist([index.to_row(SAMPLE)], schema=index.SCHEMA)
    if change == "missing":
        table = table.drop_columns(["text"])
    elif change == "extra":
        table = table.append_column("more", pa.array([1]))
    else:
        table = table.set_column(0, "key", table["key"].cast(pa.large_string()))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with pytest.raises(CorruptionError, match="columns"):
        read(sink.getvalue().to_pybytes(), 1)


@pytest.mark.parametrize("bad", ["{", "[1]", "[" * 100_000])
def test_fields_that_are_no_json_object_are_refused(bad: str) -> None:
    with pytest.raises(CorruptionError, match="sample 'a'"):
        index.from_row(index.to_row(SAMPLE) | {"fields": bad}, 0)


@settings(derandomize=True)
@given(st.data())
def test_no_damage_raises_anything_but_corruption(data: st.DataObject) -> None:
    part = bytearray(part_writer.write_part([SAMPLE, replace(SAMPLE, key="b", video=None)]).data)
    for _ in range(data.draw(st.integers(1, 3))):
        part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read(bytes(part), 2)
    except CorruptionError:
        return
