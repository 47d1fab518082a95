"""Fitting a saved state into one that is there: compare everything, then say what to read and what to do.

Invariant: fitting only compares and plans; nothing of the caller's state changes before every name, shape and type was
found to fit.
Failure behaviour: `MismatchError` names everything that is missing, not expected, or of another shape, type or kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoint.state import MODULE, OPTIMIZER, OTHER, Kinds, is_stateful, state_of
from checkpoint.tree import MAX_DEPTH, StatefulNode, TensorRef, join
from dataio.core.errors import CorruptionError, MismatchError, UsageError

_MOST_SAID = 8

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
            self._optimizer(state_of(inner, path), there.state, path)
        state = self.build(there.state, path)
        self.plan.early.append(lambda: self._kinds.load(kind, inner, state))

    def _module(self, module: Any, there: object, path: str) -> None:
        here = state_of(module, path)
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
