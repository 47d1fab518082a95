"""What a trainer attaches to its steps in addition to their state: artifacts and metadata.

Invariant: an artifact's bytes are read by `put`, so that later changes of the file change nothing. They are in memory
until the step is saved. A file for which no memory is left is copied to disk (`saving.stored_files`). Number and sizes
are bounded.
Failure behaviour: `UsageError` for a name, a type or a number that is refused; `CapacityError` if the artifacts are too
large. Then nothing changes. Artifacts of a step that is not saved are dropped when a later step is saved, and that is
logged.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format import artifacts, names
from headrace.checkpoint.format.chunking import is_small
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.saving.stored_files import StoredFile, copy_of
from headrace.dataio.core.errors import CapacityError, ConflictError, NotFoundError, UsageError
from headrace.dataio.core.limits import GIB, format_bytes
from headrace.dataio.core.log import get_logger

_log = get_logger(__name__)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extras:
    """What is saved with a step in addition to its state. Only rank 0's `metadata` is stored."""

    metadata: Metadata = field(default_factory=dict)
    artifacts: Mapping[str, Bytes] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)


NOTHING = Extras()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the artifacts that wait on one rank.

    Attributes:
        count (int): Their number.
        memory_bytes (int): The bytes of those in memory.
        file_bytes (int): The bytes of those on disk.
    """

    count: int = artifacts.MAX_COUNT
    memory_bytes: int = GIB
    file_bytes: int = 256 * GIB


class Attachments:
    """Artifacts that wait for their steps. Not thread-safe."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._waiting: dict[int, dict[str, Bytes | StoredFile]] = {}

    def put(self, step: int, name: str, source: object) -> int:
        """Read the artifact, and return its size in bytes."""
        names.check_step(step)
        artifacts.check_name(name)
        own = self._waiting.get(step, {})
        if name in own:
            raise ConflictError(f"step {step} has an artifact {name!r}", hint="give each artifact a name of its own")
        if sum(map(len, self._waiting.values())) >= self._limits.count:
            raise CapacityError(
                f"{self._limits.count} artifacts wait for {self._steps()}",
                hint="call save for that step, or put several files into an archive",
            )
        data = self._read(source, name)
        self._waiting.setdefault(step, own)[name] = data
        return data.nbytes

    def of(self, step: int, metadata: Metadata) -> Extras:
        """The artifacts that wait for this step, with its metadata."""
        waiting = self._waiting.get(step, {})
        files = {name: data for name, data in waiting.items() if isinstance(data, StoredFile)}
        return Extras(metadata, {n: data for n, data in waiting.items() if not isinstance(data, StoredFile)}, files)

    def saved(self, step: int) -> None:
        """Forget the artifacts of this step, whose save has begun, and of earlier ones."""
        self._waiting.pop(step, None)
        dropped = sorted(earlier for earlier in self._waiting if earlier < step)
        for earlier in dropped:
            del self._waiting[earlier]
        if dropped:
            _log.warning(
                "the artifacts of steps %s are dropped: these steps were not saved before step %d",
                ", ".join(map(str, dropped[:8])),
                step,
            )

    def _steps(self) -> str:
        return "step " + ", ".join(map(str, sorted(self._waiting)[:8]))

    def _read(self, source: object, name: str) -> Bytes | StoredFile:
        """The bytes of the artifact."""
        if isinstance(source, bytes | bytearray | memoryview):
            data = memoryview(source)
            self._require_room(data.nbytes, name)
            return np.frombuffer(data.tobytes(), np.uint8) if data.nbytes else np.zeros(0, np.uint8)
        if isinstance(source, str | os.PathLike):
            return self._read_file(os.fspath(source), name)
        raise UsageError(
            f"artifact {name!r}: a value of type {type(source).__name__} cannot be stored",
            hint="give bytes, or the path of a file",
        )

    def _read_file(self, path: str | bytes, name: str) -> Bytes | StoredFile:
        """The bytes of a file, at most as many as it had when it was opened."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise UsageError(
                        f"artifact {name!r}: {os.fsdecode(path)} is not a file", hint="give the path of a file"
                    )
                if not self._require_room(status.st_size, name, is_file=True):
                    return _whole(file, status.st_size)
                copy = copy_of(file.fileno(), status.st_size, os.path.dirname(os.fsdecode(path)))
                return _in_memory(copy) if is_small(copy.nbytes) else copy  # small ones share chunks with others
        except OSError as error:
            kind = NotFoundError if isinstance(error, FileNotFoundError) else UsageError
            raise kind(
                f"artifact {name!r}: {os.fsdecode(path)} cannot be read: {error.strerror}", hint="check the path"
            ) from None

    def _require_room(self, size: int, name: str, is_file: bool = False) -> bool:
        """Whether the artifact goes to disk, because no memory is left. Raises `CapacityError` if there is no room."""
        used = {False: 0, True: 0}
        for waiting in self._waiting.values():
            for data in waiting.values():
                used[isinstance(data, StoredFile)] += data.nbytes
        on_disk = is_file and size > self._limits.memory_bytes - used[False] and not is_small(size)
        most = self._limits.file_bytes if on_disk else self._limits.memory_bytes
        if size > (left := most - used[on_disk]):
            raise CapacityError(
                f"artifact {name!r} has {format_bytes(size)}; {format_bytes(left)} are left of the"
                f" {format_bytes(most)} of artifacts that may wait {'on disk' if on_disk else 'in memory'}",
                hint="call save for steps that wait, give large data as a file, or store it yourself and put its location"
                " into the metadata",
            )
        return on_disk


def _in_memory(copy: StoredFile) -> Bytes:
    data = np.empty(copy.nbytes, np.uint8)
    copy.read_into(0, data.data)
    return data


def _whole(file: io.FileIO, size: int) -> Bytes:
    data, length = np.empty(size, np.uint8), 0
    while length < data.nbytes and (count := file.readinto(data[length:].data)):
        length += count
    return data[:length]
