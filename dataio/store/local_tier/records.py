"""The records of the steps in the tier: their format, and which steps may be removed, in which order.

Invariants:

* A record names every object that its rank's manifest needs.
* Decoding creates only the types of this module, with bounded values.
* When space is needed, a step is removed as a whole, with the records of all ranks.
* A step that is not known to be committed is removed in two cases only: it can never be committed, or every rank with
  a record of it has a newer committed step of the same run. So its removal loses no progress. `removable_surplus`
  applies the same rule to each record, for the record's own rank.
* Guests' records make no step of this node removable. Records of this node also count for guests' steps.
* A guest's step is also removable if each of its ranks has `GUEST_STEPS` newer records here. Its own node has sent
  those, so the older one is not needed any more.
* The functions do no I/O.

Failure behaviour: `CorruptionError` for bytes that are not a record, `UnsupportedError` for those of another version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.limits import MIB, OBJECT_KEY_BYTES

VERSION = 1
GUEST_STEPS = 3
"""So many newer steps of the same rank make an older step of a guest removable."""
RECORD_BYTES = 4 * MIB
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=OBJECT_KEY_BYTES)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a step in the tier.

    Attributes:
        source: The store's URL.
        own: The keys that this rank wrote, with its manifest last.
        references: Other keys that it needs: packs of earlier steps, and the decision object. (`leans` in the file.)
        created: When the record was created, in Unix time.
        committed: When the step was committed, in Unix time; 0 if it is not known to be committed.
        over: Whether the step can never be committed.
        guest: Whether the copy came from a buddy node. Such a copy is not sent to another node.
    """

    version: int = VERSION
    source: Key
    run: Name
    timeline: Count
    step: Count
    attempt: Name
    rank: Count
    world_size: Count
    own: tuple[Key, ...]
    references: tuple[Key, ...] = msgspec.field(default=(), name="leans")
    created: float
    committed: float = 0.0
    over: bool = False
    guest: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """The sort key for the steps of one run."""
        return self.timeline, self.step

    @property
    def keys(self) -> tuple[str, ...]:
        return self.own + self.references


class _Head(msgspec.Struct):
    version: int


_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes, name: str) -> Record:
    """Decode a record; `name` names it in the error."""
    try:
        version = msgspec.msgpack.decode(data, type=_Head).version
        if version != VERSION:
            raise UnsupportedError(f"{name} has version {version}; this Headrace reads version {VERSION}")
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{name} is not a record of a kept step: {error}") from None


def as_guest(record: Record) -> Record:
    """Copy the record for a node that did not save the step."""
    return msgspec.structs.replace(record, guest=True)


Rank = tuple[str, str, int, bool]
"""A store, run and rank, and whether the steps are guests'."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The tier's budget: `bytes` in total, and `steps` of each run."""

    bytes: int
    steps: int


def removable_surplus(records: Iterable[Record], steps: int) -> list[Record]:
    """Return the removable records of steps that are `over`, or older than the newest `steps` committed ones."""
    all_records = list(records)
    newest = {rank: sorted(places, reverse=True)[:steps] for rank, places in _committed(all_records).items()}
    outdated = _outdated_guests(all_records)
    return [
        r
        for r in all_records
        if r.over or r in outdated or (_is_removable(r, newest) and _is_too_old(r, newest, steps))
    ]


def removable_steps(records: Iterable[Record]) -> list[list[Record]]:
    """Return the removable steps, oldest first, each with all its records."""
    all_records = list(records)
    newest = {rank: [max(places)] for rank, places in _committed(all_records).items()}
    outdated = _outdated_guests(all_records)
    steps: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in all_records:
        steps[record.source, record.run, record.attempt].append(record)
    removable = [step for step in steps.values() if all(r in outdated or _is_removable(r, newest) for r in step)]
    return sorted(removable, key=lambda step: (step[0].created, step[0].place))


def _outdated_guests(records: list[Record]) -> set[Record]:
    """The guests' uncommitted records for which `GUEST_STEPS` newer ones of the same rank are here."""
    places: dict[Rank, set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        if not record.over:
            _add(places, record)
    newest = {rank: sorted(its, reverse=True)[:GUEST_STEPS] for rank, its in places.items()}
    return {
        r
        for r in records
        if r.guest and not r.committed and len(its := newest.get(_rank(r), [])) == GUEST_STEPS and r.place < its[-1]
    }


def _committed(records: list[Record]) -> dict[Rank, set[tuple[int, int]]]:
    places: dict[Rank, set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        if record.committed and not record.over:
            _add(places, record)
    return places


def _add(places: dict[Rank, set[tuple[int, int]]], record: Record) -> None:
    """Add the record's place for guests' steps, and if it is this node's own, for the steps of this node."""
    for guest in {True, record.guest}:
        places[record.source, record.run, record.rank, guest].add(record.place)


def _is_removable(record: Record, newest: dict[Rank, list[tuple[int, int]]]) -> bool:
    if record.committed or record.over:
        return True
    return any(place > record.place for place in newest.get(_rank(record), ()))


def _is_too_old(record: Record, newest: dict[Rank, list[tuple[int, int]]], steps: int) -> bool:
    kept_places = newest.get(_rank(record), [])
    return (
        record.place not in kept_places
        and (len(kept_places) >= steps or not record.committed)
        and record.place < max(kept_places)
    )


def _rank(record: Record) -> Rank:
    return record.source, record.run, record.rank, record.guest
