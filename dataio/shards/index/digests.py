"""BLAKE3 as index parts and version documents are vouched for, apart from Arrow, which those who look up samples do without."""

from __future__ import annotations

import blake3

SHORT = 16
"""Bytes of a digest of a piece of an object, of which there are many."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of `data`, in hex."""
    return str(blake3.blake3(data).hexdigest())


def short(data: bytes | bytearray | memoryview) -> bytes:
    """The first `SHORT` bytes of the BLAKE3 of `data`."""
    return blake3.blake3(data).digest(SHORT)
