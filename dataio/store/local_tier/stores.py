"""The tier's two wrappers of a store: `WriteThroughTier` for writers, `TierReader` for readers.

Purpose: a save writes its bytes to the node at the speed of memory, however slow the store is. A restore reads them
from the node.

Invariants:

* `WriteThroughTier` writes an object to the tier first, and sends it to the store from the tier in the background.
* `put_if_absent` returns only after every earlier object is in the store, byte for byte. So no object can refer to one
  that is not yet stored. Until then, an object of the tier may be missing in the store.
* Other operations, such as those of leases, go to the store directly.
* `TierReader` reads an object from the tier only if `keeps(key)` is true. Such objects never change. It does not check
  their bytes: a reader that finds wrong bytes calls `invalidate` and reads again.

Failure behaviour of writes: if the tier is full, read-only or missing, the save continues without it, after one
warning. The bytes of the current object that are already in the tier are sent to the store with the rest. If sending
an object fails, the next `put_if_absent` raises the error.

Failure behaviour of reads: a missing copy is fetched from the buddy, or else read from the store. A read that fails,
because the copy is too short or the disk has an error, goes to the store. `invalidate` removes a copy; then the buddy's
copy is tried once, and then the store. Errors of the store are raised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain

import xxhash

from headrace.dataio.core import limits, metrics
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Buffer, Store, UploadLog, writable_bytes
from headrace.dataio.store.local_tier.objects import Label, TierObject, Writer
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.wrappers import Wrapper

_OPEN = 64
"""How many objects stay open."""
FetchFromBuddy = Callable[[str, str], bool]
"""Copies the object (source, key) from the buddy node into the tier. Returns whether the tier has it now."""


class TierReader(Wrapper):
    """Reads from `tier`, then from the buddy node, then from `inner`. Thread-safe.

    `bytes` counts the bytes that came from "tier", "buddy" and "store".
    """

    def __init__(
        self,
        inner: Store,
        tier: LocalTier,
        keeps: Callable[[str], bool],
        recall: FetchFromBuddy = lambda _source, _key: False,
    ) -> None:
        super().__init__(inner)
        self._tier, self._keeps, self._recall = tier, keeps, recall
        self._source = inner.location.url
        self._open: OrderedDict[str, TierObject] = OrderedDict()
        self._asked_buddy, self._absent = set[str](), set[str]()
        self._lock, self._locks = threading.Lock(), defaultdict[str, threading.Lock](threading.Lock)
        self.bytes = {"tier": 0, "buddy": 0, "store": 0}

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        tier_object = self._find(key)
        if tier_object is not None and tier_object.size <= max_bytes:
            data = bytearray(tier_object.size)
            if _fill(tier_object, 0, memoryview(data)):
                self._count(key, len(data))
                return bytes(data)
        stored = super().get(key, max_bytes=max_bytes)
        self._count(None, len(stored))
        return stored

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        tier_object, size = self._find(key), sum(buffer.nbytes for _, buffer in ranges)
        if tier_object is not None and all(_fill(tier_object, offset, buffer) for offset, buffer in ranges):
            self._count(key, size)
            return
        super().get_ranges_into(key, ranges)
        self._count(None, size)

    def invalidate(self, key: str) -> bool:
        with self._lock_of(key):
            if not self._keeps(key) or key in self._absent:
                return super().invalidate(key)
            self._open.pop(key, None)
            self._tier.drop(self._source, key)
            if key in self._asked_buddy:  # it came from the buddy
                self._absent.add(key)
            return True

    def _find(self, key: str) -> TierObject | None:
        if not self._keeps(key) or key in self._absent:
            return None
        with self._lock_of(key):
            tier_object = self._open.get(key) or self._tier.open(self._source, key)
            if tier_object is None and key not in self._asked_buddy:
                self._asked_buddy.add(key)
                if self._recall(self._source, key):
                    tier_object = self._tier.open(self._source, key)
            if tier_object is None:
                self._absent.add(key)
                return None
            self._remember(key, tier_object)
            return tier_object

    def _remember(self, key: str, tier_object: TierObject) -> None:
        with self._lock:
            self._open[key] = tier_object
            self._open.move_to_end(key)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)  # the last reader closes the file

    def _lock_of(self, key: str) -> threading.Lock:
        with self._lock:
            return self._locks[key]

    def _count(self, key: str | None, size: int) -> None:
        source = "store" if key is None else "buddy" if key in self._asked_buddy else "tier"
        with self._lock:
            self.bytes[source] += size
        metrics.tier_read_bytes.labels(source).inc(size)


def _fill(tier_object: TierObject, offset: int, buffer: memoryview) -> bool:
    try:
        return tier_object.fill(offset, writable_bytes(buffer))
    except OSError:  # the disk failed: use the next copy
        return False


Keeps = Callable[[str], bool]
TROUBLE = (OSError, CapacityError)
"""Errors after which a writer continues without the tier."""
_log = get_logger(__name__)


class WriteThroughTier(Wrapper):
    """Writes objects to `tier` first if `keeps(key)` is true, and sends them to `inner` in the background.

    It is a context manager that does not close `inner`. Only one thread at a time may write.
    """

    def __init__(self, inner: Store, tier: LocalTier, keeps: Keeps) -> None:
        super().__init__(inner)
        self._tier, self._keeps = tier, keeps
        self._source, self._sent = inner.location.url, list[Future[int]]()
        self._written = list[str]()
        self._exit_stack = ExitStack()
        self._pool = self._exit_stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="headrace-send"))
        self.whole = True
        """Whether every object so far was written to the tier."""
        self.send = True
        """Whether objects of the tier are sent to the store. If not, a write that the tier cannot take raises."""
        try:
            self._reservation = self._exit_stack.enter_context(tier.reserve())
        except OSError as error:
            self.go_on_without(error)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self._put(key, parts, None)

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self._put(key, parts, log)

    def _put(self, key: str, parts: Iterable[Buffer], log: UploadLog | None) -> int:
        writer = self._begin(key)
        if writer is None:
            if not self.send:
                raise CapacityError(f"{key} cannot be kept: the tier in {self._tier.root} cannot be used")
            return self._put_directly(key, parts, log)
        remaining = iter(parts)
        for part in remaining:
            try:
                writer.write(part)
            except TROUBLE as error:
                return self._fall_back(writer, key, chain([part], remaining), log, error)
        try:
            label = writer.commit()
        except OSError as error:
            return self._fall_back(writer, key, [], log, error)
        self._written.append(key)
        if self.send:
            self._sent.append(self._pool.submit(self.send_to_store, label, log))
        return label.size

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self.flush()
        return super().put_if_absent(key, data)

    def flush(self) -> None:
        """Wait until every object of the tier is in the store. Raises the error that prevented it."""
        while self._sent:
            self._sent[0].result()
            self._sent.pop(0)

    def go_on_without(self, error: Exception) -> None:
        """Stop using the tier, after one warning."""
        self.whole = False
        message = f"the tier in {self._tier.root} cannot be used; the save goes to the store only: {error}"
        warn_once(_log, message, "node")

    def end(self) -> None:
        """Cancel the sends that have not begun, and release the reservation.

        If the tier could not take all objects, it keeps none of them, because no record will name them.
        """
        for future in self._sent:
            future.cancel()
        self._exit_stack.close()
        if not self.whole:
            with suppress(OSError):
                for key in self._written:
                    self._tier.drop(self._source, key)

    def __exit__(self, *_: object) -> None:
        self.end()

    def _begin(self, key: str) -> Writer | None:
        if not self.whole or not self._keeps(key):
            return None
        try:
            return self._reservation.writer(self._source, key)
        except OSError as error:
            self.go_on_without(error)
            return None

    def _put_directly(self, key: str, parts: Iterable[Buffer], log: UploadLog | None) -> int:
        return super().put_multipart(key, parts) if log is None else super().put_logged(key, parts, log)

    def _fall_back(
        self, writer: Writer, key: str, rest: Iterable[Buffer], log: UploadLog | None, error: Exception
    ) -> int:
        """Write the object to the store directly: first the bytes that are already in the tier, then the rest."""
        self.go_on_without(error)
        try:
            if not self.send:
                raise error if isinstance(error, HeadraceError) else CapacityError(f"keeping {key}: {error}")
            return self._put_directly(key, chain(writer.written(), rest), log)
        finally:
            writer.discard()

    def send_to_store(self, label: Label, log: UploadLog | None = None) -> int:
        """Send an object from the tier to the store. Its uploads are recorded in `log`, if that is given."""
        return self._put_directly(label.key, checked(self._tier, label), log)


def checked(tier: LocalTier, label: Label) -> Iterator[memoryview]:
    """Yield the object's bytes in pieces. Raises `CorruptionError` at the end if they differ from the written ones."""
    tier_object, digest = tier.open(label.source, label.key), xxhash.xxh3_128()
    if tier_object is None:
        raise CorruptionError(f"the tier's copy of {label.key} is gone", hint="save again")
    for piece in tier_object.pieces():
        digest.update(piece)
        yield piece
    if digest.digest() != label.digest or tier_object.label != label:
        raise CorruptionError(
            f"the tier's copy of {label.key} differs from what was written", hint="check the tier's disk"
        )
