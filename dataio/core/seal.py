"""A digest inside a JSON document: the documents that name everything else are checked like everything else.

Purpose: `dataset.json`, the version documents and those of a checkpoint repository have nobody above them to hold their
digest, so each carries its own, as its last entry.
Invariants: a sealed document is JSON like any other, and the digest covers every byte before that last entry, as text; so
fields may be added to a document without making older ones unreadable.
Failure behaviour: `unseal` raises `CorruptionError` naming the document, for a wrong digest and for one that is not there.
"""

from __future__ import annotations

import re

import blake3

from headrace.dataio.core.errors import CorruptionError

_SEAL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')
_END = b"\n}\n"


def seal(document: bytes) -> bytes:
    """`document`, a JSON object of at least one entry ending in a line that is `}`, with its digest added."""
    body = document.removesuffix(_END)
    if body == document:
        raise ValueError("a document is sealed as an indented JSON object")
    return body + b',\n "digest": "' + blake3.blake3(body).hexdigest().encode() + b'"\n}\n'


def is_sealed(data: bytes) -> bool:
    """Whether `data` ends in a digest, right or wrong."""
    return _SEAL.search(data) is not None


def unseal(data: bytes, name: str) -> bytes:
    """The document without its digest, once that was found right."""
    match = _SEAL.search(data)
    if match is None:
        raise CorruptionError(f"{name} does not end in its digest", hint="it is cut short, or was edited")
    body = data[: match.start()]
    if blake3.blake3(body).hexdigest().encode() != match[1]:
        raise CorruptionError(
            f"{name} is damaged: its BLAKE3 digest does not match", hint="it was changed after writing"
        )
    return body + _END
