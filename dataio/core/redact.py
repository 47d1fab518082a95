"""Keeps secrets out of every text that leaves the process: errors, logs, reprs, metrics, manifests.

Invariant: `redact` is idempotent and never lengthens the secret's neighbours. It errs towards hiding too much.
Failure behaviour: none; it is a pure function of its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_HIDDEN = "***"
_PASSES = 8
_KEYS = r"(?:access|account|api|customer|encryption|master|private|shared)[_-]?key"
_SECRET_WORDS = rf"(?:secret|token|passw(?:or)?d|credential|signature|authorization|connection[_-]?string|{_KEYS})"
_NAMED = rf"{_SECRET_WORDS}[\w-]{{0,64}}[\"']?\s{{0,8}}[=:]\s{{0,8}}"  # bounded: a long text costs what it is long
# not compiled before they are needed: that takes a millisecond
_PATTERNS = (
    (r"(?<=://)[^/\s@]+@", _HIDDEN + "@"),  # user:password@ in a URL
    (
        r"(?i)(authorization[\"']?\s{0,8}[=:]\s{0,8}[\"']?)[^\s\"'][^\"'\r\n]*",
        r"\1" + _HIDDEN,
    ),  # has several words
    (rf"(?i)({_NAMED})([\"'])(?:(?!\2)[^\r\n])+\2", rf"\1\2{_HIDDEN}\2"),
    (rf"(?i)({_NAMED}[\"']?)([^\s\"'&,;)}}\]]+)", r"\1" + _HIDDEN),
    (r"(?i)([?&](?:sig|sas)=)[^\s\"'&]+", r"\1" + _HIDDEN),
    (r"\b(Bearer\s)[\w.~+/=-]{16,}", r"\1" + _HIDDEN),
    (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", _HIDDEN),
)
_SECRET_NAME = rf"(?i){_SECRET_WORDS}|^(?:key|sas|sig|auth|cookies?)$"


def redact(text: str) -> str:
    """`text` with anything that looks like a secret replaced by `***`."""
    for _ in range(_PASSES):  # what is hidden may make more of what is beside it look like a secret
        before = text
        for pattern, replacement in _PATTERNS:
            text = re.sub(pattern, replacement, text)
        if text == before:
            break
    return text


def printable(text: str) -> str:
    """`text` without what a terminal obeys: escapes and other characters that are not printed become `?`."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else "?" for c in text)


def is_secret_name(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    return bool(re.search(_SECRET_NAME, name))


def without_secrets(options: Mapping[str, object]) -> dict[str, object]:
    """A copy of nested `options` that lacks every secret entry; safe to send, log or store."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if not _is_secret(name, value)
    }


def has_secrets(options: Mapping[str, object]) -> bool:
    """Whether nested `options` hold a secret anywhere."""
    return any(
        _is_secret(name, value) or (isinstance(value, Mapping) and has_secrets(value))
        for name, value in options.items()
    )


def _is_secret(name: str, value: object) -> bool:
    """By its name, or as a text that holds one, such as the URL of a proxy with a password."""
    return is_secret_name(name) or (isinstance(value, str) and redact(value) != value)
