"""Chooses the samples that `verify --decode` decodes. Every run on a version chooses the same samples.

Invariants: the choice depends only on the hashes of the keys, so it is the same on every machine. A share chooses each
sample by its own hash, so a later version keeps the choice. A number chooses the samples with the smallest hashes. New
samples in a later version may then replace some of them. Memory is proportional to that number.
Failure behaviour: an amount that is neither a share nor a number raises `UsageError`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable

import xxhash

from headrace.dataio.core.errors import UsageError

MOST = 1_000_000
"""The largest number of samples that can be asked for. A share has no such limit."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%?)")


def chooser(amount: str, keys: Callable[[], Iterable[str]]) -> Callable[[str], bool]:
    """Return a function that says whether the sample with a key is chosen.

    `amount` is a share such as `2.5%`, or a number. `keys` returns all keys. It is called only for a number.
    """
    match = _AMOUNT.fullmatch(amount.strip())
    share = float(match[1]) if match else 0.0
    if match is None or (match[2] and share > 100) or (not match[2] and ("." in match[1] or share > MOST)):
        raise UsageError(f"{amount!r} is not how many samples to decode", hint=f"write 1%, or a number up to {MOST}")
    if match[2]:
        limit = int(share / 100 * 2**64)
    else:
        smallest = heapq.nsmallest(int(share), map(_place, keys()))
        limit = smallest[-1] + 1 if smallest else 0
    return lambda key: _place(key) < limit


def _place(key: str) -> int:
    return int(xxhash.xxh3_64_intdigest(key.encode()))
