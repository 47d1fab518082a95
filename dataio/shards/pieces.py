"""Digests of the pieces of long files, by which a part of a file is checked without the rest (design note 0022).

Purpose: which files have pieces, and of what size; their digests as the bytes go by; and whether a piece is right.
Pure.
Invariants: a file of `LEAST` bytes or more has pieces of `SIZE`, or of the next power of two with which they are `MOST`
at most, so that their digests take 16 KiB at most. What was stored is believed only after `fault` found none.
Failure behaviour: none; callers say whose pieces are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import xxhash

from headrace.dataio.core import limits
from headrace.dataio.shards.contract import Pieces

LEAST = 1 * limits.MIB
SIZE = 256 * limits.KIB
MOST = 2048
_DIGEST = 8

Runs = tuple[tuple[int, int], ...]
"""Of pieces: (first, how many), in order."""


def size_for(length: int) -> int | None:
    """Bytes of each piece of a file of this length; None where it has none."""
    if length < LEAST:
        return None
    return max(SIZE, 1 << (-(-length // MOST) - 1).bit_length())


class Hasher:
    """XXH3-64 of a file and of its pieces of `size` (None: of no pieces), in one pass over its bytes."""

    def __init__(self, size: int | None) -> None:
        self._size, self._whole, self._piece = size, xxhash.xxh3_64(), xxhash.xxh3_64()
        self._open = 0
        self._digests = bytearray()

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the bytes that come next, however many."""
        self._whole.update(chunk)
        left = memoryview(chunk) if self._size is not None else memoryview(b"")
        while self._size is not None and len(left):
            part, left = left[: self._size - self._open], left[self._size - self._open :]
            self._piece.update(part)
            self._open += len(part)
            if self._open == self._size:
                self._close()

    def _close(self) -> None:
        self._digests += _stored(self._piece.intdigest())
        self._piece.reset()
        self._open = 0

    def whole(self) -> int:
        """The digest of all that was taken."""
        return self._whole.intdigest()

    def pieces(self) -> Pieces | None:
        """The digests of its pieces; nothing more can be taken then."""
        if self._size is None:
            return None
        if self._open:
            self._close()
        return Pieces(self._size, bytes(self._digests))


def is_right(pieces: Pieces, number: int, view: bytes | memoryview) -> bool:
    """Whether these are the bytes of piece `number`."""
    return pieces.digests[number * _DIGEST : (number + 1) * _DIGEST] == _stored(xxhash.xxh3_64_intdigest(view))


def first_difference(one: Pieces, other: Pieces) -> int | None:
    """The first piece of which these have different digests; both are of one file and size."""
    for at in range(0, len(one.digests), _DIGEST):
        if one.digests[at : at + _DIGEST] != other.digests[at : at + _DIGEST]:
            return at // _DIGEST
    return None


def runs(numbers: Iterable[int]) -> Runs:
    """These pieces as runs."""
    found = list[tuple[int, int]]()
    for number in sorted(set(numbers)):
        if found and sum(found[-1]) == number:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return tuple(found)


def fault(pieces: Pieces, length: int) -> str:
    """What cannot be meant by the pieces of a file of this length; empty where nothing is wrong."""
    size = pieces.size
    if size < 1 or size & (size - 1):
        return f"pieces of {size} bytes, which is no power of two"
    count = -(-length // size)
    if len(pieces.digests) != count * _DIGEST:
        return f"{len(pieces.digests)} bytes of digests for {count} pieces"
    ends = [0, *(number for first, many in pieces.head for number in (first, first + many)), count]
    if any(many < 1 for _, many in pieces.head) or any(one > other for one, other in pairwise(ends)):
        return "runs of pieces that lie outside the file or are not in order"
    if pieces.marks and not (pieces.marks[-1][0] < length and len(pieces.marks) <= count):
        return "marks that lie outside the file, or more than pieces"
    if any(one[0] >= other[0] or one[1] >= other[1] for one, other in pairwise(pieces.marks)):
        return "marks that are not in order"
    return ""


def _stored(digest: int) -> bytes:
    return digest.to_bytes(_DIGEST, "little")
