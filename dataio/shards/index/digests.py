"""BLAKE3 digests of index parts and version documents.

Invariant: this module does not import Arrow, because sample lookup works without Arrow.
"""

from __future__ import annotations

import blake3

SHORT = 16
"""Length in bytes of the digest of one piece of an object. It is short because an object has many pieces."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of `data`, in hex."""
    return str(blake3.blake3(data).hexdigest())


def short(data: bytes | bytearray | memoryview) -> bytes:
    """The first `SHORT` bytes of the BLAKE3 of `data`."""
    return blake3.blake3(data).digest(SHORT)
