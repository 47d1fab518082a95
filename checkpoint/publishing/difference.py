"""How a changed block of weights is stored in an update.

- *Sparse*: the positions of the changed elements and their XOR with the old elements. Positions are stored as distances
  from the position before, in planes of bytes, and so are the XOR values. zstd compresses both.
- *XOR*: the XOR of all bytes, in planes of bytes, with zstd.
- *Whole*: the new bytes.

`encode` takes the smallest. Sparse is tried if at most a third of the elements changed, XOR if at least a tenth did.
Invariant: `decode` of an encoded block changes a copy of the old block into the new one. Sizes are checked before memory
is allocated.
Failure behaviour: `CorruptionError` for a damaged block.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from headrace.dataio.core.errors import CorruptionError

WHOLE, SPARSE, XOR = 0, 1, 2
_WORTH = 0.97
_HEAD = struct.Struct("<IB")  # number of changed elements, bytes of a distance
_LEVEL = 1
Bytes = npt.NDArray[np.uint8]
I64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Change(msgspec.Struct, frozen=True):
    """The change of a block, decoded.

    With `positions`, which are in elements and ascending, `values` are their XOR. Without, `values` are the bytes that
    replace the block, or, if `xor`, that are combined with it.
    """

    values: npt.NDArray[Any]
    positions: I64 | None = None
    xor: bool = False

    def apply(self, block: Bytes, item: int) -> None:
        """Change `block`, the old bytes, into the new ones. `item`: bytes of an element."""
        if self.positions is not None:
            block.view(_UINT[min(item, 8)])[self.positions] ^= self.values
        elif self.xor:
            block ^= self.values
        else:
            block[:] = self.values


class _Zstd(threading.local):
    """zstd's compressor and decompressor, created once for each thread."""

    def __init__(self) -> None:
        self.compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def encode(new: Bytes, old: Bytes, item: int) -> tuple[int, bytes]:
    """Return (how, bytes) of the smallest form of the change from `old` to `new`, which have the same length."""
    unit = _UINT[min(item, 8)]  # an element of 16 bytes counts as two
    after, before = new.view(unit), old.view(unit)
    positions = changed_positions(after, before)
    share = len(positions) / max(len(after), 1)
    best: tuple[int, bytes] = (WHOLE, b"")
    size = _WORTH * len(new)
    if share <= 1 / 3 and len(sparse := _encode_sparse(after[positions] ^ before[positions], positions)) < size:
        best, size = (SPARSE, sparse), len(sparse)
    if share >= 1 / 10 and len(dense := _zstd.compress(_planes(after ^ before).tobytes())) < size:
        best = XOR, dense
    return best if best[0] != WHOLE else (WHOLE, new.tobytes())


def changed_positions(new: npt.NDArray[Any], old: npt.NDArray[Any]) -> I64:
    """The positions of the elements that differ, in ascending order.

    Few changes are found in two passes: first the words of eight comparisons that hold one, then the changes in these
    words. It takes little more than half of the time of `flatnonzero`.
    """
    differ = new != old
    whole = len(differ) // 8 * 8
    if np.count_nonzero(differ) * 16 > len(differ):
        return np.flatnonzero(differ)
    words = differ[:whole].view(np.uint64)
    at = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[at].view(np.bool_))
    first = (at[inside >> 3] << 3) + (inside & 7)
    return first if whole == len(differ) else np.concatenate([first, whole + np.flatnonzero(differ[whole:])])


def _encode_sparse(differences: npt.NDArray[Any], positions: I64) -> bytes:
    distances = np.diff(positions, prepend=0)
    width = 1 if not len(distances) or distances.max() < 1 << 8 else 2 if distances.max() < 1 << 16 else 4
    planes = np.concatenate([_planes(distances.astype(_UINT[width])), _planes(differences)])
    return _HEAD.pack(len(positions), width) + _zstd.compress(planes.tobytes())


def decode(stored: memoryview, how: int, size: int, item: int) -> Change:
    """Decode the change of a block of `size` bytes. `item`: bytes of an element."""
    if how == WHOLE:
        if len(stored) != size:
            raise CorruptionError(f"a block of {size} bytes is stored as {len(stored)}")
        return Change(np.frombuffer(stored, np.uint8))
    item = min(item, 8)
    if how == XOR:
        return Change(_unplanes(_decompress(stored, size), item), xor=True)
    if how != SPARSE or len(stored) < _HEAD.size:
        raise CorruptionError(f"a block is stored in the unknown form {how}")
    return _decode_sparse(stored, size // item, item)


def _decode_sparse(stored: memoryview, elements: int, item: int) -> Change:
    count, width = _HEAD.unpack_from(stored)
    if count > elements or width not in (1, 2, 4):
        raise CorruptionError(f"{count} changed elements in a block of {elements}")
    planes = _decompress(stored[_HEAD.size :], count * (width + item))
    distances = _unplanes(planes[: count * width], width).view(_UINT[width])
    positions = np.cumsum(distances, dtype=np.int64)
    if count and (positions[-1] >= elements or not distances[1:].all()):
        raise CorruptionError("the changed elements of a block are not in it, or not in order")
    return Change(_unplanes(planes[count * width :], item).view(_UINT[item]), positions)


def _decompress(stored: memoryview, size: int) -> Bytes:
    try:
        if zstandard.frame_content_size(stored) != size:
            raise CorruptionError(f"a block does not decompress to {size} bytes")
        return np.frombuffer(_zstd.decompressor.decompress(stored, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a block cannot be decompressed: {error}") from error


def _planes(values: npt.NDArray[Any]) -> Bytes:
    """The first bytes of all elements, then all second bytes, and so on."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def _unplanes(planes: Bytes, item: int) -> Bytes:
    return np.ascontiguousarray(planes.reshape(item, -1).T).reshape(-1)
