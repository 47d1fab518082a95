"""Errors, grouped by the caller's next step.

Invariants: every error that Headrace raises on purpose derives from `HeadraceError`. It has a stable `code`, names
the thing that failed, and has the next step in `hint`. Secrets are removed from its text. `translate_os_errors` turns
every `OSError` of its block into one of these errors.

Failure behaviour: an error of another type that reaches the command line is a bug, and is reported as one. An errno
without an entry in the table becomes a plain `HeadraceError` with the system's message.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import ClassVar

from headrace.dataio.core.redact import redact

MORE_MEMORY = "raise the limit (ulimit -v, the job's or the container's), or process less data at a time"
"""The hint of an error about memory."""


class HeadraceError(Exception):
    """Base of all errors raised on purpose.

    `code` is stable and machine-readable. The command line exits with `exit_code`.
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
    """The caller made a mistake: the same call fails again until the caller changes it."""

    code = "usage"
    exit_code = 2


class NotFoundError(UsageError):
    """A named object, bucket, dataset, run or step does not exist."""

    code = "not_found"


class AccessDeniedError(UsageError):
    """The credentials are missing or wrong, or lack the permission."""

    code = "access_denied"


class RangeError(UsageError):
    """A range goes past the object's end. The object has changed, or the reader has outdated information about it."""

    code = "range"


class MismatchError(UsageError):
    """Saved data does not fit its target: a shape, a dataset version, a batch size. The message names the field."""

    code = "mismatch"


class TransientError(HeadraceError):
    """A temporary failure: the same call may succeed later. Retries within the budget were already made."""

    code = "transient"
    exit_code = 3


class AmbiguousWriteError(TransientError):
    """It is unknown whether a write happened, even after reading the object back. It is never reported as success."""

    code = "ambiguous_write"


class DeadlineError(TransientError):
    """A wait reached its limit."""

    code = "deadline"


class SlowDownError(TransientError):
    """The store answered that it is overloaded. `seconds` is the pause that it requested, or None."""

    code = "slow_down"

    def __init__(self, message: str, *, seconds: float | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds


class CorruptionError(HeadraceError):
    """Stored bytes differ from the written ones. The damaged bytes are never returned."""

    code = "corruption"
    exit_code = 4


class MissingValueError(CorruptionError):
    """The value that a field of a loader names is missing, or of another kind.

    It is missing if the file of a sample lacks its path, column or tensor. It is of another kind if, for example, a field
    of numbers finds a text. It makes a bad sample. If all samples that the loader tries are bad for this reason, the loader
    raises `UsageError` instead, since the field is probably wrong.
    """

    code = "missing_value"


class ConflictError(HeadraceError):
    """Another writer was first. The message names that writer."""

    code = "conflict"
    exit_code = 5


class CapacityError(HeadraceError):
    """A limit is reached or a disk is full. No data was lost, but this request was refused."""

    code = "capacity"
    exit_code = 6


class UnsupportedError(UsageError):
    """This store, file, codec or machine does not support the request."""

    code = "unsupported"


AMBIGUOUS = {errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of `link` after which the caller must read the file, because the link may be another writer's."""

LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that mean that a limit of the process is reached, independent of the operation."""

_REMEDIES: list[tuple[set[int], type[HeadraceError], str]] = [
    ({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, CapacityError, "free space, or raise the quota or the file size limit"),
    ({errno.EMFILE, errno.ENFILE}, CapacityError, "raise the process's limits (ulimit -n)"),
    ({errno.ENOMEM}, CapacityError, MORE_MEMORY),
    ({errno.EACCES, errno.EPERM, errno.EROFS}, AccessDeniedError, "check the owner, the mode and the mount options"),
    ({errno.ENAMETOOLONG}, UsageError, "shorten the key: a segment may have 255 bytes in most file systems"),
    (
        {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY},
        UsageError,
        "a file and a folder cannot share a name",
    ),
    ({errno.ELOOP}, UsageError, "symbolic links are not followed below the store's root"),
    ({errno.ENOENT}, NotFoundError, "check the path"),
    ({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY}, TransientError, "check the disk or mount"),
]


@contextlib.contextmanager
def translate_os_errors(doing: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `HeadraceError`. `doing` starts its text, for example `writing /data/a`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing) from error


def from_os_error(error: OSError, doing: str) -> HeadraceError:
    """Return the `HeadraceError` for an `OSError`."""
    text = f"{doing}: {os.strerror(error.errno) if error.errno else error}"
    for numbers, kind, hint in _REMEDIES:
        if error.errno in numbers:
            return kind(text, hint=hint)
    return HeadraceError(text)
