"""Accepts copies from other nodes, and returns them: this daemon as a buddy.

Purpose: keeps the guests' objects and records in this node's tier, within the tier's budget and rules.
Invariants:

- An object is stored only when all announced bytes have arrived and their digest matches. If a connection breaks, the
  bytes that have arrived are kept for `PARTIAL_SECONDS`, so the peer sends only the rest.
- A guest changes no record and no object of a step that this node has kept, and no pack of another guest.
- At most `CONNECTIONS` peers are admitted, each with its own thread, so a slow peer does not delay others.
- A connection gets a thread when its first bytes arrive. At most `SILENT` connections have sent nothing; a further one
  replaces the oldest of them.
- At most `UNADMITTED` threads serve peers that are not admitted yet. Beyond that, a new peer replaces the oldest one of
  the address that has the most of them. If the new peer's address would then have as many, the new peer is refused.

Failure behaviour: a peer that is refused or violates the protocol is disconnected, and counted by reason. A request
without room is refused with the code "capacity", and the connection stays open.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from headrace.dataio.core.errors import CapacityError, HeadraceError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.tier import protocol as p
from headrace.dataio.sidecar.tier.config import TierConfig, UnknownPeerError, require_name, server_context
from headrace.dataio.store.local_tier import records as documents
from headrace.dataio.store.local_tier.objects import Writer
from headrace.dataio.store.local_tier.tier import LocalTier

CONNECTIONS = 16
UNADMITTED = 64
"""Maximum number of peers that have a thread and are not admitted yet."""
SILENT = 512
"""Maximum number of connections that have sent nothing yet, and the length of the kernel's accept queue."""
PARTIALS = 16
HANDSHAKE_SECONDS = 5.0
PARTIAL_SECONDS = 600.0
REASONS = ("tls", "name", "protocol", "busy", "broken")
_log = get_logger(__name__)
_Name = tuple[str, str, bytes, int]


@dataclass(slots=True)
class _Partial:
    """An incomplete object with its own reservation; `busy` while a connection writes to it."""

    writer: Writer
    exit_stack: ExitStack
    busy: bool = True
    touched: float = field(default_factory=time.monotonic)

    def discard(self) -> None:
        self.writer.discard()
        self.exit_stack.close()


class BuddyServer:
    """Listens from `start` to `close`. `counts`: refused peers by reason; `received`: bytes of objects."""

    def __init__(self, config: TierConfig, local_tier: LocalTier) -> None:
        self._config, self._local_tier = config, local_tier
        self._context = server_context(config)
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, str] = {}  # with their addresses, in order of arrival
        self._admitted: set[socket.socket] = set()
        self._partials: dict[_Name, _Partial] = {}
        self._pace = p.RateLimit(config.rate)
        self._closed = False
        self.counts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.received = 0

    def start(self) -> int:
        """Listen; returns the port. `UsageError` if it is in use."""
        assert self._config.listen is not None
        address = self._config.listen
        try:
            self._socket = socket.create_server(
                (address.host, address.port), family=_family(address.host), backlog=SILENT
            )
        except OSError as error:
            raise UsageError(f"buddy_listen {address} cannot be used: {error.strerror}") from None
        self._thread = threading.Thread(target=self._accept, name="headrace-buddies", daemon=True)
        self._thread.start()
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def peers(self) -> int:
        return len(self._admitted)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(5)
        self._socket.close()
        with self._lock:
            peers, partials = list(self._peers), list(self._partials.values())
            self._partials.clear()
        for peer in peers:
            _hang_up(peer)
        for partial in partials:
            partial.discard()

    def tidy(self) -> None:
        """Discard incomplete objects that no peer has continued for `PARTIAL_SECONDS`."""
        cutoff = time.monotonic() - PARTIAL_SECONDS
        with self._lock:
            expired_names = [name for name, x in self._partials.items() if not x.busy and x.touched < cutoff]
            expired = [self._partials.pop(name) for name in expired_names]
        for partial in expired:
            partial.discard()

    # peers

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            silent: dict[socket.socket, tuple[str, float]] = {}  # with address and time limit, oldest first
            try:
                while not self._closed:
                    self._accept_some(selector, silent)
            finally:
                for sock in silent:
                    sock.close()

    def _accept_some(self, selector: selectors.BaseSelector, silent: dict[socket.socket, tuple[str, float]]) -> None:
        """Wait for connections and for their first bytes."""

        def take(sock: socket.socket) -> str:
            selector.unregister(sock)
            return silent.pop(sock)[0]

        for key, _ in selector.select(1.0):
            if key.fileobj is not self._socket:
                assert isinstance(key.fileobj, socket.socket)
                self._start(key.fileobj, take(key.fileobj))
                continue
            try:
                sock, address = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.2)  # usually no descriptors are left
                continue
            silent[sock] = (str(address[0]), time.monotonic() + HANDSHAKE_SECONDS)
            selector.register(sock, selectors.EVENT_READ)
        now = time.monotonic()
        while silent and (len(silent) > SILENT or next(iter(silent.values()))[1] < now):
            reason = "busy" if len(silent) > SILENT else "tls"
            oldest = next(iter(silent))
            self._refuse(reason, take(oldest), TimeoutError("it sent nothing"))
            oldest.close()

    def _start(self, sock: socket.socket, address: str) -> None:
        """Start a thread for a connection that has sent its first bytes.

        If too many peers are not admitted yet, one of them is disconnected: another one, or this one.
        """
        with self._lock:
            unadmitted = {other: at for other, at in self._peers.items() if other not in self._admitted}
            replaced = _peer_to_replace(unadmitted, address) if len(unadmitted) >= UNADMITTED else None
            full = len(unadmitted) >= UNADMITTED and replaced is None
            if not full:
                self._peers[sock] = address
            if replaced is not None:
                del self._peers[replaced]
        if replaced is not None:
            _hang_up(replaced)  # its thread reports it
        if full:
            sock.close()
            self._refuse("busy", address, _BusyError(f"{UNADMITTED} peers wait to be admitted"))
            return
        threading.Thread(target=self._serve, args=(sock, address), name="headrace-buddy", daemon=True).start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        peer = sock
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            with self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False) as peer:
                with self._lock:  # wrapping moved the descriptor to a new socket
                    if self._peers.pop(sock, None) is None:
                        raise _BusyError("another address has fewer connections")
                    self._peers[peer] = address
                self._admit(peer)
                self._serve_requests(p.Channel(peer, self._pace))
        except _BusyError as error:
            self._refuse("busy", address, error)
        except UnknownPeerError as error:
            self._refuse("name", address, error)
        except ssl.SSLError as error:
            self._refuse("tls", address, error)
        except (p.ProtocolError, HeadraceError) as error:
            self._refuse("protocol", address, error)
        except OSError as error:
            self._refuse("broken", address, error)
        finally:
            with self._lock:
                self._peers.pop(sock, None)
                self._peers.pop(peer, None)
                self._admitted -= {peer}
            sock.close()

    def _admit(self, peer: ssl.SSLSocket) -> None:
        """Do the TLS handshake and check the certificate's name.

        The peer is disconnected if its whole handshake takes longer than `HANDSHAKE_SECONDS`.
        """
        timer = threading.Timer(HANDSHAKE_SECONDS, _hang_up, (peer,))
        timer.daemon = True
        timer.start()
        try:
            peer.do_handshake()
        finally:
            timer.cancel()
        require_name(peer, self._config.welcome)
        with self._lock:
            if len(self._admitted) >= CONNECTIONS:
                raise _BusyError(f"{CONNECTIONS} buddies are connected")
            self._admitted.add(peer)

    def _refuse(self, reason: str, address: str, error: Exception) -> None:
        with self._lock:
            self.counts[reason] += 1
        if not self._closed:
            text = str(getattr(error, "reason", None) or error)
            _log.log(
                20 if reason == "broken" else 30,
                "closed the connection of a buddy at %s (%s): %.300s",
                address,
                reason,
                text,
            )

    def _serve_requests(self, channel: p.Channel) -> None:
        hello = channel.request()
        if not isinstance(hello, p.Hello):
            raise p.ProtocolError("no hello")
        if hello.version != p.VERSION:
            channel.send(p.Refused("unsupported", f"this buddy speaks version {p.VERSION}: update the older one"))
            return
        channel.send(p.Welcome(p.VERSION))
        while (request := channel.request()) is not None:
            match request:
                case p.Offer():
                    self._receive_object(channel, request)
                case p.Keep(size):
                    self._keep_record(channel, channel.whole(size))
                case p.List(source):
                    self._send_records(channel, source)
                case p.Fetch():
                    self._send_object(channel, request)
                case p.Hello():
                    raise p.ProtocolError("a second hello")

    # requests

    def _receive_object(self, channel: p.Channel, offer: p.Offer) -> None:
        tier_object = self._local_tier.open(offer.source, offer.key)
        if tier_object is not None and (tier_object.size, tier_object.label.digest) == (offer.size, offer.digest):
            channel.send(p.Want(offer.size))
            channel.send(p.Stored())
            return
        if tier_object is not None and not self._local_tier.may_replace(offer.source, offer.key):
            channel.send(
                p.Refused("conflict", f"{offer.key} belongs to a step that this node or another guest has kept")
            )
            return
        try:
            partial = self._open_partial(offer)
        except (CapacityError, OSError) as error:
            channel.send(p.Refused("capacity", str(error)[:1000]))
            return
        try:
            channel.send(p.Want(partial.writer.size))
            for piece in channel.body(offer.size - partial.writer.size):
                partial.writer.write(piece)
                self.received += len(piece)
        finally:
            partial.busy, partial.touched = False, time.monotonic()
        channel.send(self._finish_object(offer, partial))

    def _open_partial(self, offer: p.Offer) -> _Partial:
        """The incomplete object to continue, or a new one."""
        name = (offer.source, offer.key, offer.digest, offer.size)
        with self._lock:
            existing = self._partials.get(name)
            if existing is not None and not existing.busy:
                existing.busy = True
                return existing
            if existing is not None or len(self._partials) >= PARTIALS:
                raise CapacityError(
                    "the object is already being sent" if existing else f"{PARTIALS} objects are already being sent"
                )
            self._local_tier.make_room(offer.size)
            exit_stack = ExitStack()
            try:
                writer = exit_stack.enter_context(self._local_tier.reserve()).writer(offer.source, offer.key)
            except BaseException:
                exit_stack.close()
                raise
            self._partials[name] = partial = _Partial(writer, exit_stack)
            return partial

    def _finish_object(self, offer: p.Offer, partial: _Partial) -> p.Message:
        with self._lock:
            self._partials.pop((offer.source, offer.key, offer.digest, offer.size), None)
        matches = partial.writer.digest == offer.digest
        try:
            if matches:
                partial.writer.commit()
        finally:
            partial.discard()
        return p.Stored() if matches else p.Refused("corruption", f"the bytes of {offer.key} have another digest")

    def _keep_record(self, channel: p.Channel, data: bytes) -> None:
        try:
            self._local_tier.put_record(documents.as_guest(documents.decode(data, "a buddy's record")))
            self._local_tier.remove_surplus()
        except (HeadraceError, OSError) as error:
            channel.send(p.Refused(getattr(error, "code", "capacity"), str(error)[:1000]))
            return
        channel.send(p.Stored())

    def _send_records(self, channel: p.Channel, source: str) -> None:
        encoded = [documents.encode(record) for record in self._local_tier.records(source)[: p.RECORDS]]
        channel.send(p.Listed([len(data) for data in encoded]))
        channel.send_bytes(encoded)

    def _send_object(self, channel: p.Channel, request: p.Fetch) -> None:
        tier_object = self._local_tier.open(request.source, request.key)
        if tier_object is None or request.offset > tier_object.size:
            channel.send(p.Absent())
            return
        channel.send(p.Found(tier_object.size, tier_object.label.digest))
        try:
            channel.send_object(tier_object, request.offset)
        except HeadraceError as error:  # the file became shorter: end the connection, so the peer notices
            raise ConnectionError(str(error)) from None


def _peer_to_replace(unadmitted: Mapping[socket.socket, str], address_of_new: str) -> socket.socket | None:
    """The oldest connection of the address that has the most of them.

    None if the new peer's address would then have as many.
    """
    counts = Counter(unadmitted.values())
    address, most = counts.most_common(1)[0]
    if most <= counts[address_of_new] + 1:
        return None
    return next(sock for sock, at in unadmitted.items() if at == address)


class _BusyError(Exception):
    """Too many peers are connected."""


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # the TLS socket's own shutdown could block


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
