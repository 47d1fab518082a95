"""The reader of rows decodes a row group once, keeps to its limits, and says what is wrong with a row."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataio.core.programs import environment
from headrace.dataio.shards.ingest import row_reader
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.row_messages import RowFiles, RowRef, RowResult, RowTask
from headrace.dataio.shards.ingest.row_reader import RowReader
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.shards.media.messages import Failure
from tests.support.embedded_media import EMBEDDED, write_embedded
from tests.support.pictures import picture


def read(reader: RowReader, group: Group, folder: Path) -> RowResult:
    assert group.row is not None
    return reader.read(RowTask(group.row, group.row.group.path, str(folder)))


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Group, ...]:
    """Nine rows in three row groups."""
    cells = [{"bytes": picture("png", 32 + i, 24), "path": None} for i in range(9)]
    return gather([write_embedded(tmp_path / "t.parquet", {"image": cells}, row_group_size=3)]).groups


def test_a_row_group_is_opened_once_for_rows_in_order(
    groups: tuple[Group, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, batches = list[int](), row_reader._batches

    def counted(path: str, group: Any) -> Iterator[Any]:
        opened.append(group.number)
        return batches(path, group)

    monkeypatch.setattr(row_reader, "_batches", counted)
    monkeypatch.setattr(row_reader, "_BATCH_ROWS", 1)
    reader = RowReader()
    for group in (*groups, groups[3], groups[5], groups[4]):
        answer = read(reader, group, tmp_path / group.key)
        assert isinstance(answer, RowFiles)
        ((ext, path),) = answer.files
        number = int(group.key.rpartition("/")[2])
        assert (ext, Path(path).read_bytes()) == ("png", picture("png", 32 + number, 24))
    assert opened == [0, 1, 2, 1, 1]


def test_a_value_above_the_limit_is_refused(
    groups: tuple[Group, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "VALUE_BYTES", 10)
    answer = read(RowReader(), groups[0], tmp_path)
    assert isinstance(answer, Failure)
    assert answer.reason == "its 'image' is larger than 10 B"


def test_a_full_scratch_folder_is_no_fault_of_the_row(
    groups: tuple[Group, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "makedirs", full)
    answer = read(RowReader(), groups[0], tmp_path)
    assert isinstance(answer, Failure)
    assert (answer.scratch_full, answer.code) == (True, "capacity")


def test_memory_that_does_not_suffice_is_said_for_every_later_row(
    groups: tuple[Group, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(_: object) -> Any:
        raise pa.ArrowMemoryError("malloc of size 99 failed")

    monkeypatch.setattr(row_reader, "_batches", lambda *_: map(exhausted, [0]))
    reader = RowReader()
    for group in groups[:2]:
        answer = read(reader, group, tmp_path)
        assert isinstance(answer, Failure)
        assert " GiB of memory; write smaller row groups" in answer.reason


def test_rows_that_only_the_footer_has_are_damage(groups: tuple[Group, ...], tmp_path: Path) -> None:
    assert groups[0].row is not None
    task = RowTask(RowRef(groups[0].row.group, 5), groups[0].row.group.path, str(tmp_path))
    answer = RowReader().read(task)
    assert isinstance(answer, Failure)
    assert answer.reason == "the file has fewer rows than its footer states"


def test_text_that_is_not_utf8_skips_its_row(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xffa")]
    )
    cells = [{"bytes": picture("png"), "path": None}] * 2
    pq.write_table(pa.table({"image": pa.array(cells, EMBEDDED), "note": bad}), tmp_path / "t.parquet")
    first, second = gather([tmp_path / "t.parquet"]).groups
    reader = RowReader()
    answer = read(reader, first, tmp_path / "a")
    assert isinstance(answer, Failure)
    assert answer.reason.startswith("a value cannot be read")
    assert isinstance(read(reader, second, tmp_path / "b"), RowFiles)


def test_a_group_of_rows_takes_the_memory_of_a_page_and_not_of_the_row_group(tmp_path: Path) -> None:
    def cells() -> Iterator[Any]:
        for _ in range(24):
            yield {"bytes": b"\x89PNG\r\n\x1a\n" + os.urandom(8 << 20), "path": None}

    table = pa.table({"image": pa.array(cells(), EMBEDDED)})
    pq.write_table(
        table, tmp_path / "t.parquet", use_dictionary=False, write_batch_size=1, compression="none", row_group_size=24
    )
    program = (
        "import sys, resource\n"
        "from headrace.dataio.shards.ingest.sources import gather\n"
        "from headrace.dataio.shards.ingest.row_reader import RowReader\n"
        "from headrace.dataio.shards.ingest.row_messages import RowTask\n"
        "groups = gather([sys.argv[1]]).groups\n"
        "before, reader = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, RowReader()\n"
        "for group in groups:\n"
        "    answer = reader.read(RowTask(group.row, sys.argv[1], sys.argv[2]))\n"
        "    assert answer.bytes == (8 << 20) + 8, answer\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "t.parquet"), str(tmp_path / "scratch")]
    done = subprocess.run(command, capture_output=True, env=environment(), check=True, timeout=120)
    assert int(done.stdout) << 10 < 80 << 20  # 192 MiB are read
