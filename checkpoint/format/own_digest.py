"""The digest that a manifest or a group contains of its own bytes.

Purpose: the decision names the digests of manifests and groups. The process that writes the decision computes them from
the bytes that it fetched. If one bit changed in transit, the decision would name a digest that no object has, and the
committed step could never be restored. So each of these objects contains the BLAKE3 digest of its other bytes, as the
last entry of its MessagePack map. A process that fetches the object without knowing its digest checks this entry.

Invariant: if any single bit of an object changes, `check` raises an error, or a reader decodes the same values.
Objects of older versions have no such entry. `fetch` reads those until two copies are equal.
Failure behaviour: `CorruptionError` names the object.
"""

from __future__ import annotations

from headrace.checkpoint.format.chunking import DIGEST_BYTES, digest
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

_READS = 3
"""The number of times that an object is fetched before it counts as damaged."""
_KEY = b"\xa6digest\xc4" + bytes([DIGEST_BYTES])
_ENTRY_BYTES = len(_KEY) + DIGEST_BYTES
_FIXED_MAP, _MAP_16 = 0x80, b"\xde"


def append(data: bytes) -> bytes:
    """Return the MessagePack map `data` with one more entry, "digest": the digest of all bytes before the entry."""
    if data[0] & 0xF0 == _FIXED_MAP:
        entries, rest = data[0] & 0x0F, data[1:]
    elif data[:1] == _MAP_16:
        entries, rest = int.from_bytes(data[1:3], "big"), data[3:]
    else:
        raise ValueError("not a MessagePack map of at most 65,535 entries")
    entries += 1
    head = bytes([_FIXED_MAP | entries]) if entries < 16 else _MAP_16 + entries.to_bytes(2, "big")
    body = head + rest
    return body + _KEY + digest(body)


def has_digest(data: bytes) -> bool:
    """Whether the object's last entry is its own digest."""
    return data[-_ENTRY_BYTES:-DIGEST_BYTES] == _KEY


def check(data: bytes, key: str) -> None:
    """Raise `CorruptionError` if the object `key` contains a digest that does not match its bytes."""
    if has_digest(data) and digest(data[:-_ENTRY_BYTES]) != data[-DIGEST_BYTES:]:
        raise CorruptionError(
            f"{key} is damaged: its own digest does not match its bytes", hint="run `headrace ckpt check`"
        )


def fetch(store: Store, key: str, *, max_bytes: int) -> bytes:
    """Fetch the object `key`. Fetch it again if it is damaged, because the damage may have happened in transit.

    Args:
        store: The repository's store.
        key: The key of a manifest or a group.
        max_bytes: The maximum size of the object, in bytes.

    Raises:
        NotFoundError: The object is absent.
        CorruptionError: Every copy was damaged. Or the object has no digest, and no two copies in a row were equal.
    """
    before, error = None, CorruptionError(f"{key} differs each time it is read", hint="run `headrace ckpt check`")
    for _ in range(_READS):
        data = store.get(key, max_bytes=max_bytes)
        if has_digest(data):
            try:
                check(data, key)
                return data
            except CorruptionError as damaged:
                error = damaged
        elif data == before:
            return data
        before = data
        store.invalidate(key)
    raise error
