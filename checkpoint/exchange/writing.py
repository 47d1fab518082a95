"""Writes the files of an export, window by window, and continues after an interruption.

Each file is written as `<name>.partial`. All files get their names when all of them are complete and on the disk. A
journal holds the digest of every window that was written.
Invariants:

* Windows are read from the repository by several threads, while the window before is written. At most `_BUFFERS`
  windows are in memory.
* A repeated export compares each recorded window with its digest. It writes only windows that are missing or differ.
* Without `overwrite`, nothing that exists in the target is replaced. A journal of the same export is the exception.
Failure behaviour: `CapacityError` for a full disk, with the partial files and the journal left for the next try. Other
errors of the store and of the disk are raised in the same way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.checkpoint.exchange.output import ALIGN, Checksums, Data, DeferredBytes, OutputFile, read_window
from headrace.checkpoint.repository.fetch import Step
from headrace.dataio.core.errors import UsageError, translate_os_errors
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.direct_io import REFUSALS

WINDOW_BYTES = 32 * MIB
_BUFFERS = 2
_SUFFIX = ".partial"
_OVERWRITE = "--overwrite, or overwrite=True in Python"
JOURNAL = ".headrace-export"
"""The suffix, or in a folder the name, of the record of written windows. It exists until the export is complete."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes that are written, of all; `name`: the file that is being written."""

    bytes: int
    bytes_total: int
    name: str


Report = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class Target:
    """The file or folder to write. `stale`: whether an existing file belongs to an earlier export in this folder."""

    path: Path
    is_folder: bool
    stale: Callable[[str], bool] = lambda name: False

    def final(self, file: OutputFile) -> Path:
        """The path of a complete file."""
        return self.path / file.name if self.is_folder else self.path.with_name(file.name or self.path.name)

    def partial(self, file: OutputFile) -> Path:
        """The path of a file that is being written."""
        final = self.final(file)
        return final.with_name(final.name + _SUFFIX)

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL if self.is_folder else self.path.with_name(f".{self.path.name}{JOURNAL}")


def write_files(
    store: Store,
    step: Step,
    files: Sequence[OutputFile],
    target: Target,
    *,
    identity: str,
    overwrite: bool,
    progress: Report | None = None,
) -> int:
    """Write the files, and return the number of bytes that were written in this call.

    `identity`: text that is equal for two exports of the same bytes.
    """
    with translate_os_errors(f"writing {target.path}"), contextlib.ExitStack() as stack:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        if target.is_folder:
            target.path.mkdir(exist_ok=True)
        journal = stack.enter_context(_Journal(target, identity))
        if not journal.known and not overwrite:
            _require_new(files, target, unfinished=journal.other)
        journal.begin()
        work = _Work(store, step, target, journal, progress, sum(file.size for file in files))
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="headrace-export"))
        for file in files:
            work.write(file, pool)
        _publish(files, target)
        journal.remove()
    return work.written


def _require_new(files: Sequence[OutputFile], target: Target, *, unfinished: bool) -> None:
    """Refuse a target that exists: a file, or a folder with anything in it."""
    if unfinished:
        raise UsageError(
            f"{target.path} holds an unfinished export of something else",
            hint=f"repeat that export, remove its files, or overwrite them: {_OVERWRITE}",
        )
    if target.is_folder:
        found = sorted(name for name in os.listdir(target.path) if name != JOURNAL)
    else:
        found = sorted(target.final(file).name for file in files if os.path.lexists(target.final(file)))
    if found:
        raise UsageError(
            f"{target.path} exists already" + (f" and holds {found[0]!r}" if target.is_folder else ""),
            hint=f"give another target, or overwrite it: {_OVERWRITE}",
        )


def _publish(files: Sequence[OutputFile], target: Target) -> None:
    """Give all files their names, and remove files of an earlier export that this one replaces."""
    for file in files:
        if target.partial(file).exists():
            os.replace(target.partial(file), target.final(file))
    if target.is_folder:
        named = {file.name for file in files}
        for name in os.listdir(target.path):
            if name not in named and target.stale(name.removesuffix(_SUFFIX)):
                (target.path / name).unlink()
    _sync_folder(target.path if target.is_folder else target.path.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Journal:
    """The digests of windows that were written, by file name and window number.

    `known`: an earlier call began this export. `other`: another export was begun here. A line that is incomplete or
    damaged is ignored, so its window is written again.
    """

    def __init__(self, target: Target, identity: str) -> None:
        self._path, self._identity = target.journal, identity
        self.known = self.other = False
        self._digests: dict[tuple[str, int], str] = {}

    def __enter__(self) -> _Journal:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._created = not self._path.exists()
        self._file = os.fdopen(os.open(self._path, flags, 0o644), "r+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"another process is exporting to {self._path.parent}", hint="wait for it, or give another target"
            ) from None
        lines = self._file.read().splitlines()
        self.known = bool(lines) and lines[0] == self._identity
        self.other = bool(lines) and not self.known
        for line in lines[1:] if self.known else ():
            with contextlib.suppress(ValueError, TypeError):
                name, number, digest = json.loads(line)
                self._digests[str(name), int(number)] = str(digest)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        if self._created and not self.known:  # nothing was begun
            with contextlib.suppress(OSError):
                self._path.unlink()

    def begin(self) -> None:
        """Start a new journal, unless it continues."""
        if not self.known:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(self._identity + "\n")
            self._file.flush()
            self.known = True

    def recorded(self, name: str, number: int) -> str | None:
        """The digest of a window that was written before."""
        return self._digests.get((name, number))

    def add(self, name: str, number: int, digest: str) -> None:
        self._file.write(json.dumps([name, number, digest]) + "\n")
        self._file.flush()

    def remove(self) -> None:
        self._path.unlink()


class _Work:
    """Writes one file after another. `written`: bytes that this call wrote."""

    def __init__(
        self, store: Store, step: Step, target: Target, journal: _Journal, progress: Report | None, total: int
    ) -> None:
        self._store, self._step, self._target, self._journal = store, step, target, journal
        self._progress, self._total, self._done = progress, total, 0
        self._buffers = [memoryview(mmap.mmap(-1, WINDOW_BYTES)) for _ in range(_BUFFERS)]
        self.written = 0

    def write(self, file: OutputFile, pool: ThreadPoolExecutor) -> None:
        """Write the windows of a file that it does not hold yet, and make the file durable."""
        path = self._path(file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            os.ftruncate(fd, file.size)
            output = _FileOutput(fd, file, self._journal)
            waiting: Future[tuple[int, bool]] | None = None
            for number in range(-(-file.size // WINDOW_BYTES)):
                window = self._window(file, number, fd)
                if waiting is not None:
                    self._count(file, *waiting.result())
                waiting = pool.submit(output.put, number, *window)
            if waiting is not None:
                self._count(file, *waiting.result())
            os.fsync(fd)
        finally:
            pool.submit(lambda: None).result()  # nothing writes to the file any more
            os.close(fd)

    def _path(self, file: OutputFile) -> Path:
        """The partial file; the complete one if an interrupted export has already named it."""
        partial, final = self._target.partial(file), self._target.final(file)
        named = self._journal.recorded(file.name, 0) is not None and not partial.exists() and final.is_file()
        return final if named else partial

    def _window(self, file: OutputFile, number: int, fd: int) -> tuple[memoryview, bool]:
        """The bytes of a window, and whether they must be written."""
        start = number * WINDOW_BYTES
        buffer = self._buffers[number % _BUFFERS][: min(WINDOW_BYTES, file.size - start)]
        recorded = self._journal.recorded(file.name, number)
        is_there = recorded is not None and os.preadv(fd, [buffer], start) == len(buffer)
        if is_there and xxhash.xxh3_128_hexdigest(buffer) == recorded:
            return buffer, False
        read_window(self._store, self._step, file, start, buffer)
        return buffer, True

    def _count(self, file: OutputFile, size: int, is_new: bool) -> None:
        self.written += size if is_new else 0
        self._done += size
        if self._progress is not None:
            self._progress(Progress(self._done, self._total, file.name or self._target.path.name))


class _FileOutput:
    """Completes the windows of one file in order, records them, and writes them."""

    def __init__(self, fd: int, file: OutputFile, journal: _Journal) -> None:
        self._fd, self._file, self._journal = fd, file, journal
        self._checksums: Checksums = {}
        self._flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self._direct, self._may_be_direct = False, True

    def put(self, number: int, window: memoryview, is_new: bool) -> tuple[int, bool]:
        """Complete a window, and write it if it is new. Returns its size and whether it was written."""
        start = number * WINDOW_BYTES
        if self._file.checksums:
            self._complete(start, window)
        if not is_new:
            return len(window), False
        self._pwrite(start, window)
        self._journal.add(self._file.name, number, xxhash.xxh3_128_hexdigest(window))
        return len(window), True

    def _complete(self, start: int, window: memoryview) -> None:
        """Add data to its checksum, and fill in the parts that need it."""
        for number, part, first, last in self._file.overlapping(start, start + len(window)):
            at = self._file.starts[number] + first - start
            if isinstance(part, Data):
                data = window[at : at + last - first]
                self._checksums[number] = zlib.crc32(data, self._checksums.get(number, 0))
            elif isinstance(part, DeferredBytes):
                window[at : at + last - first] = part.make(self._checksums)[first:last]

    def _pwrite(self, start: int, window: memoryview) -> None:
        """Write whole pages past the page cache where the file system allows it, and the rest through it."""
        aligned, done = len(window) - len(window) % ALIGN, 0
        while done < len(window):
            direct = self._set_direct(self._may_be_direct and done < aligned and done % ALIGN == 0)
            try:
                done += os.pwrite(self._fd, window[done : aligned if direct else len(window)], start + done)
            except OSError as error:
                if error.errno not in REFUSALS or not direct:
                    raise
                self._may_be_direct = False

    def _set_direct(self, direct: bool) -> bool:
        """Turn direct I/O on or off. Returns whether it is on."""
        if direct != self._direct:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | (os.O_DIRECT if direct else 0))
                self._direct = direct
            except OSError as error:  # some file systems refuse the flag itself
                if error.errno not in REFUSALS:
                    raise
                self._may_be_direct = False
        return self._direct
