"""The tier's directory: whole objects of stores, records of the steps that need them, and the budget of both.

    objects/<hash>         an object's bytes, then its label, the label's length and `MAGIC`; named when complete
    records/<hash>         `record.Record`, msgpack
    writing/<token>/       a writer at work: `lock`, held by it, holds the bytes that it may still write; files half written
    lock                   held by whoever makes room or writes records

Invariants: a hash is BLAKE3 of store and key, so no name from outside is ever a path. Objects and reservations together never
pass `Limits.bytes`. What a dead writer left is recognised by its lock, which the kernel drops, and removed. Nothing is
fsynced: after a power cut a file without its label is no object, and readers check digests anyway.
Failure behaviour: `OSError` (no space, directory gone) goes up to the wrappers, which do without the tier; an object or
record that cannot be read is as if it were not there, and is removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.core.files import file_lock, private_directory
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.contract import Buffer
from headrace.dataio.store.tier import record as documents
from headrace.dataio.store.tier import retention
from headrace.dataio.store.tier.kept import ROOM_BYTES, Held, Reservation, claim_of, open_at
from headrace.dataio.store.tier.record import Record
from headrace.dataio.store.tier.retention import Limits

STRAY_SECONDS = 1800.0
"""How long an object may lie here that no record needs yet: as long as one process has seen it, whatever the clocks say."""
LOCK_SECONDS, _POLL_SECONDS = 60.0, 0.002
"""How long anybody waits for the directory's lock, which is held for a look through the directory."""
_log = get_logger(__name__)


class Shelf:
    """The directory at `root`, made when absent. Safe between processes, and between threads."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.root, self.limits = private_directory(root), limits
        for name in ("objects", "records", "writing"):
            private_directory(root / name)
        self._strays: dict[str, float] = {}  # since when, by the monotonic clock

    # objects

    def path_of(self, source: str, key: str) -> Path:
        return self.root / "objects" / _hash(source, key)

    def open(self, source: str, key: str) -> Held | None:
        """The object, or None when it is not here whole."""
        return open_at(self.path_of(source, key), source, key)

    def has(self, source: str, key: str) -> bool:
        found = self.open(source, key)
        return found is not None

    def drop(self, source: str, key: str) -> None:
        """Remove the object; absent is fine."""
        self.path_of(source, key).unlink(missing_ok=True)

    def keep(self, source: str, key: str, data: Buffer) -> None:
        """A small object at once."""
        with self.reserve() as reservation:
            writer = reservation.writer(source, key)
            writer.write(data)
            writer.commit()

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """A writer's reservation, empty at first; when the block ends, so does it."""
        made = Reservation(self)
        try:
            yield made
        finally:
            made.close()

    # records

    def records(self, source: str | None = None, run: str | None = None) -> list[Record]:
        """Newest step first."""
        found = [r for r in map(_read_record, self._files("records")) if r is not None]
        own = [r for r in found if source in (None, r.source) and run in (None, r.run)]
        return sorted(own, key=lambda r: (r.place, r.created), reverse=True)

    def put_record(self, record: Record) -> None:
        """Write or replace the rank's record of the attempt. One that is known to be committed stays, whatever comes later of
        a carrier that had stopped for a while."""
        with self.locked():
            path = self.root / "records" / _hash(record.source, f"{record.attempt}/{record.rank}")
            old = _read_record(path)
            if old is not None and old.committed and not record.committed:
                record = old
            elif old is not None:
                record = msgspec.structs.replace(record, guest=record.guest and old.guest)
            aside = path.with_name(f".{secrets.token_hex(8)}")
            aside.write_bytes(documents.encode(record))
            os.replace(aside, path)

    def withdraw(self, record: Record) -> None:
        """Remove this record, unless another has taken its place."""
        with self.locked():
            path = self.root / "records" / _hash(record.source, f"{record.attempt}/{record.rank}")
            if _read_record(path) == record:
                path.unlink(missing_ok=True)

    def forget(self, records: Iterable[Record]) -> None:
        """Remove these records, and the objects that no other needs: a person's word, whatever they are."""
        with self.locked():
            self._forget(list(records))

    # room

    def used(self) -> int:
        """Bytes of objects, and those that writers may still write."""
        with self.locked():
            return self._used()

    def make_room(self, size: int, claim: Callable[[int], None] = lambda _: None) -> None:
        """Let steps go until `size` more bytes fit, then call `claim` with how many may be reserved: `size`, or `ROOM_BYTES`
        where they are free anyway. `CapacityError` when too little may go."""
        with self.locked():
            missing = self._used() + size - self.limits.bytes
            if missing > 0:
                self._tidy()
                missing = self._used() + size - self.limits.bytes
            for step in retention.order(self.records()) if missing > 0 else ():
                self._forget(step)
                missing = self._used() + size - self.limits.bytes
                if missing <= 0:
                    break
            if missing > 0:
                raise CapacityError(
                    f"the tier in {self.root} has no room for {format_bytes(size)}: of {format_bytes(self.limits.bytes)} "
                    "the rest is in use by steps that have no other copy, or being written",
                    hint="raise tier_bytes",
                )
            claim(max(size, ROOM_BYTES) if missing + ROOM_BYTES <= size else size)

    def tidy(self) -> None:
        """What the daemon does now and then: remove surplus steps, strays, and what dead writers left."""
        with self.locked():
            self._tidy()

    # inside; under the lock

    def _used(self) -> int:
        return sum(self._sizes().values()) + sum(self._claims())

    def _tidy(self) -> None:
        for folder in self._files("writing"):
            if claim_of(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
        records = self.records()
        self._forget(retention.beyond(records, self.limits.steps))
        needed = {_hash(r.source, key) for r in self.records() for key in r.keys}
        now, seen = time.monotonic(), self._strays
        self._strays = {p.name: seen.get(p.name, now) for p in self._files("objects") if p.name not in needed}
        for name, since in self._strays.items():
            if now - since > STRAY_SECONDS:
                (self.root / "objects" / name).unlink(missing_ok=True)

    def _forget(self, gone: list[Record]) -> None:
        if not gone:
            return
        for r in gone:
            (self.root / "records" / _hash(r.source, f"{r.attempt}/{r.rank}")).unlink(missing_ok=True)
        needed = {_hash(r.source, key) for r in self.records() for key in r.keys}
        for r in gone:
            for key in r.keys:
                if _hash(r.source, key) not in needed:
                    self.drop(r.source, key)

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
        """Between processes and threads: whoever counts or changes what is here. Not reentrant. `TimeoutError`, an OSError, where
        somebody holds the lock for `LOCK_SECONDS`: he was stopped, or his disk is."""
        with file_lock(self.root / "lock", LOCK_SECONDS, _POLL_SECONDS):
            yield


def _hash(source: str, key: str) -> str:
    return blake3(f"{source}\0{key}".encode()).hexdigest()[:40]


def _read_record(path: Path) -> Record | None:
    try:
        if path.lstat().st_size > documents.RECORD_BYTES:
            raise CorruptionError(f"{path} is too large")
        return documents.decode(path.read_bytes(), str(path))
    except OSError:
        return None
    except HeadraceError as error:
        _log.warning("a record of the tier is set aside: %s", error)
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f".bad-{path.name}"))
        return None
