"""Removes secrets from every text that leaves the process: errors, logs, reprs, metrics, manifests.

Invariant: `redact` is idempotent, and does not change the text around a secret. If in doubt, it hides too much.

Failure behaviour: none. `redact` depends only on its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_HIDDEN = "***"
_PASSES = 8
_KEYS = (
    r"(?:access|account|api|app|auth|consumer|customer|encryption|hmac|kms|license|master|private|session|shared|signing"
    r"|ssh|storage|subscription)[_-]?key"
)
_SECRET_WORDS = (
    r"(?:secret|token|passw(?:or)?d|passphrase|credential|signature|authorization|cookie|connection[_-]?string"
    rf"|{_KEYS})"
)
_NAMED = rf"{_SECRET_WORDS}[\w-]{{0,64}}[\"']?\s{{0,8}}[=:]\s{{0,8}}"  # bounded, so that the time is linear in the text
_NAMING = (
    *("secret", "token", "passw", "passphrase", "credential", "signature", "authorization", "cookie", "connection"),
    "key",
)
"""A name that `_NAMED` or `_SECRET_WORDS` finds contains one of these."""
# Words, a pattern, and what replaces it. A pattern is compiled on first use, which takes a millisecond. It matches no
# ASCII text that lacks all of its words: most errors contain none of them, and looking for a word is ten times as fast.
_PATTERNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("://",), r"(?<=://)[^/\s\"'<>]+@", _HIDDEN + "@"),  # user:password@ in a URL
    (
        ("authorization",),
        r"(?i)(authorization[\"']?\s{0,8}[=:]\s{0,8}(?:b?[\"'])?)[^\s\"'][^\"'\r\n]*",
        r"\1" + _HIDDEN,
    ),  # has several words
    (_NAMING, rf"(?i)({_NAMED}b?)([\"'])(?:(?!\2)[^\r\n])+\2", rf"\1\2{_HIDDEN}\2"),
    (_NAMING, rf"(?i)({_NAMED}[\"']?)([^\s\"'&,;)}}\]]+)", r"\1" + _HIDDEN),
    (("sig=", "sas=", "key="), r"(?i)([?&](?:sig|sas|key)=)[^\s\"'&]+", r"\1" + _HIDDEN),
    (
        ("cookie", "pwd"),
        r"(?i)(\b(?:cookie|pwd)[\"']?\s{0,8}[=:]\s{0,8}[\"']?)[^\s\"'][^\"'\r\n]*",
        r"\1" + _HIDDEN,
    ),
    (("--",), rf"(?i)(--{_SECRET_WORDS}[\w-]{{0,64}}\s{{1,8}})[^\s-]\S*", r"\1" + _HIDDEN),  # an option of a command
    (
        ("-----begin",),
        r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,32}PRIVATE KEY-----)?",
        _HIDDEN,
    ),
    (
        ("hf_", "gh", "glpat-", "aiza"),
        r"\b(?:hf_|gh[opsru]_|github_pat_|glpat-|AIza)[\w-]{20,}",
        _HIDDEN,
    ),  # tokens with a known prefix
    (("eyj",), r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}", _HIDDEN),  # a JSON web token
    (("bearer",), r"\b(Bearer\s)[\w.~+/=-]{16,}", r"\1" + _HIDDEN),
    (("akia", "asia"), r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", _HIDDEN),
)
_SECRET_NAME = (
    rf"(?i){_SECRET_WORDS}|^(?:key|sas|sig|pass|pat|pin|pwd|jwt|login|private|refresh|creds)$|pwd$"
    r"|(?:^|[_-])(?:auth|oauth|bearer|creds|pkey|ticket)$"
)


def redact(text: str) -> str:
    """Replace everything in `text` that looks like a secret by `***`."""
    for _ in range(_PASSES):  # hiding one part may make its neighbour look like a secret
        before = text
        for pattern, replacement in _possible(text):
            text = re.sub(pattern, replacement, text)
        if text == before:
            break
    return text


def _possible(text: str) -> Iterator[tuple[str, str]]:
    """The patterns that may match `text`, or what replacing makes of it: that adds no word."""
    lower = text.lower() if text.isascii() else None  # other letters may match, such as the long s
    for words, pattern, replacement in _PATTERNS:
        if lower is None or any(word in lower for word in words):
            yield pattern, replacement


def printable(text: str) -> str:
    """Replace terminal escapes and other unprintable characters in `text` by `?`."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else "?" for c in text)


def is_secret_name(name: str) -> bool:
    """Whether the value of an option with this name is a secret."""
    return bool(re.search(_SECRET_NAME, name))


def without_secrets(options: Mapping[str, object]) -> dict[str, object]:
    """Copy nested `options` without the secret entries. The copy is safe to send, log or store."""
    return {name: _value_without_secrets(value) for name, value in options.items() if not _is_secret(name, value)}


def has_secrets(options: Mapping[str, object]) -> bool:
    """Whether nested `options` contain a secret at any level."""
    return any(_is_secret(name, value) for name, value in options.items()) or any(
        has_secrets(mapping) for value in options.values() for mapping in _mappings(value)
    )


def _is_secret(name: str, value: object) -> bool:
    """Whether `name` is the name of a secret, or `value` contains one, for example a URL with a password."""
    if is_secret_name(str(name)):
        return True
    if isinstance(value, list | tuple | set | frozenset):
        names = [item for item in value if isinstance(item, str)] if len(value) == 2 else []  # a header: name and value
        return any(map(is_secret_name, names)) or any(_is_secret("", item) for item in value)
    return isinstance(value, str | bytes) and redact(text := _text(value)) != text


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _value_without_secrets(value: object) -> object:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_value_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _mappings(value: object) -> Iterator[Mapping[str, object]]:
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _mappings(item)
