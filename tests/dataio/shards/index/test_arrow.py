"""Arrow without its slow imports: the functions give the results of `pyarrow.compute`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headrace.dataio.shards.index import arrow
from headrace.dataio.store.open import open_store
from tests.support.indexed_datasets import make

NUMBERS = pa.array([3, None, 1, 3], pa.int32())
WORDS = pa.array(["a", "", None, "a"])
FLAGS = pa.array([True, None, False, True])
LISTS = pa.array([[{"offset": 1}], [{"offset": 5}, {"offset": 7}]])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("and_", (FLAGS, pa.array([True, True, True, False]))),
        ("xor", (FLAGS, pa.array([True, True, True, False]))),
        ("invert", (FLAGS,)),
        ("equal", (WORDS, "")),
        ("less", (NUMBERS, 2)),
        ("less_equal", (NUMBERS, 3)),
        ("is_null", (pa.array([1.0, float("nan"), None]),)),
        ("is_valid", (WORDS,)),
        ("binary_length", (WORDS,)),
        ("count_distinct", (pa.chunked_array([WORDS, WORDS]),)),
        ("min_max", (NUMBERS,)),
        ("unique", (WORDS,)),
        ("list_element", (LISTS, 0)),
        ("list_flatten", (LISTS,)),
        ("list_parent_indices", (LISTS,)),
        ("list_value_length", (LISTS,)),
        ("take", (NUMBERS, pa.array([3, 0]))),
        ("index", (WORDS, "")),
        ("index", (FLAGS, False)),
        ("index", (WORDS, "none of them")),
        ("index_in", (WORDS, pa.array(["a", "b"]))),
        ("is_in", (WORDS, pa.array(["a", "b"]))),
        ("struct_field", (LISTS.flatten(), ["offset"])),
    ],
)
def test_each_is_arrows_own(name: str, arguments: tuple[Any, ...]) -> None:
    assert getattr(arrow, name)(*arguments).equals(getattr(pc, name)(*arguments))


def test_sums_and_rows_too() -> None:
    assert arrow.sum_(NUMBERS).as_py() == 7
    table = pa.table({"n": NUMBERS, "w": WORDS})
    assert arrow.rows(table, pa.array([2, 0])).equals(table.take(pa.array([2, 0])))


READS = """
import sys
from headrace.dataio import Dataset
with Dataset(sys.argv[1]) as dataset:
    assert len(dataset.samples([0])) == 1 and len(dataset.columns(["width"])) == len(dataset)
heavy = {"pyarrow.compute", "pyarrow.dataset", "duckdb", "s3fs", "fsspec", "aiobotocore", "obstore", "av", "torch"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_a_local_dataset_is_opened_without_slow_imports(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make(store, range(60))
    subprocess.run([sys.executable, "-c", READS, str(tmp_path)], check=True, timeout=150)
