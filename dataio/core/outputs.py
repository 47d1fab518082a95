"""Files that a command writes for its user.

Invariants: a file has its name when all of it is written. A device or a pipe (`/dev/stdout`, `/dev/null`) is written into, never
replaced and never removed, which root could; where the name is a link, what it leads to is written.
Failure behaviour: `OSError` as it comes, `FileExistsError` where nothing is to be replaced; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """What the user named, to write."""
    if is_special(path):
        with open(path, "wb") as file:
            yield file
    else:
        with written_aside(Path(os.path.realpath(path))) as file:
            yield file


@contextlib.contextmanager
def written_aside(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """A file to write beside `path`, whose name it gets at the end, whatever has it now."""
    temporary = path.with_name(f".headrace-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    except OSError as error:
        if error.filename in (temporary, str(temporary)):  # of which nobody has heard
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
