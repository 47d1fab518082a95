"""Objects of a state that load their own state as a whole: loaders, generators, schedulers, optimizers.

An object may have a method `check_state_dict(state)`, which raises an error if `load_state_dict` would refuse the
state, and changes nothing. Headrace's loaders and `RNG` have it. PyTorch's optimizers are compared by the fit.

Invariant: an object that `may_refuse` is loaded before all others, so that they are unchanged if it refuses.

Failure behaviour: an error of `check_state_dict` is raised with the path of the object.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.checkpoint.state import tensors
from headrace.checkpoint.state.tensors import OPTIMIZER, SCHEDULER
from headrace.dataio.core.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class OwnState:
    """The state that `value` is to load.

    `reads`: the state holds tensors, which are read first.
    `forced`: `value` loads the state even if it does not match.
    """

    path: str
    kind: str
    value: Any
    state: object
    reads: bool
    forced: bool = False

    @property
    def may_refuse(self) -> bool:
        """Whether `load_state_dict` may raise an error that nothing has predicted."""
        if self.kind == OPTIMIZER:
            return type(self.value).load_state_dict is not torch.optim.Optimizer.load_state_dict
        checks = callable(getattr(self.value, "check_state_dict", None)) and not self.forced
        return self.kind != SCHEDULER and not checks

    def check(self) -> None:
        """Raise an error if the object refuses its state. Objects without `check_state_dict` are not asked."""
        check = getattr(self.value, "check_state_dict", None)
        if self.forced or not callable(check):
            return
        try:
            check(self.state)
        except HeadraceError as error:
            raise type(error)(f"{self.path}: {error.message}", hint=error.hint) from error

    def load(self) -> None:
        """Load the state."""
        if self.forced:
            self.value.load_state_dict(self.state, force=True)
        else:
            tensors.load_state(self.kind, self.value, self.state)


def can_force(value: Any) -> bool:
    """Whether the object's `load_state_dict` has an argument `force`."""
    try:
        return "force" in inspect.signature(value.load_state_dict).parameters
    except (TypeError, ValueError):  # a function without a signature
        return False


def refusing_first(own_states: Iterable[OwnState]) -> tuple[list[OwnState], list[OwnState]]:
    """The objects that may refuse their state, and the others. Schedulers come first among the others.

    A scheduler of another class may raise `KeyError`.
    """
    listed = sorted(own_states, key=lambda one: one.kind != SCHEDULER)
    return [one for one in listed if one.may_refuse], [one for one in listed if not one.may_refuse]
