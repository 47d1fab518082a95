"""GPUDirect Storage: whether files and GPU memory can exchange bytes without passing through host memory, and doing it.

Purpose: `probe` finds out by doing it, in the directory that is meant; `GpuFile` reads and writes ranges of a file from and
to a tensor, by cuFile where the probe allowed it and through host memory elsewhere.
Invariants: the probe writes and reads back a small file of its own and compares every byte, so "available" means that it
worked here, now, in this file system. cuFile's compatibility mode, which goes through host memory behind the scenes, is
"available" and said.
Failure behaviour: `probe` never raises for what is missing; the verdict says why in one line. `GpuFile` raises
`TransientError` for a transfer that failed or was cut short.

Source: NVIDIA's cuFile API, by torch's binding `torch.cuda.gds`. Saves and restores of a `Checkpointer` do not go this way
yet: chunks are hashed and checked in host memory.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dataio.core.errors import TransientError, UsageError
from dataio.core.limits import MIB

ALIGNMENT = 4096
"""Offsets and lengths that are multiples of this go straight; others make cuFile copy."""
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
        with tempfile.TemporaryDirectory(prefix="millrace-gds-", dir=directory) as folder:
            return _try(Path(folder) / "probe", torch.device(device))
    except OSError as error:
        return Verdict(False, f"no file could be made in {directory or tempfile.gettempdir()}: {error.strerror}")


def _try(path: Path, device: torch.device) -> Verdict:
    given = torch.arange(_PROBE_BYTES, device=device).to(torch.uint8)
    back = torch.zeros_like(given)
    try:
        with GpuFile(path, writing=True, direct=True) as file:
            file.write(given, 0)
            file.read(back, 0)
    except (RuntimeError, OSError, TransientError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Verdict(False, f"cuFile does not work here ({first}); copies go through host memory")
    if not torch.equal(given, back):
        return Verdict(False, "cuFile returned other bytes than were written; copies go through host memory")
    return Verdict(
        True, "by cuFile" + ("" if _DRIVER.exists() else " in compatibility mode, which copies through host memory")
    )


class GpuFile:
    """A file whose ranges are read into and written from contiguous tensors, on any device. A context manager.

    `direct`: by cuFile, for tensors on a GPU that own their whole storage; see `probe`. Otherwise, and for other tensors,
    through host memory. Offsets are bytes.
    """

    def __init__(self, path: str | os.PathLike[str], *, writing: bool = False, direct: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
        self._path = os.fspath(path)
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._direct: Any = None
        if direct:
            try:
                gds: Any = torch.cuda.gds
                self._direct = gds.GdsFile(self._path, flags)
            except BaseException:
                os.close(self._fd)
                raise

    def read(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill `tensor` with the bytes from `offset` on."""
        if self._goes_straight(tensor):
            self._direct.load_storage(tensor.untyped_storage(), offset)
            return
        host = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        view, done = memoryview(host.numpy()), 0  # type: ignore[arg-type]
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if not count:
                raise TransientError(f"{self._path} ends after {offset + done} of {offset + len(view)} bytes")
            done += count
        _bytes_of(tensor).copy_(host)

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Write the bytes of `tensor` from `offset` on; `sync` makes them durable."""
        if self._goes_straight(tensor):
            self._direct.save_storage(tensor.untyped_storage(), offset)
            return
        view, done = memoryview(_bytes_of(tensor).cpu().numpy()), 0  # type: ignore[arg-type]
        while done < len(view):
            done += os.pwritev(self._fd, [view[done:]], offset + done)

    def sync(self) -> None:
        """Return when what was written will survive a power cut."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        self._direct = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _goes_straight(self, tensor: torch.Tensor) -> bool:
        return self._direct is not None and tensor.is_cuda and tensor.nbytes == tensor.untyped_storage().nbytes()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise UsageError("only contiguous tensors are read from and written to files", hint="use tensor.contiguous()")
    return tensor.detach().view(-1).view(torch.uint8) if tensor.dim() else tensor.detach().view(1).view(torch.uint8)
