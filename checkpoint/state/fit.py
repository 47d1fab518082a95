"""Compare a saved state with the state to restore into, and plan the restore. `Selection` chooses the entries to restore.

A pattern of a selection is a path in the state. `*` matches any characters, including slashes. `?` and `[...]` work as
in a shell. "model" and "model/*" match the whole model. "*/lora_*" matches every nested entry whose name begins with
"lora_".

Invariant: this module only compares and plans. The caller's state is unchanged until every name, shape and type is known
to fit. An entry is selected if both are true:

- `include` is empty, or one of its patterns matches the entry or a container of it.
- No pattern of `exclude` matches the entry or a container of it.

Objects that load their own state are restored as a whole. Modules, dicts and lists are restored entry by entry.

Failure behaviour: `MismatchError` describes the entries that are missing, unexpected, or of another shape, type or kind.
It names the first `_MOST_SAID` of them and counts the rest. `UsageError` is raised for more than `MOST` patterns, or for
a pattern that is not text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from headrace.checkpoint.state import tensors, values
from headrace.checkpoint.state.build import Builder, Fit, Saved, called
from headrace.checkpoint.state.flatten import is_stateful, state_of
from headrace.checkpoint.state.tensors import MODULE, OPTIMIZER, LocalTensor
from headrace.checkpoint.state.tree import (
    MAX_DEPTH,
    MetaNode,
    PartsNode,
    StatefulNode,
    TensorRef,
    ValueNode,
    ViewRef,
    join,
)
from headrace.dataio.core.errors import MismatchError, UsageError

_MOST_SAID = 8
_SEQUENCES = ("namedtuple", "collections.deque")


def fit(state: object, tree: object, saved: Saved, selection: Selection | None = None) -> Fit:
    """Compare the selected entries of `state` with a saved tree. Raises `MismatchError` if any entry does not fit."""
    if not isinstance(state, dict):
        raise UsageError(f"the state is a {type(state).__name__}", hint="give the dict that was saved")
    fitter = _Fitter(saved, selection or Selection())
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
        hint="nothing was changed; build the state as it was when it was saved, "
        "or restore a part of it: include=, exclude=, strict=False",
    )


class _Fitter:
    def __init__(self, saved: Saved, selection: Selection) -> None:
        self.plan, self._selection = Fit(), selection
        self._build = Builder(saved, self.plan)

    def say(self, path: str, what: str) -> None:
        self.plan.problems.append(f"{path or 'the state'}: {what}")

    def value(self, here: Any, there: object, path: str) -> object:
        """The value that the parent is to hold. It is `here` itself if it is changed in place or not restored."""
        if isinstance(here, dict) and isinstance(there, ValueNode) and isinstance(there.value, dict):
            there = there.value if self._holds(here) or not self._selection.everything else there  # a defaultdict
        if self._holds(here) or (isinstance(here, dict) and isinstance(there, dict) and not self._selection.everything):
            return self._container(here, there, path)
        if is_stateful(here) and tensors.kind_of(here) == MODULE:
            self._module(here, there, path)
            return here
        if not self._selection.takes(path):
            return here
        if isinstance(here, torch.Tensor):
            self.tensor(here, there, path)
            return here
        if is_stateful(here):
            self._stateful(here, there, path)
            return here
        return self._build.value(there, path)

    def _container(self, here: Any, there: object, path: str) -> object:
        if isinstance(here, dict) and isinstance(there, dict):
            return self.items(here, there, path)
        if isinstance(here, (list, tuple)) and type(there) is (list if isinstance(here, list) else tuple):
            return self.sequence(here, there, path)
        if isinstance(there, ValueNode) and there.kind in _SEQUENCES and isinstance(here, (tuple, deque)):
            return self._sequence_of(here, there, path)
        if self._selection.takes(path):
            self.say(path, f"a {type(here).__name__} here, {called(there)} in the checkpoint")
        return here

    def _sequence_of(self, here: Any, there: ValueNode, path: str) -> object:
        """Fit a named tuple or deque."""
        try:
            made = values.decode(there)  # its items are still nodes of the tree
        except MismatchError as error:
            if self._selection.takes(path):
                self.say(path, str(error))
            return here
        if type(made) is type(here) and getattr(made, "maxlen", None) == getattr(here, "maxlen", None):
            return self.sequence(here, made, path)
        if self._selection.takes(path):
            self.say(path, f"{_limited(here)} here, {_limited(made)} in the checkpoint")
        return here

    def tensor(self, here: Any, there: object, path: str) -> None:
        if tensors.meta_shape(here) is not None:
            self._bare(here, there, path)
        elif isinstance(there, PartsNode):
            self._parts(here, there, path)
        elif isinstance(there, (TensorRef, ViewRef)) and tensors.parts_of(here, path) is None:
            seen = tensors.describe(here, path)
            was = self._build.meta(there.name) if isinstance(there, TensorRef) else (there.dtype, there.shape)
            if self._alike(was, (seen.dtype, seen.shape), path):
                self._dense(here, there, seen)
        else:
            self.say(path, f"a tensor here, {called(there)} in the checkpoint")

    def _dense(self, here: Any, there: TensorRef | ViewRef, seen: LocalTensor) -> None:
        if isinstance(there, TensorRef):
            self.plan.in_place.append((there.name, here, seen))
        else:
            view = self._build.view(there)
            self.plan.late.append(lambda: tensors.assign(here, view))

    def _alike(self, was: tuple[str, tuple[int, ...]], now: tuple[str, tuple[int, ...]], path: str) -> bool:
        if was[1] != now[1]:
            self.say(path, f"shape {list(was[1])} in the checkpoint, {list(now[1])} here")
        elif was[0] != now[0] and not self._selection.cast:
            self.say(path, f"type {was[0]} in the checkpoint, {now[0]} here")
        else:
            return True
        return False

    def _bare(self, here: Any, there: object, path: str) -> None:
        now = tensors.meta_shape(here)
        if not isinstance(there, MetaNode):
            self.say(path, f"a tensor on the meta device here, {called(there)} in the checkpoint")
        elif (there.dtype, there.shape) != now:
            self.say(path, f"{there.dtype}{list(there.shape)} in the checkpoint, {now} here, both without bytes")

    def _parts(self, here: Any, there: PartsNode, path: str) -> None:
        mine = tensors.parts_of(here, path)
        if mine is None or mine.kind != there.kind or _shape(mine.values) != _shape(there.values):
            self.say(path, f"{mine.kind if mine else 'a dense tensor'} here, {called(there)} in the checkpoint")
        elif mine.kind.startswith("wrapper:"):
            for name, part in self._common(mine.tensors, there.parts, path):
                self.tensor(part, there.parts[name], join(path, name))
        else:
            made = self._build.assembled(there, path)
            self.plan.late.append(lambda: tensors.assign(here, made))

    def _stateful(self, here: Any, there: object, path: str) -> None:
        kind, inner = tensors.kind_of(here), tensors.unwrap(here)
        if not isinstance(there, StatefulNode) or there.kind == MODULE:
            self.say(path, f"a {type(inner).__name__} here, {called(there)} in the checkpoint")
            return
        if kind == OPTIMIZER:
            state = self._optimizer(inner, there.state, path)
        else:
            state = self._build.value(there.state, path)
        self.plan.early.append(lambda: tensors.load_state(kind, inner, state))

    def _module(self, given: Any, there: object, path: str) -> None:
        module = tensors.unwrap(given)
        here = state_of(module, path)
        if not isinstance(there, StatefulNode) or there.kind != MODULE:
            if self._selection.takes(path):
                self.say(path, f"a {type(module).__name__} here, {called(there)} in the checkpoint")
        elif not isinstance(here, dict) or not isinstance(there.state, dict):
            self.say(path, "its state is not a dict")
        else:
            new = {k: self.value(v, there.state[k], join(path, k)) for k, v in self._common(here, there.state, path)}
            if new:
                loaded = OrderedDict((key, new.get(key, value)) for key, value in here.items())
                self.plan.late.append(lambda: tensors.load_state(MODULE, module, loaded))

    def _optimizer(self, optimizer: Any, there: Any, path: str) -> object:
        """The saved state, with each tensor placed like its parameter."""
        here: Any = state_of(optimizer, path)
        try:
            sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (here, there)]
            numbers = [number for group in there["param_groups"] for number in group["params"]]
            entries = dict(there["state"])
        except (TypeError, KeyError, AttributeError):
            return self._build.value(there, path)  # not PyTorch's format: its own load_state_dict checks it
        if sizes[0] != sizes[1]:
            self.say(join(path, "param_groups"), f"groups of {sizes[1]} parameters in the checkpoint, {sizes[0]} here")
            return None
        params = dict(zip(numbers, tensors.parameters_of(optimizer), strict=False))
        state = {
            i: self._slots(entry, here["state"].get(i), params.get(i), join(f"{path}/state", i))
            for i, entry in entries.items()
        }
        rest = {key: self._build.value(value, join(path, key)) for key, value in there.items() if key != "state"}
        return {"state": state, **rest}

    def _slots(self, there: Any, here: Any, param: Any, path: str) -> object:
        if not isinstance(there, dict):
            return self._build.value(there, path)
        now = here if isinstance(here, dict) else {}
        return {key: self._slot(value, now.get(key), param, join(path, key)) for key, value in there.items()}

    def _slot(self, there: object, here: Any, param: Any, path: str) -> object:
        if not isinstance(there, TensorRef):
            return self._build.value(there, path)
        shape = self._build.meta(there.name)[1]
        if isinstance(here, torch.Tensor):
            was = tuple(here.shape)
            if was != shape:
                self.say(path, f"shape {list(shape)} in the checkpoint, {list(was)} here")
                return None
        model = here if isinstance(here, torch.Tensor) else param
        fits = isinstance(model, torch.Tensor) and tuple(model.shape) == shape and shape != ()
        return self._build.tensor(there.name, model if fits else None)

    def items(self, here: dict[Any, Any], there: dict[Any, Any], path: str) -> object:
        for key, value in self._common(here, there, path):
            new = self.value(value, there[key], join(path, key))
            if new is not value:
                self.plan.late.append(_setter(here, key, new))
        return here

    def sequence(self, here: Any, there: Any, path: str) -> object:
        if len(here) != len(there):
            if self._selection.takes(path):
                self.say(path, f"{len(there)} entries in the checkpoint, {len(here)} here")
            return here
        new = [self.value(a, b, join(path, i)) for i, (a, b) in enumerate(zip(here, there, strict=True))]
        if isinstance(here, tuple):
            kind = type(here) if hasattr(here, "_fields") else tuple
            return tuple.__new__(kind, new) if any(a is not b for a, b in zip(new, here, strict=True)) else here
        for i, (value, old) in enumerate(zip(new, here, strict=True)):
            if value is not old:
                self.plan.late.append(_setter(here, i, value))
        return here

    def _common(self, here: dict[Any, Any], there: dict[Any, Any], path: str) -> list[tuple[Any, Any]]:
        self._missing((join(path, key) for key in here if key not in there), "missing in the checkpoint")
        self._missing((join(path, key) for key in there if key not in here), "in the checkpoint, but not here")
        return [(key, value) for key, value in here.items() if key in there]

    def _missing(self, paths: Iterable[str], what: str) -> None:
        for path in paths:
            if self._selection.takes(path):
                if self._selection.strict:
                    self.say(path, what)
                else:
                    self.plan.skipped.append(path)

    def _holds(self, value: object, depth: int = 0) -> bool:
        """Whether the container holds a tensor or a stateful object, and so must be restored in place."""
        if depth > MAX_DEPTH:
            return False
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            inside = value.values() if isinstance(value, dict) else value
            return any(isinstance(v, torch.Tensor) or is_stateful(v) or self._holds(v, depth + 1) for v in inside)
        return False


def _setter(holder: Any, key: object, value: object) -> Callable[[], object]:
    return lambda: holder.__setitem__(key, value)


def _limited(value: Any) -> str:
    limit = getattr(value, "maxlen", None)
    return f"a {type(value).__name__}" + (f" of at most {limit}" if limit is not None else "")


def _shape(values: object) -> object:
    return values.get("shape") if isinstance(values, dict) else None


MOST = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries to restore.

    `strict`: an entry that only one side has is an error. Otherwise, it is skipped.
    `cast`: a tensor of another type is converted. Otherwise, it is an error.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = True
    cast: bool = False
    _matched: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(
        cls, include: str | Iterable[str] | None, exclude: str | Iterable[str], strict: bool, cast: bool
    ) -> Selection:
        """From one pattern or several."""
        return cls(_patterns(include if include is not None else ()), _patterns(exclude), strict, cast)

    def takes(self, path: str) -> bool:
        """Whether the entry at `path` is selected."""
        if any(_matches(path, pattern) for pattern in self.exclude):
            return False
        found = [pattern for pattern in self.include if _matches(path, pattern)]
        self._matched.update(found)
        return not self.include or bool(found)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Patterns of `include` that matched no path so far."""
        return tuple(pattern for pattern in self.include if pattern not in self._matched)

    @property
    def everything(self) -> bool:
        return not self.include and not self.exclude


def matching(given: str | Iterable[str]) -> Callable[[str], bool]:
    """A function that tells whether a path, or a container of it, matches one of these patterns."""
    patterns = _patterns(given)
    return lambda path: any(_matches(path, pattern) for pattern in patterns)


def _patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    several: object = given
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(several, Iterable) else ("",)
    if len(found) > MOST or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise UsageError(f"patterns are texts, at most {MOST}", hint='for example include=["model/*"]')
    return found


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.rstrip("/") + "/*")
