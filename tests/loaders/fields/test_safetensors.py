"""Tensors of .safetensors files."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.loaders.fields import arrays
from headrace.loaders.fields.arrays import Safetensors, read_entries
from headrace.loaders.fields.options import NUMPY_DTYPES
from tests.support.field_input import decode, sample_of

DAMAGE = (CorruptionError, UnsupportedError)
DTYPES = {own: getattr(torch, name) for own, name in arrays._OWN_NAMES.items()}


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def read(data: bytes) -> Any:
    return read_entries(memoryview(data).toreadonly())


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 255),
    st.integers(0, 7),
)
def test_tensors_of_all_dtypes_and_shapes_return_unchanged(own: str, shape: list[int], seed: int, before: int) -> None:
    dtype = DTYPES[own]
    count = int(np.prod(shape, dtype=int))
    values = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 2 if own == "BOOL" else 256, (count * dtype.itemsize,), generator=values).to(torch.uint8)
    end = before + count * dtype.itemsize
    header = {"x": entry(before, end, own, shape), "a": entry(0, before), "__metadata__": {"by": "a test"}}
    data = file_of(header, bytes(before) + stored.numpy().tobytes())
    found = decode(Safetensors("safetensors", "x"), data)
    if str(dtype).removeprefix("torch.") in NUMPY_DTYPES:
        assert isinstance(found, np.ndarray)
        assert not found.flags.writeable
        found = torch.tensor(found)
    assert found.dtype is dtype
    assert list(found.shape) == shape
    assert tensor_bytes(found) == stored.numpy().tobytes()


def test_files_of_the_safetensors_package_are_read() -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(dtype)
        for name, dtype in DTYPES.items()
        if name not in ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
    }
    data = library.save(tensors, {"format": "pt"})
    for name, tensor in tensors.items():
        found = decode(Safetensors("safetensors", name), data)
        assert torch.equal(torch.as_tensor(np.array(found)) if isinstance(found, np.ndarray) else found, tensor)


def test_a_tensor_is_converted() -> None:
    data = file_of({"emb": entry(0, 4, "BF16", [2])}, tensor_bytes(torch.ones(2, dtype=torch.bfloat16)))
    found = decode(Safetensors("t5.safetensors", "emb", dtype=torch.float32), data)
    assert found.dtype == torch.float32
    assert found.tolist() == [1, 1]


def test_a_name_that_is_not_there_is_damage_that_names_those_there_are() -> None:
    data = file_of({f"layer{n}": entry(0, 0) for n in range(100)})
    with pytest.raises(CorruptionError, match=r"no tensor 'emb'.*'layer0', 'layer1'.* and 92 more") as raised:
        decode(Safetensors("safetensors", "emb"), data)
    assert len(str(raised.value)) < 400
    assert decode(Safetensors("safetensors", "emb", required=False), data) is None
    long = file_of({"x" * 100_000: entry(0, 0), "\ud800": entry(0, 0)})
    with pytest.raises(CorruptionError) as raised:
        decode(Safetensors("safetensors", "emb"), long)
    assert len(str(raised.value)) < 400
    str(raised.value).encode()


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 5), "b": entry(4, 8)},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 8), "b": entry(2, 6)},
        {"a": entry(0, 8), "b": entry(4, 4)},
        {"a": entry(0, 3), "b": entry(4, 8)},
        {"a": entry(1, 8)},
        {"a": entry(0, 7)},
        {"a": entry(0, 9)},
        {"a": entry(0, 8, shape=[7])},
        {"a": entry(0, 8, shape=[-8])},
        {"a": entry(0, 8, shape=[-2, -4])},
        {"a": entry(0, 8, shape=[8.0])},
        {"a": entry(0, 8, shape=[True, 8])},
        {"a": entry(0, 8, shape=["8"])},
        {"a": entry(0, 8, shape=8)},
        {"a": entry(0, 8, shape=[1] * 65 + [8])},
        {"a": entry(0, 8, "F32", [2, 1 << 62])},
        {"a": entry(0, 8, "F4", [15])},
        {"a": entry(-8, 0), "b": entry(0, 8)},
        {"a": entry(8, 0, shape=[-8])},
        {"a": entry(0, 1 << 40), "b": entry(0, 8)},
        {"a": entry(0, 10**200)},
        {"a": entry(0, 8) | {"data_offsets": [0]}},
        {"a": entry(0, 8) | {"data_offsets": [0, 8, 8]}},
        {"a": entry(0, 8) | {"data_offsets": [0.0, 8.0]}},
        {"a": entry(0, 8) | {"data_offsets": [False, 8]}},
        {"a": entry(0, 8) | {"dtype": 3}},
        {"a": [0, 8]},
        {"a": None},
        {"a": entry(0, 8), "__metadata__": {"n": 1}},
        {"a": entry(0, 8), "__metadata__": ["n"]},
        {},
        [],
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        b' {"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        b'\xef\xbb\xbf{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}x',
        b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}',
        b"\xff" * 20,
        b"[" * 100_000,
        b"",
    ],
    ids=repr,
)
def test_a_header_that_does_not_describe_all_bytes_once_is_damage(header: Any) -> None:
    data = file_of(header, bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_header_may_end_in_spaces_and_the_tensors_stand_in_any_order() -> None:
    text = json.dumps({"b": entry(4, 8), "a": entry(0, 4), "none": entry(4, 4)}).encode() + b"   "
    entries, start = read(file_of(text, bytes(8)))
    assert list(entries) == ["b", "a", "none"]
    assert start == 8 + len(text)


def test_unknown_dtypes_and_dtypes_without_a_type_in_torch_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown dtype 'Q7'"):
        read(file_of({"a": entry(0, 8, "Q7")}, bytes(8)))
    data = file_of({"a": entry(0, 8, "F4", [16]), "b": entry(8, 11, "F6_E2M3", [4]), "c": entry(11, 12)}, bytes(12))
    with pytest.raises(UnsupportedError, match="F4, which torch has no type for"):
        decode(Safetensors("safetensors", "a"), data)
    assert decode(Safetensors("safetensors", "c"), data).tolist() == [0]


def test_bools_other_than_0_and_1_are_damage() -> None:
    with pytest.raises(CorruptionError, match="bool"):
        decode(Safetensors("safetensors", "a"), file_of({"a": entry(0, 2, "BOOL")}, b"\1\2"))


def test_a_header_longer_than_the_file_or_the_limit_is_not_read() -> None:
    for length in (1 << 40, (1 << 64) - 1, 9):
        with pytest.raises(CorruptionError, match="truncated"):
            read(length.to_bytes(8, "little") + b"{}" + bytes(6))
    with pytest.raises(UnsupportedError, match="a header of"):
        read(file_of(b"{" + b" " * (5 << 20) + b"}"))


SMALL = file_of({"a": entry(0, 4, "F32", [1]), "b": entry(4, 8, "BF16", [2])}, bytes(8))


def test_every_truncation_and_every_longer_file_is_damage() -> None:
    read(SMALL)
    for length in range(len(SMALL)):
        with pytest.raises(CorruptionError):
            read(SMALL[:length])
    with pytest.raises(CorruptionError):
        read(SMALL + b"\0")


@settings(max_examples=400)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(SMALL) - 9), st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789[]{},:"'))
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from("ab"),
)
def test_changed_bytes_of_a_header_give_a_tensor_or_damage(changes: list[tuple[int, int]], name: str) -> None:
    changed = bytearray(SMALL)
    for at, value in changes:
        changed[at] = value
    tracemalloc.start()
    try:
        assert decode(Safetensors("safetensors", name), bytes(changed)).nbytes <= 8
    except DAMAGE:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_impossible_arguments_are_refused() -> None:
    for name in ("", "__metadata__", None):
        with pytest.raises(UsageError, match="name"):
            Safetensors("safetensors", name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean name"):
        Safetensors("safetensors", key="a")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="did you mean float16"):
        Safetensors("safetensors", "a", dtype="half")


def test_the_memory_of_a_conversion_is_counted() -> None:
    sample = sample_of({"safetensors": bytes(100)})
    assert Safetensors("safetensors", "a").nbytes(sample) == 100
    assert Safetensors("safetensors", "a", dtype="float64").nbytes(sample) == 800
