"""The input and output values of the cache plan, all immutable.

Ranges are (offset, length) in bytes of the object; they lie inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

Ranges = tuple[tuple[int, int], ...]


class ObjectId(NamedTuple):
    """One version of one object. `source` names its store; size in bytes; `modified` tells it from an older one. (A
    tuple, since it is looked up all the time, and the hash of a dataclass takes five times as long.)"""

    source: str
    key: str
    size: int
    modified: float


class Want(msgspec.Struct, frozen=True):
    """One read that a stream announced. `due` is when it is expected, in seconds of the engine's clock."""

    object: ObjectId
    ranges: Ranges
    due: float = 0.0


class Create(msgspec.Struct, frozen=True):
    """Make an empty sparse file in this tier, before anything else is done to it. `keep`: it may outlive the daemon."""

    file: int
    object: ObjectId
    keep: bool = True
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch bytes [offset, offset + length) of the object into the file; answer with `fetched`, `failed` or `lost`.

    `block` numbers the part of the file. `copies` are (file, offset, length) that other cache files already hold.
    `adopted`: an earlier daemon left the block; it counts as fetched if its digest is right, and is fetched otherwise.
    `stream`: the stream that it is for, 0 for none.
    """

    file: int
    block: int
    offset: int
    length: int
    copies: tuple[tuple[int, int, int], ...] = ()
    adopted: bool = False
    stream: int = field(default=0, compare=False)


class Drop(msgspec.Struct, frozen=True):
    """Unlink the file and forget it; holders keep it. `once`: no client keeps its mapping."""

    file: int
    once: bool = False


class Ready(msgspec.Struct, frozen=True):
    """All blocks of the ticket are in the file. It counts as held once; answer with `released` when that ends. `once`:
    the file is for this read alone."""

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
