"""A store whose unchanging objects are read through the node's sidecar, so that a node fetches each byte once.

Purpose: several processes of a node read the same objects once, into memory of their own. The daemon fetches a block
from the store for the first of them, and the others get it from the daemon's cache.
Invariants:

- Only objects for which `never_changes(key)` is true are read through the daemon. Listings, `stat`, writes and all other
  objects go to `inner`.
- Bytes are copied out of the daemon's file before the caller sees them. So a caller that then compares a digest has
  compared the bytes that it uses, whatever the daemon does to the file.
- A request has at most `REQUEST_BYTES` and waits at most `OPEN_SECONDS`; within `limited`, at most half of the time that
  is left.

Failure behaviour: whatever the daemon does not deliver is read from `inner`, and the reason is logged once. After a
failure, the daemon is not asked for `RETRY_SECONDS`, or for as long as the failure took. Bytes are not checked here. A
caller that finds wrong ones calls `invalidate`, and its next read of that object goes to `inner`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.dataio.cache.blocks import Descriptor, fill
from headrace.dataio.core import limits
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import HeadraceError, NotFoundError, RangeError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.core.tracing import context, span
from headrace.dataio.sidecar import paths
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.connection import Sidecar, SidecarName
from headrace.dataio.store.base import Store, is_key, writable_bytes
from headrace.dataio.store.wrappers import Wrapper

REQUEST_BYTES = 16 * limits.MIB
OPEN_SECONDS = 60.0
RETRY_SECONDS = 3.0
_ANSWER_SECONDS = 5.0
"""How much longer than the daemon's own deadline the answer may take."""
_CONNECT_SHARE = 0.05
"""Maximum share of time that is spent on connecting to a daemon that does not answer."""
_DAMAGED = 1024
"""Number of objects that are remembered because the daemon's copy was wrong."""
_RECENT = 64
"""Number of objects of which a thread remembers that their bytes came from the daemon."""
Piece = tuple[int, memoryview]
_log = get_logger(__name__)


def through_sidecar(
    store: Store, sidecar: SidecarName, never_changes: Callable[[str], bool], clock: Clock = SYSTEM_CLOCK
) -> Store:
    """`store`, read through the node's sidecar where that is possible, else `store` itself.

    Args:
        store: The store.
        sidecar: "auto" (the default socket, or none if HEADRACE_SIDECAR=off), the path of a socket, or None for no
            sidecar.
        never_changes: Whether the object with this key never changes, so that it may be read from a cache.
        clock: Replaced in tests.

    Example:
        >>> import tempfile
        >>> from headrace.dataio.store.open import open_store
        >>> with open_store(tempfile.mkdtemp()) as store:
        ...     through_sidecar(store, None, lambda key: True) is store
        True
    """
    path = paths.chosen(sidecar)
    if path is None:
        return store
    if not store.location.shareable:
        reason = "its options include secrets or a file system object, which are never sent to another process"
        warn_once(_log, f"{store.location.url} is not read through the sidecar: {reason}", "node")
        return store
    return SidecarStore(store, path, never_changes, clock)


class SidecarStore(Wrapper):
    """Reads objects that never change through the daemon at `sidecar`, and everything else from `inner`. Thread-safe.

    `close` ends the connection, and does not close `inner`.

    Attributes:
        bytes (dict[str, int]): Bytes of unchanging objects that came through the "sidecar" and from the "store".
    """

    def __init__(
        self, inner: Store, sidecar: SidecarName, never_changes: Callable[[str], bool], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(inner)
        self._name, self._never_changes, self._clock = sidecar, never_changes, clock
        self._where = m.where(inner.location)
        self._lock = threading.Lock()
        self._connection: Sidecar | None = None
        self._next_try, self._closed, self._told = clock.monotonic(), False, False
        self._damaged: OrderedDict[str, None] = OrderedDict()
        self._thread = _OfThread()
        self.bytes = {"sidecar": 0, "store": 0}

    @contextmanager
    def limited(self, until: float | None) -> Iterator[None]:
        """A context in which this thread's reads leave time for the store itself before `until`, by `clock.monotonic`.

        None is no limit.
        """
        before, self._thread.until = self._thread.until, until
        try:
            yield
        finally:
            self._thread.until = before

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        if not self._may_ask(key):
            return super().get(key, max_bytes=max_bytes)
        size = self._ask(key, [(0, memoryview(b""))])
        if size is not None and size <= max_bytes:
            data = bytearray(size)
            self._thread.remember(key)  # also of an empty object, of which no bytes are read
            if not self._fill(key, [(0, memoryview(data))]):
                return bytes(data)
        self._read_directly(key, 0)
        stored = super().get(key, max_bytes=max_bytes)
        self._count("store", len(stored))
        return stored

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[Piece]) -> None:
        rest: Sequence[Piece] = ranges
        if self._may_ask(key) and all(offset >= 0 for offset, _ in ranges):
            rest = self._fill(key, [(offset, writable_bytes(buffer)) for offset, buffer in ranges])
            if not rest:
                return
            self._read_directly(key, sum(buffer.nbytes for _, buffer in rest))
        super().get_ranges_into(key, rest)

    def invalidate(self, key: str) -> bool:
        if not self._thread.forget(key):
            return super().invalidate(key)
        with self._lock:
            is_new = key not in self._damaged
            self._damaged[key] = None
            if len(self._damaged) > _DAMAGED:
                self._damaged.popitem(last=False)
        if is_new:
            _log.warning("the sidecar's cache has wrong bytes of %s: this process reads it from the store", key)
        return True

    def close(self) -> None:
        """End the connection to the daemon. `inner` stays open."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fill(self, key: str, pieces: Sequence[Piece]) -> list[Piece]:
        """Fill the pieces through the daemon, in order. Return those that it did not deliver."""
        requests = list(divided(pieces))
        for number, request in enumerate(requests):
            if self._ask(key, request) is None:
                return [piece for later in requests[number:] for piece in later]
            self._count("sidecar", sum(len(buffer) for _, buffer in request))
            self._thread.remember(key)
        return []

    def _ask(self, key: str, pieces: Sequence[Piece]) -> int | None:
        """Fill the pieces from the daemon's file of the object. Return the object's size; None if it is not served."""
        seconds, connection = self._seconds(), self._find()
        if connection is None or seconds <= 0:
            return None
        ranges, began = [(offset, len(buffer)) for offset, buffer in pieces], self._clock.monotonic()
        try:
            with span("sidecar.open", key=key):
                answer, descriptors = connection.call(
                    lambda id: m.Open(id, self._where, key, ranges, seconds, 0, context()),
                    timeout=seconds if self._thread.until is not None else seconds + _ANSWER_SECONDS,
                )
            if not isinstance(answer, m.Opened) or not descriptors:
                return None  # the cache has no room
            files = [Descriptor(fd) for fd in descriptors]
            try:
                for offset, buffer in pieces:
                    fill(files[0], offset, buffer)
            finally:
                connection.closed_files.append(answer.file)
            return answer.size
        except (NotFoundError, RangeError):
            return None  # the store itself decides about that
        except (HeadraceError, OSError) as error:
            self._failed(error, began)
            return None

    def _seconds(self) -> float:
        """How long the next request may take."""
        until = self._thread.until
        return OPEN_SECONDS if until is None else min(OPEN_SECONDS, (until - self._clock.monotonic()) / 2)

    def _may_ask(self, key: str) -> bool:
        return is_key(key) and self._never_changes(key) and key not in self._damaged

    def _find(self) -> Sidecar | None:
        """The connection; connects again when the pause after a failure is over. Other threads wait meanwhile."""
        with self._lock:
            began = self._clock.monotonic()
            if self._closed or began < self._next_try:
                return None
            if self._connection is not None and not self._connection.broken:
                return self._connection
            self._connection = connected = Sidecar.find(self._name)
            if connected is None:
                seconds = self._clock.monotonic() - began
                self._next_try = began + max(RETRY_SECONDS, seconds / _CONNECT_SHARE)
                hint = "(start one: headrace sidecar run)"
                path = paths.chosen(self._name)
                warn_once(_log, f"no sidecar answers on {path}: this process reads from the store {hint}", "node")
                return None
        Finalizer(self, connected.close)
        _log.info("reading %s through the sidecar of process %d", self._where.url, connected.daemon_pid)
        return connected

    def _failed(self, error: HeadraceError | OSError, began: float) -> None:
        """Pause, and log the first failure."""
        now = self._clock.monotonic()
        with self._lock:
            if self._closed:
                return
            self._next_try = max(self._next_try, now + max(RETRY_SECONDS, now - began))
            told, self._told = self._told, True
        log = _log.debug if told else _log.warning
        log("the sidecar could not serve %s; this process reads from the store: %s", self._where.url, error)

    def _read_directly(self, key: str, size: int) -> None:
        self._thread.forget(key)
        self._count("store", size)

    def _count(self, source: str, size: int) -> None:
        with self._lock:
            self.bytes[source] += size


class _OfThread(threading.local):
    """What one thread knows: the end of its time, and which objects it last read through the daemon."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._recent: OrderedDict[str, None] = OrderedDict()

    def remember(self, key: str) -> None:
        """The last bytes of this object came from the daemon."""
        self._recent[key] = None
        self._recent.move_to_end(key)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def forget(self, key: str) -> bool:
        """The next bytes will come from the store. Returns whether the last ones came from the daemon."""
        return self._recent.pop(key, False) is None


def divided(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Divide pieces into requests of at most `REQUEST_BYTES` and `protocol.RANGES` ranges. This is a pure function."""
    request, size = list[Piece](), 0
    for offset, buffer in pieces:
        at = 0
        while at < len(buffer):
            part = buffer[at : at + REQUEST_BYTES - size]
            request.append((offset + at, part))
            at, size = at + len(part), size + len(part)
            if size == REQUEST_BYTES or len(request) == m.RANGES:
                yield request
                request, size = [], 0
    if request:
        yield request
