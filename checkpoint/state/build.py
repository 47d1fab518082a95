"""Builds saved values that the state does not hold yet. Defines the plan of a restore (`Fit`).

Invariant: building a value reads nothing. The plan lists its tensors, and they are read later. Equal references share
one tensor, and views share their memory again.

Failure behaviour: `CorruptionError` if the tree names a tensor that the step does not hold, or if a view reaches
outside its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.checkpoint.format import chunking
from headrace.checkpoint.state import tensors, values
from headrace.checkpoint.state.own_states import OwnState
from headrace.checkpoint.state.tensors import OTHER, LocalTensor, Parts
from headrace.checkpoint.state.tree import MetaNode, PartsNode, StatefulNode, TensorRef, ValueNode, ViewRef, join
from headrace.dataio.core.errors import CorruptionError, MismatchError
from headrace.dataio.core.limits import CHECKED_BYTES, check_memory

Saved = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of every saved tensor by name."""


@dataclass(slots=True)
class Fit:
    """The plan of a restore, in this order: read `fresh`, run `checks`, load `own`, read `in_place`, run `late`.

    - `own` lists the objects that load their own state.
    - `only_state` and `only_step` list the paths that only the state and only the step have, where that is allowed.
    - `in_place` holds each tensor with the description of it that the fit recorded.
    """

    problems: list[str] = field(default_factory=list)
    only_state: list[str] = field(default_factory=list)
    only_step: list[str] = field(default_factory=list)
    fresh: list[tuple[str, Any]] = field(default_factory=list)
    checks: list[Callable[[], object]] = field(default_factory=list)
    own: list[OwnState] = field(default_factory=list)
    in_place: list[tuple[str, Any, LocalTensor]] = field(default_factory=list)
    late: list[Callable[[], object]] = field(default_factory=list)


class Builder:
    """Builds saved values, with new tensors that are read later. Equal references share one tensor."""

    def __init__(self, saved: Saved, plan: Fit) -> None:
        self._saved, self._plan = saved, plan
        self._built: dict[str, Any] = {}
        self._bytes = 0

    def meta(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a saved tensor."""
        if name not in self._saved:
            raise CorruptionError(f"the checkpoint refers to tensor {name!r:.200}, which it does not hold")
        return self._saved[name]

    def value(self, node: object, path: str) -> object:
        """The saved value itself."""
        if isinstance(node, TensorRef):
            return self.tensor(node.name)
        if isinstance(node, ViewRef):
            return self.view(node)
        if isinstance(node, (MetaNode, PartsNode, StatefulNode, ValueNode)):
            return self._special(node, path)
        if isinstance(node, dict):
            built = type(node)()
            built.update({k: self.value(v, join(path, k)) for k, v in node.items()})
            return built
        if isinstance(node, (list, tuple)):
            return type(node)(self.value(v, join(path, i)) for i, v in enumerate(node))
        return node

    def tensor(self, name: str, model: Any = None) -> Any:
        """A new tensor, to be read later. If `model` is given, the tensor has its placement."""
        if name not in self._built:
            dtype, shape = self.meta(name)
            if model is None:
                self._count(math.prod(shape) * chunking.ITEM_BYTES.get(dtype, 1))
            self._built[name] = tensors.empty_like(dtype, shape, model)
            self._plan.fresh.append((name, self._built[name]))
        return self._built[name]

    def _count(self, size: int) -> None:
        before, self._bytes = self._bytes, self._bytes + size
        if before // CHECKED_BYTES != self._bytes // CHECKED_BYTES:
            check_memory(self._bytes, "values of the checkpoint that the state does not hold yet")

    def view(self, ref: ViewRef) -> Any:
        """A view of bytes that are read later."""
        dtype, shape = self.meta(ref.name)
        size = chunking.ITEM_BYTES.get(ref.dtype, 0)
        last = sum((n - 1) * step for n, step in zip(ref.shape, ref.stride, strict=False))
        sound = size and dtype == "uint8" and len(shape) == 1 and len(ref.shape) == len(ref.stride)
        if not sound or 0 in ref.shape or ref.offset % size or ref.offset + (last + 1) * size > shape[0]:
            raise CorruptionError(f"the checkpoint holds a view that reaches outside tensor {ref.name!r:.200}")
        return tensors.view_of(self.tensor(ref.name), ref.dtype, ref.shape, ref.stride, ref.offset)

    def assembled(self, node: PartsNode, path: str) -> Any:
        """A sparse tensor whose parts are read later and then checked before use. None for a wrapper subclass."""
        inner = {name: self.value(part, join(path, name)) for name, part in node.parts.items()}
        tensor = tensors.assemble(parts := Parts(node.kind, node.values, inner))
        if tensor is not None:
            self._plan.checks.append(lambda: tensors.check_parts(parts, path))
        return tensor

    def _special(self, node: object, path: str) -> Any:
        if isinstance(node, MetaNode):
            return tensors.meta_tensor(node.dtype, node.shape)
        if isinstance(node, ValueNode):
            try:
                return values.decode(ValueNode(node.kind, node.about, self.value(node.value, path)))
            except MismatchError as error:
                self._plan.problems.append(f"{path}: {error}")
                return None
        tensor = self.assembled(node, path) if isinstance(node, PartsNode) else None
        if tensor is None:
            self._plan.problems.append(f"{path}: {kind_name(node)} in the checkpoint, a plain value in the state")
        return tensor


def plain(node: object, path: str) -> object:
    """A saved value without tensors. Views and meta tensors stay nodes of the tree."""
    if not isinstance(node, ValueNode):
        return node
    plan = Fit()
    value = Builder({}, plan).value(node, path)
    if plan.problems:
        raise MismatchError("; ".join(plan.problems))
    return value


def kind_name(node: object) -> str:
    """A description of a saved value for error texts."""
    if isinstance(node, (TensorRef, ViewRef)):
        return "a tensor"
    if isinstance(node, MetaNode):
        return "a meta tensor"
    if isinstance(node, PartsNode):
        return f"a tensor of kind {node.kind}"
    if isinstance(node, ValueNode):
        return f"a value of type {node.kind}"
    if isinstance(node, StatefulNode):
        return f"the state of a {node.kind}" if node.kind != OTHER else "the state of an object"
    return f"a {type(node).__name__}"
