"""Steps whose shards do not make up their tensors are never committed, and chunks outlive another sharding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.checkpoint.format import chunking, names
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.saving.arena import Staging
from headrace.checkpoint.saving.copying import Copying
from headrace.checkpoint.saving.slices import SlicedState
from headrace.checkpoint.state.flatten import Leaf
from headrace.checkpoint.state.home_plan import Row
from headrace.checkpoint.state.save_plan import FlatState, SavePlanner, assign_writes
from headrace.checkpoint.state.tensors import LocalTensor
from headrace.dataio.core.errors import MismatchError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import begin, latest, load, make, manifest_of, save

pytestmark = pytest.mark.slow


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
    assert set(assign_writes((table(one), table(other))).owners.values()) == {0, 1}
    for rows, what in (
        ((one, one), "hold 2 of 4"),
        ((one, Row("w", "float32", (4,), (1,), (3,), False)), "overlap"),
        ((one, Row("w", "float64", (4,), (2,), (2,), False)), r"float32\[4\] on rank 0 and float64\[4\] on rank 1"),
    ):
        with pytest.raises(MismatchError, match=what):
            assign_writes(tuple(table(row) for row in rows))


def save_in(
    store: Store, saved: npt.NDArray[np.uint8], dim: int, ranks: int, step: int, number: int, bases: tuple[Base, ...]
) -> Base:
    """A tensor spread over so many ranks, as torch spreads it, each of which really saves its part."""
    attempt, each = names.new_id(), -(-saved.shape[dim] // ranks)
    made = []
    for rank in range(ranks):
        at, n = min(rank * each, saved.shape[dim]), min(each, saved.shape[dim] - min(rank * each, saved.shape[dim]))
        offset, local = ((at, 0), (n, saved.shape[1])) if dim == 0 else ((0, at), (saved.shape[0], n))
        found = chunking.bands(Box(saved.shape, offset, local), 1)
        held = saved[at : at + n] if dim == 0 else saved[:, at : at + n]
        parts = [(band, held[chunking.inside(band, Box(saved.shape, offset, local))]) for band in found]
        made.append(
            make(
                store, [("w", band, part.tobytes()) for band, part in parts], step=step, number=number,
                attempt=attempt, bases=bases, rank=rank, world_size=ranks,
            )
        )  # fmt: skip
    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(lambda m: save(store, m), made)].pop()


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_most_chunks_are_found_again_by_another_number_of_ranks(dim: int, tmp_path: Path) -> None:
    saved = np.random.default_rng(1).integers(0, 256, (3072, 16384), np.uint8)
    with open_store(tmp_path) as store:
        number = begin(store)
        last = save_in(store, saved, dim, 8, 1, number, ())
        for step, ranks in enumerate((16, 6), 2):
            last = save_in(store, saved, dim, ranks, step, number, (last,))
            manifests = [manifest_of(store, last, rank) for rank in range(ranks)]
            assert sum(m.bytes_state for m in manifests) == saved.nbytes
            assert sum(m.bytes_deduplicated for m in manifests) / saved.nbytes > 0.86
        assert load(store, last)["w"] == saved.tobytes()


@pytest.mark.parametrize("mode", ["eager", "lazy", "slices"])
def test_a_column_shard_is_staged_in_bands_and_comes_back(mode: str, tmp_path: Path) -> None:
    weight = torch.randn(1024, 3000).bfloat16()[:, 500:2500]
    leaf = Leaf("w", LocalTensor(weight, "bfloat16", Box((1024, 3000), (0, 500), (1024, 2000)), True), False)
    other = Leaf("v", LocalTensor(torch.randn(3), "float32", Box((3,), (0,), (3,))), False)
    prepared = SavePlanner().prepare(FlatState(b"", [other, leaf]), Ranks(0, 1))
    specs, tensors, place = prepared.specs, prepared.tensors, prepared.layout
    assert len(specs) == len(tensors) > 4
    staging = Staging()
    arena = staging.take(place, 10)
    if mode == "slices":
        copy: SlicedState | Copying = SlicedState(arena, tensors, specs=specs, layout=place)
    else:
        late = range(1, len(specs)) if mode == "lazy" else ()
        copy = Copying(staging.pool, arena, tensors=tensors, specs=specs, layout=place, late=late)
        copy.join()
    pieces, spans = chunking.cut_all(specs, place)
    found = [
        bytes(copy[p.at : p.at + p.length] if isinstance(copy, SlicedState) else arena.view()[p.at : p.at + p.length])
        for p in pieces
    ]
    for tensor, own in zip(tensors, spans, strict=True):
        data = b"".join(found[s.piece][s.start : s.start + s.length] for s in own)
        assert data == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    staging.give_back()
    staging.close()
