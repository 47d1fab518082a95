"""Reads what the checks of `headrace doctor` need to know about this node.

Invariants: every method returns a plain value, or None if it cannot be read; none raises. A file is read up to
`FILE_BYTES`. Nothing is written, and no package of another project is imported.
Failure behaviour: a missing file, a refused access, or text in an unknown format is None. A method may hang on a dead
mount; `findings.run` limits the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
from dataclasses import dataclass, field
from pathlib import Path

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.sidecar import paths
from headrace.dataio.sidecar.connection import Sidecar

FILE_BYTES = 1 << 20
_TIME_ERROR = 5
_TIMEX_BYTES = 512
"""More than the size of the kernel's `struct timex`, which has 208 bytes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This node. A test replaces methods, or `root`.

    Args:
        root: The folder that stands for `/`.
        environ: The environment variables.
    """

    root: Path = Path("/")
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def text(self, path: str) -> str | None:
        """The content of a file, at most 1 MiB of it."""
        try:
            with (self.root / path.lstrip("/")).open("rb") as file:
                return file.read(FILE_BYTES).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """The whole number that a file consists of."""
        return whole(self.text(path))

    def exists(self, path: str) -> bool:
        try:
            return (self.root / path.lstrip("/")).exists()
        except (OSError, ValueError):
            return False

    def space(self, path: str) -> tuple[int, int] | None:
        """The bytes of a file system: in all, and free for this user."""
        try:
            found = os.statvfs(self.root / path.lstrip("/"))
        except (OSError, ValueError):
            return None
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail

    def limit(self, name: str) -> tuple[int, int] | None:
        """The soft and hard limit of a resource, such as `RLIMIT_NOFILE`. -1 is no limit."""
        try:
            return resource.getrlimit(getattr(resource, name))
        except (AttributeError, ValueError, OSError):
            return None

    def version(self, distribution: str) -> str | None:
        """The version of an installed package. The package is not imported."""
        try:
            return importlib.metadata.version(distribution)
        except Exception:  # a damaged METADATA file raises errors of many kinds
            return None

    def library(self, name: str) -> bool:
        """Whether the dynamic linker finds and loads a library."""
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    def python(self) -> str:
        return platform.python_version()

    def cores(self) -> int | None:
        """The number of processors that this process may use."""
        with contextlib.suppress(OSError, AttributeError):
            return len(os.sched_getaffinity(0))
        return os.cpu_count()

    def clock_synchronised(self) -> bool | None:
        """Whether the kernel's clock is disciplined by NTP, PTP or the host."""
        try:
            state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        except (OSError, AttributeError):
            return None
        return None if state < 0 else state != _TIME_ERROR

    def socket(self) -> Path | None:
        """The path of the daemon's socket, None if `HEADRACE_SIDECAR` says that there is no daemon."""
        try:
            return paths.chosen("auto")
        except (HeadraceError, OSError, ValueError):
            return None

    def daemon(self) -> dict[str, object] | None:
        """The daemon's status, None if no daemon answers."""
        try:
            connection = Sidecar.find("auto")
            if connection is None:
                return None
            with connection:
                return connection.status()
        except (HeadraceError, OSError, ValueError):
            return None


def whole(text: str | None) -> int | None:
    """The whole number in `text`, None if it is anything else or has more than 19 digits."""
    digits = (text or "").strip()
    if digits.removeprefix("-").isdecimal() and digits.isascii() and len(digits) < 20:
        return int(digits)
    return None


def release(text: str | None) -> tuple[int, ...] | None:
    """The numbers at the start of a version: `2.10.0+cu130` is (2, 10, 0). None if there are none."""
    numbers = list[int]()
    for part in (text or "").split("+")[0].split(".")[:4]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits or len(digits) > 6 or not digits.isascii():
            break
        numbers.append(int(digits))
        if digits != part:
            break  # 2.10.0rc1: nothing after it counts
    return tuple(numbers) or None
