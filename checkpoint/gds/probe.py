"""Whether cuFile works in a directory: found out by doing it.

Invariant: the probe writes and reads back a small file of its own, whole and in part, and compares every byte, so "available"
means that it worked here, now, in this file system. cuFile's compatibility mode, which goes through host memory behind the
scenes, is "available" and said.
Failure behaviour: `probe` never raises for what is missing; the verdict says why in one line.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.checkpoint.gds.file import ALIGNMENT, GpuFile
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import MIB

_PROBE_BYTES = MIB
_DRIVER = Path("/proc/driver/nvidia-fs/version")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether cuFile works, and how or why not, in one line."""

    available: bool
    reason: str

    def __str__(self) -> str:
        return f"GPUDirect Storage: {'available' if self.available else 'not available'}, {self.reason}"


def probe(directory: str | os.PathLike[str] | None = None, device: str | torch.device = "cuda") -> Verdict:
    """Try it in `directory` (default: the one for temporary files) with memory of `device`."""
    if not torch.cuda.is_available():
        return Verdict(False, "torch sees no GPU; copies go through host memory")
    if not hasattr(torch.cuda, "gds"):
        return Verdict(False, f"torch {torch.__version__} has no cuFile binding; copies go through host memory")
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-gds-", dir=directory) as folder:
            return _try(Path(folder) / "probe", torch.device(device))
    except OSError as error:
        return Verdict(False, f"no file could be made in {directory or tempfile.gettempdir()}: {error.strerror}")


def _try(path: Path, device: torch.device) -> Verdict:
    given = torch.arange(_PROBE_BYTES, device=device).to(torch.uint8)
    back = torch.zeros_like(given)
    try:
        with GpuFile(path, writing=True, direct=True) as file:
            file.write(given, 0)
            file.read(back[:ALIGNMENT], 0)  # in two: packs are read into parts of a buffer
            file.read(back[ALIGNMENT:], ALIGNMENT)
    except (RuntimeError, OSError, TransientError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Verdict(False, f"cuFile does not work here ({first}); copies go through host memory")
    if not torch.equal(given, back):
        return Verdict(False, "cuFile returned other bytes than were written; copies go through host memory")
    return Verdict(
        True, "by cuFile" + ("" if _DRIVER.exists() else " in compatibility mode, which copies through host memory")
    )
