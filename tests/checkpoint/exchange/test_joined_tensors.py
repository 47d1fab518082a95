"""Tensors that are joined from chunks: every range of their bytes is that of the whole tensor."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.exchange import joined_tensors
from headrace.checkpoint.exchange.joined_tensors import ChunkFile, JoinedTensor, JoinedTensors, OpenFiles, is_dense
from headrace.checkpoint.format.chunking import Box
from headrace.dataio.core.errors import CorruptionError, UsageError


@st.composite
def divided(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[Box, tuple[int, ...]]]]:
    """A tensor, and the boxes of a grid that fills it, each with the order of its dimensions in the file."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float64]))
    whole = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    grid = itertools.product(*(itertools.pairwise(edges) for edges in cuts))
    order = st.permutations(range(len(shape))).map(tuple)
    boxes = [Box(shape, tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in grid]
    return whole, [(box, draw(order)) for box in boxes]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@given(divided(), st.data())
def test_any_range_of_bytes_is_collected(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[torch.Tensor, list[tuple[Box, tuple[int, ...]]]],
    data: st.DataObject,
) -> None:
    whole, chunks = case
    path, placed, at = tmp_path_factory.getbasetemp() / f"chunks-{os.getpid()}", list[ChunkFile](), 7
    content = b"-" * at
    for box, order in chunks:
        index = tuple(slice(first, first + n) for first, n in zip(box.offset, box.local, strict=True))
        stored = whole[index].permute(order).contiguous()
        stride = tuple(stored.stride(order.index(dim)) for dim in range(len(order)))
        assert is_dense(box.local, stride)
        placed.append(ChunkFile(box, path, len(content), None if order == tuple(sorted(order)) else stride))
        content += as_bytes(stored)
    path.write_bytes(content)
    dtype = str(whole.dtype).removeprefix("torch.")
    with contextlib.ExitStack() as stack:
        tensors = {"before": JoinedTensor("uint8", (0,), []), "w": JoinedTensor(dtype, tuple(whole.shape), placed)}
        joined = JoinedTensors(tensors, OpenFiles(stack))
        first = data.draw(st.integers(0, whole.numel() - 1))
        last = data.draw(st.integers(first + 1, whole.numel()))
        view = bytearray((last - first) * whole.element_size())
        assert joined.read(joined.tensors["w"].data_ptr() + first * whole.element_size(), memoryview(view))
        assert view == as_bytes(whole.flatten()[first:last])
        assert not joined.read(joined.tensors["w"].data_ptr() + whole.nbytes, memoryview(view))
        assert (joined.tensors["before"].shape, joined.tensors["w"].dtype) == ((0,), whole.dtype)


def test_a_terabyte_is_reserved_without_memory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1234")
    with contextlib.ExitStack() as stack:
        side = 1 << 20
        box = Box((side, side), (side - 1, side - 4), (1, 4))
        tensor = JoinedTensor("uint8", (side, side), [ChunkFile(box, tmp_path / "f", 0)])
        joined, view = JoinedTensors({"w": tensor}, OpenFiles(stack)), memoryview(bytearray(4))
        assert joined.read(joined.tensors["w"].data_ptr() + side * side - 4, view)
        assert bytes(view) == b"1234"


def test_a_file_that_is_replaced_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_tensors, "MAX_OPEN", 1)
    for name in "ab":
        (tmp_path / name).write_bytes(b"1")
    with contextlib.ExitStack() as stack:
        files = OpenFiles(stack)
        assert [files.size(tmp_path / name) for name in "aba"] == [1, 1, 1]
        (tmp_path / "a").write_bytes(b"22")
        with pytest.raises(CorruptionError, match="a changed while it was imported"):
            files.fd(tmp_path / "a")
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="pipe is not a regular file"):
            files.fd(tmp_path / "pipe")
