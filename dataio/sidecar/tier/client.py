"""Connections to the buddy, and the thread that sends copies of this node's steps to it, newest first.

Purpose: if this node is lost, the buddy still has the steps that were copied to it.
Invariants: the buddy's certificate is checked before any message is sent. A fetched object is stored only if its digest
matches. A record is sent after those of its objects that this node has. Only then does the step count as copied. Steps
that this node keeps for guests are not forwarded. The sender uses one connection and one thread, at the configured
rate. A step that was begun is completed before a newer one begins (`next_copy`), so that the buddy always gets whole
steps, however fast the trainers save. Then the newest step is next. Older steps without a commit are left out.
Failure behaviour: `BuddyError` says why the buddy cannot be reached or refuses a request; a broken connection is not
reused. If the buddy is unreachable or full, the sender logs each new reason once, shows it in the status, and tries
again after `SHORTEST` to `LONGEST` seconds. The pause doubles until the buddy takes a copy. Saves continue meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, TransientError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.tier import protocol as p
from headrace.dataio.sidecar.tier.config import TierConfig, client_context
from headrace.dataio.store.local_tier import records as documents
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.tier import LocalTier

CONNECT_SECONDS = 5.0
A = TypeVar("A")


class BuddyError(TransientError):
    """The buddy is unreachable, has the wrong certificate, or refused a request."""

    code = "buddy"


class BuddyClient:
    """A connection to the buddy. Not thread-safe."""

    def __init__(self, channel: p.Channel) -> None:
        self._channel = channel
        self.sent = 0
        """Bytes of objects sent, without those that the buddy already had."""

    @classmethod
    def connect(cls, config: TierConfig, context: ssl.SSLContext, pace: p.RateLimit) -> BuddyClient:
        address = config.buddy
        assert address is not None
        with _buddy_errors(f"the buddy at {address}"):
            sock = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
            try:
                sock = context.wrap_socket(sock, server_hostname=address.host)
                channel = p.Channel(sock, pace)
                channel.send(p.Hello(p.VERSION))
                _expect(channel.answer(), p.Welcome)
            except BaseException:
                sock.close()
                raise
        return cls(channel)

    def offer(self, local_tier: LocalTier, source: str, key: str) -> bool:
        """Send an object of `local_tier`, unless the buddy has it; False if it is no longer in `local_tier`."""
        tier_object = local_tier.open(source, key)
        if tier_object is None:
            return False
        with _buddy_errors(f"sending {key} to the buddy"):
            self._channel.send(p.Offer(source, key, tier_object.size, tier_object.label.digest))
            want = _expect(self._channel.answer(), p.Want)
            if want.offset > tier_object.size:
                raise p.ProtocolError("it requested bytes after the end of the object")
            self.sent += self._channel.send_object(tier_object, want.offset)
            _expect(self._channel.answer(), p.Stored)
        return True

    def keep(self, record: Record) -> None:
        """Send the record."""
        data = documents.encode(record)
        with _buddy_errors(f"sending the record of step {record.step} to the buddy"):
            self._channel.send(p.Keep(len(data)))
            self._channel.send_bytes([data])
            _expect(self._channel.answer(), p.Stored)

    def records(self, source: str) -> list[Record]:
        """The buddy's records of this store."""
        with _buddy_errors("listing the buddy's records"):
            self._channel.send(p.List(source))
            sizes = _expect(self._channel.answer(), p.Listed).sizes
            records = [documents.decode(self._channel.whole(size), "a buddy's record") for size in sizes]
            if any(record.source != source for record in records):
                raise p.ProtocolError("it listed records of another store")
            return records

    def fetch(self, local_tier: LocalTier, source: str, key: str) -> bool:
        """Fetch an object into `local_tier`; False if the buddy does not have it."""
        with _buddy_errors(f"fetching {key} from the buddy"):
            self._channel.send(p.Fetch(source, key, 0))
            answer = self._channel.answer()
            if isinstance(answer, p.Absent):
                return False
            header = _expect(answer, p.Found)
            with local_tier.reserve() as reservation:
                writer = reservation.writer(source, key)
                for piece in self._channel.body(header.size):
                    writer.write(piece)
                if writer.digest != header.digest:
                    raise CorruptionError(f"the buddy sent {key} with another digest")
                writer.commit()
        return True

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _expect(answer: p.Answer, kind: type[A]) -> A:
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, p.Refused) and answer.code == CapacityError.code:
        raise CapacityError(f"the buddy has no room: {answer.message}")
    if isinstance(answer, p.Refused):
        raise BuddyError(f"the buddy refused: {answer.message}")
    raise p.ProtocolError(f"it answered {type(answer).__name__} instead of {kind.__name__}")


@contextlib.contextmanager
def _buddy_errors(doing: str) -> Iterator[None]:
    """Convert connection errors to `BuddyError`. `CapacityError` and `CorruptionError` pass through."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise BuddyError(f"{doing}: its certificate is refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise BuddyError(f"{doing}: TLS failed: {error.reason or error}") from None
    except (OSError, p.ProtocolError) as error:
        raise BuddyError(f"{doing}: {getattr(error, 'strerror', None) or error}") from None


IDLE_SECONDS, BUSY_SECONDS = 0.5, 0.02
"""The pause before the sender looks for new records, and the pause while records are new."""
BUSY_FOR_SECONDS = 10.0
"""How long after a copy records count as new."""
SHORTEST, LONGEST = 1.0, 30.0
RUNS = 32
"""Maximum number of runs for which the newest copy is remembered."""
K = TypeVar("K")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """The newest step of a run on the buddy.

    `created` is the Unix time of its record. `sent` is the Unix time at which the copy was complete.
    """

    step: int
    created: float
    sent: float


class CopySender:
    """Sends copies from `start` to `close`.

    `trouble` is the reason why it cannot send, and empty while it can. `waiting` counts the records that the buddy lacks.
    """

    def __init__(self, config: TierConfig, local_tier: LocalTier) -> None:
        self._config, self._local_tier = config, local_tier
        self._context, self._rate_limit = client_context(config), p.RateLimit(config.rate)
        self._pause = SHORTEST
        self._sent: dict[tuple[str, str, bytes], None] = {}
        self._copied: dict[CopyId, None] = {}
        self._held, self._hold = "", contextlib.ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-copies", daemon=True)
        self.trouble, self.waiting, self.bytes = "not reached yet", 0, 0
        self.copies: dict[str, Copy] = {}

    def has(self, record: Record) -> bool:
        """Whether the buddy has all of this rank's part of the step."""
        return _has(record, self._copied)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2.0)  # it may be sending an object; as a daemon thread, it does not keep the process alive

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._next()  # updates `waiting`, also while the buddy is unreachable
                with BuddyClient.connect(self._config, self._context, self._rate_limit) as buddy:
                    if not self.waiting:  # otherwise only a copy shows that the buddy has room
                        self._report_reachable()
                    self._send_all(buddy)
            except (HeadraceError, OSError) as error:
                self._hold_step("")
                if not isinstance(error, CapacityError):  # the buddy may have lost its tier, or be another machine now
                    self._sent.clear()
                    self._copied.clear()
                self._report_trouble(str(error))
                self._stop.wait(self._pause)
                self._pause = min(self._pause * 2, LONGEST)

    def _send_all(self, buddy: BuddyClient) -> None:
        idle, copied, looked, seen = time.monotonic(), 0.0, 0.0, 0
        while not self._stop.is_set():
            now, changed = time.monotonic(), self._local_tier.records_changed()
            if changed == seen and now - looked < IDLE_SECONDS:
                self._stop.wait(BUSY_SECONDS if now - copied < BUSY_FOR_SECONDS else IDLE_SECONDS)
                continue
            looked, seen = now, changed  # of before the look, so that no later record is missed
            record = self._next()
            self._hold_step("" if record is None else record.attempt)
            if record is not None:
                self._send(buddy, record)
                idle = copied = time.monotonic()
                seen = 0
            elif now - idle > p.IO_SECONDS / 3:
                buddy.records("-")  # keeps the connection alive, which would time out
                idle = now

    def _hold_step(self, attempt: str) -> None:
        """Hold this step in the tier until all its records are sent; "" for none. Otherwise newer steps would replace it."""
        if attempt != self._held:
            self._hold.close()
            self._held = ""
            if attempt:
                self._hold.enter_context(self._local_tier.hold(attempt))
                self._held = attempt

    def _next(self) -> Record | None:
        """The next record to send. Updates `waiting`."""
        records = [r for r in self._local_tier.records() if not r.guest and not r.over]
        record, self.waiting = next_copy(records, self._copied)
        return record

    def _send(self, buddy: BuddyClient, record: Record) -> None:
        for key in record.keys:
            if self._stop.is_set():
                return
            tier_object, sent_before = self._local_tier.open(record.source, key), buddy.sent
            if tier_object is None:
                if record not in self._local_tier.records(record.source, record.run):
                    return  # the step was removed or replaced in the meantime
                continue
            # the digest is needed: a second worker's manifest has the same key as the first one's
            name = (record.source, key, tier_object.label.digest)
            if name not in self._sent and buddy.offer(self._local_tier, record.source, key):
                _remember(self._sent, name)
            self.bytes += buddy.sent - sent_before
        buddy.keep(record)
        _remember(self._copied, _copy_id(record))
        self._report_reachable()
        last_copy = self.copies.get(record.run)
        if last_copy is None or record.created >= last_copy.created:
            self.copies.pop(record.run, None)
            self.copies[record.run] = Copy(record.step, record.created, time.time())
            while len(self.copies) > RUNS:
                del self.copies[next(iter(self.copies))]

    def _report_reachable(self) -> None:
        if self.trouble:
            _log.info("the buddy at %s takes copies", self._config.buddy)
        self.trouble, self._pause = "", SHORTEST

    def _report_trouble(self, reason: str) -> None:
        if reason != self.trouble:
            _log.warning("the buddy receives no copies; saves continue: %s", reason)
        self.trouble = reason


def next_copy(records: Sequence[Record], copied: Container[CopyId]) -> tuple[Record | None, int]:
    """The record to send next, and how many the buddy lacks or has only in their state before the commit.

    A step is begun if the buddy has the records of some of its ranks. It is complete if the buddy has all that are here.
    A step that was begun goes first, then the newest one. Of several runs, the one whose newest step waits longest is
    next. A step that is not committed is left out if it is older than a complete step of the same ranks.

    Args:
        records: The records of this node that can be copied, newest step first.
        copied: The copies that the buddy has.
    """
    steps = dict[tuple[str, str, str], list[Record]]()
    for record in records:
        steps.setdefault((record.source, record.run, record.attempt), []).append(record)
    complete = dict[tuple[str, str], list[set[int]]]()
    begun, newest, waiting = list[Record](), dict[tuple[str, str], Record](), 0
    for (source, run, _), its in steps.items():
        ranks, unsent = {r.rank for r in its}, [r for r in its if _copy_id(r) not in copied]
        lacking = [r for r in its if not _has(r, copied)]
        newer = complete.setdefault((source, run), [])
        if not lacking:
            newer.append(ranks)
        elif not any(r.committed for r in its) and any(ranks <= others for others in newer):
            continue
        waiting += len(unsent)
        if 0 < len(lacking) < len(its):
            begun += unsent
        elif unsent:
            newest.setdefault((source, run), unsent[0])
    if begun:
        return begun[0], waiting
    return min(newest.values(), key=lambda record: record.created, default=None), waiting


CopyId = tuple[str, int, bool]
"""A copy of a record: its attempt, its rank, and whether it was committed."""


def _has(record: Record, copied: Container[CopyId]) -> bool:
    """Whether the buddy has all of this rank's part of the step."""
    return any((record.attempt, record.rank, committed) in copied for committed in (False, True))


def _copy_id(record: Record) -> CopyId:
    return record.attempt, record.rank, record.committed > 0


def _remember(names: dict[K, None], name: K, limit: int = 65536) -> None:
    names[name] = None
    while len(names) > limit:
        del names[next(iter(names))]
