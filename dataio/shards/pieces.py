"""Digests of the pieces of long files, with which a reader can check a range of a file without the rest.

Purpose: this module chooses the size of pieces, computes their digests while the bytes are streamed, and verifies
pieces. It does no I/O. Design note 0022 gives the reasons.

Invariants:

* A file of `MIN_FILE_BYTES` or more has pieces. Their size is `MIN_PIECE_BYTES`, or the smallest larger power of two
  that gives at most `MAX_PIECES` pieces. The digests of a file therefore take at most 64 KiB.
* Readers use stored pieces only after `find_fault` found them valid.

Failure behaviour: none. Callers raise errors that name the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import xxhash

from headrace.dataio.core import limits
from headrace.dataio.shards.sample import Pieces

MIN_FILE_BYTES = 1 * limits.MIB
MIN_PIECE_BYTES = 64 * limits.KIB
MAX_PIECES = 8192
_DIGEST = 8

Runs = tuple[tuple[int, int], ...]
"""Runs of pieces as (first, count), in order."""


def piece_size(length: int) -> int | None:
    """Return the size of the pieces of a file with this length, in bytes, or None if the file has no pieces."""
    if length < MIN_FILE_BYTES:
        return None
    return max(MIN_PIECE_BYTES, 1 << (-(-length // MAX_PIECES) - 1).bit_length())


class Hasher:
    """Computes the XXH3-64 of a file and of its pieces of `size` bytes (None: no pieces), in one pass."""

    def __init__(self, size: int | None) -> None:
        self._size, self._whole, self._piece = size, xxhash.xxh3_64(), xxhash.xxh3_64()
        self._open = 0
        self._digests = bytearray()

    def update(self, chunk: bytes | memoryview) -> None:
        """Add the next bytes of the file, in chunks of any length."""
        self._whole.update(chunk)
        remaining = memoryview(chunk) if self._size is not None else memoryview(b"")
        while self._size is not None and len(remaining):
            part, remaining = remaining[: self._size - self._open], remaining[self._size - self._open :]
            self._piece.update(part)
            self._open += len(part)
            if self._open == self._size:
                self._close()

    def _close(self) -> None:
        self._digests += _digest_bytes(self._piece.intdigest())
        self._piece.reset()
        self._open = 0

    def whole(self) -> int:
        """Return the digest of all bytes so far."""
        return self._whole.intdigest()

    def pieces(self) -> Pieces | None:
        """Return the digests of the pieces. Do not call `update` after this."""
        if self._size is None:
            return None
        if self._open:
            self._close()
        return Pieces(self._size, bytes(self._digests))


def matches(pieces: Pieces, number: int, view: bytes | memoryview) -> bool:
    """Return whether these bytes have the digest of piece `number`."""
    return pieces.digests[number * _DIGEST : (number + 1) * _DIGEST] == _digest_bytes(xxhash.xxh3_64_intdigest(view))


def first_difference(one: Pieces, other: Pieces) -> int | None:
    """Return the number of the first piece whose digests differ, or None.

    Both must have the same piece size and describe files of one length.
    """
    for at in range(0, len(one.digests), _DIGEST):
        if one.digests[at : at + _DIGEST] != other.digests[at : at + _DIGEST]:
            return at // _DIGEST
    return None


def runs(numbers: Iterable[int]) -> Runs:
    """Merge piece numbers into runs."""
    merged = list[tuple[int, int]]()
    for number in sorted(set(numbers)):
        if merged and sum(merged[-1]) == number:
            merged[-1] = merged[-1][0], merged[-1][1] + 1
        else:
            merged.append((number, 1))
    return tuple(merged)


def find_fault(pieces: Pieces, length: int) -> str:
    """Return what is invalid in the pieces of a file with this length, or "" if they are valid."""
    size = pieces.size
    if size < 1 or size & (size - 1):
        return f"pieces of {size} bytes, which is not a power of two"
    count = -(-length // size)
    if len(pieces.digests) != count * _DIGEST:
        return f"{len(pieces.digests)} bytes of digests for {count} pieces"
    ends = [0, *(number for first, many in pieces.head for number in (first, first + many)), count]
    if any(many < 1 for _, many in pieces.head) or any(one > other for one, other in pairwise(ends)):
        return "runs of pieces that are outside the file or are not in order"
    if pieces.marks and not (pieces.marks[-1][0] < length and len(pieces.marks) <= count):
        return "marks that are outside the file, or more than pieces"
    if any(one[0] >= other[0] or one[1] >= other[1] for one, other in pairwise(pieces.marks)):
        return "marks that are not in order"
    return ""


def _digest_bytes(digest: int) -> bytes:
    return digest.to_bytes(_DIGEST, "little")
