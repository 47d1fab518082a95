"""From errno to the error of its remedy.

Invariant: every `OSError` inside `translated` leaves it as an error of `headrace.dataio.core.errors` that names what
was being done.
Failure behaviour: an errno that is not in the tables becomes a plain `HeadraceError` with the system's own words.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from headrace.dataio.core.errors import (
    MORE_MEMORY,
    AccessDeniedError,
    CapacityError,
    HeadraceError,
    NotFoundError,
    TransientError,
    UsageError,
)

AMBIGUOUS = {errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""What `link` may answer although it took effect, or although another's did: to be settled by reading back."""

LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What the process itself may not have more of, whatever it is doing."""

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
def translated(doing: str) -> Iterator[None]:
    """Turn an `OSError` of the block into the error of its remedy; `doing` is for example `writing /data/a`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing) from error


def from_os_error(error: OSError, doing: str) -> HeadraceError:
    """The error of the remedy for `error`."""
    text = f"{doing}: {os.strerror(error.errno) if error.errno else error}"
    for numbers, kind, hint in _REMEDIES:
        if error.errno in numbers:
            return kind(text, hint=hint)
    return HeadraceError(text)
