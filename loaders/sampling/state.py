"""A loader's state: where it is, and the fingerprint of everything that decides what comes next.

Purpose: resume exactly, on any number of ranks, from a few bytes.
Invariants: a state is JSON, as `json.dumps` writes it, of less than `MAX_BYTES`, and about 45 more for each source of a
mixture, as long as nothing is quarantined beside a list (`headrace.loaders.quarantine.shared_list`); it is the same on
every rank, and has the same keys wherever a loader is. The position counts global batches that the trainer received. To
be short, the global batch, or what stands for the buckets, is the first value of "order", and version and digest of a
list of bad samples, "17:0123abcd", the first of "quarantine". Where that is not short enough, digests stand for what
clip and order are.
Failure behaviour: `MismatchError` names the field, what was saved and what is here; `UsageError` for what is no state
at all.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import blake3
import msgspec

from headrace.dataio.core.errors import MismatchError, UsageError

DIGEST_CHARACTERS = 10
"""Enough to tell versions of one's own datasets from each other; nobody is kept from making two that collide."""
MAX_BYTES = 200
MAX_COUNT = 1 << 32
"""Epochs, and batches in one; beyond, positions would not fit 64 bits."""
_HINTS = {
    "quarantine_list": "give the loader the list that the interrupted run had",
    "global_batch": "keep batch_size times world size as it was",
    "version": "open the dataset with version=",
    "digest": "this is another dataset, or it was packed again",
    "order": "another way of sampling (shuffle, drop_last, evaluate), or another release of Headrace: finish the run with that",
    "weights": "weights may change from the step of the state on, not before it",
    "buckets": "keep shapes, budget, patch and multiple as they were",
}
_FORCE = "load_state_dict(state, force=True) goes on and says what is lost"
_LISTED = re.compile(r"([0-9]{1,9}):([0-9a-f]{0,16})")
_POSITION = ("epoch", "batch", "quarantine")
_FIRST = ("global_batch", "buckets")


class Identity(msgspec.Struct, frozen=True):
    """Which samples a source has; `taken` of them were delivered, where the source is one of a mixture."""

    version: int
    digest: str
    taken: int | None = None


class Fingerprint(msgspec.Struct, frozen=True):
    """What must be equal for a position to mean the same samples, and the same frames of them.

    `sources` is the dataset's, or by name those of a mixture; `order` is the schedule's description, `clip` that of the
    parts.
    """

    sources: Identity | Mapping[str, Identity]
    seed: int
    order: Mapping[str, Any]
    clip: Any

    def values(self) -> dict[str, Any]:
        """As plain JSON types, in the order in which differences are looked for."""
        return {**self._identity(), "seed": self.seed, "clip": parts(self.clip), **plain(dict(self.order))}

    def _identity(self) -> dict[str, Any]:
        if isinstance(self.sources, Identity):
            return {"version": self.sources.version, "digest": self.sources.digest[:DIGEST_CHARACTERS]}
        rows = {n: [s.version, s.digest[:DIGEST_CHARACTERS], s.taken] for n, s in self.sources.items()}
        return {"sources": rows}


class Position(msgspec.Struct, frozen=True):
    """Batches of `epoch` that were delivered; samples condemned so far, as (source, number); and version and digest of
    the list of bad samples that the epoch goes by, if there is one."""

    epoch: int
    batch: int
    quarantine: tuple[tuple[int, int], ...] = ()
    listed: tuple[int, str] | None = None


class Difference(msgspec.Struct, frozen=True):
    """A field that is not what it was; None where there is none."""

    field: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        return f"the loader's {self.field} was {self.saved!r} when its state was saved, and is {self.here!r} now"


def dump(fingerprint: Fingerprint, position: Position) -> dict[str, Any]:
    """The state as plain JSON types."""
    mixture = not isinstance(fingerprint.sources, Identity)
    condemned = [[source, number] if mixture else number for source, number in position.quarantine]
    listed = [] if position.listed is None else ["{}:{}".format(*position.listed)]
    values = fingerprint.values()
    first = [values.pop(name) for name in _FIRST if name in values]
    values["order"] = [*first, *values["order"]]
    state = values | {"epoch": position.epoch, "batch": position.batch, "quarantine": listed}
    if _bytes(state) >= MAX_BYTES:
        state["clip"] = _stand_in(state["clip"])
    if _bytes(state) >= MAX_BYTES:
        first = [_stand_in(one) if isinstance(one, str) else one for one in first]
        state["order"] = [*first, _stand_in(values["order"][len(first) :])]
    return state | {"quarantine": [*listed, *condemned]}


def _bytes(state: Mapping[str, Any]) -> int:
    """As JSON, but for the sources of a mixture, of which there may be any number."""
    return len(json.dumps({**state, "sources": {}} if "sources" in state else state))


def _stand_in(value: Any) -> str:
    """Four characters that only an accident of one in 2^24 gives to another value."""
    digest = blake3.blake3(json.dumps(value, sort_keys=True).encode()).digest(3)
    return base64.urlsafe_b64encode(digest).decode()


def load(fingerprint: Callable[[int, int], Fingerprint], state: Mapping[str, Any]) -> Position:
    """The position in `state`, once its fingerprint was found to be the one that is here at that position."""
    saved, position = read(state)
    for difference in differences(fingerprint(position.epoch, position.batch), saved):
        raise mismatch(difference)
    return position


def mismatch(difference: Difference) -> MismatchError:
    """The error that says so."""
    hint = _HINTS.get(difference.field.rpartition(".")[2], "make the loader with the same arguments")
    return MismatchError(str(difference), hint=f"{hint}; {_FORCE}")


def read(state: Mapping[str, Any]) -> tuple[dict[str, Any], Position]:
    """The saved fingerprint's fields, and the position."""
    if (
        not isinstance(state, Mapping)
        or {"seed", "epoch", "batch"} - set(state)
        or not {"digest", "sources"} & set(state)
    ):
        raise UsageError("this is not the state of a loader", hint="pass what state_dict() returned")
    saved = plain(dict(state))
    listed, condemned = _quarantine(saved.get("quarantine", []))
    numbers = [saved["epoch"], saved["batch"], *(number for pair in condemned for number in pair)]
    if not all(isinstance(n, int) and 0 <= n <= MAX_COUNT for n in numbers) or any(len(p) != 2 for p in condemned):
        raise UsageError("the loader's state holds an impossible position", hint="pass what state_dict() returned")
    position = Position(saved["epoch"], saved["batch"], tuple((source, n) for source, n in condemned), listed)
    fields = {name: value for name, value in saved.items() if name not in _POSITION}
    if (
        "buckets" not in fields and isinstance(fields.get("order"), list) and fields["order"]
    ):  # there they were apart once
        first, *fields["order"] = fields["order"]
        fields["buckets" if isinstance(first, str) else "global_batch"] = first
    return fields, position


def resolved(here: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved fields with what is here in place of the digests that stand for it."""
    found = dict(saved)
    for name in {"clip", "order", "buckets"} & set(here) & set(saved):
        stand_in = _stand_in(here[name])
        if saved[name] in (stand_in, [stand_in]):
            found[name] = here[name]
    return found


def _quarantine(values: Any) -> tuple[tuple[int, str] | None, list[list[Any]]]:
    """Version and digest of the list that is gone by, if any, and the samples beside it as [source, number]."""
    rest = list(values) if isinstance(values, list) else [values]
    named = _LISTED.fullmatch(rest[0]) if rest and isinstance(rest[0], str) else None
    listed = None if named is None else (int(named[1]), named[2])
    return listed, [one if isinstance(one, list) else [0, one] for one in (rest if named is None else rest[1:])]


def differences(fingerprint: Fingerprint, saved: Mapping[str, Any]) -> Iterator[Difference]:
    """The fields that are not what they were, the most telling first."""
    here = fingerprint.values()
    saved = resolved(here, saved)
    for field in [*here, *(name for name in saved if name not in here)]:
        if field == "sources" and isinstance(saved.get(field), dict) and field in here:
            yield from _of_sources(here[field], saved[field])
        elif here.get(field) != saved.get(field):
            yield Difference(field, saved.get(field), here.get(field))


def _of_sources(here: Mapping[str, Sequence[Any]], saved: Mapping[str, Any]) -> Iterator[Difference]:
    """Versions and digests; the counters follow from the rest."""
    if sorted(here) != sorted(saved):
        yield Difference("sources", sorted(saved), sorted(here))
    for name in here:
        old = saved.get(name, [None, None])
        for number, field in enumerate(("version", "digest")):
            if name in saved and old[number] != here[name][number]:
                yield Difference(f"sources.{name}.{field}", old[number], here[name][number])


def parts(described: Any) -> Any:
    """What says how samples are cut into parts: the values of a dataclass in order, without defaults behind the last
    word; numbers to nine digits."""
    if not dataclasses.is_dataclass(described) or isinstance(described, type):
        return plain(described)
    fields = dataclasses.fields(described)
    values = [getattr(described, field.name) for field in fields]
    while not isinstance(values[-1], str) and values[-1] == fields[len(values) - 1].default:
        values.pop()
    return [float(f"{value:.9g}") if isinstance(value, float) else plain(value) for value in values]


def plain(value: Any) -> Any:
    """Tuples as lists, as they come back from JSON."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
