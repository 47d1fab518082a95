"""`diff` finds what differs between two steps, reads only what may differ, and compares across world sizes and meshes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.cli import ckpt
from headrace.checkpoint.compare.diff import StepId, diff
from headrace.checkpoint.compare.numbers import compare
from headrace.checkpoint.compare.tensors import blocks
from headrace.checkpoint.format import chunking, names
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.documents import Base
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UsageError
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Wrapped, begin, flip, make, save, tiny_state


def run(url: Path, *states: dict[str, Any], name: str = "x") -> str:
    with Checkpointer(str(url), run=name, sidecar=None) as checkpointer:
        for step, state in enumerate(states, 1):
            checkpointer.save(step, state).result(60)
    return str(url)


def test_equal_steps_read_no_data(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        one = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
        save(store, make(store, tiny_state(1), step=2, bases=(one,)))
        found = diff(NoPacks(store), "exp@1", "exp@2")
    assert found.is_equal
    assert found.equal == len(tiny_state(1))
    assert found.bytes_compared == 0
    assert found.equal_bytes == sum(map(len, tiny_state(1).values()))


class NoPacks(Wrapped):
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        assert not key.startswith(names.PACKS)
        self.inner.get_into(key, offset, buffer)


def test_norms_are_those_of_numpy_and_only_chunks_that_differ_are_read(tmp_path: Path) -> None:
    a = torch.randn(3 * MIB, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[MIB + 5] += 3.0
    url = run(tmp_path, {"w": a, "same": a * 2}, {"w": b, "same": a * 2})
    found = diff(url, "x@1", "x@2")
    (change,) = found.changed
    assert (change.name, change.elements, change.read, change.changed) == ("w", 3 * MIB, MIB // 4, 1)
    assert change.largest == pytest.approx(3.0)
    assert change.norm_diff == pytest.approx(3.0)
    part = a[MIB : MIB + MIB // 4].double()
    assert change.norm_a == pytest.approx(float(part.norm()))
    assert change.relative == pytest.approx(3.0 / float(part.norm()))
    assert found.bytes_compared == MIB
    assert found.equal_names == ["same"]


def test_added_removed_reshaped_and_other_values(tmp_path: Path) -> None:
    one = {
        "gone": torch.ones(3),
        "shape": torch.ones(4),
        "type": torch.ones(4),
        "lr": 0.1,
        "nan": math.nan,
        "list": [1, 2],
    }
    two = {
        "new": torch.ones(3),
        "shape": torch.ones(2, 2),
        "type": torch.ones(4).half(),
        "lr": 0.2,
        "nan": math.nan,
        "n": 1,
    }
    found = diff(run(tmp_path, one, two), "x@1", "x@latest")
    assert [each.name for each in found.added] == ["new"]
    assert [each.name for each in found.removed] == ["gone"]
    assert [(each.name, each.dtype_b, each.shape_b) for each in found.reshaped] == [
        ("shape", "float32", (2, 2)),
        ("type", "float16", (4,)),
    ]
    assert {each.path: (each.a, each.b) for each in found.values.listed} == {
        "lr": ("0.1", "0.2"),
        "list": ("[1, 2]", None),
        "n": (None, "1"),
    }


def test_many_values_are_counted_and_shortened(tmp_path: Path) -> None:
    one, two = ({f"v{i}": f"{seed}" * 1000 for i in range(300)} for seed in (1, 2))
    found = diff(run(tmp_path, one, two), "x@1", "x@2")
    assert found.values.total == 300
    assert len(found.values.listed) == 200
    assert max(len(each.a or "") for each in found.values.listed) <= 80


def shards(data: np.ndarray, grid: tuple[int, int]) -> list[Box]:
    rows, columns = data.shape[0] // grid[0], data.shape[1] // grid[1]
    return [Box(data.shape, (r * rows, c * columns), (rows, columns)) for r in range(grid[0]) for c in range(grid[1])]


def save_sharded(store: Store, data: np.ndarray, grid: tuple[int, int], step: int, number: int) -> Base:
    """A step whose ranks hold one shard each, stored as `Checkpointer` does: in bands where columns are cut."""
    from concurrent.futures import ThreadPoolExecutor

    attempt, boxes = names.new_id(), shards(data, grid)
    made = []
    for rank, box in enumerate(boxes):
        rows: list[tuple[str, Box, bytes]] = []
        for band in chunking.bands(box, 1):
            part = data[tuple(slice(at, at + n) for at, n in zip(band.offset, band.local, strict=True))]
            rows.append(("w", band, np.ascontiguousarray(part).tobytes()))
        made.append(
            make(
                store, rows, step=step, number=number, attempt=attempt, rank=rank, world_size=len(boxes),
                replicas=b"r" * 32, commit_timeout=60.0,
            )
        )  # fmt: skip
    with ThreadPoolExecutor(len(made)) as pool:
        return [*pool.map(lambda each: save(store, each), made)].pop()


@pytest.mark.parametrize(
    "grids", [((1, 1), (3, 1)), ((2, 1), (3, 1)), ((1, 2), (1, 3)), ((2, 1), (1, 2)), ((2, 2), (3, 1))]
)
def test_steps_of_other_meshes_are_compared_as_global_tensors(grids: Sequence[tuple[int, int]], tmp_path: Path) -> None:
    one = np.random.default_rng(0).integers(0, 256, (1536, 3000), dtype=np.uint8)
    two = one.copy()
    two[700, 1200:1210] ^= 1
    with open_store(str(tmp_path)) as store:
        number = begin(store)
        save_sharded(store, one, grids[0], 1, number)
        save_sharded(store, one, grids[1], 2, number)
        save_sharded(store, two, grids[1], 3, number)
        same = diff(store, "exp@1", "exp@2")
        assert same.is_equal
        assert same.equal_bytes == one.size
        (change,) = diff(store, "exp@1", "exp@3").changed
    assert change.changed == 10
    assert change.norm_diff == pytest.approx(math.sqrt(10))
    assert change.largest == 1
    if change.read == one.size:
        assert change.norm_a == pytest.approx(float(np.linalg.norm(one.astype(float))))


@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (5, 3), (2, 5, 9), (1, 40)])
def test_blocks_cover_a_tensor_once(shape: tuple[int, ...]) -> None:
    seen = np.zeros(shape, int)
    for block in blocks(shape, 4, most=24):
        assert math.prod(block.local) <= 6
        seen[tuple(slice(at, at + n) for at, n in zip(block.offset, block.local, strict=True))] += 1
    assert (seen == 1).all()


FLOATS = ["float64", "float32", "float16", "bfloat16"]
FLOATS += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e8m0fnu", "int8", "uint8", "int64", "bool", "complex64", "uint16"])
def test_every_type_gives_the_numbers_that_torch_gives(dtype: str) -> None:
    kind = getattr(torch, dtype)
    one, two = (
        torch.arange(0, 256, dtype=torch.uint8).repeat(16),
        torch.arange(0, 256, dtype=torch.uint8).repeat(16).flip(0),
    )
    a, b = (each.view(kind) if dtype != "bool" else (each > 99) for each in (one, two))
    change = compare(_bytes(a), _bytes(b), dtype)
    wide = [(torch.view_as_real(each) if each.is_complex() else each).double().flatten() for each in (a, b)]
    good = wide[0].isfinite() & wide[1].isfinite()
    x, y = wide[0][good], wide[1][good]
    assert change.nonfinite == len(good) - len(x)
    assert change.norm_a == pytest.approx(float(x.norm()))
    assert change.norm_diff == pytest.approx(float((y - x).norm()))
    assert change.largest == pytest.approx(float((y - x).abs().max()))
    assert change.elements == a.numel()


def test_a_nan_equals_itself_and_signs_of_zero_differ() -> None:
    a = np.array([np.nan, 0.0, np.inf, 1.0], np.float32)
    b = np.array([np.nan, -0.0, np.inf, 2.0], np.float32)
    change = compare(memoryview(a.tobytes()), memoryview(b.tobytes()), "float32")
    assert (change.changed, change.nonfinite, change.largest) == (2, 2, 1.0)


def test_steps_of_two_repositories_and_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(tmp_path / "one", {"w": torch.ones(4)})
    two = run(tmp_path / "two", {"w": torch.ones(4)}, {"w": torch.zeros(4)}, name="y")
    assert ckpt(["tag", two, "best", "--run", "y", "--step", "2"]) == 0
    assert diff(one, "x@1", "y@1", other=two).is_equal
    capsys.readouterr()
    assert ckpt(["diff", one, "x@1", two, "y@tag:best"]) == 0
    text = capsys.readouterr().out
    assert "1 tensor changed" in text
    assert "w  float32 [4]  relative 1  |a| 2  |b| 0  |b-a| 2  max 1  100.0% changed" in text
    assert ckpt(["diff", one, "x@1", two, "y@1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_equal"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    url = run(tmp_path, {"w": torch.ones(4)}, {"w": torch.ones(4)})
    assert StepId.parse("a@tag:b") == StepId("a", "tag:b")
    for wrong in ("x", "@1", "x@", "a/b@1"):
        with pytest.raises(UsageError):
            StepId.parse(wrong)
    with pytest.raises(NotFoundError):
        diff(url, "x@1", "x@7")
    for words in (
        ["x@1"],
        ["--steps", "1,2"],
        ["--run", "x", "--steps", "1"],
        ["x@1", "x@2", "--run", "x", "--steps", "1,2"],
    ):
        with pytest.raises(UsageError):
            ckpt(["diff", url, *words])


def test_a_damaged_chunk_that_must_be_read_is_named(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        save(store, make(store, tiny_state(1), step=1, number=begin(store)))
        base = save(store, make(store, tiny_state(2), step=2))
        (pack,) = store.list(names.packs(base.attempt))
        flip(tmp_path / pack.key, 300 * KIB)
        with pytest.raises(CorruptionError, match="step 2 of run exp is damaged: tensor 'weights'"):
            diff(store, f"{RUN}@1", f"{RUN}@2")
