"""Flatten a state into tensors and a tree of Python values.

Objects are recognised by their methods (`state_dict` and `load_state_dict`). `share` then joins tensors that are
overlapping views of the same memory. They are saved once, as one tensor of bytes from the first to the last byte that
any of them uses. Nodes of the tree describe the views, so the views share memory again after a restore. Views that do
not overlap are saved separately.

Invariants:

- Tensors are referenced, not copied. Each has a unique name, which is its path in the state.
- Modules, optimizers and schedulers are replicated. With several ranks, each of their tensors is written once, and so
  is each shard of a DTensor. Everything else is rank-local.
- Entries that are the same view of the same memory are saved as one tensor.
- The bytes of joined views are at most twice the bytes of the views themselves. Otherwise, the views are saved
  separately.
Failure behaviour: `UsageError` names the path of a value that cannot be saved.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from headrace.checkpoint.format.chunking import whole
from headrace.checkpoint.state import tensors, values
from headrace.checkpoint.state.tensors import MODULE, OTHER, LocalTensor
from headrace.checkpoint.state.tree import (
    MAX_DEPTH,
    PLAIN,
    MetaNode,
    PartsNode,
    StatefulNode,
    TensorRef,
    ValueNode,
    ViewRef,
    join,
)
from headrace.dataio.core.errors import UsageError


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a state.

    `replicated`: it belongs to all ranks. `first`: the lowest rank that holds it writes it.
    """

    name: str
    local: LocalTensor
    replicated: bool
    first: bool = False


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state: the tree refers to the leaves by name."""

    tree: object
    leaves: list[Leaf]


def is_stateful(value: object) -> bool:
    """Whether the object has `state_dict` and `load_state_dict`."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def never(path: str) -> bool:
    """The default of `replicated_path`: no entry is replicated by its path."""
    return False


def flatten(state: object, replicated_path: Callable[[str], bool] = never) -> Flat:
    """Flatten `state`, a dict. Tensors are referenced, not copied.

    `replicated_path` returns whether the entry at a path is the same on all ranks. Modules, optimizers, schedulers and
    DTensors are replicated in any case.
    """
    if not isinstance(state, dict):
        raise UsageError(
            f"the state is a {type(state).__name__}", hint='give a dict such as {"model": model, "optim": optim}'
        )
    flattener = _Flattener(replicated_path)
    tree = flattener.value(_as_dict(state), "", False, 0)
    return Flat(tree, list(flattener.leaves.values()))


class _Flattener:
    def __init__(self, replicated_path: Callable[[str], bool]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._replicated_path = replicated_path
        self._named: set[str] = set()
        self._at: dict[int, Leaf] = {}
        self._views: dict[Hashable, str] = {}

    def value(self, value: Any, path: str, replicated: bool, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{path[:200]}: the state is nested deeper than {MAX_DEPTH}", hint="does it contain itself?"
            )
        if isinstance(value, torch.Tensor):
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
        if (node := values.encode(value)) is not None:
            return ValueNode(node.kind, node.about, self.value(node.value, path, replicated, depth + 1))
        return value

    def _stateful(self, value: Any, path: str, replicated: bool, depth: int) -> StatefulNode:
        kind = tensors.kind_of(value)
        inner = tensors.unwrap(value)
        below = self.value(state_of(inner, path), path, replicated or kind != OTHER, depth + 1)
        for name in tensors.buffer_names(inner) if kind == MODULE else ():
            leaf = self.leaves.get(join(path, name))
            if leaf is not None and not leaf.local.sharded:
                self.leaves[leaf.name] = msgspec.structs.replace(leaf, first=True)
        return StatefulNode(kind, below)

    def _tensor(self, tensor: Any, path: str, replicated: bool, depth: int) -> object:
        if path in self._named:
            raise UsageError(f"two entries of the state are both called {path!r}", hint="rename one of them")
        self._named.add(path)
        if (plain := tensors.describe_plain(tensor)) is not None:
            return TensorRef(self._add(Leaf(path, plain, replicated or self._replicated_path(path))))
        bare = tensors.meta_shape(tensor)
        if bare is not None:
            return MetaNode(*bare)
        parts = tensors.parts_of(tensor, path)
        replicated = replicated or self._replicated_path(path)
        if parts is None:
            local = tensors.describe(tensor, path)
            return TensorRef(self._add(Leaf(path, local, replicated or local.sharded)))
        inner = {k: self.value(v, join(path, k), replicated, depth + 1) for k, v in parts.tensors.items()}
        return PartsNode(parts.kind, parts.values, inner)

    def _add(self, leaf: Leaf) -> str:
        """The name under which the tensor is saved. The same view of the same memory has the earlier leaf's name."""
        if leaf.local.address is not None:
            earlier = self._at.setdefault(leaf.local.address, leaf)
            if earlier is not leaf:  # rare, so views are compared for these only
                self._views.setdefault(_view_key(earlier), earlier.name)
                name = self._views.setdefault(_view_key(leaf), leaf.name)
                if name != leaf.name:
                    return name
        self.leaves[leaf.name] = leaf
        return leaf.name


def _view_key(leaf: Leaf) -> Hashable:
    return leaf.local.memory, leaf.local.box, leaf.replicated


def state_of(value: Any, path: str) -> object:
    """`value.state_dict()`. A mapping of another type becomes a dict."""
    state = value.state_dict()
    if isinstance(state, Mapping):
        return _as_dict(state)
    if is_stateful(state):
        raise UsageError(f"{path}: state_dict() of {type(value).__name__} returned an object with a state of its own")
    return state


def _as_dict(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state's outermost mapping as a dict. Only dict, OrderedDict, Counter and defaultdict keep their type."""
    kept_types: tuple[type, ...] = (dict, OrderedDict, Counter, defaultdict)
    return state if isinstance(state, dict) and type(state) in kept_types else dict(state)


_ALIGN = 16
"""Joined bytes start at a multiple of the widest element."""


@dataclass(frozen=True, slots=True)
class _Reach:
    leaf: Leaf
    start: int
    stop: int


def share(flat: Flat) -> Flat:
    """`flat` with overlapping views joined into one tensor of bytes."""
    views: dict[str, ViewRef] = {}
    bases: dict[str, Leaf] = {}
    for group in _groups(flat.leaves):
        base, refs = _joined(group)
        bases[group[0].leaf.name] = base
        views |= refs
    if not views:
        return flat
    leaves = [bases.get(leaf.name, leaf) for leaf in flat.leaves if leaf.name in bases or leaf.name not in views]
    return Flat(_renamed(flat.tree, views), leaves)


def _groups(leaves: list[Leaf]) -> Iterator[list[_Reach]]:
    for sharing in _sharing_storage(leaves):
        reaches = ((leaf, tensors.byte_range(leaf.local.tensor)) for leaf in sharing)
        members = [_Reach(leaf, *reach) for leaf, reach in reaches if reach is not None]
        for group in tensors.overlapping((member, (member.start, member.stop)) for member in members):
            if len(group) > 1 and _is_worth_joining(group):
                yield sorted(group, key=lambda m: m.leaf.name)


def _sharing_storage(leaves: list[Leaf]) -> Iterator[list[Leaf]]:
    """Leaves whose tensors have a common storage, which is rare."""
    first: dict[int, Leaf] = {}
    more: dict[int, list[Leaf]] = {}
    for leaf in leaves:
        local = leaf.local
        if not local.sharded and local.address is not None:
            start = local.address - local.tensor.storage_offset() * local.tensor.element_size()
            earlier = first.setdefault(start, leaf)
            if earlier is not leaf:
                more.setdefault(start, [earlier]).append(leaf)
    for several in more.values():
        alike: dict[Hashable, list[Leaf]] = defaultdict(list)
        for leaf in several:
            alike[leaf.local.tensor.device, leaf.replicated, leaf.first].append(leaf)
        yield from (group for group in alike.values() if len(group) > 1)


def _is_worth_joining(group: list[_Reach]) -> bool:
    member_bytes: int = sum(member.leaf.local.tensor.nbytes for member in group)
    return max(m.stop for m in group) - min(m.start for m in group) <= 2 * member_bytes


def _joined(group: list[_Reach]) -> tuple[Leaf, dict[str, ViewRef]]:
    start = min(member.start for member in group) // _ALIGN * _ALIGN
    stop = max(member.stop for member in group)
    first = group[0].leaf
    local = LocalTensor(tensors.storage_bytes(first.local.tensor, start, stop), "uint8", whole((stop - start,)))
    refs = {member.leaf.name: _view(member.leaf, first.name, start) for member in group}
    return Leaf(first.name, local, first.replicated, first.first), refs


def _view(leaf: Leaf, base: str, start: int) -> ViewRef:
    tensor = leaf.local.tensor
    offset = tensor.storage_offset() * tensor.element_size() - start
    return ViewRef(base, leaf.local.dtype, leaf.local.shape, tuple(tensor.stride()), offset)


def _renamed(tree: Any, views: dict[str, ViewRef]) -> Any:
    if isinstance(tree, TensorRef):
        return views.get(tree.name, tree)
    if isinstance(tree, StatefulNode):
        return StatefulNode(tree.kind, _renamed(tree.state, views))
    if isinstance(tree, ValueNode):
        return ValueNode(tree.kind, tree.about, _renamed(tree.value, views))
    if isinstance(tree, PartsNode):
        return PartsNode(tree.kind, tree.values, _renamed(tree.parts, views))
    if isinstance(tree, dict):
        for key, value in tree.items():
            tree[key] = _renamed(value, views)
        return tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(_renamed(value, views) for value in tree)
    return tree
