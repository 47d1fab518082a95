"""The records of kept steps: their format, and which of them may be removed, in which order. Pure.

Invariants: a record names every object that its rank's manifest needs. Decoding builds only these types, within bounds.
To make room a step is removed whole, with the records of all ranks. A step that is not known to be committed is removed
only if it never can be, or if a newer step of the same run is committed for every rank that has a record of it. So no progress
is lost with it.

Failure behaviour: `CorruptionError` for bytes that are no record, `UnsupportedError` for those of a newer version.
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
RECORD_BYTES = 4 * MIB
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=OBJECT_KEY_BYTES)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a kept step.

    Attributes:
        source: The store's URL.
        own: The keys that this rank wrote, its manifest last.
        references: Other keys that it needs: packs of earlier steps, and the decision object. (`leans` in the file.)
        created: Unix time.
        committed: Unix time; 0 if not known to be committed.
        over: The step can never be committed.
        guest: The copy came from a buddy, and is not sent on.
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
        """The order of a run's steps."""
        return self.timeline, self.step

    @property
    def keys(self) -> tuple[str, ...]:
        return self.own + self.references


class _Head(msgspec.Struct):
    version: int


_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes, where: str) -> Record:
    """Decode a record; `where` names it in the error."""
    try:
        version = msgspec.msgpack.decode(data, type=_Head).version
        if version != VERSION:
            raise UnsupportedError(f"{where} has version {version}; this Headrace reads version {VERSION}")
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{where} is not a record of a kept step: {error}") from None


def as_guest(record: Record) -> Record:
    """The same record, for a node that did not save the step."""
    return msgspec.structs.replace(record, guest=True)


Rank = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The tier's budget: `bytes` in all, and `steps` of each run."""

    bytes: int
    steps: int


def removable_surplus(records: Iterable[Record], steps: int) -> list[Record]:
    """The removable records of steps that are over, or older than their run's newest `steps` committed ones."""
    known = list(records)
    newest = {rank: sorted(places, reverse=True)[:steps] for rank, places in _committed(known).items()}
    return [r for r in known if r.over or (_expendable(r, newest) and _too_old(r, newest, steps))]


def removable_steps(records: Iterable[Record]) -> list[list[Record]]:
    """The removable steps, oldest first, each with all its records."""
    known = list(records)
    newest = {rank: [max(places)] for rank, places in _committed(known).items()}
    steps: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in known:
        steps[record.source, record.run, record.attempt].append(record)
    free = [step for step in steps.values() if all(_expendable(r, newest) for r in step)]
    return sorted(free, key=lambda step: (step[0].created, step[0].place))


def _committed(records: list[Record]) -> dict[Rank, set[tuple[int, int]]]:
    places: dict[Rank, set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        if record.committed and not record.over:
            places[_rank(record)].add(record.place)
    return places


def _expendable(record: Record, newest: dict[Rank, list[tuple[int, int]]]) -> bool:
    if record.committed or record.over:
        return True
    return any(place > record.place for place in newest.get(_rank(record), ()))


def _too_old(record: Record, newest: dict[Rank, list[tuple[int, int]]], steps: int) -> bool:
    kept = newest.get(_rank(record), [])
    return record.place not in kept and (len(kept) >= steps or not record.committed) and record.place < max(kept)


def _rank(record: Record) -> Rank:
    return record.source, record.run, record.rank
