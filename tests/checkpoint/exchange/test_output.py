"""The bytes of an exported file: any range of a tensor, in boxes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.exchange.output import Data, OutputFile, boxes, read_window
from headrace.checkpoint.restoring.chunk_reader import tensors_of


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_the_boxes_of_a_range_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(shape)
    found = [
        numbers[tuple(slice(at, at + n) for at, n in zip(box.offset, box.local, strict=True))].ravel()
        for box in boxes(tuple(shape), start, stop)
    ]
    assert len(found) <= 2 * len(shape) + 1
    assert [int(number) for part in found for number in part] == list(range(start, stop))


@pytest.mark.parametrize("target", ["", "float32"])
def test_windows_join_to_the_whole_file(tmp_path: Path, target: str) -> None:
    tensor = torch.randn(50, 30, 7).bfloat16()
    with Checkpointer(tmp_path, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"a": tensor}).result(60)
    with read(tmp_path, run="exp") as step:
        saved = tensors_of(step._opened, 0)["a"]
        part = Data(saved, "bfloat16", tensor.numel(), target=target)
        file = OutputFile("", [b"12345678", part, b"end"])
        joined = bytearray(file.size)
        for start in range(0, file.size, 512):
            read_window(step._store, step._opened, file, start, memoryview(joined)[start : start + 512])
    expected = tensor.float() if target else tensor
    assert bytes(joined) == b"12345678" + bytes(expected.view(torch.uint8).numpy()) + b"end"
