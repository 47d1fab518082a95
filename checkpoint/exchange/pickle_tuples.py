"""Refuses pickles with tuples that would take forever to hash: `check_tuples(data, label)`.

`torch.load(weights_only=True)` runs no code, but it builds dicts. The hash of a key that is a tuple visits every object in
it, as often as it occurs. A tuple that has another one twice, which has another one twice, and so on, has 2 to the 60
objects after 60 steps. This module follows the operations of a pickle with the sizes of the values in place of the values.

Invariant: nothing is built. Time and memory are proportional to the size of the pickle. Lists, dicts and calls count as one
object, because they are no part of a hash.
Failure behaviour: `CorruptionError` for such a tuple, and for a pickle that is damaged.
"""

from __future__ import annotations

import pickletools
from typing import Any

from headrace.dataio.core.errors import CorruptionError

MOST = 1_000_000
"""The largest tuple, if the pickle is small. Otherwise, it is the number of the pickle's bytes."""
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "FROZENSET": None}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_GETS = ("GET", "BINGET", "LONG_BINGET")


def check_tuples(data: bytes, label: str) -> None:
    """Raise `CorruptionError` if the pickle has a tuple of too many objects. `label` names it in errors.

    Example:
        >>> import pickle
        >>> check_tuples(pickle.dumps({("a", 1): (2, 3)}), "a pickle")
    """
    try:
        largest = _largest_tuple(data, max(MOST, len(data)))
    except (ValueError, IndexError, KeyError) as error:
        raise CorruptionError(f"{label} cannot be read: {error!s:.200}", hint="copy or download it again") from None
    if largest > max(MOST, len(data)):
        raise CorruptionError(f"{label} has a tuple of more than {MOST} objects", hint="do not trust its author")


def _largest_tuple(data: bytes, enough: int) -> int:
    """The number of objects in the largest tuple. It ends at the first tuple with more than `enough`."""
    stack: list[int | None] = []  # sizes; None for a mark
    memo: dict[object, int | None] = {}
    largest = 0
    for code, argument, _ in pickletools.genops(data):
        if code.name in _TUPLES:
            length = _TUPLES[code.name]
            items = _above_mark(stack) if length is None else [stack.pop() or 1 for _ in range(length)]
            size = 1 + sum(items)
            largest = max(largest, size)
            if size > enough:
                break
            stack.append(size)
        elif code.name in _PUTS:
            memo[argument] = stack[-1]
        elif code.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif code.name in _GETS:
            stack.append(memo[argument])
        elif code.name == "DUP":
            stack.append(stack[-1])
        else:
            _follow(code, stack)
    return largest


def _follow(code: Any, stack: list[int | None]) -> None:
    """Do what any other operation does to the stack: take some values, and leave values that count as one object."""
    before = code.stack_before
    if pickletools.markobject in before:
        _above_mark(stack)
        before = before[: before.index(pickletools.markobject)]
    for _ in before:
        stack.pop()
    stack += [None if kind is pickletools.markobject else 1 for kind in code.stack_after]


def _above_mark(stack: list[int | None]) -> list[int]:
    """Take the values above the last mark, and the mark."""
    items = []
    while (item := stack.pop()) is not None:
        items.append(item)
    return items
