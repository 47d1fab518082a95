"""Compares the values of two steps that are not tensors: numbers, text, settings of optimizers, states of loaders.

Invariant: values are compared by type and content; a NaN equals a NaN. At most `MOST` differences are listed, each with
at most `CHARACTERS` of each value. The others are counted.
Failure behaviour: `CorruptionError` for a damaged document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.tree import MetaNode, PartsNode, StatefulNode, TensorRef, ValueNode, ViewRef, join

MOST = 200
CHARACTERS = 80
_MISSING = object()


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value that differs. `a` and `b` are shortened texts of it; None if the step does not have the value."""

    path: str
    rank: int
    a: str | None
    b: str | None


@dataclass(slots=True)
class ValueChanges:
    """The first `MOST` values that differ, and the number of all of them."""

    listed: list[ValueChange] = field(default_factory=list)
    total: int = 0

    def add(self, path: str, rank: int, a: object, b: object) -> None:
        self.total += 1
        if len(self.listed) < MOST:
            self.listed.append(ValueChange(path[:500], rank, _text(a), _text(b)))


def changes(a: Step, b: Step) -> ValueChanges:
    """Compare the values of two steps, rank by rank. With different numbers of ranks, only those of rank 0."""
    found = ValueChanges()
    ranks = len(a.manifests) if len(a.manifests) == len(b.manifests) else 1
    for rank in range(ranks):
        ours, theirs = a.manifests[rank].tree, b.manifests[rank].tree
        if ours != theirs:
            _compare(dict(_leaves(tree.decode(ours), "")), dict(_leaves(tree.decode(theirs), "")), rank, found)
    return found


def _compare(ours: dict[str, object], theirs: dict[str, object], rank: int, found: ValueChanges) -> None:
    for path, value in ours.items():
        other = theirs.get(path, _MISSING)
        if not _equal(value, other):
            found.add(path, rank, value, other)
    for path, value in theirs.items():
        if path not in ours:
            found.add(path, rank, _MISSING, value)


def _leaves(node: object, path: str) -> Iterator[tuple[str, object]]:
    """The values by path. Tensors are left out, because they are compared on their own."""
    if isinstance(node, StatefulNode):
        yield from _leaves(node.state, path)
    elif isinstance(node, PartsNode):
        yield f"{path} (kind)", node.kind
        yield from _leaves(node.parts, path)
    elif isinstance(node, ValueNode):
        yield f"{path} ({node.kind})", node.about
        yield from _leaves(node.value, path)
    elif isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, join(path, key))
    elif isinstance(node, (list, tuple)) and any(isinstance(each, _HOLDERS) for each in node):
        for i, value in enumerate(node):
            yield from _leaves(value, join(path, i))
    elif not isinstance(node, (TensorRef, ViewRef)):
        yield path, node


_HOLDERS = (dict, list, tuple, TensorRef, ViewRef, MetaNode, PartsNode, StatefulNode, ValueNode)


def _equal(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


def _text(value: object) -> str | None:
    if value is _MISSING:
        return None
    if isinstance(value, (str, bytes)) and len(value) > 2 * CHARACTERS:
        value = value[: 2 * CHARACTERS]
    elif isinstance(value, (list, tuple)) and len(value) > CHARACTERS:
        value = value[:CHARACTERS]
    text = repr(value)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"
