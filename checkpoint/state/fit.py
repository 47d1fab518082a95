"""Compare a saved state with the state to restore into, and plan the restore.

`Selection` chooses the entries to restore.

A pattern of a selection is a path in the state. `*` matches any characters, including slashes. `?` and `[...]` work as
in a shell. "model" and "model/*" match the whole model. "*/lora_*" matches every nested entry whose name begins with
"lora_".

Objects that load their own state (optimizers, loaders) and plain values are restored as a whole. "optimizer" and
"optimizer/*" match such an object. No pattern matches a part of it.

Invariant: this module only compares and plans. The caller's state is unchanged until every name, shape and dtype is
known to fit. An entry is selected if both are true:

- `include` is empty, or one of its patterns matches the entry or a container of it.
- No pattern of `exclude` matches the entry or a container of it.

Modules, dicts, and lists with tensors are restored entry by entry.

Failure behaviour: `MismatchError` describes the entries that are missing, unexpected, or of another shape, dtype or
kind. It names the first `_MAX_NAMED` of them and counts the rest. `UsageError` is raised for more than `MOST` patterns,
and for a pattern that is empty or not a string.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from headrace.checkpoint.state import tensors, values
from headrace.checkpoint.state.build import Builder, Fit, Saved, kind_name
from headrace.checkpoint.state.flatten import is_stateful, state_of
from headrace.checkpoint.state.own_states import OwnState, can_force
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
    tensor_names,
)
from headrace.dataio.core.errors import MismatchError, UnsupportedError, UsageError

_MAX_NAMED = 8
_SEQUENCES = ("namedtuple", "collections.deque")


def fit(state: object, tree: object, saved: Saved, selection: Selection | None = None) -> Fit:
    """Compare the selected entries of `state` with a saved tree. Raises `MismatchError` if any entry does not fit."""
    if not isinstance(state, dict):
        raise UsageError(
            f"the state is a {type(state).__name__}", hint="give a dict with the keys of the dict that was saved"
        )
    fitter = _Fitter(saved, selection or Selection())
    if isinstance(tree, dict):
        fitter.items(state, tree, "")
    else:
        fitter.report("", "the checkpoint does not hold a dict")
    if fitter.plan.problems:
        raise _mismatch(fitter.plan.problems, fitter.strict)
    return fitter.plan


def _mismatch(problems: list[str], strict: bool) -> MismatchError:
    part = "restore a part of it: include=, exclude=, strict=False" if strict else "leave these entries out: exclude="
    more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
    return MismatchError(
        "the checkpoint does not fit the state: " + "; ".join(problems[:_MAX_NAMED]) + more,
        hint=f"the state is unchanged; build it as it was when it was saved, or {part}",
    )


class _Fitter:
    def __init__(self, saved: Saved, selection: Selection) -> None:
        self.plan, self._selection = Fit(), selection
        self._build = Builder(saved, self.plan)
        self.strict = self._selection.strict

    def report(self, path: str, problem: str) -> None:
        self.plan.problems.append(f"{path or 'the state'}: {problem}")

    def value(self, current: Any, saved: object, path: str) -> object:
        """The value for the container to hold. It is `current` itself if that is changed in place or not restored."""
        if type(saved) is TensorRef and (local := tensors.describe_plain(current)) is not None:  # nearly all values
            self._plain_tensor(current, saved, local, path)
            return current
        if (
            isinstance(current, dict)
            and isinstance(saved, ValueNode)
            and isinstance(saved.value, dict)  # a defaultdict
            and (self._holds_tensors(current) or not self._selection.everything)
        ):
            saved = saved.value
        if isinstance(current, dict) and isinstance(saved, StatefulNode):
            saved = saved.state  # the object was saved; the state has its state_dict()
        if self._holds_tensors(current) or (
            isinstance(current, dict) and isinstance(saved, dict) and not self._selection.everything
        ):
            return self._container(current, saved, path)
        if is_stateful(current) and tensors.kind_of(current) == MODULE:
            self._module(current, saved, path)
            return current
        if not self._selection.selects(path):
            return current
        if isinstance(current, torch.Tensor):
            self.tensor(current, saved, path)
            return current
        if is_stateful(current):
            self._stateful(current, saved, path)
            return current
        return self._build.value(saved, path)

    def _container(self, current: Any, saved: object, path: str) -> object:
        if isinstance(current, dict) and isinstance(saved, dict):
            return self.items(current, saved, path)
        if isinstance(current, (list, tuple)) and type(saved) is (list if isinstance(current, list) else tuple):
            return self.sequence(current, saved, path)
        if isinstance(saved, ValueNode) and saved.kind in _SEQUENCES and isinstance(current, (tuple, deque)):
            return self._sequence_of(current, saved, path)
        if self._selection.selects(path):
            self.report(path, f"a {type(current).__name__} in the state, {kind_name(saved)} in the checkpoint")
        return current

    def _sequence_of(self, current: Any, saved: ValueNode, path: str) -> object:
        """Fit a named tuple or deque."""
        try:
            sequence = values.decode(saved)  # its items are still nodes of the tree
        except MismatchError as error:
            if self._selection.selects(path):
                self.report(path, str(error))
            return current
        if type(sequence) is type(current) and getattr(sequence, "maxlen", None) == getattr(current, "maxlen", None):
            return self.sequence(current, sequence, path)
        if self._selection.selects(path):
            self.report(path, f"{_kind_and_limit(current)} in the state, {_kind_and_limit(sequence)} in the checkpoint")
        return current

    def _plain_tensor(self, current: Any, saved: TensorRef, local: LocalTensor, path: str) -> None:
        if self._selection.selects(path) and self._meta_matches(
            self._build.meta(saved.name), (local.dtype, local.shape), path
        ):
            self.plan.in_place.append((saved.name, current, local))

    def tensor(self, current: Any, saved: object, path: str) -> None:
        if tensors.meta_shape(current) is not None:
            self._meta_tensor(current, saved, path)
        elif isinstance(saved, PartsNode):
            self._parts(current, saved, path)
        elif isinstance(saved, (TensorRef, ViewRef)) and tensors.parts_of(current, path) is None:
            local = tensors.describe(current, path)
            saved_meta = self._build.meta(saved.name) if isinstance(saved, TensorRef) else (saved.dtype, saved.shape)
            if self._meta_matches(saved_meta, (local.dtype, local.shape), path):
                self._dense(current, saved, local)
        else:
            self.report(path, f"a tensor in the state, {kind_name(saved)} in the checkpoint")

    def _dense(self, current: Any, saved: TensorRef | ViewRef, local: LocalTensor) -> None:
        if isinstance(saved, TensorRef):
            self.plan.in_place.append((saved.name, current, local))
        else:
            view = self._build.view(saved)
            self.plan.late.append(lambda: tensors.assign(current, view))

    def _meta_matches(
        self, saved_meta: tuple[str, tuple[int, ...]], current_meta: tuple[str, tuple[int, ...]], path: str
    ) -> bool:
        if saved_meta[1] != current_meta[1]:
            self.report(path, f"shape {list(saved_meta[1])} in the checkpoint, {list(current_meta[1])} in the state")
        elif saved_meta[0] != current_meta[0] and not self._selection.cast:
            self.report(path, f"type {saved_meta[0]} in the checkpoint, {current_meta[0]} in the state")
        else:
            return True
        return False

    def _meta_tensor(self, current: Any, saved: object, path: str) -> None:
        current_meta = tensors.meta_shape(current)
        if not isinstance(saved, MetaNode):
            self.report(path, f"a tensor on the meta device in the state, {kind_name(saved)} in the checkpoint")
        elif (saved.dtype, saved.shape) != current_meta:
            self.report(
                path,
                f"{saved.dtype}{list(saved.shape)} in the checkpoint, {current_meta} in the state; both are on the meta device",
            )

    def _parts(self, current: Any, saved: PartsNode, path: str) -> None:
        parts = tensors.parts_of(current, path)
        if parts is None or parts.kind != saved.kind or _shape(parts.values) != _shape(saved.values):
            self.report(
                path, f"{parts.kind if parts else 'a dense tensor'} in the state, {kind_name(saved)} in the checkpoint"
            )
        elif parts.kind.startswith("wrapper:"):
            for name, part in self._common(parts.tensors, saved.parts, path):
                self.tensor(part, saved.parts[name], join(path, name))
        else:
            tensor = self._build.assembled(saved, path)
            self.plan.late.append(lambda: tensors.assign(current, tensor))

    def _stateful(self, current: Any, saved: object, path: str) -> None:
        kind, inner = tensors.kind_of(current), tensors.unwrap(current)
        if isinstance(saved, dict):  # the state_dict() was saved; the state has the object
            saved = StatefulNode(kind, saved)
        if not isinstance(saved, StatefulNode) or saved.kind == MODULE:
            self.report(path, f"a {type(inner).__name__} in the state, {kind_name(saved)} in the checkpoint")
            return
        if kind == OPTIMIZER:
            state = self._optimizer(inner, saved.state, path)
        else:
            state = self._build.value(saved.state, path)
        reads = any(True for _ in tensor_names(saved.state))
        forced = can_force(inner) and self._selection.forces(path)
        self.plan.own.append(OwnState(path, kind, inner, state, reads, forced))

    def _module(self, wrapped: Any, saved: object, path: str) -> None:
        module = tensors.unwrap(wrapped)
        current = state_of(module, path)
        if isinstance(saved, dict):  # the state_dict() was saved; the state has the module
            saved = StatefulNode(MODULE, saved)
        if not isinstance(saved, StatefulNode) or saved.kind != MODULE:
            if self._selection.selects(path):
                self.report(path, f"a {type(module).__name__} in the state, {kind_name(saved)} in the checkpoint")
        elif not isinstance(current, dict) or not isinstance(saved.state, dict):
            self.report(path, "its state is not a dict")
        else:
            needed = _without_tied(current, saved.state, path)
            new = {k: self.value(v, saved.state[k], join(path, k)) for k, v in self._common(needed, saved.state, path)}
            if new:
                loaded = OrderedDict((key, new.get(key, value)) for key, value in current.items())
                self.plan.late.append(lambda: tensors.load_state(MODULE, module, loaded))

    def _optimizer(self, optimizer: Any, saved: Any, path: str) -> object:
        """The saved state, with each tensor placed like its parameter."""
        current: Any = state_of(optimizer, path)
        try:
            sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (current, saved)]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            entries = dict(saved["state"])
        except (TypeError, KeyError, AttributeError):
            return self._build.value(saved, path)  # not PyTorch's format: its own load_state_dict checks it
        if sizes[0] != sizes[1]:
            self.report(
                join(path, "param_groups"),
                f"groups of {sizes[1]} parameters in the checkpoint, {sizes[0]} in the state",
            )
            return None
        params = dict(zip(numbers, tensors.parameters_of(optimizer), strict=False))
        state = {
            i: self._slots(entry, current["state"].get(i), params.get(i), join(f"{path}/state", i))
            for i, entry in entries.items()
        }
        other_entries = {
            key: self._build.value(value, join(path, key)) for key, value in saved.items() if key != "state"
        }
        return {"state": state, **other_entries}

    def _slots(self, saved: Any, current: Any, param: Any, path: str) -> object:
        if not isinstance(saved, dict):
            return self._build.value(saved, path)
        slots = current if isinstance(current, dict) else {}
        return {key: self._slot(value, slots.get(key), param, join(path, key)) for key, value in saved.items()}

    def _slot(self, saved: object, current: Any, param: Any, path: str) -> object:
        if not isinstance(saved, TensorRef):
            return self._build.value(saved, path)
        shape = self._build.meta(saved.name)[1]
        if isinstance(current, torch.Tensor):
            current_shape = tuple(current.shape)
            if current_shape != shape:
                self.report(path, f"shape {list(shape)} in the checkpoint, {list(current_shape)} in the state")
                return None
        like = current if isinstance(current, torch.Tensor) else param
        fits = isinstance(like, torch.Tensor) and tuple(like.shape) == shape and shape != ()
        return self._build.tensor(saved.name, like if fits else None)

    def items(self, current: dict[Any, Any], saved: dict[Any, Any], path: str) -> object:
        for key, value in self._common(current, saved, path):
            new = self.value(value, saved[key], join(path, key))
            if new is not value:
                self.plan.late.append(_setter(current, key, new))
        return current

    def sequence(self, current: Any, saved: Any, path: str) -> object:
        if len(current) != len(saved):
            if self._selection.selects(path):
                self.report(path, f"{len(saved)} entries in the checkpoint, {len(current)} in the state")
            return current
        new = [self.value(a, b, join(path, i)) for i, (a, b) in enumerate(zip(current, saved, strict=True))]
        if isinstance(current, tuple):
            kind = type(current) if hasattr(current, "_fields") else tuple
            return tuple.__new__(kind, new) if any(a is not b for a, b in zip(new, current, strict=True)) else current
        for i, (value, old) in enumerate(zip(new, current, strict=True)):
            if value is not old:
                self.plan.late.append(_setter(current, i, value))
        return current

    def _common(self, current: dict[Any, Any], saved: dict[Any, Any], path: str) -> list[tuple[Any, Any]]:
        only_state = (join(path, key) for key in current if key not in saved)
        self._missing(only_state, "missing in the checkpoint", self.plan.only_state)
        only_step = (join(path, key) for key in saved if key not in current)
        self._missing(only_step, "in the checkpoint, but not in the state", self.plan.only_step)
        return [(key, value) for key, value in current.items() if key in saved]

    def _missing(self, paths: Iterable[str], problem: str, skipped: list[str]) -> None:
        for path in paths:
            if self._selection.selects(path):
                if self._selection.strict:
                    self.report(path, problem)
                else:
                    skipped.append(path)

    def _holds_tensors(self, value: object, depth: int = 0) -> bool:
        """Whether the container holds a tensor or a stateful object, and so must be restored in place."""
        if depth > MAX_DEPTH:
            return False
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            inside = value.values() if isinstance(value, dict) else value
            return any(
                isinstance(v, torch.Tensor) or is_stateful(v) or self._holds_tensors(v, depth + 1) for v in inside
            )
        return False


def _without_tied(current: dict[Any, Any], saved: dict[Any, Any], path: str) -> dict[Any, Any]:
    """The entries of a module, without names that the step lacks and whose memory another name fills.

    Files of other tools hold tied weights under one name only.
    """
    missing = [key for key in current if key not in saved and isinstance(current[key], torch.Tensor)]
    if not missing:
        return current
    filled = {_memory(value, path) for key, value in current.items() if key in saved}
    tied = {key for key in missing if (memory := _memory(current[key], path)) is not None and memory in filled}
    return {key: value for key, value in current.items() if key not in tied}


def _memory(value: object, path: str) -> Hashable:
    """Equal for tensors that are the same view of the same memory. None for anything else."""
    if not isinstance(value, torch.Tensor) or tensors.meta_shape(value) is not None:
        return None
    try:
        return tensors.describe(value, path).memory
    except UnsupportedError:
        return None


def _setter(container: Any, key: object, value: object) -> Callable[[], object]:
    return lambda: container.__setitem__(key, value)


def _kind_and_limit(value: Any) -> str:
    limit = getattr(value, "maxlen", None)
    return f"a {type(value).__name__}" + (f" of at most {limit}" if limit is not None else "")


def _shape(values: object) -> object:
    return values.get("shape") if isinstance(values, dict) else None


MOST = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries to restore.

    `strict`: an entry that only the state or only the checkpoint has is an error. Otherwise, it is skipped.
    `cast`: a tensor of another dtype is converted. Otherwise, it is an error.
    `force`: objects that match load a state that does not match them, if their `load_state_dict` has the argument.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = True
    cast: bool = False
    force: tuple[str, ...] = ()
    _matched: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        include: str | Iterable[str] | None,
        exclude: str | Iterable[str],
        strict: bool,
        cast: bool,
        force: str | Iterable[str] = (),
    ) -> Selection:
        """From one pattern or several."""
        included = _checked_patterns(include if include is not None else ())
        return cls(included, _checked_patterns(exclude), strict, cast, _checked_patterns(force))

    def selects(self, path: str) -> bool:
        """Whether the entry at `path` is selected."""
        if self.everything:
            return True
        if self._matches("exclude", self.exclude, path):
            return False
        return not self.include or self._matches("include", self.include, path)

    def forces(self, path: str) -> bool:
        """Whether the object at `path` is to load a state that does not match it."""
        return self._matches("force", self.force, path)

    def _matches(self, argument: str, patterns: tuple[str, ...], path: str) -> bool:
        matched = [(argument, one) for one in patterns if _matches(path, one) or fnmatchcase(f"{path}/", one)]
        self._matched.update(matched)
        return bool(matched)

    @property
    def unmatched(self) -> dict[str, tuple[str, ...]]:
        """For each argument, its patterns that matched no path so far."""
        given = {"include": self.include, "exclude": self.exclude, "force": self.force}
        found = {name: tuple(one for one in its if (name, one) not in self._matched) for name, its in given.items()}
        return {name: patterns for name, patterns in found.items() if patterns}

    @property
    def everything(self) -> bool:
        return not self.include and not self.exclude


def matching(patterns: str | Iterable[str]) -> Callable[[str], bool]:
    """Return a function that checks whether a path, or a container of it, matches one of these patterns."""
    checked = _checked_patterns(patterns)
    if not checked:
        return lambda path: False
    return lambda path: any(_matches(path, pattern) for pattern in checked)


def _checked_patterns(pattern_or_several: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(pattern_or_several, str):
        patterns: tuple[str, ...] = (pattern_or_several,)
    else:
        untyped: object = pattern_or_several
        patterns = tuple(pattern_or_several) if isinstance(untyped, Iterable) else ("",)
    if len(patterns) > MOST or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"patterns must be strings, at most {MOST}", hint='for example include=["model/*"]')
    return patterns


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.rstrip("/") + "/*")
