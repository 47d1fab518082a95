"""What a trainer attaches to its steps in addition to their state: artifacts and metadata.

Invariant: an artifact's bytes are read by `put`, so that later changes of the file change nothing. They are in memory
until the step is saved. Their number and size are bounded.
Failure behaviour: `UsageError` for a name, a type or a number that is refused; `CapacityError` if the artifacts are too
large. Then nothing changes. Artifacts of a step that is not saved are dropped when a later step is saved, and that is
logged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format import artifacts, names
from headrace.checkpoint.format.metadata import Metadata
from headrace.dataio.core.errors import CapacityError, ConflictError, NotFoundError, UsageError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger

_log = get_logger(__name__)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extras:
    """What is saved with a step in addition to its state. Only rank 0's `metadata` is stored."""

    metadata: Metadata = field(default_factory=dict)
    artifacts: Mapping[str, Bytes] = field(default_factory=dict)


NOTHING = Extras()


class Attachments:
    """Artifacts that wait for their steps. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, Bytes]] = {}

    def put(self, step: int, name: str, source: object) -> int:
        """Read the artifact, and return its size in bytes."""
        names.check_step(step)
        artifacts.check_name(name)
        own = self._waiting.get(step, {})
        if name in own:
            raise ConflictError(f"step {step} has an artifact {name!r}", hint="give each artifact a name of its own")
        if sum(map(len, self._waiting.values())) >= artifacts.MAX_COUNT:
            raise CapacityError(
                f"{artifacts.MAX_COUNT} artifacts wait for {self._steps()}",
                hint="call save for that step, or put several files into an archive",
            )
        free = artifacts.MAX_BYTES - sum(data.nbytes for waiting in self._waiting.values() for data in waiting.values())
        data = _read(source, free, name)
        self._waiting.setdefault(step, own)[name] = data
        return data.nbytes

    def of(self, step: int) -> Mapping[str, Bytes]:
        """The artifacts that wait for this step."""
        return dict(self._waiting.get(step, {}))

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


def _read(source: object, most: int, name: str) -> Bytes:
    """The bytes of the artifact; `CapacityError` if there are more than `most`."""
    if isinstance(source, bytes | bytearray | memoryview):
        data = memoryview(source)
        _check_size(data.nbytes, most, name)
        return np.frombuffer(data.tobytes(), np.uint8) if data.nbytes else np.zeros(0, np.uint8)
    if isinstance(source, str | os.PathLike):
        return _read_file(os.fspath(source), most, name)
    raise UsageError(
        f"artifact {name!r}: a value of type {type(source).__name__} cannot be stored",
        hint="give bytes, or the path of a file",
    )


def _read_file(path: str | bytes, most: int, name: str) -> Bytes:
    """The bytes of a file, at most as many as it had when it was opened."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(
                    f"artifact {name!r}: {os.fsdecode(path)} is not a file", hint="give the path of a file"
                )
            _check_size(status.st_size, most, name)
            data, length = np.empty(status.st_size, np.uint8), 0
            while length < data.nbytes and (count := file.readinto(data[length:].data)):
                length += count
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else UsageError
        raise kind(
            f"artifact {name!r}: {os.fsdecode(path)} cannot be read: {error.strerror}", hint="check the path"
        ) from None
    return data[:length]


def _check_size(size: int, most: int, name: str) -> None:
    if size > most:
        raise CapacityError(
            f"artifact {name!r} has {format_bytes(size)}; {format_bytes(max(most, 0))} are left of the"
            f" {format_bytes(artifacts.MAX_BYTES)} of artifacts that may wait for their steps",
            hint="call save for steps that wait, or store large files yourself and put their location into the metadata",
        )
