"""Taking a state apart into tensors and a tree of Python values.

Works on objects by what they offer (`state_dict` and `load_state_dict`); what a tensor is, `Kinds` says, so this room
does not import torch.
Invariant: tensors are referred to, not copied, and each has a name of its own: its path in the state. Modules, optimizers
and schedulers are replicated: with several ranks each of their tensors is written once; everything else belongs to its rank.
Failure behaviour: `UsageError` naming the path of what cannot be saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from checkpoint.tree import MAX_DEPTH, StatefulNode, TensorRef, join
from dataio.core.errors import UsageError

MODULE, OPTIMIZER, SCHEDULER, OTHER = "module", "optimizer", "scheduler", "other"


class Kinds(Protocol):
    """What this room must know of torch."""

    def is_tensor(self, value: object) -> bool: ...
    def describe(self, tensor: Any, path: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape), or `UnsupportedError` naming the path."""
        ...

    def unwrap(self, value: object) -> object:
        """The module inside of a wrapper such as DistributedDataParallel; anything else is itself."""
        ...

    def kind(self, value: object) -> str:
        """module, optimizer, scheduler or other, of an object with a state."""
        ...

    def buffers(self, module: Any) -> list[str]:
        """Keys of a module's state that are no parameters: ranks may differ in them, and rank 0's are the ones that count."""
        ...

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor in main memory."""
        ...

    def load(self, kind: str, value: Any, state: object) -> None:
        """`value.load_state_dict(state)`, keeping every element's bits."""
        ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a state. `replicated`: every rank has it; `first`: and rank 0's is the one to save."""

    name: str
    tensor: Any
    dtype: str
    shape: tuple[int, ...]
    replicated: bool
    first: bool = False


@dataclass(frozen=True, slots=True)
class Flat:
    """A state taken apart: the tree refers to the leaves by name."""

    tree: object
    leaves: list[Leaf]


def is_stateful(value: object) -> bool:
    """Whether the object saves and loads its own state."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def flatten(state: object, kinds: Kinds) -> Flat:
    """Take `state`, a dict, apart. Tensors are referred to, not copied."""
    if not isinstance(state, dict):
        raise UsageError(
            f"the state is a {type(state).__name__}", hint='give a dict such as {"model": model, "optim": optim}'
        )
    leaves: dict[str, Leaf] = {}
    tree = _flatten(state, "", False, kinds, leaves, 0)
    return Flat(tree, list(leaves.values()))


def _flatten(value: Any, path: str, replicated: bool, kinds: Kinds, leaves: dict[str, Leaf], depth: int) -> object:
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:200]}: the state is nested deeper than {MAX_DEPTH}", hint="does it contain itself?")
    if kinds.is_tensor(value):
        if path in leaves:
            raise UsageError(f"two entries of the state are both called {path!r}", hint="rename one of them")
        dtype, shape = kinds.describe(value, path)
        leaves[path] = Leaf(path, value, dtype, shape, replicated)
        return TensorRef(path)
    if is_stateful(value):
        kind = kinds.kind(value)
        inner = kinds.unwrap(value)
        below = _flatten(state_of(inner, path), path, replicated or kind != OTHER, kinds, leaves, depth + 1)
        for name in kinds.buffers(inner) if kind == MODULE else ():
            if (leaf := leaves.get(join(path, name))) is not None:
                leaves[leaf.name] = replace(leaf, first=True)
        return StatefulNode(kind, below)
    if isinstance(value, dict):
        items = {k: _flatten(v, join(path, k), replicated, kinds, leaves, depth + 1) for k, v in value.items()}
        return items if type(value) is dict else _same_dict(value, items)
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        parts = [_flatten(v, join(path, i), replicated, kinds, leaves, depth + 1) for i, v in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def state_of(value: Any, path: str) -> object:
    state = value.state_dict()
    if isinstance(state, Mapping) and not isinstance(state, dict):
        return dict(state)
    if is_stateful(state):
        raise UsageError(f"{path}: state_dict() of {type(value).__name__} returned an object with a state of its own")
    return state


def _same_dict(value: dict[Any, Any], items: dict[Any, Any]) -> object:
    """The items in a dict of the same type, where that type is one that can be saved; else the value, to be refused."""
    if isinstance(value, OrderedDict):
        return OrderedDict(items)
    try:
        copied = value.copy()
        copied.clear()
        copied.update(items)
    except Exception:
        return value
    return copied
