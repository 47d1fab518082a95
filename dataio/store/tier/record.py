"""What the tier says of a rank's part of a step: which objects it needs, and whether the store is known to have them.

Invariant: a record names every object that its rank's manifest needs; decoding builds nothing but these types, within bounds.
Failure behaviour: `CorruptionError` for bytes that are no record, `UnsupportedError` for those of a newer version.
"""

from __future__ import annotations

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
    """`source` is the store's URL; `own` are the keys that this rank wrote, its manifest last; `leans` what else it needs:
    packs of earlier steps, and the fate. `created` and `committed` in Unix seconds, 0 for "not known to be". `over`: it can
    never be committed. `guest`: it came from a buddy, or was fetched from one, and is not sent on."""

    version: int = VERSION
    source: Key
    run: Name
    timeline: Count
    step: Count
    attempt: Name
    rank: Count
    world_size: Count
    own: tuple[Key, ...]
    leans: tuple[Key, ...] = ()
    created: float
    committed: float = 0.0
    over: bool = False
    guest: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """What orders the steps of a run."""
        return self.timeline, self.step

    @property
    def keys(self) -> tuple[str, ...]:
        return self.own + self.leans


class _Head(msgspec.Struct):
    version: int


_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes, where: str) -> Record:
    """The record in `data`; `where` is for the error."""
    try:
        version = msgspec.msgpack.decode(data, type=_Head).version
        if version != VERSION:
            raise UnsupportedError(f"{where} has version {version}; this Headrace reads version {VERSION}")
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{where} is no record of a kept step: {error}") from None


def as_guest(record: Record) -> Record:
    """The record on a node that did not save the step."""
    return msgspec.structs.replace(record, guest=True)
