"""Values that are not tensors come back as they were saved, types included, or are refused when they are saved."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.state import values
from headrace.checkpoint.state.tree import ValueNode, decode, encode
from headrace.dataio.core.errors import CorruptionError, MismatchError, UnsupportedError, UsageError


class Text(str, enum.Enum):  # noqa: UP042
    A = "a value"


class Number(enum.IntEnum):
    THREE = 3


class Plain(enum.Enum):
    PAIR = (1, "x")


class Flags(enum.IntFlag):
    NONE = 0
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: Any
    y: Any = 2


class Loose(Point):
    """Without slots: its members may have attributes."""


class MyText(str):
    __slots__ = ()


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyOrdered(OrderedDict):  # type: ignore[type-arg]
    pass


class MyList(list):  # type: ignore[type-arg]
    pass


class MyTuple(tuple[int, ...]):
    __slots__ = ()


class MyPath(type(pathlib.Path())):  # type: ignore[misc]
    pass


UTC = datetime.UTC
KEPT: list[Any] = [
    *(Text.A, Number.THREE, Plain.PAIR, Flags.ONE | Flags.TWO, Flags.NONE),
    *(Point(1, [2, Text.A]), Loose(1), torch.Size([1, 2]), (), [()], (1, (2,))),
    *(torch.float32, torch.float8_e4m3fn, torch.device("cuda:1"), torch.device("meta"), torch.__version__),
    *(np.float64(0.1), np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("é"), np.bytes_(b"b")),
    *(np.float64(math.nan), np.datetime64("2026-11-24T06:00:00.000000001"), np.timedelta64(5, "s"), np.str_("")),
    *({1, "a", None}, frozenset({(1, 2), frozenset({3})}), {Text.A}, set(), {1: {2: {3}}}),
    *(bytearray(b"x"), range(2, 9, 3), slice(1, None, 2), deque([1, Text.A], maxlen=2), deque()),
    *(defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), Counter("aab"), OrderedDict({"b": 1, "a": 2})),
    *(
        datetime.datetime(2026, 11, 24, 6, 1, 2, 3),
        datetime.datetime(2026, 1, 1, tzinfo=UTC),
        datetime.date(2026, 1, 1),
    ),
    *(datetime.time(1, 2), datetime.timedelta(days=-1, microseconds=7)),
    *(pathlib.Path("/x/é"), fractions.Fraction(1, 3), decimal.Decimal("1.10")),
    *({1.5: 2, (1, "a"): 3, None: 4, b"k": 5}, {True: 1, 0: 2}, 2**63, -(2**63) - 1, -0.0, math.inf, 1j, b""),
]


def with_attribute() -> Loose:
    found = Loose(1)
    found.note = "lost"  # type: ignore[attr-defined]
    return found


def local_enum() -> Any:
    class Local(str, enum.Enum):  # noqa: UP042
        A = "a"

    return Local.A


def local_tuple() -> Any:
    Local = namedtuple("Local", "a")
    return Local(1)


REFUSED: list[Any] = [
    *(MyText("a"), MyInt(1), MyFloat(1), MyDict(a=1), MyOrdered(a=1), MyList([1]), MyTuple((1,)), MyPath("/x")),
    *(local_enum(), local_tuple(), defaultdict(lambda: 1), torch.ones(1, 1).max(0)),
    *(np.array([object()]), np.zeros(1, "i4,f4"), np.ma.masked_array([1], [True]), np.longlong(1), object(), int, len),
    *({Text.A: 1}, {frozenset(): 1}, {math.nan: MyText("x")}, [{"deep": MyText("x")}], {MyInt(1)}, deque([MyInt(1)])),
    *(
        datetime.datetime(2026, 1, 1, fold=1),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(UTC.utcoffset(None), "Z")),
    ),
    *(
        "\ud800",
        Point(MyInt(1)),
        with_attribute(),
        fractions.Fraction(1 << 20_000, 3),
        io.StringIO("x"),
        memoryview(b"x"),
    ),
]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(x, b[k]) for k, x in a.items())
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, set | frozenset):
        return bool(a == b) and {type(x) for x in a} == {type(x) for x in b}
    return repr(a) == repr(b)


def test_what_is_saved_comes_back_exactly_into_a_state_in_place_of_one_and_in_read(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, {"k": KEPT, "t": torch.ones(1)}).result(60)
        for into in ({"k": None, "t": torch.zeros(1)}, {"k": list(KEPT), "t": torch.zeros(1)}):
            checkpointer.restore(into)
            found: Any = into["k"]
            for given, back in zip(KEPT, found, strict=True):
                assert same(given, back), (given, back)
    assert found[-1] is not None
    default = found[next(i for i, value in enumerate(KEPT) if isinstance(value, defaultdict))]
    assert default["new"] == []
    with read(str(tmp_path), run="r") as saved:
        assert saved["k/0"] is Text.A
        assert same(saved["k/5"], Point(1, [2, Text.A]))


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_would_come_back_as_something_else_is_refused_by_its_path(value: Any, tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        with pytest.raises(UsageError, match=r"^a/k"):
            checkpointer.save(1, {"a": {"k": value}})
        assert checkpointer.steps() == []


def test_arrays_and_streams_come_back_with_their_bytes_and_position(tmp_path: Path) -> None:
    stream = io.BytesIO(b"scales")
    stream.seek(2)
    arrays = [
        *(np.arange(6, dtype=">i4").reshape(2, 3).T, np.array(5.0), np.zeros((0, 3)), np.array(["a", "bc"])),
        *(np.array([math.nan, -0.0]), np.array([b"x"]), np.array([True]), np.array(["2026-01-01"], "M8[D]")),
    ]
    into: dict[str, Any] = {"arrays": None, "stream": None}
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, {"arrays": arrays, "stream": stream}).result(60)
        checkpointer.restore(into)
    assert (into["stream"].getvalue(), into["stream"].tell()) == (b"scales", 2)
    for given, back in zip(arrays, into["arrays"], strict=True):
        assert (given.dtype, given.shape, given.tobytes()) == (back.dtype, back.shape, back.tobytes())
        assert back.flags.writeable


def test_tensors_inside_of_named_tuples_deques_and_default_dicts_come_back(tmp_path: Path) -> None:
    def state(x: float) -> dict[str, Any]:
        return {
            "point": Point(torch.full((3,), x), 1),
            "last": deque([torch.full((2,), x)], maxlen=3),
            "by": defaultdict(dict, {"w": torch.full((4,), x)}),
        }

    into = state(0.0)
    there, point, last = into["by"]["w"], into["point"].x, into["last"][0]
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, state(7.0)).result(60)
        checkpointer.restore(into)
    assert type(into["point"]) is Point
    assert torch.equal(into["point"].x, torch.full((3,), 7.0))
    assert torch.equal(into["last"][0], torch.full((2,), 7.0))
    assert into["last"].maxlen == 3
    assert into["by"]["w"] is there
    assert into["point"].x is point
    assert into["last"][0] is last
    assert torch.equal(there, torch.full((4,), 7.0))
    with read(str(tmp_path), run="r") as saved:
        assert torch.equal(saved["by/w"].read(), torch.full((4,), 7.0))


@pytest.mark.parametrize(
    "here",
    [
        {"p": Point(torch.nn.Parameter(torch.zeros(7)), 5)},
        {"p": Point(torch.zeros(3, dtype=torch.float64, device="meta"), 5)},
        {"p": Loose(torch.zeros(3), 5)},
        {"p": (torch.zeros(3), 5)},
        {"d": deque([torch.zeros(7)], maxlen=2)},
        {"d": deque([torch.zeros(2)] * 2, maxlen=2)},
        {"d": deque([torch.zeros(2)], maxlen=3)},
        {"d": [torch.zeros(2)]},
        {"s": {torch.zeros(2)}},
        {"n": [deque([Point(torch.zeros(3))])]},
    ],
    ids=str,
)
def test_tensors_in_a_container_of_another_shape_class_or_length_do_not_fit(
    here: dict[str, Any], tmp_path: Path
) -> None:
    given = {"w": torch.ones(2), "p": Point(torch.ones(3), 5), "d": deque([torch.ones(2)], maxlen=2)}
    given |= {"s": {torch.ones(2)}, "n": [deque([Point(torch.ones(2))])]}
    into = {"w": torch.zeros(2), **dict.fromkeys("pdsn"), **here}
    before = dict(into)
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, given).result(60)
        with pytest.raises(MismatchError, match=f"{next(iter(here))}.*: "):
            checkpointer.restore(into)
    assert torch.equal(into["w"], torch.zeros(2))
    assert all(into[key] is value for key, value in before.items())


def test_other_entries_of_a_named_tuple_with_tensors_are_replaced_and_its_class_stays(tmp_path: Path) -> None:
    into: dict[str, Any] = {"p": Point(torch.zeros(3), 0)}
    there = into["p"].x
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, {"p": Point(torch.ones(3), 5)}).result(60)
        checkpointer.restore(into)
    assert type(into["p"]) is Point
    assert into["p"].y == 5
    assert into["p"].x is there
    assert torch.equal(there, torch.ones(3))


def test_a_class_that_is_not_loaded_or_has_changed_is_named_and_nothing_is_imported(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", sidecar=None) as checkpointer:
        checkpointer.save(1, {"a": [Text.A], "p": Point(1)}).result(60)
        module = sys.modules.pop(__name__)
        try:
            with pytest.raises(
                MismatchError, match=r"a/0: .*test_values:Text.*not loaded in this process.*import its module"
            ):
                checkpointer.restore({"a": None, "p": None})
            assert __name__ not in sys.modules
        finally:
            sys.modules[__name__] = module
    for node in (
        ValueNode("enum", [f"{__name__}:Text", ["B"]]),
        ValueNode("enum", [f"{__name__}:Point", ["A"]]),
        ValueNode("namedtuple", [f"{__name__}:Point", ["x", "z"]], [1, 2]),
        ValueNode("namedtuple", [f"{__name__}:Text", []], []),
        ValueNode("namedtuple", ["subprocess:Popen", ["args"]], [["true"]]),
        ValueNode("enum", ["os:system", ["true"]]),
    ):
        with pytest.raises(MismatchError):
            values.decode(decode_again(node))


def decode_again(node: ValueNode) -> ValueNode:
    found = decode(encode(node))
    assert isinstance(found, ValueNode)
    return found


@pytest.mark.parametrize(
    "node",
    [
        ValueNode("numpy.array", ["|O", [1], b"12345678"]),
        ValueNode("numpy.array", ["<f8", [1 << 40], b"12345678"]),
        ValueNode("numpy.array", ["<f8", [-1, 0], b""]),
        ValueNode("numpy.scalar", ["<f8", b"1"]),
        ValueNode("numpy.array", ["<f8,<i4", [1], b"12345678"]),
        ValueNode("bytearray", 1 << 40),
        ValueNode("range", [1, 2, 0]),
        ValueNode("set", None, [[1]]),
        ValueNode("set", None, 5),
        ValueNode("torch.dtype", "load"),
        ValueNode("torch.device", "nowhere"),
        ValueNode("torch.Size", ["x"]),
        ValueNode("collections.defaultdict", "eval", {}),
        ValueNode("collections.deque", -1, []),
        ValueNode("fractions.Fraction", [1, 0]),
        ValueNode("decimal.Decimal", "x"),
        ValueNode("datetime.datetime", "yesterday"),
        ValueNode("datetime.timedelta", [10**12]),
        ValueNode("io.BytesIO", [b"x", -1]),
        ValueNode("io.BytesIO", 7),
        ValueNode("enum", []),
        ValueNode("namedtuple", [1, 2]),
        ValueNode("pathlib.Path", 1),
        ValueNode("fractions.Fraction", ["1e400000"]),
        ValueNode("fractions.Fraction", [1 << 40_000, 3]),
        ValueNode("fractions.Fraction", [1]),
        ValueNode("range", [1 << 40_000, 1 << 50_000, 3]),
        ValueNode("set", None, ValueNode("range", [0, 1000, 1])),
        ValueNode("frozenset", None, ValueNode("range", [0, 1000, 1])),
        ValueNode("collections.deque", None, ValueNode("range", [0, 1000, 1])),
        ValueNode("collections.deque", 2.0, []),
        ValueNode("collections.defaultdict", "int", [(1, 2)]),
        ValueNode("numpy.text", 1000),
        ValueNode("numpy.array", ["<f8", [1.0], b"12345678"]),
        ValueNode("torch.device", 0),
        ValueNode("torch.Size", {1: 2}),
        ValueNode("decimal.Decimal", 0.5),
        ValueNode("datetime.datetime", b"yesterday"),
        ValueNode("datetime.timedelta", [0.5, 0, 0]),
        ValueNode("slice", [1]),
        ValueNode("enum", {0: f"{__name__}:Text", 1: ["A"]}),
    ],
    ids=lambda node: node.kind,
)
def test_a_node_that_no_save_has_written_is_reported(node: ValueNode) -> None:
    again = decode_again(node)
    inner = values.decode(again.value) if isinstance(again.value, ValueNode) else again.value
    with pytest.raises((CorruptionError, MismatchError)):
        values.decode(ValueNode(again.kind, again.about, inner))


@pytest.mark.parametrize("error", [MemoryError, OverflowError])
def test_a_value_that_memory_does_not_hold_is_reported(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setitem(values._MAKING, "set", fails)
    with pytest.raises(CorruptionError, match="kind set"):
        values.decode(ValueNode("set", None, []))


def test_a_kind_of_a_later_version_asks_for_it() -> None:
    with pytest.raises(UnsupportedError, match="newer Headrace"):
        values.decode(ValueNode("later", 1))
