"""What a carrier writes down for the one that takes over from it, should it be killed.

A file of records: a length, msgpack, and the XXH3-64 of that. They say under which name this carrier writes its packs, which
uploads were
begun, which of their parts the store has, which packs are complete and what is in them, and at last the manifest.
Invariants: a record is written after what it says is true. The manifest is synced before the arena is given back, or, where the
file cannot be written (`safe` is then false), in the store, so that from then on the arena is not needed. Nothing here is
trusted: parts are compared with what the store lists (`dataio.store.resume`), packs are looked up again, chunks are found by
their digest.
Failure behaviour: reading ends at the first record that is torn; what was written behind it is cut off and done again. A disk
that is full or fails costs a warning: the save goes on, and a carrier that takes over finds what was written until then.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec
import xxhash

from checkpoint.format import manifest as manifests
from checkpoint.format import names
from checkpoint.format.manifest import DELTAS, Chunk, PackName
from checkpoint.format.pack import Entry
from checkpoint.repository.commit import FinalError
from checkpoint.repository.dedup import Known, Stored
from checkpoint.saving.plan import PutPlan
from dataio.core.errors import NotFoundError
from dataio.core.limits import GIB
from dataio.core.log import get_logger
from dataio.store.contract import Store
from dataio.store.resume import Resuming
from dataio.store.uploads import Part, Unfinished

_MOST_BYTES = 1 * GIB
_FRAME = struct.Struct("<IQ")
_log = get_logger(__name__)


class Carrier(msgspec.Struct, tag="carrier", frozen=True):
    """The name that this carrier's packs have."""

    name: str


class Begun(msgspec.Struct, tag="begun", frozen=True):
    key: str
    id: str
    nonce: str


class Sent(msgspec.Struct, tag="sent", frozen=True):
    key: str
    number: int
    size: int
    etag: str
    digest: bytes


class Filled(msgspec.Struct, tag="filled", frozen=True):
    """All chunks of a pack, before the last of its bytes is sent."""

    key: str
    entries: tuple[Entry, ...]


class Ended(msgspec.Struct, tag="ended", frozen=True):
    key: str
    size: int | None


class Finished(msgspec.Struct, tag="finished", frozen=True):
    manifest: bytes


Record = Carrier | Begun | Sent | Filled | Ended | Finished
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class _Upload:
    id: str
    nonce: str
    parts: dict[int, Part] = field(default_factory=dict)


class ProgressFile:
    """An `UploadLog` in the file `fd`, which stays the caller's; with None in memory only. Safe to share between threads."""

    def __init__(self, fd: int | None) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self.safe = True
        self._uploads: dict[str, _Upload] = {}
        self._tables: dict[str, tuple[Entry, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._filling: dict[str, list[Entry]] = {}
        self.manifest: bytes | None = None
        self.carrier = ""
        try:
            for record in self._read():
                self._apply(record)
        except OSError as error:
            self._do_without(error)
        if not self.carrier:
            self._write(Carrier(os.urandom(4).hex()))

    # packs

    def packing(self, key: str, entry: Entry) -> None:
        """A chunk goes into this pack."""
        self._filling.setdefault(key, []).append(entry)

    def filled(self, key: str) -> None:
        """All chunks of this pack are known."""
        if key in self._filling:
            self._write(Filled(key, tuple(self._filling.pop(key))))

    def finished(self, manifest: bytes) -> None:
        """All packs are stored; `manifest` is what is left to be written. On the disk when this returns, if `safe`."""
        self._write(Finished(manifest))
        with self._lock:
            if self._fd is not None:
                self._try(_sync)

    def stored(self, store: Store, plan: PutPlan) -> dict[int, tuple[Entry, ...]]:
        """The complete packs of an earlier carrier by number, looked up in the store."""
        found = {}
        for key, size in self._sizes.items():
            number = int(key.removesuffix(".pack").rpartition("-")[2])
            if key == self.key(plan, number) and key in self._tables and _size(store, key) == size:
                found[number] = self._tables[key]
        return found

    def require_packs(self, store: Store, plan: PutPlan, encoded: bytes) -> manifests.Manifest:
        """The manifest, decoded; `TransientError` unless every pack that it needs of this save is in the store."""
        manifest = manifests.decode(
            encoded, names.manifest(plan.run, plan.timeline, plan.step, plan.attempt, plan.rank)
        )
        for pack in manifest.packs:
            key = names.pack(pack.attempt, pack.name)
            if pack.attempt == plan.attempt and _size(store, key) < 0:
                raise FinalError(f"{key} was not stored before its worker ended", hint="save again")
        return manifest

    def name(self, plan: PutPlan, number: int) -> PackName:
        return PackName(plan.attempt, names.pack_name(plan.rank, self.carrier, number))

    def key(self, plan: PutPlan, number: int) -> str:
        return names.pack(plan.attempt, self.name(plan, number).name)

    # uploads

    def unfinished(self, key: str) -> Unfinished | None:
        with self._lock:
            upload = self._uploads.get(key)
            return Unfinished(upload.id, upload.nonce, dict(upload.parts)) if upload is not None else None

    def begun(self, key: str, upload: Unfinished) -> None:
        self._write(Begun(key, upload.id, upload.nonce))

    def sent(self, key: str, part: Part) -> None:
        self._write(Sent(key, part.number, part.size, part.etag, part.digest))

    def ended(self, key: str, size: int | None) -> None:
        self._write(Ended(key, size))

    def abandon(self, store: Store) -> None:
        """Abort every upload that was begun and not ended."""
        for key in list(self._uploads):
            Resuming(store, self).abandon(key)

    # inside

    def _write(self, record: Record) -> None:
        payload = _encoder.encode(record)
        with self._lock:
            if self._fd is not None:
                self._try(
                    lambda fd: _write_all(fd, _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
                )
            self._apply(record)

    def _try(self, work: Callable[[int], object]) -> None:
        """Do something to the file, or do without it from now on: what would come behind a torn record is not read."""
        assert self._fd is not None
        try:
            work(self._fd)
        except OSError as error:
            self._do_without(error)

    def _do_without(self, error: OSError) -> None:
        _log.warning("progress cannot be written down, a carrier that takes over will do it again: %s", error)
        self._fd, self.safe = None, False

    def _apply(self, record: Record) -> None:
        match record:
            case Carrier(name):
                self.carrier = name
            case Begun(key, id, nonce):
                self._uploads[key] = _Upload(id, nonce)
            case Sent(key, number, size, etag, digest) if key in self._uploads:
                self._uploads[key].parts[number] = Part(number, size, etag, digest)
            case Filled(key, entries):
                self._tables[key] = entries
            case Ended(key, size):
                self._uploads.pop(key, None)
                if size is not None:
                    self._sizes[key] = size
            case Finished(manifest):
                self.manifest = manifest

    def _read(self) -> Iterator[Record]:
        if self._fd is None:
            return
        at, end = 0, min(os.fstat(self._fd).st_size, _MOST_BYTES)
        while at + _FRAME.size <= end:
            length, check = _FRAME.unpack(os.pread(self._fd, _FRAME.size, at))
            payload = os.pread(self._fd, length, at + _FRAME.size) if length <= end - at else b""
            try:
                if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != check:
                    break
                yield _decoder.decode(payload)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                break
            at += _FRAME.size + length
        os.ftruncate(self._fd, at)
        os.lseek(self._fd, at, os.SEEK_SET)


_sync = os.fsync


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class FreeNumbers:
    """The numbers that are not in `taken`, by their place among them."""

    def __init__(self, taken: Collection[int]) -> None:
        self._free = (number for number in count() if number not in taken)
        self._found: list[int] = []

    def __getitem__(self, nth: int) -> int:
        while len(self._found) <= nth:
            self._found.append(next(self._free))
        return self._found[nth]


def add_stored(known: Known, packs: dict[int, tuple[Entry, ...]], progress: ProgressFile, plan: PutPlan) -> None:
    """Make the chunks of these packs known, as this save's own."""
    for number, entries in packs.items():
        for entry in entries:
            if entry.codec in DELTAS:
                continue  # what it leans on is not written down: it is stored once more
            chunk = Chunk(entry.digest, 0, entry.offset, entry.stored, entry.raw, entry.codec)
            known.chunks[entry.digest] = Stored(progress.name(plan, number), chunk)
            known.own[entry.digest] = entry.stored


def _size(store: Store, key: str) -> int:
    try:
        return store.stat(key).size
    except NotFoundError:
        return -1
