"""Steps whose shards do not make up their tensors are never committed, and chunks outlive another sharding."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from checkpoint.format import ulid
from checkpoint.format.chunk import Box
from checkpoint.format.documents import Base
from checkpoint.state.prepare import Row, divide
from dataio.core.errors import MismatchError
from dataio.core.limits import MIB
from dataio.store.contract import Store
from dataio.store.open import open_store
from tests.checkpoint.making import begin, latest, load, make, manifest_of, save


def test_a_step_that_lacks_a_part_of_a_tensor_is_not_committed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        made = make(store, {"w": b"0123456789"}, step=1, number=begin(store), boxes={"w": Box((20,), (0,), (10,))})
        with pytest.raises(MismatchError, match=r"tensor 'w': its shards hold 10 of 20 elements"):
            save(store, made)
        assert latest(store) is None


def test_ranks_that_hold_different_shapes_or_leave_a_part_out_are_told_before_anything_is_staged() -> None:
    def table(*rows: Row) -> bytes:
        import msgspec
        import zstandard

        return zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(rows))

    one, other = Row("w", "float32", (4,), (0,), (2,), False), Row("w", "float32", (4,), (2,), (2,), False)
    assert set(divide((table(one), table(other))).owners.values()) == {0, 1}
    for rows, what in (
        ((one, one), "hold 2 of 4"),
        ((one, Row("w", "float32", (4,), (1,), (3,), False)), "overlap"),
        ((one, Row("w", "float64", (4,), (2,), (2,), False)), r"float32\[4\] on rank 0 and float64\[4\] on rank 1"),
    ):
        with pytest.raises(MismatchError, match=what):
            divide(tuple(table(row) for row in rows))


def save_in(store: Store, data: bytes, ranks: int, step: int, number: int, bases: tuple[Base, ...]) -> Base:
    rows, attempt = len(data) // 4096, ulid.new()
    cuts = [rows * i // ranks for i in range(ranks + 1)]
    made = [
        make(
            store, {"w": data[a * 4096 : b * 4096]}, step=step, number=number, attempt=attempt, bases=bases, rank=r,
            world_size=ranks, boxes={"w": Box((len(data),), (a * 4096,), ((b - a) * 4096,))},
        )
        for r, (a, b) in enumerate(itertools.pairwise(cuts))
    ]  # fmt: skip
    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(lambda m: save(store, m), made)].pop()


@pytest.mark.parametrize("ranks", [16, 6])
def test_most_chunks_are_found_again_by_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(48 * MIB)
    with open_store(tmp_path) as store:
        number = begin(store)
        first = save_in(store, data, 8, 1, number, ())
        second = save_in(store, data, ranks, 2, number, (first,))
        manifests = [manifest_of(store, second, rank) for rank in range(ranks)]
        assert sum(m.bytes_state for m in manifests) == len(data)
        assert sum(m.bytes_deduplicated for m in manifests) / len(data) > 0.85
        assert load(store, second)["w"] == data
