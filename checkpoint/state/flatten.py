"""Taking a state apart into tensors and a tree of Python values.

Works on objects by what they offer (`state_dict` and `load_state_dict`); what a tensor is, `Kinds` says, so this room
does not import torch.
Invariant: tensors are referred to, not copied, and each has a name of its own: its path in the state. Modules, optimizers
and schedulers are replicated: with several ranks each of their tensors is written once, and so is each part of a tensor that is
spread over ranks; everything else belongs to its rank. Entries that are the same view of the same memory are one tensor.
Failure behaviour: `UsageError` naming the path of what cannot be saved.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.state.tree import (
    MAX_DEPTH,
    PLAIN,
    MetaNode,
    PartsNode,
    StatefulNode,
    TensorRef,
    ValueNode,
    join,
)
from headrace.dataio.core.errors import UsageError

MODULE, OPTIMIZER, SCHEDULER, OTHER = "module", "optimizer", "scheduler", "other"


class Seen(msgspec.Struct, frozen=True, gc=False):
    """A tensor as this rank has it: `tensor` holds the elements `box` of a global one.

    `sharded`: the tensor is spread over ranks, evenly or not; it belongs to all of them.
    `memory`: equal for tensors that are the same view of the same memory; None when nothing is there.
    """

    tensor: Any
    dtype: str
    box: Box
    sharded: bool = False
    memory: Hashable = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return self.box.shape


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor made of others. `kind` as in `tree.PartsNode`; `values` are plain; `tensors` are its parts."""

    kind: str
    values: object
    tensors: dict[str, Any]


class Kinds(Protocol):
    """What this room must know of torch."""

    def is_tensor(self, value: object) -> bool: ...
    def describe(self, tensor: Any, path: str) -> Seen:
        """What this rank holds of it, or `UnsupportedError` naming the path."""
        ...

    def taken(self, value: object) -> ValueNode | None:
        """A value that is no tensor as a node, None when its type cannot be saved."""
        ...

    def made(self, node: ValueNode) -> Any:
        """The value of a node of which `value` was made already."""
        ...

    def parts(self, tensor: Any, path: str) -> Parts | None:
        """The parts of a tensor that is made of others, None for one with memory of its own."""
        ...

    def bare(self, tensor: Any) -> tuple[str, tuple[int, ...]] | None:
        """(dtype, shape) of a tensor that has no bytes (on the meta device), None for any other."""
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

    def parameters(self, optimizer: Any) -> list[Any]:
        """The optimizer's parameters, in the order of its groups."""
        ...

    def empty(self, dtype: str, shape: tuple[int, ...], model: Any = None) -> Any:
        """A new tensor, on the device and with the placement of `model` when that is given, else in main memory."""
        ...

    def nothing(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A tensor without bytes."""
        ...

    def assemble(self, parts: Parts) -> Any:
        """A tensor made of parts whose elements may be set later; None when only an existing one can be filled."""

    def check(self, parts: Parts, path: str) -> None:
        """`CorruptionError` if the parts, whose elements are set by now, are not those of such a tensor."""
        ...

    def assign(self, tensor: Any, value: Any) -> None:
        """Give a tensor the elements of another, whatever their layouts and types."""
        ...

    def storage(self, tensor: Any) -> Hashable:
        """Equal for tensors that are views of the same memory; None when unknown."""
        ...

    def reach(self, tensor: Any) -> tuple[int, int] | None:
        """The bytes [start, stop) that it reaches of the memory that it is a view of; None when unknown."""
        ...

    def storage_bytes(self, tensor: Any, start: int, stop: int) -> Any:
        """The bytes [start, stop) of the memory that `tensor` is a view of."""
        ...

    def view(self, base: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
        """A view of the bytes `base` from byte `offset`; `stride` in elements."""
        ...

    def load(self, kind: str, value: Any, state: object) -> None:
        """`value.load_state_dict(state)`, keeping every element's bits."""
        ...


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a state. `replicated`: it belongs to all ranks; `first`: and rank 0's is the one to save."""

    name: str
    seen: Seen
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


def nowhere(path: str) -> bool:
    """No entry is said to be the same on all ranks."""
    return False


def flatten(state: object, kinds: Kinds, everywhere: Callable[[str], bool] = nowhere) -> Flat:
    """Take `state`, a dict, apart. Tensors are referred to, not copied.

    `everywhere`: whether the entry of this path is the same on all ranks although nothing else says so.
    """
    if not isinstance(state, dict):
        raise UsageError(
            f"the state is a {type(state).__name__}", hint='give a dict such as {"model": model, "optim": optim}'
        )
    flattener = _Flattener(kinds, everywhere)
    tree = flattener.value(_as_dict(state), "", False, 0)
    return Flat(tree, list(flattener.leaves.values()))


class _Flattener:
    def __init__(self, kinds: Kinds, everywhere: Callable[[str], bool]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._kinds, self._everywhere = kinds, everywhere
        self._named: set[str] = set()
        self._memory: dict[Hashable, str] = {}

    def value(self, value: Any, path: str, replicated: bool, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{path[:200]}: the state is nested deeper than {MAX_DEPTH}", hint="does it contain itself?"
            )
        if self._kinds.is_tensor(value):
            return self._tensor(value, path, replicated, depth)
        if is_stateful(value):
            return self._stateful(value, path, replicated, depth)
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in (dict, OrderedDict, Counter):
            return kind({k: self.value(v, join(path, k), replicated, depth + 1) for k, v in value.items()})
        if kind in (list, tuple):
            return kind(self.value(v, join(path, i), replicated, depth + 1) for i, v in enumerate(value))
        if (node := self._kinds.taken(value)) is not None:
            return ValueNode(node.kind, node.about, self.value(node.value, path, replicated, depth + 1))
        return value

    def _stateful(self, value: Any, path: str, replicated: bool, depth: int) -> StatefulNode:
        kind = self._kinds.kind(value)
        inner = self._kinds.unwrap(value)
        below = self.value(state_of(inner, path), path, replicated or kind != OTHER, depth + 1)
        for name in self._kinds.buffers(inner) if kind == MODULE else ():
            leaf = self.leaves.get(join(path, name))
            if leaf is not None and not leaf.seen.sharded:
                self.leaves[leaf.name] = msgspec.structs.replace(leaf, first=True)
        return StatefulNode(kind, below)

    def _tensor(self, tensor: Any, path: str, replicated: bool, depth: int) -> object:
        if path in self._named:
            raise UsageError(f"two entries of the state are both called {path!r}", hint="rename one of them")
        self._named.add(path)
        bare = self._kinds.bare(tensor)
        if bare is not None:
            return MetaNode(*bare)
        parts = self._kinds.parts(tensor, path)
        replicated = replicated or self._everywhere(path)
        if parts is None:
            seen = self._kinds.describe(tensor, path)
            return TensorRef(self._add(Leaf(path, seen, replicated or seen.sharded)))
        inner = {k: self.value(v, join(path, k), replicated, depth + 1) for k, v in parts.tensors.items()}
        return PartsNode(parts.kind, parts.values, inner)

    def _add(self, leaf: Leaf) -> str:
        """The name under which the tensor is saved: that of an earlier one which is the same view of the same memory."""
        if leaf.seen.memory is not None:
            name = self._memory.setdefault((leaf.seen.memory, leaf.seen.box, leaf.replicated), leaf.name)
            if name != leaf.name:
                return name
        self.leaves[leaf.name] = leaf
        return leaf.name


def state_of(value: Any, path: str) -> object:
    """`value.state_dict()`, as a dict where it is a mapping of another kind."""
    state = value.state_dict()
    if isinstance(state, Mapping):
        return _as_dict(state)
    if is_stateful(state):
        raise UsageError(f"{path}: state_dict() of {type(value).__name__} returned an object with a state of its own")
    return state


def _as_dict(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state's outermost mapping: only what is inside of it comes back with its type."""
    known: tuple[type, ...] = (dict, OrderedDict, Counter, defaultdict)
    return state if isinstance(state, dict) and type(state) in known else dict(state)
