"""What a carrier reports while it works, as values and as lines of JSON.

Invariant: after `Released` the carrier never touches the arena again; at most one of `Done` and `Failed` ends the stream.
Failure behaviour: `as_error` rebuilds an error of the same class from its code, and a plain `HeadraceError` from a code
that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.dataio.core.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of state dealt with, of how many."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Released:
    """The arena is no longer needed."""


@dataclass(frozen=True, slots=True)
class Committing:
    """This rank's manifest is written: what is left is to wait for other ranks, and small writes."""


@dataclass(frozen=True, slots=True)
class Done:
    """The step is committed."""

    result: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failed:
    """The step was not committed by this carrier. `again`: the same plan may be carried to its commit later."""

    code: str
    message: str
    hint: str
    again: bool = False


Event = Progress | Released | Committing | Done | Failed


def to_json(event: Event) -> str:
    """One line, without the newline."""
    name = type(event).__name__.lower()
    return json.dumps({"event": name} | {key: getattr(event, key) for key in event.__slots__})


def failed(error: HeadraceError, *, again: bool = False) -> Failed:
    return Failed(error.code, error.message, error.hint, again)


def as_error(code: str, message: str, hint: str) -> HeadraceError:
    """The error that a carrier in another process reported."""
    return _classes(HeadraceError).get(code, HeadraceError)(message, hint=hint)


def _classes(kind: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= {code: c for code, c in _classes(child).items() if code not in found}
    return found
