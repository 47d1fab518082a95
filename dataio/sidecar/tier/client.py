"""One connection to the buddy: offer objects and records, list, fetch.

Invariants: the buddy's certificate was checked before anything is said; what is fetched becomes an object only when its digest is
right. Failure behaviour: `BuddyError` says why the buddy cannot be reached or does not want something; a connection that broke
cannot be used any more.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Self, TypeVar

from headrace.dataio.core.errors import CapacityError, CorruptionError, TransientError
from headrace.dataio.sidecar.tier import protocol as p
from headrace.dataio.sidecar.tier.config import TierConfig
from headrace.dataio.store.local_tier import records as documents
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.tier import LocalTier

CONNECT_SECONDS = 5.0
A = TypeVar("A")


class BuddyError(TransientError):
    """The buddy is away, is not who it should be, or has no room."""

    code = "buddy"


class Buddy:
    """A connection. For one thread at a time."""

    def __init__(self, channel: p.Channel) -> None:
        self._channel = channel
        self.sent = 0
        """Bytes of objects that had to be sent."""

    @classmethod
    def connect(cls, config: TierConfig, context: ssl.SSLContext, pace: p.Pace) -> Buddy:
        where = config.buddy
        assert where is not None
        with _said(f"the buddy at {where}"):
            sock = socket.create_connection((where.host, where.port), CONNECT_SECONDS)
            try:
                sock = context.wrap_socket(sock, server_hostname=where.host)
                channel = p.Channel(sock, pace)
                channel.send(p.Hello(p.VERSION))
                _expect(channel.answer(), p.Welcome)
            except BaseException:
                sock.close()
                raise
        return cls(channel)

    def offer(self, shelf: LocalTier, source: str, key: str) -> bool:
        """Let the buddy have this object of `shelf`; False when it is not here any more."""
        held = shelf.open(source, key)
        if held is None:
            return False
        with _said(f"sending {key} to the buddy"):
            self._channel.send(p.Offer(source, key, held.size, held.label.digest))
            want = _expect(self._channel.answer(), p.Want)
            if want.offset > held.size:
                raise p.ProtocolError("it wants more than there is")
            self.sent += self._channel.send_bytes(held.pieces(want.offset))
            _expect(self._channel.answer(), p.Stored)
        return True

    def keep(self, record: Record) -> None:
        """Let the buddy have the record."""
        data = documents.encode(record)
        with _said(f"sending the record of step {record.step} to the buddy"):
            self._channel.send(p.Keep(len(data)))
            self._channel.send_bytes([data])
            _expect(self._channel.answer(), p.Stored)

    def records(self, source: str) -> list[Record]:
        """What the buddy has of this store."""
        with _said("listing the buddy's records"):
            self._channel.send(p.List(source))
            sizes = _expect(self._channel.answer(), p.Listed).sizes
            return [documents.decode(self._channel.whole(size), "a buddy's record") for size in sizes]

    def fetch(self, shelf: LocalTier, source: str, key: str) -> bool:
        """Bring an object onto `shelf`; False when the buddy does not have it."""
        with _said(f"fetching {key} from the buddy"):
            self._channel.send(p.Fetch(source, key, 0))
            answer = self._channel.answer()
            if isinstance(answer, p.Absent):
                return False
            found = _expect(answer, p.Found)
            with shelf.reserve() as reservation:
                writer = reservation.writer(source, key)
                for piece in self._channel.body(found.size):
                    writer.write(piece)
                if writer.digest != found.digest:
                    raise CorruptionError(f"{key} came from the buddy with another digest")
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
    raise p.ProtocolError(f"it answered {type(answer).__name__} where {kind.__name__} was meant")


@contextlib.contextmanager
def _said(doing: str) -> Iterator[None]:
    """Trouble with the connection in plain words; no room and damage stay what they are."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise BuddyError(f"{doing}: its certificate is refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise BuddyError(f"{doing}: TLS failed: {error.reason or error}") from None
    except (OSError, p.ProtocolError) as error:
        raise BuddyError(f"{doing}: {getattr(error, 'strerror', None) or error}") from None
