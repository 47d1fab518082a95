"""The input and output values of the cache plan, all immutable.

Ranges are (offset, length) in bytes of the object; they lie inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

Ranges = tuple[tuple[int, int], ...]


class ObjectId(NamedTuple):
    """One version of one object.

    `source` names its store, `size` is in bytes, and `modified`, the modification time, distinguishes versions.
    It is a tuple because it is a frequent dictionary key, and hashing a dataclass takes five times as long.
    """

    source: str
    key: str
    size: int
    modified: float


class Want(msgspec.Struct, frozen=True):
    """One read that a stream announced. `due` is the time at which it is expected, in seconds of the engine's clock."""

    object: ObjectId
    ranges: Ranges
    due: float = 0.0


class Create(msgspec.Struct, frozen=True):
    """Create an empty sparse file in this tier.

    It precedes all other instructions for the file. `keep`: the file may outlive the daemon.
    """

    file: int
    object: ObjectId
    keep: bool = True
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch bytes [offset, offset + length) of the object into the file; answer with `fetched`, `failed` or `lost`.

    `block` numbers the part of the file. `copies` are (file, offset, length) that other cache files already hold.
    `adopted`: an earlier daemon left the block. It counts as fetched if its digest matches; otherwise it is fetched.
    `stream`: the stream for which it is fetched, 0 for none.
    """

    file: int
    block: int
    offset: int
    length: int
    copies: tuple[tuple[int, int, int], ...] = ()
    adopted: bool = False
    stream: int = field(default=0, compare=False)


class Drop(msgspec.Struct, frozen=True):
    """Unlink the file and forget it; holders keep its bytes. `once`: no client keeps its mapping."""

    file: int
    once: bool = False


class Ready(msgspec.Struct, frozen=True):
    """All parts of the ticket are in the file, which counts as held once more.

    Answer with `released` when the hold ends. `once`: it is a ring file, whose mapping clients do not keep.
    """

    ticket: int
    file: int
    once: bool = False


class Bypass(msgspec.Struct, frozen=True):
    """There is no room for the ticket's blocks: read the store directly."""

    ticket: int


class Failed(msgspec.Struct, frozen=True):
    """The fetch of this block failed, and so did the ticket."""

    ticket: int
    file: int
    block: int


Instruction = Create | Fetch | Drop | Ready | Bypass | Failed
