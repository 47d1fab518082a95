"""The digest inside a manifest or a group: its object names all other bytes of itself.

Purpose: the decision names the digests of manifests and groups. The process that writes the decision takes the digests
from the bytes that it fetched. If one bit of them changed on the way, the decision would name a digest that no object
has, and the committed step could never be restored. So each of these objects carries its own BLAKE3 digest, as the last
entry of its MessagePack map, and every process that fetches it without knowing its digest compares that one.

Invariant: a change of any single bit of an object is found by `check`, or it changes nothing that a reader decodes.
Objects of older versions have no such entry. `fetch` reads those until two copies are equal.
Failure behaviour: `CorruptionError` names the object.
"""

from __future__ import annotations

from headrace.checkpoint.format.chunking import DIGEST_BYTES, digest
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

_READS = 3
"""How often an object is fetched until it counts as damaged."""
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
    return data[-_ENTRY_BYTES:-DIGEST_BYTES] == _KEY


def check(data: bytes, key: str) -> None:
    """Raise `CorruptionError` if the object `key` has a digest of its own that is not the digest of its bytes."""
    if has_digest(data) and digest(data[:-_ENTRY_BYTES]) != data[-DIGEST_BYTES:]:
        raise CorruptionError(
            f"{key} is damaged: its own digest is not that of its bytes", hint="run `headrace ckpt check`"
        )


def fetch(store: Store, key: str, *, max_bytes: int) -> bytes:
    """Fetch the object `key`, again if it is damaged, because the damage may have happened in transit.

    Args:
        store: The repository's store.
        key: The key of a manifest or a group.
        max_bytes: A larger object is refused.

    Raises:
        NotFoundError: The object is absent.
        CorruptionError: It was damaged each time; or it has no digest, and no two copies in a row were equal.
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
