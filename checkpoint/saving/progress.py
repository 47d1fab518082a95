"""A log of what a commit worker has done, for the next worker if this one is killed.

The file holds records: a length, the XXH3-64 of the payload, and the payload in msgpack. They record which uploads
were begun, which packs are complete and what they hold, and at the end the manifest.
Invariants: a record is written after its event has happened. The manifest is synced before the arena is released. If
the file cannot be written (`safe` is False), the manifest is in the store before the release. Each worker names its
packs with its own random digits, so a late request of an earlier worker never overwrites a pack of this one. The log is
not trusted: packs are looked up in the store again, and chunks are found by their digest.
Failure behaviour: reading ends at the first torn record. The rest is cut off, and that work is repeated. A full or
failing disk is logged, and the save continues.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import xxhash

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.manifest import DELTAS, Chunk, PackName
from headrace.checkpoint.format.pack import Entry
from headrace.checkpoint.repository.commit import FinalError
from headrace.checkpoint.saving.dedup import KnownChunks, Stored
from headrace.checkpoint.saving.plan import PutPlan
from headrace.dataio.core.errors import HeadraceError, NotFoundError
from headrace.dataio.core.limits import GIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.wrappers import Wrapper

_MOST_BYTES = 1 * GIB
_FRAME = struct.Struct("<IQ")
_log = get_logger(__name__)


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """A multipart upload was begun."""

    key: str
    id: str


class Aborted(msgspec.Struct, tag="aborted", frozen=True):
    key: str


class Packed(msgspec.Struct, tag="packed", frozen=True):
    """A pack was stored; `entries` are its chunks."""

    key: str
    size: int
    entries: tuple[Entry, ...]


class Finished(msgspec.Struct, tag="finished", frozen=True):
    manifest: bytes


Record = Begun | Aborted | Packed | Finished
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class ProgressFile:
    """An `UploadLog` in the file `fd`, which the caller closes; in memory only if `fd` is None.

    Thread-safe.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self.safe = True
        self.unfinished: dict[str, str] = {}
        """Ids of unfinished uploads, by key."""
        self._packed: dict[str, Packed] = {}
        self._filling: dict[str, list[Entry]] = {}
        self._stored: dict[str, Packed] = {}
        self._checked: set[str] = set()
        self.manifest: bytes | None = None
        self._worker = os.urandom(4).hex()
        try:
            for record in self._read():
                self._apply(record)
        except OSError as error:
            self._do_without(error)

    @property
    def fresh(self) -> bool:
        """Whether no earlier worker recorded anything."""
        return self.manifest is None and not self._packed and not self.unfinished

    # packs

    def name(self, plan: PutPlan, number: int) -> PackName:
        """The name of this worker's pack with this number."""
        return PackName(plan.attempt, names.pack_name(plan.rank, self._worker, number))

    def packing(self, pack: PackName, entry: Entry) -> None:
        """Record that a chunk is written into this pack."""
        self._filling.setdefault(pack.key, []).append(entry)

    def finished(self, manifest: bytes) -> None:
        """Record the manifest after all packs are stored. If `safe`, the record is on disk when this returns."""
        self._write(Finished(manifest))
        with self._lock:
            if self._fd is not None:
                self._try(_sync)

    def stored(self, store: Store, plan: PutPlan) -> dict[PackName, tuple[Entry, ...]]:
        """The packs that earlier workers completed and that are in the store."""
        packs = {}
        for packed in self._packed.values():
            name = names.parse_pack_key(packed.key)
            if name is not None and name[0] == plan.attempt and _size(store, packed.key) == packed.size:
                packs[PackName(*name)] = packed.entries
        return packs

    def require_packs(self, store: Store, plan: PutPlan, encoded: bytes) -> manifests.Manifest:
        """Decode the manifest; `FinalError` unless every pack of this attempt that it names is in the store."""
        manifest = manifests.decode(
            encoded, names.manifest(plan.run, plan.timeline, plan.step, plan.attempt, plan.rank)
        )
        for pack in manifest.packs:
            key = names.pack(pack.attempt, pack.name)
            if pack.attempt == plan.attempt and _size(store, key) < 0:
                raise FinalError(f"{key} was not stored before its worker ended", hint="save again")
        return manifest

    # uploads

    def begun(self, key: str, upload: str) -> None:
        self._write(Begun(key, upload))

    def ended(self, key: str, size: int | None) -> None:
        if size is None:
            self._write(Aborted(key))
        else:
            self._stored[key] = Packed(key, size, tuple(self._filling.pop(key, ())))
            self.unfinished.pop(key, None)
            self._note_pack(key)

    def checked(self, key: str) -> None:
        """Record that the pack's contents match its entries. Once the pack is stored, a later worker may use it."""
        self._checked.add(key)
        self._note_pack(key)

    def _note_pack(self, key: str) -> None:
        """Write the record of a pack that is checked and stored.

        With a tier, another thread stores the pack, before or after the check.
        """
        packed = self._stored.pop(key, None) if key in self._checked else None
        if packed is not None:
            self._write(packed)

    def abandon(self, store: Store) -> None:
        """Abort every upload that an earlier worker left unfinished.

        Uploads that cannot be aborted stay on the server, invisible.
        """
        for key, upload in list(self.unfinished.items()):
            try:
                store.abort_upload(key, upload)
                self.ended(key, None)
            except HeadraceError as error:
                _log.warning("the unfinished upload %s of %s is left on the server: %s", upload, key, error)

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
        """Call `work` on the file.

        After an error, the file is no longer used, because records after a torn one are not read.
        """
        assert self._fd is not None
        try:
            work(self._fd)
        except OSError as error:
            self._do_without(error)

    def _do_without(self, error: OSError) -> None:
        _log.warning("progress cannot be recorded; a worker that takes over will repeat it: %s", error)
        self._fd, self.safe = None, False

    def _apply(self, record: Record) -> None:
        match record:
            case Begun(key, upload):
                self.unfinished[key] = upload
            case Aborted(key):
                self.unfinished.pop(key, None)
            case Packed(key):
                self.unfinished.pop(key, None)
                self._packed[key] = record
            case Finished(manifest):
                self.manifest = manifest

    def _read(self) -> Iterator[Record]:
        if self._fd is None:
            return
        at, end = 0, min(os.fstat(self._fd).st_size, _MOST_BYTES)
        while at + _FRAME.size <= end:
            length, check = _FRAME.unpack(os.pread(self._fd, _FRAME.size, at))
            payload = os.pread(self._fd, length, at + _FRAME.size) if length <= end - at else b""
            if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != check:
                break
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # another version's record
                yield _decoder.decode(payload)
            at += _FRAME.size + length
        os.ftruncate(self._fd, at)
        os.lseek(self._fd, at, os.SEEK_SET)


class RecordingStore(Wrapper):
    """Wraps `inner` and records uploads and packs in `progress`."""

    def __init__(self, inner: Store, progress: ProgressFile) -> None:
        super().__init__(inner)
        self._progress = progress

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        size = self.inner.put_logged(key, parts, self._progress)
        self._progress.ended(key, size)
        return size


_sync = os.fsync


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def add_stored(known: KnownChunks, packs: Mapping[PackName, tuple[Entry, ...]]) -> None:
    """Add the chunks of these packs to `known`, as chunks that this save has written."""
    for name, entries in packs.items():
        for entry in entries:
            if entry.codec in DELTAS:
                continue  # the log does not record its base, so the chunk is stored again
            chunk = Chunk(entry.digest, 0, entry.offset, entry.stored, entry.raw, entry.codec)
            known.chunks[entry.digest] = Stored(name, chunk)
            known.own[entry.digest] = entry.stored


def _size(store: Store, key: str) -> int:
    try:
        return store.stat(key).size
    except NotFoundError:
        return -1
