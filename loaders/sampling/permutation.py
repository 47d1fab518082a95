"""Keyed permutations of 0 … n-1 that need no table: a vectorised Feistel network with cycle walking.

Purpose: shuffle any number of items with O(1) memory, and compute the new or the original place of any item directly.
Invariants: for one key and one n, `permute` is a bijection of [0, n) and `unpermute` is its inverse. Keys and sizes may
differ from element to element. Only wrapping 64-bit integer arithmetic is used, so equal arguments give equal results
on every machine and in every version of numpy. This is a shuffle, not a cipher: it is not secure.
Failure behaviour: `ValueError` for a value outside [0, n).

Method: Feistel rounds over two halves of the bits (Luby and Rackoff 1988). The halves may differ in width, so the
domain is smaller than 2n. Cycle walking (Black and Rogaway 2002) applies the rounds again until the value is in [0, n);
fewer than two applications are expected. The mixing constants are those of splitmix64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LOW = np.uint64((1 << 32) - 1)
_27, _30, _31, _32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUND_KEYS = [np.uint64((number + 1) * _GOLDEN & _MASK) for number in range(_ROUNDS)]


def mix(values: U64) -> U64:
    """The splitmix64 finaliser, applied to each element. Every input bit affects every output bit."""
    mixed = values >> _30
    mixed ^= values
    mixed *= _FIRST
    mixed ^= mixed >> _27
    mixed *= _SECOND
    mixed ^= mixed >> _31
    return mixed


def key_of(*parts: int | I64) -> U64:
    """A 64-bit key for each element, from any number of integers or integer arrays (broadcast).

    The order of the parts matters.
    """
    if set(map(type, parts)) <= {int}:  # a single key, as for each clip: ten times as fast as the array path
        return np.array([_one_key(parts)], np.uint64)  # type: ignore[arg-type] # mypy does not follow `set`
    arrays = [np.atleast_1d(np.asarray(_wrap(part))) for part in parts]
    key = np.zeros(np.broadcast_shapes(*(a.shape for a in arrays)), np.uint64)
    for array in arrays:
        key = mix((key ^ array.astype(np.uint64)) + np.uint64(_GOLDEN))
    return key


def _one_key(parts: Sequence[int]) -> int:
    key = 0
    for part in parts:
        key = ((key ^ (part & _MASK)) + _GOLDEN) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def short(key: U64) -> str:
    """The upper 32 bits of a key as eight hexadecimal characters, for states."""
    return f"{int(key[0]) >> 32:08x}"


def permute(values: I64, n: int | I64, key: U64) -> I64:
    """The place of each of `values` in the permutation of [0, n) that `key` selects.

    All arguments are broadcast to one dimension.
    """
    return _walk(values, n, key, range(_ROUNDS))


def unpermute(values: I64, n: int | I64, key: U64) -> I64:
    """The inverse of `permute`."""
    return _walk(values, n, key, range(_ROUNDS - 1, -1, -1))


def _wrap(part: int | I64) -> U64 | np.uint64:
    return part.astype(np.uint64) if isinstance(part, np.ndarray) else np.uint64(part & _MASK)


def _walk(values: I64, n: int | I64, key: U64, rounds: range) -> I64:
    at, size, keys = np.broadcast_arrays(np.atleast_1d(values), np.asarray(n), key)
    if at.size and (at.min() < 0 or bool((at >= size).any())):
        raise ValueError("a value lies outside the range that is permuted")
    x, size, keys = at.astype(np.uint64), size.astype(np.uint64), keys.copy()
    bits = _bit_length(size - np.uint64(1)) if x.size else x
    left, right = bits // np.uint64(2), bits - bits // np.uint64(2)
    todo = np.arange(x.size)
    while todo.size:
        x[todo] = _feistel(x[todo], left[todo], right[todo], keys[todo], rounds)
        todo = todo[x[todo] >= size[todo]]
    return x.astype(np.int64)


def _feistel(x: U64, left: U64, right: U64, key: U64, rounds: range) -> U64:
    """Apply the rounds.

    Even rounds change the upper `left` bits using the lower `right` bits. Odd rounds do the reverse.
    """
    one = np.uint64(1)
    upper_mask, lower_mask = (one << left) - one, (one << right) - one
    upper, lower = x >> right, x & lower_mask
    for number in rounds:
        round_key = key + _ROUND_KEYS[number]
        if number % 2 == 0:
            upper = upper ^ (mix(lower ^ round_key) & upper_mask)
        else:
            lower = lower ^ (mix(upper ^ round_key) & lower_mask)
    return (upper << right) | lower


def _bit_length(values: U64) -> U64:
    """The number of bits of each value; 0 for 0.

    It is exact, since a 32-bit half fits the 53-bit mantissa of a float.
    """
    high, low = values >> _32, values & _LOW
    length: U64 = np.where(high != 0, np.frexp(high)[1] + 32, np.frexp(low)[1]).astype(np.uint64)
    return length
