"""A loader's state: where it is, and the fingerprint of everything that decides what comes next.

Purpose: resume exactly, on any number of ranks, from a few bytes.
Invariants: a state is JSON of less than 200 bytes as long as nothing is quarantined; it is the same on every rank. The
position counts global batches that the trainer received.
Failure behaviour: `MismatchError` names the field, what was saved and what is here; `UsageError` for what is no state at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataio.core.errors import MismatchError, UsageError
from loaders.clip import Clip
from loaders.order import Order

DIGEST_CHARACTERS = 16
_HINTS = {
    "global_batch": "keep batch_size times world size as it was",
    "version": "open the dataset with version=",
    "digest": "this is another dataset, or it was packed again",
    "order": "the sample order of another release of Millrace: finish the run with that one",
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal for a position to mean the same samples, and the same frames of them."""

    version: int
    digest: str
    seed: int
    global_batch: int
    clip: tuple[Any, ...]
    order: tuple[int, ...]
    drop_last: bool

    @classmethod
    def of(cls, version: int, digest: str, order: Order, clip: Clip, drop_last: bool) -> Fingerprint:
        built = (order.chunk, order.lanes, order.window) if order.shuffle else ()
        return cls(
            version, digest[:DIGEST_CHARACTERS], order.seed, order.batch, dataclasses.astuple(clip), built, drop_last
        )

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise when `saved` describes another order."""
        for field in dataclasses.fields(self):
            here, there = _plain(getattr(self, field.name)), saved[field.name]
            if here != there:
                raise MismatchError(
                    f"the loader's {field.name} was {there!r} when its state was saved, and is {here!r} now",
                    hint=_HINTS.get(field.name, "make the loader with the same arguments"),
                )


@dataclass(frozen=True, slots=True)
class Position:
    """Batches of `epoch` that were delivered; samples condemned so far."""

    epoch: int
    batch: int
    quarantine: tuple[int, ...] = ()


def dump(fingerprint: Fingerprint, position: Position) -> dict[str, Any]:
    """The state as plain JSON types."""
    state = {name: _plain(value) for name, value in dataclasses.asdict(fingerprint).items()}
    state |= {"epoch": position.epoch, "batch": position.batch}
    if position.quarantine:
        state["quarantine"] = list(position.quarantine)
    return state


def load(fingerprint: Fingerprint, state: Mapping[str, Any]) -> Position:
    """The position in `state`, once its fingerprint was found to be this one."""
    needed = {field.name for field in dataclasses.fields(fingerprint)} | {"epoch", "batch"}
    if not isinstance(state, Mapping) or needed - set(state):
        raise UsageError("this is not the state of a VideoLoader", hint="pass what state_dict() returned")
    plain = {name: _plain(value) for name, value in state.items()}
    fingerprint.check(plain)
    epoch, batch, quarantine = plain["epoch"], plain["batch"], plain.get("quarantine", [])
    if not all(isinstance(n, int) and n >= 0 for n in (epoch, batch, *quarantine)):
        raise UsageError("the loader's state holds an impossible position", hint="pass what state_dict() returned")
    return Position(epoch, batch, tuple(quarantine))


def _plain(value: Any) -> Any:
    """Tuples as lists, as they come back from JSON."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
