"""Taking a state apart into tensors and a tree of Python values, and fitting a saved one into a state that is there.

Works on objects by what they offer (`state_dict` and `load_state_dict`); what a tensor is, `Kinds` says, so this room
does not import torch. Invariant: fitting only compares and plans; nothing of the caller's state changes before every
name, shape and type was found to fit. Modules, optimizers and schedulers are replicated: with several ranks each of their
tensors is written once; everything else belongs to its rank.
Failure behaviour: `UsageError` naming the path of what cannot be saved, `MismatchError` naming what does not fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from checkpoint.tree import MAX_DEPTH, StatefulNode, TensorRef, join
from dataio.core.errors import CorruptionError, MismatchError, UsageError

MODULE, OPTIMIZER, SCHEDULER, OTHER = "module", "optimizer", "scheduler", "other"
_MOST_SAID = 8


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
        below = _flatten(_state_of(inner, path), path, replicated or kind != OTHER, kinds, leaves, depth + 1)
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


def _state_of(value: Any, path: str) -> object:
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


Saved = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of every saved tensor by name."""


@dataclass(slots=True)
class Fit:
    """What restoring will do, in this order: read `fresh`, run `early`, read `in_place`, run `late`.

    Objects that judge their own state (loaders) come early, so that their refusal leaves the modules untouched.
    """

    problems: list[str] = field(default_factory=list)
    fresh: list[tuple[str, Any]] = field(default_factory=list)
    early: list[Callable[[], object]] = field(default_factory=list)
    in_place: list[tuple[str, Any]] = field(default_factory=list)
    late: list[Callable[[], object]] = field(default_factory=list)


def fit(state: object, tree: object, saved: Saved, kinds: Kinds) -> Fit:
    """Compare `state` with a saved tree; `MismatchError` names everything that does not fit."""
    if not isinstance(state, dict):
        raise UsageError(f"the state is a {type(state).__name__}", hint="give the dict that was saved")
    fitter = _Fitter(saved, kinds)
    if isinstance(tree, dict):
        fitter.items(state, tree, "")
    else:
        fitter.say("", "the checkpoint does not hold a dict")
    if fitter.plan.problems:
        raise _mismatch(fitter.plan.problems)
    return fitter.plan


def _mismatch(problems: list[str]) -> MismatchError:
    more = f"; and {len(problems) - _MOST_SAID} more" if len(problems) > _MOST_SAID else ""
    return MismatchError(
        "the checkpoint does not fit the state: " + "; ".join(problems[:_MOST_SAID]) + more,
        hint="nothing was changed; build the state as it was when it was saved",
    )


class _Fitter:
    def __init__(self, saved: Saved, kinds: Kinds) -> None:
        self.plan, self._saved, self._kinds = Fit(), saved, kinds

    def say(self, path: str, what: str) -> None:
        self.plan.problems.append(f"{path or 'the state'}: {what}")

    def value(self, here: Any, there: object, path: str) -> object:
        """What the parent is to hold: `here` itself when it is changed in place."""
        if self._kinds.is_tensor(here):
            self.tensor(here, there, path)
            return here
        if is_stateful(here):
            self.stateful(here, there, path)
            return here
        if self._holds(here):
            if isinstance(here, dict) and isinstance(there, dict):
                return self.items(here, there, path)
            if isinstance(here, (list, tuple)) and type(there) is (list if isinstance(here, list) else tuple):
                return self.sequence(here, there, path)
            self.say(path, f"a {type(here).__name__} here, {_called(there)} in the checkpoint")
            return here
        return self.build(there, path)

    def tensor(self, here: Any, there: object, path: str) -> None:
        if not isinstance(there, TensorRef):
            self.say(path, f"a tensor here, {_called(there)} in the checkpoint")
            return
        dtype, shape = self._kinds.describe(here, path)
        was_dtype, was_shape = self._meta(there)
        if was_shape != shape:
            self.say(path, f"shape {list(was_shape)} in the checkpoint, {list(shape)} here")
        elif was_dtype != dtype:
            self.say(path, f"type {was_dtype} in the checkpoint, {dtype} here")
        else:
            self.plan.in_place.append((there.name, here))

    def stateful(self, here: Any, there: object, path: str) -> None:
        kind, inner = self._kinds.kind(here), self._kinds.unwrap(here)
        if not isinstance(there, StatefulNode) or (there.kind == MODULE) != (kind == MODULE):
            self.say(path, f"a {type(inner).__name__} here, {_called(there)} in the checkpoint")
            return
        if kind == MODULE:
            self._module(inner, there.state, path)
            return
        if kind == OPTIMIZER:
            self._optimizer(_state_of(inner, path), there.state, path)
        state = self.build(there.state, path)
        self.plan.early.append(lambda: self._kinds.load(kind, inner, state))

    def _module(self, module: Any, there: object, path: str) -> None:
        here = _state_of(module, path)
        if not isinstance(here, dict) or not isinstance(there, dict):
            self.say(path, "its state is not a dict")
            return
        loaded = {k: self.value(v, there[k], join(path, k)) for k, v in self._common(here, there, path)}
        self.plan.late.append(lambda: self._kinds.load(MODULE, module, OrderedDict(loaded)))

    def _optimizer(self, here: Any, there: Any, path: str) -> None:
        try:
            sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (here, there)]
            pairs = [
                (here["state"][i], there["state"][i], join(f"{path}/state", i))
                for i in here["state"]
                if i in there["state"]
            ]
        except (TypeError, KeyError, AttributeError):
            return  # not of torch's form: its own load_state_dict judges
        if sizes[0] != sizes[1]:
            self.say(join(path, "param_groups"), f"groups of {sizes[1]} parameters in the checkpoint, {sizes[0]} here")
        for mine, theirs, at in pairs:
            for key in mine if isinstance(mine, dict) and isinstance(theirs, dict) else ():
                self._same_shape(mine[key], theirs.get(key), join(at, key))

    def _same_shape(self, here: Any, there: object, path: str) -> None:
        if self._kinds.is_tensor(here) and isinstance(there, TensorRef):
            shape, was = self._kinds.describe(here, path)[1], self._meta(there)[1]
            if shape != was:
                self.say(path, f"shape {list(was)} in the checkpoint, {list(shape)} here")

    def items(self, here: dict[Any, Any], there: dict[Any, Any], path: str) -> object:
        for key, value in self._common(here, there, path):
            new = self.value(value, there[key], join(path, key))
            if new is not value:
                self.plan.late.append(_setter(here, key, new))
        return here

    def sequence(self, here: Any, there: Any, path: str) -> object:
        if len(here) != len(there):
            self.say(path, f"{len(there)} entries in the checkpoint, {len(here)} here")
            return here
        new = [self.value(a, b, join(path, i)) for i, (a, b) in enumerate(zip(here, there, strict=True))]
        if isinstance(here, tuple):
            return tuple(new) if any(a is not b for a, b in zip(new, here, strict=True)) else here
        for i, (value, old) in enumerate(zip(new, here, strict=True)):
            if value is not old:
                self.plan.late.append(_setter(here, i, value))
        return here

    def _common(self, here: dict[Any, Any], there: dict[Any, Any], path: str) -> list[tuple[Any, Any]]:
        for key in here:
            if key not in there:
                self.say(join(path, key), "missing in the checkpoint")
        for key in there:
            if key not in here:
                self.say(join(path, key), "in the checkpoint, but not here")
        return [(key, value) for key, value in here.items() if key in there]

    def _holds(self, value: object, depth: int = 0) -> bool:
        """Whether a tensor or an object with a state is inside, so that it must be restored in place."""
        if depth > MAX_DEPTH:
            return False
        if isinstance(value, (dict, list, tuple)):
            inside = value.values() if isinstance(value, dict) else value
            return any(self._kinds.is_tensor(v) or is_stateful(v) or self._holds(v, depth + 1) for v in inside)
        return False

    def build(self, there: object, path: str) -> object:
        """The saved value itself, with new tensors."""
        if isinstance(there, TensorRef):
            tensor = self._kinds.empty(*self._meta(there))
            self.plan.fresh.append((there.name, tensor))
            return tensor
        if isinstance(there, StatefulNode):
            self.say(path, f"{_called(there)} in the checkpoint, a plain value here")
            return None
        if isinstance(there, dict):
            built = type(there)()
            built.update({k: self.build(v, join(path, k)) for k, v in there.items()})
            return built
        if isinstance(there, (list, tuple)):
            return type(there)(self.build(v, join(path, i)) for i, v in enumerate(there))
        return there

    def _meta(self, ref: TensorRef) -> tuple[str, tuple[int, ...]]:
        if ref.name not in self._saved:
            raise CorruptionError(f"the checkpoint names tensor {ref.name!r:.200} and does not hold it")
        return self._saved[ref.name]


def _setter(holder: Any, key: object, value: object) -> Callable[[], object]:
    return lambda: holder.__setitem__(key, value)


def _called(there: object) -> str:
    if isinstance(there, TensorRef):
        return "a tensor"
    if isinstance(there, StatefulNode):
        return f"the state of a {there.kind}" if there.kind != OTHER else "the state of an object"
    return f"a {type(there).__name__}"
