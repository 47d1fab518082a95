"""Tensors that share memory without being the same view of it: saved once as bytes, and shared again on restore.

Views of one memory that overlap become one tensor of bytes, which reaches from the first to the last byte that any of them
uses, and nodes of the tree that say how to look at it. Views that do not overlap stay what they are.

Invariant: what a view shows after a restore is what it showed when it was saved.
The bytes stored are at most twice what the views would have taken on their own: views that are far apart in their memory are
stored one by one instead.
Failure behaviour: none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.format.chunking import whole
from headrace.checkpoint.state.flatten import Flat, Kinds, Leaf, Seen
from headrace.checkpoint.state.tree import PartsNode, StatefulNode, TensorRef, ValueNode, ViewRef

_ALIGN = 16
"""Bytes start at a multiple of the widest element."""


@dataclass(frozen=True, slots=True)
class _Reach:
    leaf: Leaf
    start: int
    stop: int


def share(flat: Flat, kinds: Kinds) -> Flat:
    """`flat` with overlapping views joined."""
    views: dict[str, ViewRef] = {}
    bases: dict[str, Leaf] = {}
    for group in _groups(flat.leaves, kinds):
        base, refs = _joined(group, kinds)
        bases[group[0].leaf.name] = base
        views |= refs
    if not views:
        return flat
    kept = [bases.get(leaf.name, leaf) for leaf in flat.leaves if leaf.name in bases or leaf.name not in views]
    return Flat(_renamed(flat.tree, views), kept)


def _groups(leaves: list[Leaf], kinds: Kinds) -> Iterator[list[_Reach]]:
    by_storage: dict[Hashable, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if not leaf.seen.sharded:
            by_storage[kinds.storage(leaf.seen.tensor), leaf.replicated, leaf.first].append(leaf)
    for sharing in by_storage.values():
        if len(sharing) > 1:  # few are: how far they reach is asked of those only
            found = ((leaf, kinds.reach(leaf.seen.tensor)) for leaf in sharing)
            members = [_Reach(leaf, *reach) for leaf, reach in found if reach is not None]
            yield from _overlapping(members) if len(members) > 1 else ()


def _overlapping(members: list[_Reach]) -> Iterator[list[_Reach]]:
    group: list[_Reach] = []
    end = -1
    for member in [*sorted(members, key=lambda m: m.start), None]:
        if member is not None and member.start < end:
            group.append(member)
            end = max(end, member.stop)
            continue
        if len(group) > 1 and _worth_it(group):
            yield sorted(group, key=lambda m: m.leaf.name)
        if member is not None:
            group, end = [member], member.stop


def _worth_it(group: list[_Reach]) -> bool:
    own: int = sum(member.leaf.seen.tensor.nbytes for member in group)
    return max(m.stop for m in group) - min(m.start for m in group) <= 2 * own


def _joined(group: list[_Reach], kinds: Kinds) -> tuple[Leaf, dict[str, ViewRef]]:
    start = min(member.start for member in group) // _ALIGN * _ALIGN
    stop = max(member.stop for member in group)
    first = group[0].leaf
    seen = Seen(kinds.storage_bytes(first.seen.tensor, start, stop), "uint8", whole((stop - start,)))
    refs = {member.leaf.name: _view(member.leaf, first.name, start) for member in group}
    return Leaf(first.name, seen, first.replicated, first.first), refs


def _view(leaf: Leaf, base: str, start: int) -> ViewRef:
    tensor = leaf.seen.tensor
    offset = tensor.storage_offset() * tensor.element_size() - start
    return ViewRef(base, leaf.seen.dtype, leaf.seen.shape, tuple(tensor.stride()), offset)


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
