"""Errors, grouped by what the one who catches them should do.

Invariant: every error that Headrace raises on purpose derives from `HeadraceError`, carries a stable `code`, names the
thing that failed and, in `hint`, the next step. Secrets are redacted from the text before it is stored.
Failure behaviour: an error of another type that reaches the command line is a bug and is reported as one.
"""

from __future__ import annotations

from typing import ClassVar

from headrace.dataio.core.redact import redact

MORE_MEMORY = "raise the limit (ulimit -v, the job's or the container's), or give less to do at once"
"""The next step for whoever got no more memory."""


class HeadraceError(Exception):
    """Base of all errors raised on purpose.

    `code` is stable and machine-readable; `exit_code` is what the command line returns for it.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = redact(message)
        self.hint = redact(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(HeadraceError):
    """The caller's mistake: the same call will fail again until the caller changes it."""

    code = "usage"
    exit_code = 2


class NotFoundError(UsageError):
    """A named object, bucket, dataset, run or step does not exist."""

    code = "not_found"


class AccessDeniedError(UsageError):
    """The credentials are missing, wrong or not allowed to do this."""

    code = "access_denied"


class RangeError(UsageError):
    """Bytes were asked for that lie past the object's end: what it was, or what the reader knows of it, has changed."""

    code = "range"


class MismatchError(UsageError):
    """Something saved does not fit what it is loaded into: a shape, a dataset version, a batch size. Names the field."""

    code = "mismatch"


class TransientError(HeadraceError):
    """Passing trouble; the same call may succeed later. Retries within the budget were already made."""

    code = "transient"
    exit_code = 3


class AmbiguousWriteError(TransientError):
    """A write may or may not have happened and reading back could not tell. Never reported as success."""

    code = "ambiguous_write"


class DeadlineError(TransientError):
    """A wait reached its limit."""

    code = "deadline"


class SlowDownError(TransientError):
    """The store is overloaded and said so; `seconds` is how long it asked to be left alone, if it said that too."""

    code = "slow_down"

    def __init__(self, message: str, *, seconds: float | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds


class CorruptionError(HeadraceError):
    """Stored bytes are not what was written. The damaged bytes are never returned."""

    code = "corruption"
    exit_code = 4


class ConflictError(HeadraceError):
    """Another writer got there first; says who."""

    code = "conflict"
    exit_code = 5


class CapacityError(HeadraceError):
    """A limit or a full disk: nothing was lost, but this request was not admitted."""

    code = "capacity"
    exit_code = 6


class UnsupportedError(UsageError):
    """This store, file, codec or machine cannot do what was asked."""

    code = "unsupported"
