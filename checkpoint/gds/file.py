"""Files whose ranges are read into and written from GPU memory by cuFile, and a probe that tests whether cuFile works.

`Direct` reports which tensors cuFile can reach, and opens files for them. `CUFILE` uses cuFile; tests replace it with
host memory and an ordinary file. `probe` writes and reads back a small file and compares every byte. So "available"
means that cuFile worked on this machine and file system at that time. Its compatibility mode, which copies through host
memory, counts as available and is reported.
Invariant: direct transfers and copies through host memory give the same bytes.
Failure behaviour: `TransientError` for a transfer that failed or was cut short; `UsageError` for a tensor that is not
contiguous. `probe` never raises for a missing capability; its verdict gives the reason in one line.

cuFile is called through PyTorch's binding `torch.cuda.gds`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from headrace.dataio.core.errors import TransientError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

FILE = "file://"
ALIGNMENT = 4096
"""cuFile directly transfers ranges whose offset and length are multiples of this. It copies other ranges."""


class CuFile(Protocol):
    """The interface of `torch.cuda.gds.GdsFile`: reads and writes whole storages at an offset in bytes."""

    def load_storage(self, storage: Any, offset: int = 0) -> None: ...
    def save_storage(self, storage: Any, offset: int = 0) -> None: ...


def _cufile(path: str, flags: int) -> CuFile:
    gds: Any = torch.cuda.gds
    opened: CuFile = gds.GdsFile(path, flags)
    return opened


@dataclass(frozen=True, slots=True)
class Direct:
    """`open` opens a file for direct transfers. `device`: the type of the devices whose memory it can reach."""

    device: str = "cuda"
    open: Callable[[str, int], CuFile] = _cufile

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is contiguous in memory that `open` can reach."""
        return (
            tensor.device.type == self.device
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current stream of the device, because cuFile is not ordered with its work."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def buffer(self, size: int, device: torch.device) -> torch.Tensor:
        """Allocate device memory and register it with cuFile until `release`."""
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            gds: Any = torch.cuda.gds
            with contextlib.suppress(RuntimeError):  # without registration cuFile copies through its own buffers
                gds.gds_register_buffer(memory.untyped_storage())
        return memory

    def release(self, buffer: torch.Tensor) -> None:
        """Deregister a buffer."""
        if buffer.device.type == "cuda":
            gds: Any = torch.cuda.gds
            with contextlib.suppress(RuntimeError):
                gds.gds_deregister_buffer(buffer.untyped_storage())


CUFILE = Direct()


class GpuFile:
    """A file whose ranges are read into and written from tensors. It is a context manager.

    `direct`: True for cuFile, or another `Direct`. It moves contiguous tensors in its device's memory. Other tensors,
    and all tensors without `direct`, are copied through host memory. Offsets are in bytes.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, writing: bool = False, direct: bool | Direct | None = False
    ) -> None:
        flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
        self._path = os.fspath(path)
        self._direct = CUFILE if direct is True else direct or None
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._file: CuFile | None = None
        try:
            if self._direct is not None:
                self._file = self._direct.open(self._path, flags)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill `tensor` with the file's bytes from `offset`."""
        if (file := self._direct_file(tensor)) is not None:
            self._require_size(offset, tensor.nbytes)
            with _cufile_errors(f"reading {self._path}"):
                file.load_storage(_storage_of(tensor), offset)
            return
        host = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        view, position = memoryview(host.numpy()), 0  # type: ignore[arg-type]
        while position < len(view):
            count = os.preadv(self._fd, [view[position:]], offset + position)
            if not count:
                raise TransientError(f"{self._path} ends after {offset + position} of {offset + len(view)} bytes")
            position += count
        _bytes_of(tensor).copy_(host)

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Write the bytes of `tensor` at `offset`; `sync` makes them durable."""
        if (file := self._direct_file(tensor)) is not None:
            with _cufile_errors(f"writing {self._path}"):
                file.save_storage(_storage_of(tensor), offset)
            self._require_size(offset, tensor.nbytes)
            return
        view, position = memoryview(_bytes_of(tensor).cpu().numpy()), 0  # type: ignore[arg-type]
        while position < len(view):
            position += os.pwritev(self._fd, [view[position:]], offset + position)

    def sync(self) -> None:
        """Flush written bytes to the disk with `fsync`."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _require_size(self, offset: int, length: int) -> None:
        """Raise `TransientError` unless the file has these bytes, because torch does not report short transfers."""
        if self.size < offset + length:
            raise TransientError(f"{self._path} ends after {self.size} of {offset + length} bytes")

    def _direct_file(self, tensor: torch.Tensor) -> CuFile | None:
        return self._file if self._direct is not None and tensor.nbytes and self._direct.reaches(tensor) else None


@contextlib.contextmanager
def _cufile_errors(action: str) -> Any:
    try:
        yield
    except RuntimeError as error:  # torch's error names neither the file nor a next step
        first = (str(error).splitlines() or ["no reason"])[0]
        raise TransientError(f"{action} by cuFile failed: {first}", hint="try again, or without gds") from error


def _storage_of(tensor: torch.Tensor) -> Any:
    """The tensor's bytes as a storage that shares the memory of its own storage."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    return storage if tensor.nbytes == storage.nbytes() else storage[start : start + tensor.nbytes]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise UsageError("only contiguous tensors are read from and written to files", hint="use tensor.contiguous()")
    return flat_bytes(tensor.detach())


def directory_of(store: Store) -> str:
    """The path of a store that is a directory."""
    return urllib.parse.unquote(store.location.url.removeprefix(FILE), errors="surrogateescape")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor as a flat tensor of bytes."""
    return tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


_PROBE_BYTES = MIB
_DRIVER = Path("/proc/driver/nvidia-fs/version")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether cuFile works, and one line with its mode or the reason."""

    available: bool
    reason: str

    def __str__(self) -> str:
        return f"GPUDirect Storage: {'available' if self.available else 'not available'}, {self.reason}"


def probe(directory: str | os.PathLike[str] | None = None, device: str | torch.device = "cuda") -> Verdict:
    """Test cuFile in `directory` (default: the directory for temporary files) with memory of `device`."""
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
    written = torch.arange(_PROBE_BYTES, device=device).to(torch.uint8)
    read_back = torch.zeros_like(written)
    try:
        with GpuFile(path, writing=True, direct=True) as file:
            file.write(written, 0)
            file.read(read_back[:ALIGNMENT], 0)  # in two parts, because packs are read into parts of a buffer
            file.read(read_back[ALIGNMENT:], ALIGNMENT)
    except (RuntimeError, OSError, TransientError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Verdict(False, f"cuFile does not work here ({first}); copies go through host memory")
    if not torch.equal(written, read_back):
        return Verdict(False, "cuFile returned other bytes than were written; copies go through host memory")
    return Verdict(
        True, "by cuFile" + ("" if _DRIVER.exists() else " in compatibility mode, which copies through host memory")
    )
