"""Attempt ids: 26 characters that sort by the time they were drawn (a ULID: 48 bits of milliseconds, 80 of randomness).

Invariant: two draws never collide in practice, so an id names one attempt of one save for ever.
Failure behaviour: `check` raises `UsageError` naming the text.
"""

from __future__ import annotations

import os
import re

from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import UsageError

_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PATTERN = re.compile(rf"[0-7][{_DIGITS}]{{25}}")


def new(clock: Clock = SYSTEM_CLOCK) -> str:
    """A fresh id."""
    return from_bytes(int(clock.time() * 1000).to_bytes(6, "big") + os.urandom(10))


def from_bytes(raw: bytes) -> str:
    """The text of 16 bytes."""
    number = int.from_bytes(raw, "big")
    return "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def to_bytes(text: str) -> bytes:
    """The 16 bytes of an id."""
    number = 0
    for digit in check(text):
        number = number << 5 | _DIGITS.index(digit)
    return number.to_bytes(16, "big")


def is_ulid(text: str) -> bool:
    """Whether `text` is an id."""
    return _PATTERN.fullmatch(text) is not None


def check(text: str) -> str:
    """`text` itself when it is an id."""
    if not is_ulid(text):
        raise UsageError(
            f"{text!r} is not an attempt id", hint="attempt ids have 26 characters, as in `headrace ckpt ls`"
        )
    return text
