"""Arrays that the processes of one machine compute together, and then share.

Purpose: all ranks of a node need the same numbers of a dataset's samples, such as the bucket of each. They divide the
work, so that a node reads each column of the index once. Then all of them map the same files, so that a node holds the
arrays once in its page cache.

The files are in a private folder of the user in the system's temporary folder (`$TMPDIR`), in a folder for each
`Work.key`:

- `<n>.piece` holds piece n of the work, and its digest. The process that computes it holds a lock on `<n>.lock`.
- `arrays.json` names the finished arrays and their digests. The process that combines the pieces writes it last, and
  then removes the pieces.

Invariants:

* The arrays depend only on `Work`. They are the same if a process computes them alone, in its own memory.
* The kernel releases the locks of a process that dies, once no child has its files open. The other processes then
  compute its piece.
* Every piece and array is checked against its digest when it is opened. Damaged ones are computed again.
* Files in use may be removed, because a mapped file of a local file system exists until its last user ends.

Failure behaviour: errors of `Work.piece` are raised. If the folder cannot be used (full, without locks, not private, not
on a local file system), or another process holds a piece for `WAIT_SECONDS` without progress, the process logs one
warning and computes the arrays alone. If the disk is full, it first removes the folder of the work.

Limits: before a process makes a new folder, it removes the least recently used ones above `MAX_BYTES` or `MAX_WORKS`,
and those that were not used for `MAX_AGE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core import limits
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError
from headrace.dataio.core.files import file_lock, is_local, private_directory, write_atomically
from headrace.dataio.core.json import parse_json, seal, unseal
from headrace.dataio.core.log import get_logger, warn_once

SHARED_SAMPLES = 1_000_000
"""Work on fewer samples is not shared, because reading them again takes less time than sharing."""
MAX_BYTES = 4 * limits.GIB
MAX_WORKS = 64
MAX_AGE_SECONDS = 7 * 24 * 3600
WAIT_SECONDS = 120.0
"""How long a process waits for others that make no progress."""
_POLL_SECONDS = 0.01
_FORMAT = "1"
"""Part of every key. It changes when the same `Work.key` gets other arrays."""
_DONE = "arrays.json"

_log = get_logger(__name__)

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def _return_free_memory() -> None:
    """Return free memory to the system. glibc would keep about 200 MB after many parts were read in threads."""
    gc.collect()
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class NewArray(Protocol):
    """Makes an array of zeros. A second array of the same name replaces the first."""

    def __call__(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arrays to compute.

    Args:
        key: everything that determines the arrays. None: it is not known, so the arrays are not shared.
        samples: number of samples that the work reads.
        pieces: number of pieces of the work. Processes divide them.
        piece: computes one piece.
        combine: makes the arrays with its second argument, and fills them from the pieces, which come in order.
        release: releases what computing the pieces keeps in memory. Called at the end if the arrays are shared.
    """

    key: Sequence[str] | None
    samples: int
    pieces: int
    piece: Callable[[int], Array]
    combine: Callable[[Iterable[Array], NewArray], None]
    release: Callable[[], None] = lambda: None


def compute(work: Work) -> Arrays:
    """Return the arrays of `work`, by name. Shared arrays are read-only."""
    if work.key is None or work.samples < SHARED_SAMPLES:
        return _compute_alone(work)
    folder: Path | None = None
    try:
        folder = _folder_of(work.key)
        return _compute_together(folder, work)
    except OSError as error:
        if folder is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(folder, ignore_errors=True)  # so the disk does not stay full
        warn_once(_log, f"this process does not share arrays with the other processes of this machine: {error}", "node")
        return _compute_alone(work)
    finally:
        work.release()
        _return_free_memory()


def content_key(arrays: Arrays) -> str:
    """Return a digest of these arrays, to be part of another `Work.key`."""
    hasher = blake3.blake3()
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return str(hasher.hexdigest())


# --- alone


class _InMemory:
    """New arrays in the memory of this process."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def __call__(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        self.arrays[name] = np.zeros(shape, dtype)
        return self.arrays[name]


def _compute_alone(work: Work) -> Arrays:
    memory = _InMemory()
    work.combine(map(work.piece, range(work.pieces)), memory)
    return memory.arrays


# --- together


def _compute_together(folder: Path, work: Work) -> Arrays:
    arrays = _open_arrays(folder)
    if arrays is None:
        _compute_pieces(folder, work)
        with file_lock(folder / "combine.lock", WAIT_SECONDS, _POLL_SECONDS):
            arrays = _open_arrays(folder)
            if arrays is None:
                _combine(folder, work)
                arrays = _open_arrays(folder)
    if arrays is None:
        raise FileNotFoundError(f"{folder} was removed while its arrays were written")
    with contextlib.suppress(OSError):  # the folder may be removed; the mapped arrays stay valid
        os.utime(folder)
    return arrays


def _compute_pieces(folder: Path, work: Work) -> None:
    """Compute the pieces that no other process computes, until all pieces exist or the arrays are finished."""
    missing, last_progress = list(range(work.pieces)), time.monotonic()
    while missing and not (folder / _DONE).exists():
        still_missing = [number for number in missing if not _has_piece(folder, work, number)]
        if len(still_missing) < len(missing):
            last_progress = time.monotonic()
        elif time.monotonic() - last_progress > WAIT_SECONDS:
            raise TimeoutError(f"another process computes piece {missing[0]} of {folder} and makes no progress")
        else:
            time.sleep(_POLL_SECONDS)
        missing = still_missing


def _has_piece(folder: Path, work: Work, number: int) -> bool:
    """Whether the piece exists. If no other process computes it, this process does, unless the arrays are finished."""
    path = folder / f"{number}.piece"
    if path.exists():
        return True
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(file_lock(folder / f"{number}.lock", 0, 0))
        except TimeoutError:
            return False
        if not path.exists() and not (folder / _DONE).exists():
            with write_atomically(path) as file:
                file.write(_encoded(work.piece(number)))
    return True


def _encoded(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    data = buffer.getvalue()
    return data + blake3.blake3(data).digest()


def _read_piece(folder: Path, work: Work, number: int) -> Array:
    """Read a piece. A damaged one is computed again."""
    data = (folder / f"{number}.piece").read_bytes()
    if blake3.blake3(data[:-32]).digest() != data[-32:]:
        return work.piece(number)
    array: Array = np.load(io.BytesIO(data[:-32]), allow_pickle=False)
    return array


def _combine(folder: Path, work: Work) -> None:
    """Write the arrays and `arrays.json`, and remove all other files. The caller holds the lock."""
    files = _InFiles(folder)
    work.combine((_read_piece(folder, work, number) for number in range(work.pieces)), files)
    entries = {
        name: {"file": path.name, "digest": _file_digest(path)} for name, path in files.paths.items()
    }  # fmt: skip
    document = msgspec.json.format(msgspec.json.encode({"arrays": entries}), indent=1) + b"\n"
    with write_atomically(folder / _DONE) as file:
        file.write(seal(document))
    needed = {_DONE, "combine.lock", *(path.name for path in files.paths.values())}
    for path in folder.iterdir():
        if path.name not in needed:
            with contextlib.suppress(OSError):
                path.unlink()


class _InFiles:
    """New arrays in files of `folder`, which are mapped for writing. `paths` are the files of the newest arrays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths: dict[str, Path] = {}

    def __call__(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        kind, sides = np.dtype(dtype), (shape,) if isinstance(shape, int) else shape
        path = self._folder / f"{name}-{secrets.token_hex(8)}.npy"
        with open(path, "xb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": sides}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            size = file.tell() + kind.itemsize * int(np.prod(sides, dtype=np.int64))
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises an error here, but SIGBUS later
        self.paths[name] = path
        return np.asarray(np.load(path, mmap_mode="r+", allow_pickle=False))


def _open_arrays(folder: Path) -> Arrays | None:
    """Map the finished arrays. None means that they do not exist; damaged ones are removed first."""
    try:
        data = (folder / _DONE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        entries = parse_json(unseal(data, str(folder / _DONE)))["arrays"]
        return {name: _mapped(folder, **entry) for name, entry in entries.items()}
    except (CorruptionError, ValueError, FileNotFoundError) as error:
        _log.warning("shared arrays are damaged and will be computed again: %s", error)
        with contextlib.suppress(FileNotFoundError):
            if (folder / _DONE).read_bytes() == data:  # otherwise another process has computed them again
                (folder / _DONE).unlink()
        return None


def _mapped(folder: Path, file: str, digest: str) -> Array:
    path = folder / file
    if path.parent != folder or _file_digest(path) != digest:
        raise CorruptionError(f"{path}: its digest does not match")
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _file_digest(path: Path) -> str:
    return str(blake3.blake3().update_mmap(path).hexdigest())


# --- the folder


def _folder_of(key: Sequence[str]) -> Path:
    """Return the folder of this work. It is created if needed, and old folders are removed first."""
    from importlib.metadata import version  # slow to import, and small datasets do not need it

    full_key = "\n".join([_FORMAT, version("headrace"), *key])
    try:
        user = private_directory(Path(tempfile.gettempdir(), f"headrace-{os.geteuid()}"))
        parent = private_directory(user / "arrays")
    except AccessDeniedError as error:
        raise PermissionError(str(error)) from error  # `compute` catches OSErrors, not errors of the store
    if not is_local(parent):
        raise OSError(f"{parent} is not on a local file system, where a file that is in use may be removed")
    folder = parent / blake3.blake3(full_key.encode()).hexdigest()[:32]
    if not folder.exists():
        _make_room(parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _make_room(parent: Path) -> None:
    """Remove the least recently used folders, as far as the limits require."""
    total = 0
    for kept, (used, folder, size) in enumerate(sorted(_folders(parent), reverse=True)):
        total += size
        if total > MAX_BYTES or kept >= MAX_WORKS - 1 or used < time.time() - MAX_AGE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _folders(parent: Path) -> Iterator[tuple[float, Path, int]]:
    """For each folder: when it was last used, its path and its bytes. Other processes may change the folders meanwhile."""
    for folder in parent.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            used, size = folder.stat().st_mtime, 0
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    size += path.stat().st_size
            yield used, folder, size
