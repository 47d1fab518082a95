"""A loader's state: its position, and a fingerprint of everything that determines the batches.

Purpose: resume exactly, on any number of ranks, from a state of a few bytes.

Invariants:
- A state is JSON. As `json.dumps` writes it, it takes less than `MAX_BYTES`, plus about 45 bytes for each source of a
  mixture. Quarantined samples that no shared list stores take more.
- It is the same on every rank, and its keys do not depend on the position.
- The position counts the global batches that the trainer received.
- To save space, the global batch, or the digest of the buckets, is the first value of "order". Version and digest of a
  shared list of bad samples, such as "17:0123abcd", are the first value of "quarantine". If the state is still too
  long, digests replace the descriptions of clip and order.

Failure behaviour: `MismatchError` with the field, the saved value and the current value. `UsageError` if a value is not
a state.
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
"""Enough to distinguish versions of a user's own datasets. It does not protect against deliberate collisions."""
MAX_BYTES = 200
MAX_COUNT = 1 << 32
"""Maximum number of epochs, and of batches in an epoch. Above it, positions would not fit 64 bits."""
_HINTS = {
    "quarantine_list": "give the loader the list that the interrupted run had",
    "global_batch": "do not change batch_size times world size",
    "digest": "this is another dataset, or it was packed again",
    "order": "use the saved sampling options (shuffle, drop_last, evaluate) and release of Headrace",
    "weights": "weights may change from the step of the state on, not before it",
    "buckets": "do not change shapes, budget, patch and multiple",
}
_FORCE = (
    'load_state_dict(state, force=True), or restore(..., force="loader") of a Checkpointer, loads it anyway and reports '
    "the differences"
)
_LISTED = re.compile(r"([0-9]{1,9}):([0-9a-f]{0,16})")
_POSITION = ("epoch", "batch", "quarantine")
_FIRST = ("global_batch", "buckets")


class Identity(msgspec.Struct, frozen=True):
    """Identifies the samples of a source. In a mixture, `taken` is the number of samples that the source has given."""

    version: int
    digest: str
    taken: int | None = None


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that must match so that a position means the same samples, and the same frames of them.

    Args:
        sources: the dataset, or the sources of a mixture by name.
        seed: seed of the order.
        order: description of the schedule.
        clip: description of the parts.
    """

    sources: Identity | Mapping[str, Identity]
    seed: int
    order: Mapping[str, Any]
    clip: Any

    def values(self) -> dict[str, Any]:
        """The fingerprint as plain JSON types, in the order in which differences are reported."""
        return {**self._identity(), "seed": self.seed, "clip": parts(self.clip), **plain(dict(self.order))}

    def _identity(self) -> dict[str, Any]:
        if isinstance(self.sources, Identity):
            return {"version": self.sources.version, "digest": self.sources.digest[:DIGEST_CHARACTERS]}
        rows = {n: [s.version, s.digest[:DIGEST_CHARACTERS], s.taken] for n, s in self.sources.items()}
        return {"sources": rows}


class Position(msgspec.Struct, frozen=True):
    """The position of a loader.

    Args:
        epoch: the current epoch.
        batch: number of its global batches that were delivered.
        quarantine: known bad samples, as (source, id).
        listed: version and digest of the list of bad samples that the epoch follows, if any.
    """

    epoch: int
    batch: int
    quarantine: tuple[tuple[int, int], ...] = ()
    listed: tuple[int, str] | None = None


class Difference(msgspec.Struct, frozen=True):
    """A field with different values in the state and here. A missing value is None."""

    field: str
    saved: Any
    here: Any

    def __str__(self) -> str:
        return f"{self._subject()} was {self.saved!r} when the loader's state was saved, and is {self.here!r} now"

    def _subject(self) -> str:
        """The words for the field: version and digest belong to the dataset, not to the loader."""
        source, _, name = self.field.rpartition(".")
        if name not in ("version", "digest"):
            return f"the loader's {self.field}"
        return f"the {name} of the mixture's {source.removeprefix('sources.')!r}" if source else f"the dataset's {name}"


def dump(fingerprint: Fingerprint, position: Position) -> dict[str, Any]:
    """The state as plain JSON types."""
    mixture = not isinstance(fingerprint.sources, Identity)
    known_bad = [[source, number] if mixture else number for source, number in position.quarantine]
    listed = [] if position.listed is None else ["{}:{}".format(*position.listed)]
    values = fingerprint.values()
    leading = [values.pop(name) for name in _FIRST if name in values]
    values["order"] = [*leading, *values["order"]]
    state = values | {"epoch": position.epoch, "batch": position.batch, "quarantine": listed}
    if _bytes(state) >= MAX_BYTES:
        state["clip"] = _short_digest(state["clip"])
    if _bytes(state) >= MAX_BYTES:
        leading = [_short_digest(one) if isinstance(one, str) else one for one in leading]
        state["order"] = [*leading, _short_digest(values["order"][len(leading) :])]
    return state | {"quarantine": [*listed, *known_bad]}


def _bytes(state: Mapping[str, Any]) -> int:
    """Length of the JSON, without the sources of a mixture, which may be many."""
    return len(json.dumps({**state, "sources": {}} if "sources" in state else state))


def _short_digest(value: Any) -> str:
    """Four characters that replace a value. Two different values have the same four with a probability of 2^-24."""
    digest = blake3.blake3(json.dumps(value, sort_keys=True).encode()).digest(3)
    return base64.urlsafe_b64encode(digest).decode()


def load(fingerprint: Callable[[int, int], Fingerprint], state: Mapping[str, Any]) -> Position:
    """The position in `state`. Raises `MismatchError` unless its fingerprint equals `fingerprint` at that position."""
    saved, position = read(state)
    for difference in differences(fingerprint(position.epoch, position.batch), saved):
        raise mismatch(difference)
    return position


def mismatch(difference: Difference) -> MismatchError:
    """The error for a difference."""
    source, _, name = difference.field.rpartition(".")
    hint = _HINTS.get(name, "make the loader with the same arguments")
    if name == "version" and difference.saved is not None:
        pinned = f"version={difference.saved!r}"
        hint = f"open this source with Dataset(url, {pinned})" if source else f"give the loader {pinned}"
    return MismatchError(str(difference), hint=f"{hint}; {_FORCE}")


def read(state: Mapping[str, Any]) -> tuple[dict[str, Any], Position]:
    """The fields of the saved fingerprint, and the position."""
    if (
        not isinstance(state, Mapping)
        or {"seed", "epoch", "batch"} - set(state)
        or not {"digest", "sources"} & set(state)
    ):
        raise UsageError("this is not the state of a loader", hint="pass what state_dict() returned")
    saved = plain(dict(state))
    listed, known_bad = _parse_quarantine(saved.get("quarantine", []))
    numbers = [saved["epoch"], saved["batch"], *(number for pair in known_bad for number in pair)]
    if not all(isinstance(n, int) and 0 <= n <= MAX_COUNT for n in numbers) or any(len(p) != 2 for p in known_bad):
        raise UsageError("the loader's state has an impossible position", hint="pass what state_dict() returned")
    position = Position(
        saved["epoch"], saved["batch"], quarantine=tuple((source, n) for source, n in known_bad), listed=listed
    )
    fields = {name: value for name, value in saved.items() if name not in _POSITION}
    if (
        "buckets" not in fields and isinstance(fields.get("order"), list) and fields["order"]
    ):  # old states have them as separate fields
        leading, *fields["order"] = fields["order"]
        fields["buckets" if isinstance(leading, str) else "global_batch"] = leading
    return fields, position


def resolved(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved fields. Digests that match values of `current` are replaced by these values."""
    fields = dict(saved)
    for name in {"clip", "order", "buckets"} & set(current) & set(saved):
        stand_in = _short_digest(current[name])
        if saved[name] in (stand_in, [stand_in]):
            fields[name] = current[name]
    return fields


def _parse_quarantine(values: Any) -> tuple[tuple[int, str] | None, list[list[Any]]]:
    """Version and digest of the list that is followed, if any, and the other samples as [source, id]."""
    entries = list(values) if isinstance(values, list) else [values]
    match = _LISTED.fullmatch(entries[0]) if entries and isinstance(entries[0], str) else None
    listed = None if match is None else (int(match[1]), match[2])
    return listed, [one if isinstance(one, list) else [0, one] for one in (entries if match is None else entries[1:])]


def differences(fingerprint: Fingerprint, saved: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the fields that differ, the most informative first."""
    current = fingerprint.values()
    saved = resolved(current, saved)
    for field in [*current, *(name for name in saved if name not in current)]:
        if field == "sources" and isinstance(saved.get(field), dict) and field in current:
            yield from _source_differences(current[field], saved[field])
        elif current.get(field) != saved.get(field):
            yield Difference(field, saved.get(field), current.get(field))


def _source_differences(current: Mapping[str, Sequence[Any]], saved: Mapping[str, Any]) -> Iterator[Difference]:
    """Differences of versions and digests. The counters follow from the other fields, so they are not compared."""
    if sorted(current) != sorted(saved):
        yield Difference("sources", sorted(saved), sorted(current))
    for name in current:
        old = saved.get(name, [None, None])
        for number, field in enumerate(("version", "digest")):
            if name in saved and old[number] != current[name][number]:
                yield Difference(f"sources.{name}.{field}", old[number], current[name][number])


def parts(described: Any) -> Any:
    """The description of parts for a state.

    For a dataclass, it is the list of its values, with floats rounded to nine digits. Defaults after the last string
    are left out.
    """
    if not dataclasses.is_dataclass(described) or isinstance(described, type):
        return plain(described)
    fields = dataclasses.fields(described)
    values = [getattr(described, field.name) for field in fields]
    while not isinstance(values[-1], str) and values[-1] == fields[len(values) - 1].default:
        values.pop()
    return [float(f"{value:.9g}") if isinstance(value, float) else plain(value) for value in values]


def plain(value: Any) -> Any:
    """`value` with lists in place of tuples, as JSON returns them."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
