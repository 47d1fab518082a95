"""Hostile records and tables: sizes are refused before memory is allocated, and errors are those of damaged objects."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from blake3 import blake3

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import ProcessName, encode
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.records import Published, Stored
from headrace.checkpoint.publishing.updates import Update
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, TensorBlocks, Weights, decode_weights, load_weights
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

RECORD = Published(
    name="policy",
    number=2,
    run="r",
    timeline=1,
    step=1,
    attempt=names.new_id(),
    tag="published.policy",
    include=(),
    exclude=(),
    prefix="",
    dtype="",
    bytes=4,
    weights=Stored("weights-0", 1, ""),
    update=None,
    parent=0,
    parent_weights="",
    created=0.0,
    process=ProcessName("host", 1),
)
BLOCKS = 4
WEIGHTS = Weights((TensorBlocks("a", "uint8", (BLOCKS * BLOCK_BYTES,), bytes(32 * BLOCKS)),))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path)) as store:
        yield store


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 3},
        {"name": "other"},
        {"run": "../x"},
        {"attempt": "../../x"},
        {"step": -1},
        {"timeline": -1},
        {"created": 1e300},
        {"step": 10**12},
        {"parent": 2},
        {"parent": -1},
        {"dtype": "load"},
        {"dtype": "no such type"},
        {"dtype": "int8"},
        {"include": ("x",) * 1001},
        {"exclude": ("",)},
        {"weights": Stored("../../repo.json", 1, "")},
        {"weights": Stored("weights-0", 1 << 60, "")},
        {"update": Stored("update-0", 10, "", 11)},
        {"update": Stored("update-0", 10, "", -1)},
    ],
)
def test_records_with_impossible_values_are_refused(store: Store, changes: dict[str, Any]) -> None:
    store.put(records.key_of("policy", 2), encode(msgspec.structs.replace(RECORD, **changes)))
    with pytest.raises(CorruptionError, match="impossible"):
        records.find(store, "policy")


def refused(work: Callable[[], object], limit: int) -> None:
    """Run `work`, which must raise `CorruptionError`, and compare the memory that it allocates with the limit."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            work()
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x91\xdd\x00\x40\x00\x00" + b"\x94\xa0\xa0\x90\xc4\x00" * (4 << 20),  # 4 million tensors
        b"\x91\x91\x94\xa1a\xa5uint8\xdd\x00\x40\x00\x00" + bytes(4 << 20) + b"\xc4\x00",  # 4 million dimensions
        msgspec.msgpack.encode(Weights((TensorBlocks("a", "uint8", (1 << 62,) * 64, b""),))),
        msgspec.msgpack.encode(Weights((TensorBlocks("a", "uint8", (0, 1 << 40, 1 << 40), b""),))),
        msgspec.msgpack.encode(Weights((TensorBlocks("a", "uint8", (-1, -5), bytes(32)),))),
        msgspec.msgpack.encode(Weights((TensorBlocks("a", "object", (1,), bytes(32)),))),
        msgspec.msgpack.encode(Weights((TensorBlocks("", "uint8", (1,), bytes(32)),))),
        b"\x91" * 100_000,
    ],
)
def test_hostile_tables_of_weights(raw: bytes) -> None:
    data = zstandard.compress(raw)
    refused(lambda: decode_weights(data, "the table"), len(raw) + (8 << 20))


def test_a_table_that_decompresses_to_too_much(store: Store) -> None:
    compressor = zstandard.ZstdCompressor().compressobj(size=300 << 20)
    data = b"".join(compressor.compress(bytes(10 << 20)) for _ in range(30)) + compressor.flush()
    refused(lambda: decode_weights(data, "the table"), 1 << 20)


def test_a_table_that_is_too_large_is_damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.checkpoint.publishing import weights

    monkeypatch.setattr(weights, "MAX_TABLE_BYTES", 100)
    store.put(RECORD.key_of(RECORD.weights), bytes(101))
    with pytest.raises(CorruptionError, match="larger"):
        load_weights(store, RECORD)


def update_of(store: Store, raw: bytes, end: int = 0, size: int | None = None) -> Callable[[], Update]:
    table = zstandard.compress(raw)
    stored = Stored("update-0", end + len(table) if size is None else size, blake3(table).hexdigest(), end)
    store.put(RECORD.key_of(stored), bytes(end) + table)
    return lambda: Update(store, msgspec.structs.replace(RECORD, update=stored), WEIGHTS)


ROW = msgspec.msgpack.encode((0, 0, 0, 0, 0, bytes(16)))


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\x00\x10\x00\x00" + ROW * (1 << 20),  # a million rows
        b"\x92" + ROW * 2,  # one block twice
        *(
            b"\x91" + msgspec.msgpack.encode(row)
            for row in (
                (1, 0, 0, 0, 0, b""),
                (-1, 0, 0, 0, 0, b""),
                (0, BLOCKS, 0, 0, 0, b""),
                (0, -1, 0, 0, 0, b""),
                (0, 0, 0, -1, 0, b""),
                (0, 0, 0, 0, 101, b""),
                (0, 0, 0, 1 << 63, 1, b""),
                (0, 0, 0, 0, -1, b""),
            )
        ),
        b"no msgpack",
    ],
)
def test_hostile_tables_of_updates(store: Store, raw: bytes) -> None:
    refused(update_of(store, raw, 100), len(raw) + (2 << 20))


def test_an_update_that_is_shorter_than_its_record_says(store: Store) -> None:
    with pytest.raises(CorruptionError, match="shorter"):
        update_of(store, b"\x90", size=1 << 20)()
