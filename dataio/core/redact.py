"""Keeps secrets out of every text that leaves the process: errors, logs, reprs, metrics, manifests.

Invariant: `redact` is idempotent and never lengthens the secret's neighbours. It errs towards hiding too much.
Failure behaviour: none; it is a pure function of its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_HIDDEN = "***"
_SECRET_WORDS = r"(?:secret|token|passw(?:or)?d|credential|signature|access[_-]?key|authorization|private[_-]?key)"
_PATTERNS = (
    (re.compile(r"(?<=://)[^/\s@]+@"), _HIDDEN + "@"),  # user:password@ in a URL
    (re.compile(rf"(?i)([\w-]*{_SECRET_WORDS}[\w-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"'&,;)}}\]]+)"), r"\1" + _HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), _HIDDEN),
)
_SECRET_NAME = re.compile(rf"(?i){_SECRET_WORDS}|^(?:key|sas)$")


def redact(text: str) -> str:
    """`text` with anything that looks like a secret replaced by `***`."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    return bool(_SECRET_NAME.search(name))


def without_secrets(options: Mapping[str, object]) -> dict[str, object]:
    """A copy of nested `options` that lacks every secret entry; safe to send, log or store."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if not is_secret_name(name)
    }


def has_secrets(options: Mapping[str, object]) -> bool:
    """Whether nested `options` hold a secret anywhere."""
    return any(
        is_secret_name(name) or (isinstance(value, Mapping) and has_secrets(value)) for name, value in options.items()
    )
