"""Raw chunks go from the store straight to where they belong, and are checked there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.format.chunking import Box, whole
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Want
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, MemorySink, Wrapped, begin, load, make, manifest_of, save

BIG = 3 * 1024 * KIB + 4096
NOISE = np.random.default_rng(5).bytes(BIG)


class Seen(Wrapped):
    """Remembers the memory that packs were read to; flips a bit of the first `bad` reads of the chunk at `offset`."""

    def __init__(self, inner: Store, offset: int = -1, bad: int = 0) -> None:
        super().__init__(inner)
        self.memory: list[tuple[int, int]] = []
        self.offset, self.bad, self.flipped = offset, bad, 0

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.inner.get_ranges_into(key, ranges)
        for offset, view in ranges:
            self.memory.append((ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view)))
            if offset == self.offset and self.flipped < self.bad:
                view[7] ^= 1
                self.flipped += 1

    def read_inside(self, sink: MemorySink) -> int:
        """How many bytes were read straight into the sink's memory."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(sink.data))
        return sum(length for at, length in self.memory if start <= at < start + len(sink.data))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "repo")


def test_every_byte_of_a_large_raw_tensor_is_read_to_its_place(store: Store) -> None:
    base = save(store, make(store, {"big": NOISE, "small": b"1234"}, step=1, number=begin(store)))
    seen, sink = Seen(store), MemorySink(BIG)
    with chunk_reader.LeasedStep(store, RUN, base) as step:
        saved = chunk_reader.tensors_of(step, 0)["big"]
        chunk_reader.read(seen, step, [Want(saved, whole((BIG,)), sink)])
    assert sink.data == NOISE
    assert sink.closed
    assert seen.read_inside(sink) == BIG == sum(length for _, length in seen.memory)


def test_a_chunk_of_two_tensors_is_read_to_one_and_copied_to_the_other(store: Store) -> None:
    state = {"one": NOISE, "two": NOISE, "zeros": bytes(BIG)}
    base = save(store, make(store, state, step=1, number=begin(store)))
    assert manifest_of(store, base).bytes_deduplicated > BIG
    seen = Seen(store)
    assert load(seen, base) == state
    assert sum(length for _, length in seen.memory) < 2 * BIG


def test_rows_are_read_straight_into_a_part_and_columns_by_way_of_a_buffer(store: Store) -> None:
    rows = BIG // 4096
    box = Box((rows, 4096), (0, 0), (rows, 4096))
    base = save(store, make(store, {"w": NOISE}, step=1, number=begin(store), boxes={"w": box}))
    array = np.frombuffer(NOISE, np.uint8).reshape(rows, 4096)
    for part, direct in (((256, 0), (512, 4096)), True), (((0, 1024), (rows, 2048)), False):
        (row, column), (height, width) = part
        seen, sink = Seen(store), MemorySink(height * width)
        with chunk_reader.LeasedStep(store, RUN, base) as step:
            saved = chunk_reader.tensors_of(step, 0)["w"]
            chunk_reader.read(seen, step, [Want(saved, Box(box.shape, (row, column), (height, width)), sink)])
        assert bytes(sink.data) == array[row : row + height, column : column + width].tobytes()
        assert seen.read_inside(sink) == (height * width if direct else 0)


def test_damage_that_was_read_to_its_place_is_read_again_and_else_wiped_out(store: Store) -> None:
    base = save(store, make(store, {"big": NOISE}, step=1, number=begin(store)))
    chunk = manifest_of(store, base).chunks[1]
    once = Seen(store, chunk.offset, bad=1)
    assert load(once, base) == {"big": NOISE}
    assert once.flipped == 1
    always, sink = Seen(store, chunk.offset, bad=9), MemorySink(BIG)
    with chunk_reader.LeasedStep(store, RUN, base) as step, pytest.raises(CorruptionError, match="tensor 'big'"):
        chunk_reader.read(always, step, [Want(chunk_reader.tensors_of(step, 0)["big"], whole((BIG,)), sink)])
    assert always.flipped == 2
    assert not sink.closed
    at = sum(c.raw for c in manifest_of(store, base).chunks[:1])
    assert bytes(sink.data[at : at + chunk.raw]) == bytes(chunk.raw)


def test_compressed_chunks_go_by_way_of_a_buffer(store: Store) -> None:
    state = {"zeros": bytes(BIG), "noise": NOISE}
    base = save(store, make(store, state, step=1, number=begin(store), compression="zstd"))
    assert load(store, base) == state
