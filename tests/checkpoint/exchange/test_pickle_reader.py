"""The reader of pickles: plain values come back, and nothing else is built, imported or called, whatever the bytes are."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import struct
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.exchange.pickle_reader import Limits, Name, Record, read_pickle
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError

texts = st.text(st.characters(codec="utf-8"), max_size=20)
keys = st.none() | st.booleans() | st.integers(-(2**12) + 1, 2**12 - 1) | texts | st.binary(max_size=20)
scalars = keys | st.integers() | st.floats()
values = st.recursive(
    scalars | st.sets(keys, max_size=4) | st.frozensets(keys, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)
names = st.sampled_from([b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"cbuiltins\neval\n", b"ctorch\nSize\n"])
operations = st.sampled_from([bytes([code]) for code in range(256)]) | names | st.binary(max_size=9)
programs = st.lists(operations, max_size=60).map(lambda parts: b"\x80\x04" + b"".join(parts) + b".")


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal, with the same types and the same bits of floats."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", two)
    if isinstance(one, dict):
        return same(list(one), list(two)) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@given(values, st.sampled_from([4, 5]))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert same(read_pickle(pickle.dumps(value, protocol), ()), value)


@given(st.binary(max_size=200) | programs | st.tuples(programs, programs).map(b"".join))
def test_any_bytes_give_a_value_or_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(HeadraceError):
        read_pickle(data, {"torch.Size"}, Limits(1000, 20))


@given(values, st.data())
def test_a_changed_pickle_gives_a_value_or_an_error_of_ours(value: Any, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, 4))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(HeadraceError):
        read_pickle(bytes(whole), ())


def test_allowed_classes_become_records_that_are_never_built() -> None:
    data = pickle.dumps([torch.Size([2, 3]), torch.float32, collections.OrderedDict(a=1), slice], 2)
    names = {"torch.Size", "torch.float32", "collections.OrderedDict", "__builtin__.slice"}
    size, dtype, ordered, name = read_pickle(data, names)
    assert isinstance(size, Record)
    assert (size.name, size.args, size.state) == ("torch.Size", ((2, 3),), None)
    assert (dtype, ordered, name) == (Name("torch.float32"), {"a": 1}, Name("__builtin__.slice"))
    with pytest.raises(UnsupportedError, match=r"names '__builtin__.slice', which is not read, because it can be code"):
        read_pickle(data, names - {"__builtin__.slice"})


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/headrace-was-here",)


FRAME = b"\x80\x04"
SIZE = b"\x8c\x05torch\x8c\x04Size\x93"
HOSTILE = {
    "reduce of os.system": (pickle.dumps(Evil()), "names 'posix.system'"),
    "global of builtins.eval": (b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "names 'builtins.eval'"),
    "name that is put together": (FRAME + b"\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.", "names 'os.system'"),
    "instance of protocol 0": (b"(S'ls'\nios\nsystem\n.", "operation b'S'"),
    "instance": (b"(ios\nsystem\n.", "names 'os.system'"),
    "object": (b"(cos\nsystem\no.", "names 'os.system'"),
    "extension": (FRAME + b"\x82\x01.", r"operation b'\\x82'"),
    "persistent id": (FRAME + b"\x8c\x01aQ.", "operation b'Q'"),
    "new object with keywords": (FRAME + SIZE + b")}\x92.", r"operation b'\\x92'"),
    "attribute of an allowed name": (FRAME + b"\x8c\x05torch\x8c\x0dSize.__init__\x93.", "names 'torch.Size.__init__'"),
    "state of a name": (FRAME + SIZE + b"}b.", "a Record is missing"),
    "state of a dict": (FRAME + b"}}b.", "a Record is missing"),
    "state twice": (FRAME + SIZE + b")R}b}b.", "two states"),
    "call of a text": (FRAME + b"\x8c\x01a)R.", "no name or no arguments"),
    "call of a record": (FRAME + SIZE + b")R)R.", "no name or no arguments"),
    "call with a list": (FRAME + SIZE + b"]R.", "no name or no arguments"),
    "items of a record": (FRAME + SIZE + b")R(K\x01K\x02u.", "a dict is missing"),
    "entries of a tuple": (FRAME + b")K\x01a.", "a list is missing"),
    "number as a name": (FRAME + b"K\x01K\x02\x93.", "a name is not a text"),
    "long of a gigabyte": (FRAME + b"\x8b\x00\x00\x00\x40.", r"operation b'\\x8b'"),
    "text of 2 to the 63 bytes": (FRAME + b"\x8d" + struct.pack("<Q", 1 << 63) + b".", "cut off"),
    "bytes of 2 to the 64": (FRAME + b"\x8e" + b"\xff" * 8 + b".", "cut off"),
    "frame beyond the end": (FRAME + b"\x95" + b"\xff" * 8 + b".", "cut off"),
    "memo that is missing": (FRAME + b"j\xff\xff\xff\xff.", "memo 4294967295 is missing"),
    "memo of nothing": (FRAME + b"\x94.", "a value is missing"),
    "memo of a mark": (FRAME + b"(\x94.", "a value is missing"),
    "mark that is missing": (FRAME + b"K\x01t.", "a mark is missing"),
    "mark at the end": (FRAME + b"(.", "another number of values"),
    "two values at the end": (FRAME + b"NN.", "another number of values"),
    "key without a value": (FRAME + b"}(K\x01u.", "a key has no value"),
    "no end": (FRAME + b"N", "cut off"),
    "nothing": (b"", "cut off"),
    "protocol 0": (b"\x80\x00N.", "protocol 0"),
    "protocol 200": (b"\x80\xc8N.", "protocol 200"),
    "text that is not UTF-8": (FRAME + b"\x8c\x01\xff.", "not UTF-8"),
    "name without an end": (b"\x80\x02c" + b"a" * 5000, "a name has no end"),
    "integer as a key whose hash is that of another": (FRAME + b"}\x8a\x08" + b"\xff" * 7 + b"\x1fNs.", "int as a key"),
    "integer as a key of which many can collide": (FRAME + b"}M\x00\x10Ns.", "int as a key"),
    "float as a key": (FRAME + b"}G" + bytes(8) + b"Ns.", "float as a key"),
    "tuple as a key": (FRAME + b"})Ns.", "tuple as a key"),
    "tuple in a set": (FRAME + b"\x8f()\x90.", "tuple as a key or in a set"),
    "name in a frozen set": (FRAME + b"(" + SIZE + b"\x91.", "Name as a key or in a set"),
    "list that contains itself": (FRAME + b"]\x94h\x00a.", "contains itself"),
    "record that contains itself": (FRAME + SIZE + b")R\x94h\x00b.", "contains itself"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_by_name(name: str) -> None:
    data, message = HOSTILE[name]
    with pytest.raises((CorruptionError, UnsupportedError), match=message):
        read_pickle(data, {"torch.Size"})
    assert not os.path.exists("/tmp/headrace-was-here")


def test_tuples_that_double_are_refused_and_never_hashed() -> None:
    program = b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60))
    with pytest.raises(CorruptionError, match="more than 20000000 objects"):
        read_pickle(FRAME + program + b".", ())
    with pytest.raises(UnsupportedError, match="tuple as a key"):
        read_pickle(FRAME + b"}" + program + b"Ns.", ())


def test_depth_objects_and_operations_have_limits() -> None:
    nested: Any = []
    for _ in range(63):
        nested = [nested]
    assert read_pickle(pickle.dumps(nested), ()) == nested
    with pytest.raises(CorruptionError, match="nested deeper than 64"):
        read_pickle(pickle.dumps([nested]), ())
    with pytest.raises(CorruptionError, match="nested deeper than 64"):  # far beyond the recursion limit of Python
        read_pickle(FRAME + b"]" * (n := sys.getrecursionlimit() * 10) + b"a" * (n - 1) + b".", ())
    with pytest.raises(CorruptionError, match="more than 100 operations"):
        read_pickle(FRAME + b"(" + b"N" * 200 + b"t.", (), Limits(objects=100))
    with pytest.raises(CorruptionError, match="more than 100 operations"):  # a memo bomb
        read_pickle(FRAME + b"N" + b"\x94" * 200 + b".", (), Limits(objects=100))
