"""Detects killed ranks and lost nodes, so that the other ranks can abort a save instead of waiting for a manifest.

- Ranks on one node check each other's processes in `/proc`.
- Nodes form a ring: each rank keeps a TCP connection (`PeerConnection`) to a rank of the next node (its `PeerProbe`).
  No data is sent. The kernel resets the connections of a process that ends. A lost node does not answer.

Invariant: a rank counts as ended only if its process has ended. A zombie counts as ended. Another process with the same
pid does not count as the rank. `ENDED` and `SILENT` are reported only for a rank to which a connection was open. A
second connection must also have been refused, reset or not answered. A node counts as silent only if its kernel does
not answer. If only a process there has ended, the node's daemon may still be storing that process's part. A probe
listens at the address from which this node reaches the job's master. It never accepts a connection or reads from one.
Failure behaviour: a rank that cannot be observed, for example behind a firewall, counts as alive.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from headrace.checkpoint.format.chunking import digest
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock

LIVES, ENDED, SILENT = "lives", "ended", "silent"
ADDRESS_BYTES = 18
"""An IPv6 address, or an IPv4 address mapped to IPv6, and the port."""
_NOWHERE = bytes(ADDRESS_BYTES)
_QUEUE = 1024
_IDLE, _INTERVAL, _PROBES = 15, 5, 3
"""TCP keepalive: idle seconds before the first probe, seconds between probes, unanswered probes. 30 s in total."""
_ANSWER_SECONDS = 10.0
"""Seconds that a second connection may take to be answered, after the first has broken."""
_UNREACHED = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_COMING, _OPEN, _REFUSED, _RESET, _LOST, _BROKEN = "coming", "open", "refused", "reset", "lost", "broken"
_probes: weakref.WeakSet[PeerProbe] = weakref.WeakSet()


class PeerProbe:
    """A listening socket that other ranks connect to.

    `address`: the address to connect to; zeros if the socket could not be opened. `host`: the address to listen on;
    None (default) for the address from which this node reaches the job's master.
    """

    def __init__(self, host: str | None = None) -> None:
        self._socket: socket.socket | None = None
        self.address = _NOWHERE
        with contextlib.suppress(OSError, ValueError):
            host = host or _own_host()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.bind((host, 0))
            self._socket.listen(_QUEUE)
            self.address = _packed(host, self._socket.getsockname()[1])
        _probes.add(self)

    def close(self) -> None:
        """Close the socket, which resets the connections of the other ranks."""
        if self._socket is not None:
            self._socket.close()


class PeerConnection:
    """A connection to another rank's probe. It never blocks: callers poll `state`. All times are in seconds."""

    def __init__(
        self,
        address: bytes,
        *,
        idle: int = _IDLE,
        interval: int = _INTERVAL,
        probes: int = _PROBES,
        answer: float = _ANSWER_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._address, self._keeping, self._answer, self._clock = address, (idle, interval, probes), answer, clock
        self._lock, self._state = threading.Lock(), LIVES
        self._connected, self._reconnected = False, 0.0
        self._socket = None if address == _NOWHERE else _connect(address, self._keeping)

    def state(self) -> str:
        """`LIVES`, `ENDED` (the process has ended) or `SILENT` (its node does not answer). The last two are final."""
        with self._lock:
            if self._socket is not None and self._state == LIVES:
                self._state = self._look(self._socket)
            return self._state

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _look(self, connection: socket.socket) -> str:
        state = _peek(connection)
        if state == _OPEN:
            self._connected, self._reconnected = True, 0.0
        elif self._reconnected:  # the first connection broke, and this is the second
            if state in (_REFUSED, _RESET):
                return ENDED
            if state == _LOST or self._clock.monotonic() - self._reconnected >= self._answer:
                return SILENT
        elif (
            self._connected or state == _RESET
        ):  # a proxy between the nodes may have closed it: connect again before reporting anything
            connection.close()
            self._socket, self._reconnected = _connect(self._address, self._keeping), self._clock.monotonic()
        return LIVES


def wait_closed(address: bytes) -> None:
    """Return when the probe is closed, or its process has ended."""
    with contextlib.suppress(OSError), socket.create_connection(_unpack_address(address)) as connection:
        connection.recv(1)


def _connect(address: bytes, keeping: tuple[int, int, int]) -> socket.socket:
    """Start a connection without waiting for it."""
    host, port = _unpack_address(address)
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), keeping, strict=True):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.connect_ex((host, port))  # `_peek` sees the result later
    return connection


def _peek(connection: socket.socket) -> str:
    """The state of a connection, without waiting."""
    try:
        if connection.recv(1):
            return _OPEN
    except BlockingIOError:
        with contextlib.suppress(OSError):
            connection.getpeername()
            return _OPEN
        return _COMING
    except ConnectionRefusedError:
        return _REFUSED
    except ConnectionResetError:
        return _RESET
    except OSError as error:
        return _LOST if error.errno in _UNREACHED else _BROKEN
    return _BROKEN


def _own_host() -> str:
    """The address from which this node reaches the job's master."""
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not master:
        return socket.gethostbyname(socket.gethostname())
    addresses = socket.getaddrinfo(master, int(port or 9), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket sends nothing here; the kernel chooses the route
        return str(probe.getsockname()[0])


def _packed(host: str, port: int) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    wide = address if address.version == 6 else ipaddress.IPv6Address(f"::ffff:{address}")
    return wide.packed + port.to_bytes(2, "big")


def _unpack_address(address: bytes) -> tuple[str, int]:
    wide = ipaddress.IPv6Address(address[:16])
    return str(wide.ipv4_mapped or wide), int.from_bytes(address[16:], "big")


def _in_child() -> None:
    """A forked child closes its copies of the parent's probes, so that they close when the parent ends."""
    for probe in list(_probes):
        probe.close()


os.register_at_fork(after_in_child=_in_child)


_CARD = struct.Struct(f">8sQQ{ADDRESS_BYTES}s")
"""A digest of a rank's node and pid namespace, its pid and start time, and the address of its probe.
"""


class Peers:
    """Watches the other ranks.

    `cards`: the `card` of every rank. `rank`: this rank. `probe`: this rank's probe, closed here.
    """

    def __init__(self, cards: Sequence[bytes], rank: int = 0, probe: PeerProbe | None = None) -> None:
        rows = [_CARD.unpack(each) for each in cards]
        node, self._probe = _place(), probe
        self._local = {r: (pid, started) for r, (place, pid, started, _) in enumerate(rows) if place == node}
        places = [place for place, *_ in rows]
        self._watched = watched_rank(places, rank)
        self._neighbors = {
            r for r, place in enumerate(places) if self._watched is not None and place == places[self._watched]
        }
        self._connection = PeerConnection(rows[self._watched][3]) if self._watched is not None else None
        if self._watched is None and probe is not None:
            probe.close()  # one node: no rank will connect

    def failed_ranks(self, ranks: Sequence[int]) -> str:
        """Describes which of `ranks` have ended or are on a silent node; "" for none."""
        ended = [r for r in ranks if r in self._local and _start_time(self._local[r][0]) != self._local[r][1]]
        connection, watched = self._connection, self._watched
        if connection is not None and watched is not None and watched in ranks and connection.state() == ENDED:
            ended.append(watched)
        return f"the process of {_named(ended)} has ended" if ended else self.silent_ranks(ranks)

    def silent_ranks(self, ranks: Sequence[int]) -> str:
        """Describes which of `ranks` are on a node that does not answer; "" for none."""
        if self._connection is None or not self._neighbors.intersection(ranks) or self._connection.state() != SILENT:
            return ""
        return f"the node of {_named(sorted(self._neighbors.intersection(ranks)))} does not answer"

    @property
    def across(self) -> bool:
        """Whether this rank watches a rank of another node."""
        return self._connection is not None

    def close(self) -> None:
        """Close the connections to the other ranks."""
        for connection in (self._connection, self._probe):
            if connection is not None:
                connection.close()


def watched_rank(places: Sequence[bytes], rank: int) -> int | None:
    """The rank of the next node that `rank` watches; None if there is only one node. This is a pure function.

    The ranks of a node watch different ranks if the next node has enough ranks.
    """
    nodes = list(dict.fromkeys(places))
    if len(nodes) < 2:
        return None
    following = nodes[(nodes.index(places[rank]) + 1) % len(nodes)]
    candidates = [r for r, place in enumerate(places) if place == following]
    return candidates[places[:rank].count(places[rank]) % len(candidates)]


def card(probe: PeerProbe | None = None) -> bytes:
    """This process's entry for `Peers`: its node, pid, start time and probe. The size is always the same."""
    return _CARD.pack(_place(), os.getpid(), _start_time(os.getpid()), probe.address if probe else bytes(ADDRESS_BYTES))


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}"


def _place() -> bytes:
    """A digest that is equal for processes on one node and in one pid namespace."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, space = "", os.getpid()
    return digest(f"{boot}{space}{socket.gethostname()}".encode())[:8]


def _start_time(pid: int) -> int:
    """The start time of a process in clock ticks; 0 if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
