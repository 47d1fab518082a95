"""Host memory in the place of a GPU's: what is replaced is the lowest call, an open file that moves whole storages."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from headrace.checkpoint.gds import ALIGNMENT, Direct


class Counts:
    """What went through, how many of the next transfers fail, and of how many writes the end is missing."""

    def __init__(self) -> None:
        self.written = self.read = self.failing = self.short = 0
        self.lock = threading.Lock()

    def direct(self) -> Direct:
        return Direct("cpu", lambda path, flags: HostFile(path, flags, self))


class HostFile:
    """As `torch.cuda.gds.GdsFile`, and as particular as O_DIRECT about what is written."""

    def __init__(self, path: str, flags: int, counts: Counts) -> None:
        self._fd, self._counts = os.open(path, flags), counts

    def __del__(self) -> None:
        os.close(self._fd)

    def save_storage(self, storage: Any, offset: int = 0) -> None:
        self._try()
        assert offset % ALIGNMENT == 0
        assert storage.nbytes() % ALIGNMENT == 0
        with self._counts.lock:
            cut, self._counts.short = ALIGNMENT * bool(self._counts.short), max(0, self._counts.short - 1)
        data = ctypes.string_at(storage.data_ptr(), storage.nbytes() - cut)  # of how much it was torch says nothing
        assert os.pwrite(self._fd, data, offset) == len(data)
        with self._counts.lock:
            self._counts.written += storage.nbytes()

    def load_storage(self, storage: Any, offset: int = 0) -> None:
        self._try()
        assert offset % ALIGNMENT == 0
        data = os.pread(self._fd, storage.nbytes(), offset)
        assert len(data) == storage.nbytes()
        ctypes.memmove(storage.data_ptr(), data, len(data))
        with self._counts.lock:
            self._counts.read += len(data)

    def _try(self) -> None:
        with self._counts.lock:
            if self._counts.failing:
                self._counts.failing -= 1
                raise RuntimeError("cuFileRead failed: GPUDirect Storage not supported\nmore")
