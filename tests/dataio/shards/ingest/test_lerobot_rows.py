"""The rows of an episode, as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.ingest import lerobot_rows
from headrace.dataio.shards.ingest.lerobot_rows import EpisodeRows, tensors
from tests.support import lerobot_set
from tests.support.lerobot_set import FRONT, LeRobotSet

LENGTHS = {0: 5, 2: 3, 3: 9000}


def columns(**changed: Any) -> dict[str, Any]:
    number = np.repeat(list(LENGTHS), list(LENGTHS.values()))
    time = np.concatenate([np.arange(n) / 30 for n in LENGTHS.values()]).astype(np.float32)
    count = len(number)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * count, dtype=np.int16)), 2)
    found = {
        "episode_index": number,
        "timestamp": time,
        "done": np.arange(count) % 2 == 0,
        "byte": (np.arange(count) % 256).astype(np.uint8),
        "half": np.arange(count).astype(np.float16),
        "pair": pairs,
        "grid": pa.array([[[n, 1.0, 2.0], [3.0, 4.0, 5.0]] for n in range(count)]),
        "note": ["text"] * count,
    }
    return found | changed


def rows_of(tmp_path: Path, *wanted: int, group: int = 1000, **changed: Any) -> list[dict[str, np.ndarray]]:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table(columns(**changed)), path, row_group_size=group)
    with EpisodeRows(path, "data.parquet") as rows:
        return [load(rows.read(number, LENGTHS[number])) for number in wanted or LENGTHS]


@pytest.mark.parametrize("group", [1, 4, 1000, 100_000])
def test_every_numeric_column_is_a_tensor_of_its_own_type(tmp_path: Path, group: int) -> None:
    if group == 1:
        group = 7  # row groups end inside episodes
    found = rows_of(tmp_path, group=group)
    expected = columns()
    first = 0
    for arrays, length in zip(found, LENGTHS.values(), strict=True):
        assert set(arrays) == set(expected) - {"note"}
        for name in ("episode_index", "timestamp", "done", "byte", "half"):
            np.testing.assert_array_equal(arrays[name], expected[name][first : first + length], strict=True)
        assert arrays["pair"].dtype == np.int16
        assert arrays["pair"].tolist() == expected["pair"].to_pylist()[first : first + length]
        assert arrays["grid"].tolist() == expected["grid"].to_pylist()[first : first + length]
        first += length


def test_episodes_may_be_left_out(tmp_path: Path) -> None:
    (only,) = rows_of(tmp_path, 3)
    assert len(only["timestamp"]) == 9000


def test_row_groups_before_the_episode_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lerobot_set.write(tmp_path, LeRobotSet(codecs={FRONT: "libx264"}))
    groups = list[int]()
    original = pq.ParquetFile.iter_batches

    def recorded(self: Any, size: int, row_groups: list[int], *more: Any, **named: Any) -> Any:
        groups.extend(row_groups)
        return original(self, size, row_groups, *more, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", recorded)
    with EpisodeRows(tmp_path / "data/chunk-000/file-000.parquet", "data") as rows:
        rows.read(2, 7)
    assert groups == [2, 3], "the next group is looked at, to see that no row of the episode follows"


def test_rows_that_are_missing_or_too_many_are_refused_and_others_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table(columns()), path)
    with EpisodeRows(path, "data.parquet") as rows:
        with pytest.raises(CorruptionError, match=r"data.parquet has more than 4 rows of it, and its length is 4"):
            rows.read(0, 4)
        with pytest.raises(CorruptionError, match=r"has 0 rows of it, and its length is 4"):
            rows.read(1, 4)
        assert len(load(rows.read(2, 3))["timestamp"]) == 3
        with pytest.raises(CorruptionError, match=r"has 9000 rows of it, and its length is 9001"):
            rows.read(3, 9001)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"timestamp": ["0"] * 9008}, UnsupportedError, "no column 'timestamp' of times"),
        ({"timestamp": np.zeros(9008)}, CorruptionError, "do not begin at 0 or do not grow"),
        ({"timestamp": np.arange(9008) + 5.0}, CorruptionError, "do not begin at 0 or do not grow"),
        ({"byte": pa.array([None, *range(9007)])}, UnsupportedError, "values of the column 'byte' are missing"),
        ({"grid": [[1.0] * (n % 2) for n in range(9008)]}, UnsupportedError, "'grid' have different lengths"),
        ({"episode_index": np.zeros(9008)}, CorruptionError, "no column 'episode_index' of integers"),
    ],
)
def test_rows_that_are_no_tensors_are_refused(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rows_of(tmp_path, **changed)


def test_rows_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_rows, "ROWS_BYTES", 10_000)
    with pytest.raises(UnsupportedError, match="its rows take more than"):
        rows_of(tmp_path, 3)


def test_a_column_of_very_many_equal_values_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_rows, "_GROUP_VALUES", 1_000_000)
    path, count = tmp_path / "data.parquet", 3_000_000
    lists = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, bool)))
    pq.write_table(pa.table({"episode_index": [0], "timestamp": [0.0], "many": lists}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(CorruptionError, match=r"the column 'many\.list\.element' of row group 0 is too large"):
        EpisodeRows(path, "data.parquet")


def test_a_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table(columns()), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptionError, match=r"data.parquet is not a readable Parquet file"):
        EpisodeRows(path, "data.parquet")


def test_equal_arrays_give_equal_aligned_bytes() -> None:
    arrays: dict[str, np.ndarray] = {"b": np.arange(3, dtype=np.uint8), "a": np.arange(4, dtype=np.float64)}
    data = tensors(arrays)
    assert data == tensors(dict(reversed(arrays.items())))
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert data.endswith(arrays["a"].tobytes() + arrays["b"].tobytes())
    with pytest.raises(UnsupportedError, match="'c' has the type complex128"):
        tensors({"c": np.zeros(2, complex)})
