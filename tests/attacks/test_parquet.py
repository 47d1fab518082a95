"""Parquet with embedded media that was written to harm: footers and pages with changed bytes, and rows that do not exist."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.shards.ingest.manifests import Columns
from headrace.dataio.shards.ingest.row_messages import RowFiles
from headrace.dataio.shards.ingest.row_pool import RowPool
from headrace.dataio.shards.ingest.source_stores import FileStat, SourceStores
from headrace.dataio.shards.ingest.tables import EmbeddedRow, Tables
from headrace.dataio.shards.media.messages import Failure
from tests.support.embedded_media import EMBEDDED, write_embedded
from tests.support.pictures import picture

pytestmark = pytest.mark.slow


def rows_of(tables: Tables, path: Path) -> list[EmbeddedRow]:
    info = path.stat()
    return tables.rows_of(str(path), FileStat(info.st_size, info.st_mtime_ns), Columns(), "t") or []


@pytest.mark.parametrize("seed", [1, 2])
def test_changed_bytes_are_refused_or_cost_rows_and_never_this_process(tmp_path: Path, seed: int) -> None:
    """Seed 1 has a footer that makes Arrow abort."""
    cells = [{"bytes": picture("png", 32 + i, 24), "path": None} for i in range(6)]
    others: dict[str, Any] = {"key": list("abcdef"), "caption": ["x"] * 6, "n": list(range(6))}
    path = write_embedded(
        tmp_path / "t.parquet", {"image": cells}, others, row_group_size=2, use_dictionary=True, compression="snappy"
    )
    good, chance = path.read_bytes(), random.Random(seed)
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    stores = SourceStores()
    pool, outcomes = RowPool(stores), set[str]()
    with Tables(stores) as tables:
        for number in range(120):
            data = bytearray(good)
            where = range(footer, len(good) - 8) if number % 4 else range(4, footer)
            for _ in range(chance.choice([1, 1, 2, 4])):
                data[chance.choice(where)] = chance.choice([chance.randrange(256), 0xFF, 0x80, 0, 0x7F])
            path.write_bytes(data)
            try:
                rows = rows_of(tables, path)
            except (UsageError, NotFoundError) as error:
                outcomes.add(error.message.partition(": ")[2][:60])
                continue
            for row in rows:
                answer = pool.submit(row.ref, str(tmp_path / "scratch" / "row")).result()
                assert isinstance(answer, RowFiles | Failure)
                outcomes.add(type(answer).__name__)
    pool.close()
    assert outcomes >= {"RowFiles", "Failure"}
    assert len(outcomes) > 4


def test_rows_that_take_no_bytes_are_not_counted_one_by_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.nulls(5_000_000, EMBEDDED)}), tmp_path / "t.parquet")
    with Tables(SourceStores()) as tables, pytest.raises(UsageError, match="its footer claims"):
        rows_of(tables, tmp_path / "t.parquet")
