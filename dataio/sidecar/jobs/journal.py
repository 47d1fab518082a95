"""The journal: a private directory of small files, from which the next daemon continues this daemon's jobs.

Each job has these files, named by its token:

- `.plan`: the put plan as received
- `.job`: the entry
- `.events` and `.log`: the worker's output
- `.progress`: state that a worker leaves for its successor

An entry is 8 bytes of magic, a length, msgpack, and the XXH3-64 of all bytes before it.
Invariants: an entry exists only if its plan does, and both are on the disk before `record` returns. A worker is alive
exactly as long as its `.events` file is locked; its pid may have been reused. The files contain no secrets.
Failure behaviour: an entry is invalid if it is incomplete or too large, if a newer version wrote it, or if it belongs to
another user or job. An invalid entry is logged and moved to `refused/`, which keeps the last `REFUSED`. Files without an
entry are removed. `CorruptionError` for a plan that differs from the recorded one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.core.files import private_directory
from headrace.dataio.core.limits import KIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.jobs.memfd import PLAN_BYTES

VERSION = 1
MAGIC = b"MLRJOB\0\1"
ENTRY_BYTES = 64 * KIB
REFUSED = 16
KINDS = ("job", "plan", "events", "log", "progress")
_HEAD, _SUM = struct.Struct("<8sI"), struct.Struct("<Q")
_NAME = re.compile(r"([0-9a-f]{32})\.(job|plan|events|log|progress)(\.new)?")
_log = get_logger(__name__)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `accepted` is in Unix seconds, `pid` is the newest worker's, and `tries` counts the workers so far."""

    version: int = VERSION
    token: str
    kind: str
    about: str
    urgent: bool
    size: int
    plan_bytes: int
    plan_digest: str
    accepted: float
    pid: int = 0
    started: int = 0
    """The worker's start in clock ticks since boot; together with `pid` it identifies the process."""
    tries: int = 0
    failures: int = 0
    """Number of workers that reported a failure after which the job was retried."""
    failing_since: float = 0.0
    """The Unix time at which the first of them failed."""


class _Head(msgspec.Struct):
    version: int


class Journal:
    """The entries in `folder`, which is created if it is absent. Only the daemon that holds the socket uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = private_directory(folder)

    def record(self, entry: Entry, plan: bytes) -> None:
        """Make the job durable: the plan, the entry and their names are on the disk when this returns."""
        self._write(f"{entry.token}.plan", plan, sync=True)
        self._write(f"{entry.token}.job", _encode(entry), sync=True)
        self._sync()

    def update(self, entry: Entry) -> None:
        """Replace the entry. It is not synced, because the changed fields are needed only until the machine restarts."""
        self._write(f"{entry.token}.job", _encode(entry), sync=False)

    def remove(self, token: str) -> None:
        """Remove the files of a job that has ended. The entry is removed first, so no entry lacks its files."""
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / f"{token}.{kind}")

    def load(self) -> list[Entry]:
        """All valid entries, oldest first. Invalid ones are moved to `refused/`, and files without an entry removed."""
        entries = [entry for name in self._names(".job") if (entry := self._read(name)) is not None]
        tokens = {entry.token for entry in entries}
        for name in self._names(""):
            match = _NAME.fullmatch(name)
            if match is not None and (match[3] or match[1] not in tokens):
                os.unlink(self.folder / name)
        return sorted(entries, key=lambda entry: entry.accepted)

    def plan(self, entry: Entry) -> int:
        """A descriptor of the verified plan. The caller must close it."""
        fd = os.open(self.folder / f"{entry.token}.plan", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = _pread(fd, entry.plan_bytes + 1)
            if len(data) != entry.plan_bytes or digest(data) != entry.plan_digest:
                raise CorruptionError(
                    f"the plan of job {entry.token} differs from the one that was recorded", hint="save again"
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open(self, token: str, kind: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """A descriptor of one of the job's files. The caller must close it."""
        return os.open(self.folder / f"{token}.{kind}", flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    # internal

    def _names(self, suffix: str) -> Iterator[str]:
        return iter(sorted(name for name in os.listdir(self.folder) if name.endswith(suffix)))

    def _read(self, name: str) -> Entry | None:
        try:
            return _read_entry(self.folder / name, name)
        except (OSError, HeadraceError) as error:
            _log.error("the journal's entry %s is invalid and was moved to refused/: %s", name, error)
            self._move_to_refused(name)
            return None

    def _move_to_refused(self, name: str) -> None:
        refused = private_directory(self.folder / "refused")
        with contextlib.suppress(OSError):
            os.replace(self.folder / name, refused / name)
        refused_files = sorted(refused.iterdir(), key=lambda path: path.lstat().st_mtime)
        for path in refused_files[:-REFUSED]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _write(self, name: str, data: bytes, *, sync: bool) -> None:
        temporary = self.folder / f"{name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, self.folder / name)

    def _sync(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def digest(plan: bytes) -> str:
    """The digest that identifies a plan."""
    return xxhash.xxh3_128_hexdigest(plan)


def read_plan(fd: int) -> bytes:
    """The plan's bytes. They cannot change, because `check_plan` verified the seals."""
    return _pread(fd, PLAN_BYTES)


def is_locked(fd: int) -> bool:
    """Whether another open file holds the lock of this file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _encode(entry: Entry) -> bytes:
    payload = msgspec.msgpack.encode(entry)
    data = _HEAD.pack(MAGIC, len(payload)) + payload
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def _read_entry(path: Path, name: str) -> Entry:
    data = _read_own_file(path)
    if len(data) < _HEAD.size + _SUM.size or data[:6] != MAGIC[:6]:
        raise CorruptionError("it is not an entry")
    magic, length = _HEAD.unpack_from(data)
    body = data[: _HEAD.size + length]
    if len(data) != len(body) + _SUM.size or _SUM.unpack_from(data, len(body))[0] != xxhash.xxh3_64_intdigest(body):
        raise CorruptionError("it is torn")
    payload = body[_HEAD.size :]
    try:
        if magic != MAGIC or msgspec.msgpack.decode(payload, type=_Head).version != VERSION:
            raise UnsupportedError("a newer Headrace wrote it")
        entry = msgspec.msgpack.decode(payload, type=Entry)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(f"it cannot be read: {error}") from None
    if name != f"{entry.token}.job" or not _NAME.fullmatch(name):
        raise CorruptionError("it belongs to another job")
    return entry


def _read_own_file(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise CorruptionError("it is not a file of this user")
        if status.st_size > ENTRY_BYTES:
            raise CorruptionError(f"it has {status.st_size} bytes; the most is {ENTRY_BYTES}")
        return _pread(fd, ENTRY_BYTES)
    finally:
        os.close(fd)


def _pread(fd: int, limit: int) -> bytes:
    parts, at = [], 0
    while at < limit and (part := os.pread(fd, min(limit - at, 1 << 24), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
