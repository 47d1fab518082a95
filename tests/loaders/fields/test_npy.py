"""Arrays of .npy files."""

from __future__ import annotations

import io
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.lib import format as npy_format

from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.loaders.fields.arrays import Npy, read_npy
from headrace.loaders.fields.options import ITEM_BYTES, NUMPY_DTYPES
from tests.support.field_input import decode, sample_of

Array = np.ndarray[Any, np.dtype[Any]]
DAMAGE = (CorruptionError, UnsupportedError)


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    npy_format.write_array(file, np.asanyarray(array), version)
    return file.getvalue()


def with_header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    header = text.encode("utf-8")
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def header(descr: str, shape: str, fortran_order: bool = False) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n"


def read(data: bytes) -> Array:
    return read_npy(memoryview(data).toreadonly())


def test_the_tables_have_the_dtypes_of_numpy_and_torch() -> None:
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size
    for name, size in NUMPY_DTYPES.items():
        assert np.dtype(name).itemsize == size
        assert torch.tensor(np.zeros(2, name)).dtype is getattr(torch, name)


@given(
    st.data(),
    st.sampled_from(sorted(NUMPY_DTYPES)),
    arrays.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4),
    st.sampled_from(["<", ">"]),
    st.sampled_from(["C", "F"]),
    st.sampled_from([None, (1, 0), (2, 0), (3, 0)]),
    st.integers(0, 9),
)
def test_arrays_of_all_dtypes_shapes_orders_and_versions_return_unchanged(
    data: st.DataObject,
    name: str,
    shape: tuple[int, ...],
    byte_order: Any,
    order: Any,
    version: tuple[int, int] | None,
    offset: int,
) -> None:
    dtype = np.dtype(name).newbyteorder(byte_order)
    array = np.asarray(data.draw(arrays.arrays(dtype, shape)), order=order)
    stored = npy(array, version)
    found = read_npy(memoryview(bytes(offset) + stored).toreadonly()[offset:])  # at any alignment
    assert found.dtype == np.dtype(name)
    assert found.dtype.isnative
    assert found.shape == array.shape
    assert found.tobytes() == array.astype(name).tobytes()


def test_the_array_is_a_view_of_the_file() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    data = bytearray(npy(array))
    found = read_npy(memoryview(data))
    assert not found.flags.writeable
    data[-4:] = np.float32(99).tobytes()
    assert found[-1, -1] == 99
    assert found.flags.c_contiguous
    assert read(npy(np.asfortranarray(array))).flags.f_contiguous


@given(st.sampled_from(sorted(NUMPY_DTYPES)), st.sampled_from(sorted(ITEM_BYTES)))
def test_a_conversion_is_that_of_torch(stored: str, dtype: str) -> None:
    array = np.array([[0, 1, 0], [1, 1, 0]], stored)
    field = Npy("latent.npy", dtype=getattr(torch, dtype))
    if stored.startswith("complex") and not dtype.startswith("complex"):
        with pytest.raises(UnsupportedError, match="cannot be converted"):
            decode(field, npy(array))
        return
    found = decode(field, npy(array))
    assert isinstance(found, np.ndarray) == (dtype in NUMPY_DTYPES)
    expected = torch.tensor(array).to(getattr(torch, dtype))
    assert torch.equal(torch.tensor(found) if isinstance(found, np.ndarray) else found, expected)


def test_numbers_that_a_dtype_cannot_hold_become_infinite_without_a_warning() -> None:
    data = npy(np.array([1e300, np.nan, -70000]))
    for dtype in ("float16", "float32", "bfloat16"):
        found = torch.as_tensor(decode(Npy(dtype=dtype), data))
        expected = torch.tensor([1e300, np.nan, -70000], dtype=torch.float64).to(getattr(torch, dtype))
        assert torch.equal(found.nan_to_num(1), expected.nan_to_num(1))
    decode(Npy(dtype="int32"), data)


# --- what is refused


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([b"a"]),
        np.array([{}, []], object),
        np.zeros(2, [("x", "f4"), ("y", "i4")]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, np.longdouble),
        np.zeros(2, "V3"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_dtypes_that_torch_lacks_are_refused_with_what_to_do(array: Array) -> None:
    file = io.BytesIO()
    np.save(file, array)
    with pytest.raises(UnsupportedError, match=r"which torch has no type for \(convert the array before it is saved"):
        read(file.getvalue())


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"

    class Writes:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    data = npy(np.array([Writes()], object))
    with pytest.raises(UnsupportedError, match="dtype object"):
        read(data)
    with pytest.raises(CorruptionError):
        read(pickle.dumps(Writes()))
    assert not mark.exists()
    np.load(io.BytesIO(data), allow_pickle=True)
    assert mark.exists(), "the file would have done nothing anyway"


@pytest.mark.parametrize(
    "shape",
    [
        "(250000000000,)",
        "(1000, 1000, 1000, 1000)",
        "(-1,)",
        "(-3, -4)",
        "(9223372036854775807, 2)",
        "(4294967296, 4294967296)",
        f"(0, {10**30})",
        f"(0, {1 << 62}, 4)",
        f"({'9' * 4000},)",
        f"(0x{'f' * 5000},)",
        f"({'1, ' * 65})",
        f"({'0, ' * 65})",
        "(True, 3)",
        "(3.0,)",
        "3",
        "[3]",
        "(2,)",
        "(4,)",
        "()",
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_shape_that_does_not_fit_the_file_costs_nothing(shape: str, version: int) -> None:
    data = with_header(header("'<f4'", shape), bytes(12), version)
    read(with_header(header("'<f4'", "(3,)"), bytes(12), version))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_longer_than_the_file_or_the_limit_is_not_read() -> None:
    start = b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFFF)
    with pytest.raises(CorruptionError, match="truncated"):
        read(start + b"{" * 100)
    long = header("'<f4'", "(3,)").rstrip() + " " * 20_000 + "\n"
    with pytest.raises(UnsupportedError, match="a header of"):
        read(with_header(long, bytes(12)))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 9000,
        "[" * 4000 + "]" * 4000,
        "-" * 9000 + "1",
        header("'<f4'", "(3,)") + "+ 1",
        "{'descr': '<f4', 'shape': (3,)}",
        header("('<f4', (1000000000,))", "(3,)"),
        header("[]", "(3,)"),
        header("None", "(3,)"),
        header("['<f4']", "(3,)"),
        header("'|O'", "(3,)"),
        header("{'a': 1}", "(3,)"),
        header("'<f4'", "(3,)", fortran_order=1),  # type: ignore[arg-type]
        "{'descr': 'ÿÿ', 'fortran_order': False, 'shape': (3,)}",
        "",
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_malformed_header_is_damage(text: str, version: int) -> None:
    began = time.monotonic()
    with pytest.raises(DAMAGE):
        read(with_header(text, bytes(12), version))
    assert time.monotonic() - began < 30


def test_a_header_of_python_2_is_read_without_a_warning() -> None:
    found = read(with_header(header("'<f4'", "(3L, 1L)"), bytes(12)))
    assert found.shape == (3, 1)


def test_bools_other_than_0_and_1_are_damage() -> None:
    with pytest.raises(CorruptionError, match="bool"):
        read(npy(np.zeros(3, bool))[:-1] + b"\x02")


def test_another_version_and_another_file_are_refused() -> None:
    data = npy(np.zeros(3))
    with pytest.raises(UnsupportedError, match=r"version 4\.0"):
        read(data[:6] + b"\4" + data[7:])
    with pytest.raises(UnsupportedError, match=r"version 1\.1"):
        read(data[:7] + b"\1" + data[8:])
    with pytest.raises(CorruptionError, match=r"not a \.npy file"):
        read(b"PK\3\4" + data)


def test_every_truncation_and_every_longer_file_is_damage() -> None:
    for array in (np.arange(5, dtype=np.int16), np.array([[True, False]]), np.float64(3)):
        data = npy(array)
        for length in range(len(data)):
            with pytest.raises(CorruptionError):
                read(data[:length])
        with pytest.raises(CorruptionError):
            read(data + b"\0")


@settings(max_examples=400)
@given(
    st.sampled_from([npy(np.arange(6, dtype=">i4").reshape(2, 3)), npy(np.zeros((2, 2), "c8"), (3, 0))]),
    st.lists(st.tuples(st.integers(0, 139), st.integers(0, 255)), min_size=1, max_size=4),
)
@example(npy(np.zeros(3)), [(10, 0x5C)])
def test_changed_bytes_of_a_header_give_an_array_or_damage(data: bytes, changes: list[tuple[int, int]]) -> None:
    changed = bytearray(data)
    for at, value in changes:
        changed[at] = value
    tracemalloc.start()
    try:
        found = read(bytes(changed))
        assert found.nbytes <= len(data)
    except DAMAGE:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_impossible_arguments_are_refused_with_what_may_be_meant() -> None:
    with pytest.raises(UsageError, match="did you mean float32"):
        Npy(dtype="float")
    with pytest.raises(UsageError, match="did you mean bfloat16"):
        Npy(dtype="bfloat")
    with pytest.raises(UsageError, match="give 'stack', 'pad', 'concat', 'list' or a function"):
        Npy(collate="sum")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="file"):
        Npy("")
    with pytest.raises(UsageError, match="file"):
        Npy(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="required"):
        Npy(required="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean dtype"):
        Npy(dtyp="float32")  # type: ignore[call-arg]


def test_equal_fields_are_equal_and_have_one_repr() -> None:
    assert Npy(".latent.npy", dtype=torch.float16) == Npy("latent.npy", dtype="float16")
    assert repr(Npy(dtype=torch.float16)) == "Npy(file='npy', dtype='float16', collate='stack', required=True)"
    assert hash(Npy()) == hash(Npy())
    assert pickle.loads(pickle.dumps(Npy("a"))) == Npy("a")  # noqa: S301


def test_the_memory_of_a_conversion_is_counted() -> None:
    sample = sample_of({"npy": bytes(100), "json": bytes(1000)})
    assert Npy().nbytes(sample) == 100
    assert Npy(dtype="float32").nbytes(sample) == 400
