"""The tier's directory: copies of whole objects, the records of the steps that need them, and the budget.

    objects/<hash>         an object's bytes, then its label, the label's length and `MAGIC`; named when complete
    records/<hash>         `records.Record` in msgpack
    writing/<token>/       one writer's partial files, and its locked file `lock` with the bytes that it has reserved
    spare/                 files of removed objects, for the next ones (`spare`)
    holds/<hash>-<token>   the hash of an attempt whose step stays for now; locked by the process that needs it
    lock                   held while a process changes or counts the directory's content

Invariants:

* A hash is BLAKE3 of store and key, so a name from outside is never used as a path.
* Objects, reservations and spare files together never exceed `TierLimits.bytes`.
* The kernel releases the lock of a dead writer. `tidy` then removes the writer's files.
* Nothing is fsynced. After a power failure, a file without its label counts as absent, and readers check digests.

Failure behaviour: `OSError` (no space, no directory) is raised to the wrappers, which then continue without the tier.
An object or record that cannot be read counts as absent. A record that cannot be decoded is renamed to
`.bad-<name>`, with a warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.core.files import file_lock, private_directory
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.local_tier.objects import ROOM_BYTES, Reservation, TierObject, claim_of, open_at
from headrace.dataio.store.local_tier.records import (
    RECORD_BYTES,
    Record,
    TierLimits,
    decode,
    encode,
    removable_steps,
    removable_surplus,
)
from headrace.dataio.store.local_tier.spare import SpareFiles

STRAY_SECONDS = 1800.0
"""How long an object without a record may stay, by the monotonic clock of the process that first saw it."""
LOCK_SECONDS, _POLL_SECONDS = 60.0, 0.002
"""How long a process waits for the directory's lock, which is held while a process scans the directory."""
_log = get_logger(__name__)


class LocalTier:
    """The tier in the directory `root`, which is created if absent. Threads and processes may share it."""

    def __init__(self, root: Path, limits: TierLimits) -> None:
        self.root, self.limits = root, limits
        self._spare = SpareFiles(root / "spare")
        self.create()
        self._unneeded: dict[str, float] = {}  # name → first seen, by the monotonic clock

    def create(self) -> None:
        """Create the directories that are absent. `AccessDeniedError` if others may enter one."""
        private_directory(self.root)
        for name in ("objects", "records", "writing", "holds", "spare"):
            private_directory(self.root / name)

    # objects

    def path_of(self, source: str, key: str) -> Path:
        return self.root / "objects" / _hash(source, key)

    def open(self, source: str, key: str) -> TierObject | None:
        """Open the object; None if it is absent or incomplete."""
        return open_at(self.path_of(source, key), source, key)

    def has(self, source: str, key: str) -> bool:
        tier_object = self.open(source, key)
        return tier_object is not None

    def may_replace(self, source: str, key: str) -> bool:
        """Whether a guest's object may replace this one.

        It may not if a step of this node needs the object. Of a guest's step, only the manifest, which is the last of
        its objects, may be replaced, because a second worker may have written another one.
        """
        records = [r for r in self.records(source) if key in r.keys]
        return all(r.guest and r.own[-1:] == (key,) for r in records)

    def drop(self, source: str, key: str) -> None:
        """Remove the object. An absent object is not an error."""
        self.path_of(source, key).unlink(missing_ok=True)

    def keep(self, source: str, key: str, data: Buffer) -> None:
        """Store a small object that is complete in memory."""
        with self.reserve() as reservation:
            writer = reservation.writer(source, key)
            writer.write(data)
            writer.commit()

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """Open an empty reservation for the block, and release it at the end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            reservation.close()

    # records

    def records(self, source: str | None = None, run: str | None = None) -> list[Record]:
        """The records of a store and run, newest step first."""
        readable = [r for r in map(_read_record, self._files("records")) if r is not None]
        matching = [r for r in readable if source in (None, r.source) and run in (None, r.run)]
        return sorted(matching, key=lambda r: (r.place, r.created), reverse=True)

    def records_changed(self) -> int:
        """When a record was last added, replaced or removed, in nanoseconds. It costs less than `records`."""
        return os.stat(self.root / "records").st_mtime_ns

    def put_record(self, record: Record) -> None:
        """Write or replace the rank's record of the attempt.

        A record that is known to be committed stays committed, even if a commit worker was stopped for a while and
        writes an older state later. A guest's record never replaces one of this node.
        """
        with self.locked():
            path = self.root / "records" / _hash(record.source, f"{record.attempt}/{record.rank}")
            previous = _read_record(path)
            if previous is not None and (
                (previous.committed and not record.committed) or (record.guest and not previous.guest)
            ):
                return
            temporary = path.with_name(f".{secrets.token_hex(8)}")
            temporary.write_bytes(encode(record))
            os.replace(temporary, path)

    def withdraw(self, record: Record) -> None:
        """Remove this record, unless another one replaced it."""
        with self.locked():
            path = self.root / "records" / _hash(record.source, f"{record.attempt}/{record.rank}")
            if _read_record(path) == record:
                path.unlink(missing_ok=True)

    def forget(self, records: Iterable[Record]) -> None:
        """Remove these records, and the objects that no other record needs.

        The state of the records does not matter, because the user asked for the removal.
        """
        with self.locked():
            self._forget(list(records))

    def forget_unchanged(self, records: Iterable[Record]) -> list[Record]:
        """As `forget`, but without records that another process has replaced, for example by a committed one.

        Returns the records that are held (`hold`). They stay.
        """
        with self.locked():
            held, free = self._split_by_holds(list(records))
            paths = ((r, self.root / "records" / _hash(r.source, f"{r.attempt}/{r.rank}")) for r in free)
            self._forget([r for r, path in paths if _read_record(path) == r])
            return held

    @contextlib.contextmanager
    def hold(self, attempt: str) -> Iterator[None]:
        """Keep the attempt's records and objects during the block, although newer steps make them surplus.

        They are removed nevertheless if a save needs their space, on request (`forget`), and if the disk takes no file.
        """
        path = self.root / "holds" / f"{_hash('', attempt)}-{secrets.token_hex(4)}"
        fd = -1
        with contextlib.suppress(OSError), self.locked():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            if fd >= 0:
                path.unlink(missing_ok=True)
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked child may have the file open
                os.close(fd)

    # space

    def used(self) -> int:
        """The bytes of all objects, plus those that writers have reserved."""
        with self.locked():
            return self._used()

    def make_room(self, size: int, claim: Callable[[int], None] = lambda _: None) -> None:
        """Remove steps until `size` more bytes fit, then call `claim` with the number of bytes to reserve.

        That number is `size` plus an advance. The advance is at most an eighth of the space that is left after `size`,
        so other writers find some. The sum is at most `ROOM_BYTES`, unless `size` is larger. Raises `CapacityError` if
        the removable steps are too small.
        """
        with self.locked():
            excess = self._used() + size - self.limits.bytes
            if excess > 0:
                self._tidy()
                excess = self._used() + size - self.limits.bytes
            for step in removable_steps(self.records()) if excess > 0 else ():
                self._forget(step)
                excess = self._used() + size - self.limits.bytes
                if excess <= 0:
                    break
            if excess > 0:
                raise CapacityError(
                    f"the tier in {self.root} has no room for {format_bytes(size)}: its {format_bytes(self.limits.bytes)} "
                    "are used by steps that have no other copy, or are being written",
                    hint="raise tier_bytes",
                )
            advance = min(max(ROOM_BYTES - size, 0), -excess // 8)
            self._spare.trim(-excess - advance)
            claim(size + advance)

    def take_spare(self, target: Path, claim: Callable[[int], None]) -> int | None:
        """Move a spare file to `target`, and call `claim` with its size. Returns its descriptor; None if there is none."""
        if not self._spare:
            return None
        with self.locked():
            taken = self._spare.take(target)
            if taken is None:
                return None
            claim(taken[1])
            return taken[0]

    def remove_surplus(self) -> None:
        """Remove the steps that `tidy` would remove."""
        with self.locked():
            self._remove_surplus()

    def tidy(self) -> None:
        """Remove surplus steps, unneeded objects, and files of dead writers. The daemon calls this regularly."""
        with self.locked():
            self._tidy()

    # private; the caller holds the lock

    def _used(self) -> int:
        return sum(self._sizes().values()) + sum(self._claims())

    def _tidy(self) -> None:
        for folder in self._files("writing"):
            if claim_of(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
        self._spare.tidy()
        self._remove_surplus()
        needed = {_hash(r.source, key) for r in self.records() for key in r.keys}
        now, first_seen = time.monotonic(), self._unneeded
        self._unneeded = {p.name: first_seen.get(p.name, now) for p in self._files("objects") if p.name not in needed}
        for name, since in self._unneeded.items():
            if now - since > STRAY_SECONDS:
                (self.root / "objects" / name).unlink(missing_ok=True)

    def _remove_surplus(self) -> None:
        self._forget(self._split_by_holds(removable_surplus(self.records(), self.limits.steps))[1])

    def _split_by_holds(self, records: list[Record]) -> tuple[list[Record], list[Record]]:
        """The records that live processes hold, and the others. Files of dead processes are removed."""
        hashes = set[str]()
        for path in self._files("holds"):
            if _is_locked(path):
                hashes.add(path.name.partition("-")[0])
            else:
                path.unlink(missing_ok=True)
        held = [r for r in records if _hash("", r.attempt) in hashes]
        return held, [r for r in records if r not in held]

    def _forget(self, records: list[Record]) -> None:
        if not records:
            return
        for r in records:
            (self.root / "records" / _hash(r.source, f"{r.attempt}/{r.rank}")).unlink(missing_ok=True)
        needed = {_hash(r.source, key) for r in self.records() for key in r.keys}
        for r in records:
            for key in r.keys:
                if _hash(r.source, key) not in needed:
                    self._spare.add(self.path_of(r.source, key))

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for path in self._files("objects"):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name] = path.lstat().st_size
        return sizes

    def _claims(self) -> Iterator[int]:
        for folder in self._files("writing"):
            yield claim_of(folder) or 0

    def _files(self, name: str) -> list[Path]:
        with os.scandir(self.root / name) as entries:
            return [Path(e.path) for e in entries if not e.name.startswith(".")]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock, to count or change its content. Not reentrant.

        Raises `TimeoutError` after `LOCK_SECONDS`. Then another process was stopped while it held the lock, or the disk
        hangs.
        """
        with file_lock(self.root / "lock", LOCK_SECONDS, _POLL_SECONDS):
            yield


def _hash(source: str, key: str) -> str:
    return blake3(f"{source}\0{key}".encode()).hexdigest()[:40]


def _is_locked(path: Path) -> bool:
    """Whether a live process has an exclusive lock on the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _read_record(path: Path) -> Record | None:
    try:
        if path.lstat().st_size > RECORD_BYTES:
            raise CorruptionError(f"{path} is too large")
        return decode(path.read_bytes(), str(path))
    except OSError:
        return None
    except HeadraceError as error:
        _log.warning("renamed a bad record of the tier: %s", error)
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f".bad-{path.name}"))
        return None
