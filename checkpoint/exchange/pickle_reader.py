"""Reads the values of a pickle without running it: `read_pickle(data, allowed)`.

A pickle is a program for a small machine with a stack. Python's machine imports what the program names, and calls it.
This one does neither. It builds plain values: None, bool, int, float, str, bytes, list, tuple, dict, set and frozenset. A
name of an allowed class or function becomes a `Name`, and a call of one becomes a `Record` with its arguments and state.

Invariant: nothing is imported, called or set as an attribute. A name that is not in `allowed` is refused. A value has at
most `Limits.objects` objects, at most `Limits.depth` levels, and no cycles. Objects that are used twice count twice, so a
caller may recurse. Keys of dicts and items of sets are texts, bytes, small integers, booleans, None and records. No
collisions of their hashes can be constructed.
Failure behaviour: `UnsupportedError` names a class that is not allowed, or an operation that is not supported.
`CorruptionError` for a pickle that is damaged, cut off, or larger than its limits.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.checkpoint.gc_pause import gc_paused
from headrace.dataio.core.errors import CorruptionError, UnsupportedError

_KEY_BITS = 12
"""The hash of an integer has no secret: of larger ones, some can be chosen for which a dict takes a time that grows with
the square of their number. No metadata of DCP has such keys.
"""
_PROTOCOLS = range(2, 6)
_UINT8, _UINT16, _UINT32, _UINT64, _INT32, _DOUBLE = map(struct.Struct, ("<B", "<H", "<I", "<Q", "<i", ">d"))
_ORDERED = "collections.OrderedDict"
"""If it is allowed, it becomes a dict."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one pickle.

    Attributes:
        objects (int): The number of values, names and records, and of operations.
        depth (int): The number of levels.
    """

    objects: int = 20_000_000
    depth: int = 64


@dataclass(frozen=True, slots=True)
class Name:
    """A class or a function that the pickle names, such as "torch.float32". It is only a text."""

    text: str


@dataclass(eq=False, slots=True)
class Record:
    """An object that the pickle would build: `name(*args)`, and then the state that it would be given.

    Records are equal only if they are the same object, so a record as a key needs no hash of its contents.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None


def read_pickle(data: bytes, allowed: Collection[str], limits: Limits | None = None) -> Any:
    """The value of a pickle.

    Args:
        data (bytes): The pickle, of protocol 2 to 5.
        allowed (Collection[str]): The names of classes and functions that it may have, such as "torch.Size".
        limits (Limits | None): Default: None, `Limits()`.

    Returns:
        Any: Plain values, `Name`s and `Record`s.

    Raises:
        UnsupportedError: The pickle names another class, or needs an operation that is not supported.
        CorruptionError: The pickle is damaged or exceeds its limits.

    Example:
        >>> import pickle
        >>> read_pickle(pickle.dumps({"a": [1, (2.5, None)]}), allowed=())
        {'a': [1, (2.5, None)]}
    """
    limits = limits or Limits()
    with gc_paused():
        value = _Machine(data, allowed, limits).run()
        _check_shape(value, limits)
    return value


class _Mark:
    """Separates the arguments of an operation from the values below them on the stack."""


_MARK = _Mark()


class _Machine:
    """The stack, the memo and the position of one pickle."""

    def __init__(self, data: bytes, allowed: Collection[str], limits: Limits) -> None:
        self._data, self._at = data, 0
        self._allowed, self._limits = allowed, limits
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        stop = pickle.STOP[0]
        for _ in range(self._limits.objects):
            if self._at >= len(self._data):
                raise self._damaged("it is cut off")
            code = self._data[self._at]
            self._at += 1
            if code == stop:
                break
            operation = _OPERATIONS.get(code)
            if operation is None:
                self._refuse(code)
            operation(self)
        else:
            raise CorruptionError(f"the pickle has more than {self._limits.objects} operations")
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise self._damaged("it ends with another number of values than one")
        return self._stack[0]

    def _damaged(self, reason: str) -> CorruptionError:
        return CorruptionError(f"the pickle is damaged near byte {self._at}: {reason}")

    def _refuse(self, code: int) -> NoReturn:
        if code == pickle.INST[0]:
            self.name(*(self._line() for _ in range(2)))
        raise UnsupportedError(
            f"the pickle needs operation {bytes([code])!r} at byte {self._at - 1}, which is not read",
            hint="only plain values and the classes of torch.distributed.checkpoint are read",
        )

    def _take(self, length: int) -> bytes:
        part = self._data[self._at : self._at + length]
        if len(part) != length or length < 0:
            raise self._damaged("it is cut off")
        self._at += length
        return part

    def _number(self, format: struct.Struct) -> Any:
        if self._at + format.size > len(self._data):
            raise self._damaged("it is cut off")
        self._at += format.size
        return format.unpack_from(self._data, self._at - format.size)[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise self._damaged("a name has no end")
        line = self._take(end - self._at)
        self._at += 1
        return self._text(line)

    def _text(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._damaged("a text is not UTF-8") from None

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._damaged("a value is missing")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                items = self._stack[at + 1 :]
                del self._stack[at:]
                return items
        raise self._damaged("a mark is missing")

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self._damaged(f"a {kind.__name__} is missing")
        return self._stack[-1]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def frame(self) -> None:
        if self._number(_UINT64) > len(self._data) - self._at:
            raise self._damaged("it is cut off")

    def protocol(self) -> None:
        if (number := self._take(1)[0]) not in _PROTOCOLS:
            raise UnsupportedError(
                f"the pickle has protocol {number}", hint="protocols 2 to 5 are read: save it again with torch"
            )

    def push_integer(self, format: struct.Struct) -> None:
        self.push(self._number(format))

    def push_long(self) -> None:
        self.push(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def push_text(self, format: struct.Struct) -> None:
        self.push(self._text(self._take(self._number(format))))

    def push_bytes(self, format: struct.Struct) -> None:
        self.push(self._take(self._number(format)))

    def push_tuple(self, length: int) -> None:
        items = [self._pop() for _ in range(length)]
        self.push(tuple(reversed(items)))

    def push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        self.push(kind(self._pop_to_mark()))

    def append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def appends(self) -> None:
        items = self._pop_to_mark()
        self._top(list).extend(items)

    def add_items(self) -> None:
        items = self._pop_to_mark()
        self._top(set).update(map(self._key, items))

    def push_frozen_set(self) -> None:
        self.push(frozenset(map(self._key, self._pop_to_mark())))

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._top(dict)[self._key(key)] = value

    def set_items(self) -> None:
        items = self._pop_to_mark()
        if len(items) % 2:
            raise self._damaged("a key has no value")
        self._top(dict).update(zip(map(self._key, items[::2]), items[1::2], strict=True))

    def _key(self, value: Any) -> Any:
        """The value, if it can be a key."""
        if isinstance(value, (str, bytes, bool, type(None), Record)):
            return value
        if type(value) is int and value.bit_length() <= _KEY_BITS:
            return value
        raise UnsupportedError(
            f"the pickle has a {type(value).__name__} as a key or in a set, which is not read",
            hint="only texts, bytes, integers below 4096, booleans and None are read as keys",
        )

    def put(self, format: struct.Struct) -> None:
        self._remember(self._number(format))

    def memoize(self) -> None:
        self._remember(len(self._memo))

    def _remember(self, number: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._damaged("a value is missing")
        self._memo[number] = self._stack[-1]

    def push_memo(self, format: struct.Struct) -> None:
        number = self._number(format)
        if number not in self._memo:
            raise self._damaged(f"memo {number} is missing")
        self.push(self._memo[number])

    def name(self, module: str, qualified: str) -> Name:
        """The name, if it is allowed."""
        text = f"{module}.{qualified}"
        if text not in self._allowed:
            raise UnsupportedError(
                f"the pickle names {text!r:.200}, which is not read, because it can be code",
                hint="convert it where you trust its author",
            )
        return Name(text)

    def global_(self) -> None:
        self.push(self.name(self._line(), self._line()))

    def stack_global(self) -> None:
        qualified, module = self._pop(), self._pop()
        if type(qualified) is not str or type(module) is not str:
            raise self._damaged("a name is not a text")
        self.push(self.name(module, qualified))

    def call(self) -> None:
        args, name = self._pop(), self._pop()
        if type(args) is not tuple or type(name) is not Name:
            raise self._damaged("a call has no name or no arguments")
        self.push({} if name.text == _ORDERED and not args else Record(name.text, args))

    def build(self) -> None:
        state = self._pop()
        record = self._top(Record)
        if record.state is not None:
            raise self._damaged("an object has two states")
        record.state = state


def _check_shape(value: Any, limits: Limits) -> None:
    """Refuse cycles, values that are nested too deeply, and values that are too large if shared objects count twice."""
    sizes: dict[int, tuple[int, int]] = {}  # (objects, levels) of containers
    begun: dict[int, tuple[int, list[Any]]] = {}  # (other objects, containers inside) of those that are not measured
    stack = [value] if type(value) in _CONTAINERS else []
    while stack:
        node = stack[-1]
        if id(node) in sizes:
            stack.pop()
            continue
        if id(node) in begun:
            others, inner = begun.pop(id(node))
        else:
            others, inner = _divided(node)
            if waiting := [child for child in inner if id(child) not in sizes]:
                begun[id(node)] = others, inner
                if any(id(child) in begun for child in waiting):
                    raise CorruptionError("the pickle has an object that contains itself")
                stack += waiting
                continue
        stack.pop()
        objects, levels = 1 + others, 0
        for child in inner:
            size, depth = sizes[id(child)]
            objects, levels = objects + size, max(levels, depth)
        if levels >= limits.depth:
            raise CorruptionError(f"the pickle is nested deeper than {limits.depth}")
        if objects > limits.objects:
            raise CorruptionError(f"the pickle has more than {limits.objects} objects")
        sizes[id(node)] = objects, levels + 1


_CONTAINERS = frozenset([list, tuple, dict, set, frozenset, Record])


def _divided(node: Any) -> tuple[int, list[Any]]:
    """The number of plain objects in a container, and the containers in it."""
    children: Collection[Any] = node
    if type(node) is dict:
        children = [*node.keys(), *node.values()]
    elif type(node) is Record:
        children = (*node.args, node.state)
    inner = [child for child in children if type(child) in _CONTAINERS]
    return len(children) - len(inner), inner


_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: _Machine.protocol,
        pickle.FRAME: _Machine.frame,
        pickle.MARK: lambda machine: machine.push(_MARK),
        pickle.NONE: lambda machine: machine.push(None),
        pickle.NEWTRUE: lambda machine: machine.push(True),
        pickle.NEWFALSE: lambda machine: machine.push(False),
        pickle.BININT: lambda machine: machine.push_integer(_INT32),
        pickle.BININT1: lambda machine: machine.push_integer(_UINT8),
        pickle.BININT2: lambda machine: machine.push_integer(_UINT16),
        pickle.BINFLOAT: lambda machine: machine.push_integer(_DOUBLE),
        pickle.LONG1: _Machine.push_long,
        pickle.SHORT_BINUNICODE: lambda machine: machine.push_text(_UINT8),
        pickle.BINUNICODE: lambda machine: machine.push_text(_UINT32),
        pickle.BINUNICODE8: lambda machine: machine.push_text(_UINT64),
        pickle.SHORT_BINBYTES: lambda machine: machine.push_bytes(_UINT8),
        pickle.BINBYTES: lambda machine: machine.push_bytes(_UINT32),
        pickle.BINBYTES8: lambda machine: machine.push_bytes(_UINT64),
        pickle.EMPTY_TUPLE: lambda machine: machine.push(()),
        pickle.TUPLE1: lambda machine: machine.push_tuple(1),
        pickle.TUPLE2: lambda machine: machine.push_tuple(2),
        pickle.TUPLE3: lambda machine: machine.push_tuple(3),
        pickle.TUPLE: lambda machine: machine.push_marked(tuple),
        pickle.EMPTY_LIST: lambda machine: machine.push([]),
        pickle.APPEND: _Machine.append,
        pickle.APPENDS: _Machine.appends,
        pickle.EMPTY_DICT: lambda machine: machine.push({}),
        pickle.SETITEM: _Machine.set_item,
        pickle.SETITEMS: _Machine.set_items,
        pickle.EMPTY_SET: lambda machine: machine.push(set()),
        pickle.ADDITEMS: _Machine.add_items,
        pickle.FROZENSET: _Machine.push_frozen_set,
        pickle.BINPUT: lambda machine: machine.put(_UINT8),
        pickle.LONG_BINPUT: lambda machine: machine.put(_UINT32),
        pickle.MEMOIZE: _Machine.memoize,
        pickle.BINGET: lambda machine: machine.push_memo(_UINT8),
        pickle.LONG_BINGET: lambda machine: machine.push_memo(_UINT32),
        pickle.GLOBAL: _Machine.global_,
        pickle.STACK_GLOBAL: _Machine.stack_global,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.call,
        pickle.BUILD: _Machine.build,
    }.items()
}
"""The operations that are read, by their codes."""
