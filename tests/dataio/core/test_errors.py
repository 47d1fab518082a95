"""The error tree: every kind has a stable code, an exit code, a hint, and no secrets."""

from __future__ import annotations

import pytest

from headrace.dataio.core import errors
from headrace.dataio.core.errors import HeadraceError

CODES = {
    "HeadraceError": ("error", 70),
    "UsageError": ("usage", 2),
    "NotFoundError": ("not_found", 2),
    "AccessDeniedError": ("access_denied", 2),
    "RangeError": ("range", 2),
    "MismatchError": ("mismatch", 2),
    "UnsupportedError": ("unsupported", 2),
    "TransientError": ("transient", 3),
    "AmbiguousWriteError": ("ambiguous_write", 3),
    "DeadlineError": ("deadline", 3),
    "SlowDownError": ("slow_down", 3),
    "CorruptionError": ("corruption", 4),
    "MissingValueError": ("missing_value", 4),
    "ConflictError": ("conflict", 5),
    "CapacityError": ("capacity", 6),
}


def test_codes_and_exit_codes_are_stable() -> None:
    kinds = {n: k for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, HeadraceError)}
    assert {name: (kind.code, kind.exit_code) for name, kind in kinds.items()} == CODES


def test_an_error_says_what_and_what_next() -> None:
    error = HeadraceError("the bucket is gone", hint="create it")
    assert str(error) == "the bucket is gone (create it)"
    assert (error.message, error.hint) == ("the bucket is gone", "create it")
    assert str(HeadraceError("alone")) == "alone"


@pytest.mark.parametrize("text", ["secret=hunter2", "http://user:hunter2@host/x", "AWS_SECRET_ACCESS_KEY: 'hunter2'"])
def test_secrets_are_not_stored_in_an_error(text: str) -> None:
    error = HeadraceError(text, hint=text)
    assert "hunter2" not in f"{error} {error!r} {error.args} {error.message} {error.hint}"
