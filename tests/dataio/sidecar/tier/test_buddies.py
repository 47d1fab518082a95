"""Buddies: accepted connections, exchanged objects, and faulty buddies, which must not affect others."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import socket
import ssl
import struct
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_record

from headrace.dataio.core.errors import CapacityError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.tier import protocol as p
from headrace.dataio.sidecar.tier import server as servers
from headrace.dataio.sidecar.tier.client import SHORTEST, BuddyClient, BuddyError, CopySender
from headrace.dataio.sidecar.tier.config import (
    Address,
    TierConfig,
    address,
    client_context,
    names,
    same_name,
    server_context,
)
from headrace.dataio.sidecar.tier.tier_service import TierService
from headrace.dataio.store.local_tier.objects import TierObject
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from tests.dataio.sidecar.conftest import wait_for
from tests.dataio.sidecar.tier.conftest import config, make_certificates, refused
from tests.support.local_tier import record

Listening = tuple[TierService, Address]
DATA = random.Random(1).randbytes(3 * MIB + 17)


def connect(config: TierConfig) -> BuddyClient:
    return BuddyClient.connect(config, client_context(config), p.RateLimit(config.rate))


@pytest.fixture
def guest(tmp_path: Path, certificates: Path, listening: Listening) -> TierConfig:
    """What the node at 127.0.0.2 is told."""
    return config(tmp_path / "a", certificates, "127.0.0.2", buddy=listening[1])


@pytest.fixture
def mine(guest: TierConfig) -> LocalTier:
    made = LocalTier(guest.folder, TierLimits(guest.bytes, guest.steps))
    made.keep("s", "packs/1", DATA)
    made.put_record(record("s", 1, ["packs/1"], committed=0.0))
    return made


def whole(held: TierObject | None) -> bytes | None:
    return None if held is None else b"".join(held.pieces())


def test_what_is_offered_lies_on_the_buddy_and_is_fetched_back(
    guest: TierConfig, mine: LocalTier, listening: Listening
) -> None:
    peer = listening[0].local_tier
    with connect(guest) as buddy:
        assert buddy.offer(mine, "s", "packs/1")
        assert not buddy.offer(mine, "s", "packs/2")
        buddy.keep(mine.records()[0])
        sent = buddy.sent
        assert buddy.offer(mine, "s", "packs/1")
        assert buddy.sent == sent == len(DATA)  # the second time nothing goes
        assert [r.step for r in buddy.records("s")] == [1]
        assert buddy.records("another") == []
        mine.drop("s", "packs/1")
        assert buddy.fetch(mine, "s", "packs/1")
        assert not buddy.fetch(mine, "s", "packs/2")
    assert whole(peer.open("s", "packs/1")) == whole(mine.open("s", "packs/1")) == DATA
    assert [r.guest for r in peer.records()] == [True]
    assert refused(listening[0]) == {}


def test_an_earlier_record_and_manifest_that_come_last_leave_the_committed_step(
    guest: TierConfig, mine: LocalTier, listening: Listening
) -> None:
    """An older connection is served after a newer one. The tier then has another worker's manifest under the same key. Its
    digest is not the one in the decision, so a reader uses the next copy. The next offer restores the right manifest."""
    earlier, peer = mine.records()[0], listening[0].local_tier
    committed = replace_record(earlier, own=("packs/2", "manifest"), committed=5.0)
    mine.keep("s", "manifest", b"of the first worker")
    with connect(guest) as older, connect(guest) as newer:
        mine.keep("s", "manifest", b"of the second worker")
        assert newer.offer(mine, "s", "manifest")
        newer.keep(committed)
        mine.keep("s", "manifest", b"of the first worker")
        assert older.offer(mine, "s", "manifest")
        older.keep(earlier)
        assert peer.records() == [replace_record(committed, guest=True)]
        mine.keep("s", "manifest", b"of the second worker")
        assert newer.offer(mine, "s", "manifest")
    assert whole(peer.open("s", "manifest")) == b"of the second worker"


@pytest.mark.parametrize("size", [0, 1])
def test_an_offer_of_fewer_bytes_than_an_earlier_one_had_sent_is_another_object(
    guest: TierConfig, listening: Listening, size: int
) -> None:
    name, digest = ("s", "packs/9"), xxhash.xxh3_128_digest(DATA[:size])
    with wrapped(listening[1], client_context(guest)) as sock:
        channel = p.Channel(sock, p.RateLimit(None))
        channel.send(p.Hello(p.VERSION))
        assert isinstance(channel.answer(), p.Welcome)
        channel.send(p.Offer(*name, len(DATA), digest))
        assert channel.answer() == p.Want(0)
        channel.send_bytes([memoryview(DATA)[:MIB]])
    wait_for(lambda: [held.busy for held in listening[0]._server._partials.values()] == [False])  # type: ignore[union-attr]
    with wrapped(listening[1], client_context(guest)) as sock:
        channel = p.Channel(sock, p.RateLimit(None))
        channel.send(p.Hello(p.VERSION))
        assert isinstance(channel.answer(), p.Welcome)
        channel.send(p.Offer(*name, size, digest))
        assert channel.answer() == p.Want(0)
        channel.send_bytes([DATA[:size]])
        assert isinstance(channel.answer(), p.Stored)
    assert whole(listening[0].local_tier.open(*name)) == DATA[:size]


def test_a_body_of_a_negative_size_is_a_broken_rule_and_not_an_endless_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(p.ProtocolError):
        next(p.Channel(ours, p.RateLimit(None)).body(-1))


class Cut(Exception):
    pass


def test_a_broken_transfer_goes_on_where_it_broke(
    guest: TierConfig, mine: LocalTier, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = TierObject.parts

    def cut(held: TierObject, start: int, buffer: memoryview) -> Any:
        for number, piece in enumerate(parts(held, start, buffer)):
            if number == 2:
                raise Cut
            yield piece

    with monkeypatch.context() as patched:
        patched.setattr(TierObject, "parts", cut)
        with pytest.raises(Cut), connect(guest) as buddy:
            buddy.offer(mine, "s", "packs/1")
    wait_for(lambda: refused(listening[0]) == {"broken": 1})
    assert listening[0].local_tier.open("s", "packs/1") is None
    with connect(guest) as buddy:
        assert buddy.offer(mine, "s", "packs/1")
        assert buddy.sent == len(DATA) - 2 * MIB
    assert whole(listening[0].local_tier.open("s", "packs/1")) == DATA


def test_an_object_that_rots_on_the_way_is_no_object(guest: TierConfig, mine: LocalTier, listening: Listening) -> None:
    path = mine.path_of("s", "packs/1")
    data = bytearray(path.read_bytes())
    data[MIB] ^= 1
    path.write_bytes(data)
    with connect(guest) as buddy:
        with pytest.raises(BuddyError, match="another digest"):
            buddy.offer(mine, "s", "packs/1")
        assert buddy.records("s") == []  # the connection goes on
    assert listening[0].local_tier.open("s", "packs/1") is None
    assert listening[0].local_tier.used() == 0


def test_a_copy_that_rotted_on_the_buddy_is_not_taken_back(
    guest: TierConfig, mine: LocalTier, listening: Listening
) -> None:
    with connect(guest) as buddy:
        buddy.offer(mine, "s", "packs/1")
        path = listening[0].local_tier.path_of("s", "packs/1")
        data = bytearray(path.read_bytes())
        data[MIB] ^= 1
        path.write_bytes(data)
        mine.drop("s", "packs/1")
        with pytest.raises(Exception, match="another digest"):
            buddy.fetch(mine, "s", "packs/1")
    assert mine.open("s", "packs/1") is None


def test_a_buddy_without_room_says_so_and_the_connection_goes_on(
    guest: TierConfig, mine: LocalTier, listening: Listening
) -> None:
    listening[0].local_tier.limits = TierLimits(2 * MIB, 2)
    with connect(guest) as buddy:
        with pytest.raises(CapacityError, match="the buddy has no room"):
            buddy.offer(mine, "s", "packs/1")
        assert buddy.records("s") == []


def test_the_pace_is_kept(guest: TierConfig, mine: LocalTier) -> None:
    slow = replace(guest, rate=6 * MIB)
    with connect(slow) as buddy:
        began = time.monotonic()
        buddy.offer(mine, "s", "packs/1")
        assert time.monotonic() - began > 0.25


def test_threads_that_share_a_rate_keep_it_together() -> None:
    both = threading.Barrier(2)

    class Size(int):
        """A size that is divided only when both threads have come as far, if they can."""

        def __truediv__(self, other: float) -> float:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return int(self) / other

    limit, began = p.RateLimit(1000, sleep=lambda seconds: None), time.monotonic()
    takers = [threading.Thread(target=limit.take, args=[Size(5000)]) for _ in range(2)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(150)
    assert limit._free_at >= began + 9.9


class Pauses(threading.Event):
    """An event that notes for how long it was waited for, instead of waiting; set after `most` waits."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seconds = most, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        if len(self.seconds) >= self.most:
            self.set()
        return self.is_set()


def test_a_buddy_that_is_full_is_tried_again_after_longer_and_longer_pauses(
    guest: TierConfig, mine: LocalTier, listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    peer = listening[0].local_tier
    peer.limits = TierLimits(2 * MIB, 2)
    sender = CopySender(guest, mine)
    sender._stop = pauses = Pauses(7)
    sender._run()
    assert pauses.seconds == [1, 2, 4, 8, 16, 30, 30]
    assert "no room" in sender.trouble
    assert caplog.text.count("the buddy receives no copies") == 1
    peer.limits = TierLimits(512 * MIB, 2)
    sender._stop = pauses = Pauses(1)
    sender._run()
    assert (sender.trouble, sender._pause) == ("", SHORTEST)
    assert [record.step for record in peer.records()] == [1]


def bare(where: Address) -> socket.socket:
    return socket.create_connection((where.host, where.port), 5)


def hung_up(sock: socket.socket) -> bool:
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        sock.close()
    return True


def still_serves(guest: TierConfig) -> None:
    with connect(guest) as buddy:
        assert buddy.records("nothing") == []


@pytest.mark.parametrize("say", [b"", b"GET / HTTP/1.1\r\n\r\n", DATA[:2000], b"\x16\x03\x01\xff\xff" + b"x" * 100])
def test_what_is_no_tls_is_hung_up_on_and_counted(guest: TierConfig, listening: Listening, say: bytes) -> None:
    sock = bare(listening[1])
    if say:
        with contextlib.suppress(OSError):  # it may have hung up already
            sock.sendall(say)
            sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()
    assert not say or hung_up(sock)
    wait_for(lambda: sum(refused(listening[0]).values()) == 1)
    still_serves(guest)


def wrapped(where: Address, context: ssl.SSLContext, name: str = "127.0.0.1") -> ssl.SSLSocket:
    return context.wrap_socket(bare(where), server_hostname=name)


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_connection_reset_before_tls_leaves_no_open_descriptor(guest: TierConfig, side: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        other = bare(Address(*listener.getsockname()))
        ours, _ = listener.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        wait_for(lambda: bool(select.select([ours], [], [], 0)[0]))
        with pytest.raises(ConnectionResetError):
            if side == "server":
                server_context(guest).wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
            else:
                client_context(guest).wrap_socket(ours, server_hostname="127.0.0.1")
        gc.collect()
    assert [str(warning.message) for warning in left if warning.category is ResourceWarning] == []


def test_a_peer_without_a_certificate_is_refused(guest: TierConfig, certificates: Path, listening: Listening) -> None:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with wrapped(listening[1], context) as sock:
        assert hung_up(sock)
    wait_for(lambda: refused(listening[0]) == {"tls": 1})
    still_serves(guest)


def test_a_certificate_of_another_ca_is_refused_on_both_sides(
    guest: TierConfig, certificates: Path, other_ca: Path, listening: Listening
) -> None:
    foreign = replace(guest, cert=other_ca / "127.0.0.2.pem", key=other_ca / "127.0.0.2.key", ca=other_ca / "ca.pem")
    with pytest.raises(BuddyError, match="certificate is refused"):
        connect(foreign)
    trusting = replace(foreign, ca=certificates / "ca.pem")
    with pytest.raises(BuddyError), connect(trusting) as buddy:
        buddy.records("s")
    wait_for(lambda: refused(listening[0]) == {"tls": 2})
    still_serves(guest)


def test_a_name_that_is_not_expected_is_refused_on_both_sides(
    guest: TierConfig,
    certificates: Path,
    tmp_path: Path,
    listening: Listening,
    open_tier: Callable[[TierConfig], TierService],
) -> None:
    stranger = replace(guest, cert=certificates / "stranger.example.pem", key=certificates / "stranger.example.key")
    with pytest.raises(BuddyError), connect(stranger) as buddy:
        buddy.records("s")
    wait_for(lambda: refused(listening[0]) == {"name": 1})
    impostor = open_tier(
        config(tmp_path / "c", certificates, "stranger.example", listen=Address("127.0.0.1", 0), names=("127.0.0.2",))
    )
    port = impostor.status()["guests"]["port"]  # type: ignore[index]
    with pytest.raises(BuddyError, match="certificate is refused"):
        connect(replace(guest, buddy=Address("127.0.0.1", port)))
    still_serves(guest)


def test_an_expired_certificate_is_refused(guest: TierConfig, certificates: Path, listening: Listening) -> None:
    make_certificates(certificates, "old.example,127.0.0.2", days=0)
    time.sleep(1.1)  # a certificate is valid to the second
    old = replace(guest, cert=certificates / "old.example.pem", key=certificates / "old.example.key")
    with pytest.raises(BuddyError), connect(old) as buddy:
        buddy.records("s")
    wait_for(lambda: refused(listening[0]) == {"tls": 1})
    still_serves(guest)


def test_older_tls_is_refused(guest: TierConfig, listening: Listening) -> None:
    context = client_context(guest)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        wrapped(listening[1], context)
    wait_for(lambda: refused(listening[0]) == {"tls": 1})


FRAMES = [
    b"",
    struct.pack("<I", 1 << 31),
    struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
    struct.pack("<I", 100) + b"short",
    struct.pack("<I", 1) + b"\x80",
]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("after_hello", [False, True])
def test_garbage_of_a_peer_that_was_let_in_ends_its_connection_only(
    guest: TierConfig, listening: Listening, frame: bytes, after_hello: bool
) -> None:
    with connect(guest) as other:
        sock = wrapped(listening[1], client_context(guest))
        channel = p.Channel(sock)
        if after_hello:
            channel.send(p.Hello(p.VERSION))
            assert channel.answer() == p.Welcome(p.VERSION)
        sock.sendall(frame)
        sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)
        assert other.records("s") == []


def test_a_newer_version_is_refused_by_name(guest: TierConfig, listening: Listening) -> None:
    with wrapped(listening[1], client_context(guest)) as sock:
        channel = p.Channel(sock)
        channel.send(p.Hello(9))
        answer = channel.answer()
    assert isinstance(answer, p.Refused)
    assert "speaks version 1" in answer.message


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_no_bytes_decode_to_anything_but_a_message(data: bytes) -> None:
    ours, peer = socket.socketpair()
    with ours, peer:
        peer.sendall(struct.pack("<I", len(data)) + data)
        with contextlib.suppress(p.ProtocolError):
            assert isinstance(p.Channel(ours).request(), p.Message)


@pytest.mark.parametrize("what", ["message", "body", "reader"])
def test_a_peer_that_drips_is_given_up_as_one_that_is_silent(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "IO_SECONDS", 0.5)
    monkeypatch.setattr(p, "LEAST_RATE", 1 << 30)
    ours, peer = socket.socketpair()
    over, dripped = threading.Event(), []

    def drip() -> None:
        while not over.wait(0.05):
            dripped.append(peer.recv(1) if what == "reader" else peer.send(b"\0"))

    with ours, peer:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        channel, thread = p.Channel(ours), threading.Thread(target=drip)
        peer.sendall(struct.pack("<I", 1000) if what == "message" else b"")
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            if what == "reader":
                channel.send_bytes([bytes(4 * MIB)])
            else:
                channel.answer() if what == "message" else channel.whole(1000)
        held = time.monotonic() - began
        over.set()
        thread.join()
    assert len(dripped) > 2
    assert held < 20


def test_more_peers_than_allowed_are_turned_away(guest: TierConfig, listening: Listening) -> None:
    held = [connect(guest) for _ in range(servers.CONNECTIONS)]
    with pytest.raises(BuddyError):
        connect(guest)
    wait_for(lambda: refused(listening[0]) == {"busy": 1})
    for buddy in held:
        buddy.close()
    wait_for(lambda: listening[0].status()["guests"]["peers"] == 0)  # type: ignore[index]
    still_serves(guest)


def test_strangers_that_only_hold_connections_do_not_keep_buddies_out(
    guest: TierConfig, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HANDSHAKE_SECONDS", 1.0)
    held = [bare(listening[1]) for _ in range(servers.UNADMITTED)]
    for sock in held[:8]:
        sock.sendall(b"\x16\x03\x01")  # the beginning of a handshake
    still_serves(guest)
    for sock in held:
        assert hung_up(sock)
    wait_for(lambda: sum(refused(listening[0]).values()) == servers.UNADMITTED)
    still_serves(guest)


def test_silent_connections_keep_no_buddy_out_however_many_come_again(
    guest: TierConfig, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SILENT", 64)
    stop = threading.Event()

    def hold() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), bare(listening[1]) as sock:
                sock.settimeout(1)
                sock.recv(1)

    threads = [threading.Thread(target=hold) for _ in range(96)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: refused(listening[0]).get("busy", 0) > 0)
        for _ in range(4):
            still_serves(guest)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_strangers_of_one_address_make_room_for_another(
    guest: TierConfig, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HANDSHAKE_SECONDS", 60.0)  # no stranger leaves by itself during this test
    where = (listening[1].host, listening[1].port)
    with contextlib.ExitStack() as held:
        for _ in range(servers.UNADMITTED + 5):
            sock = held.enter_context(socket.create_connection(where, 5, ("127.0.0.3", 0)))
            sock.sendall(b"\x16\x03\x01")  # the beginning of a handshake
        wait_for(lambda: refused(listening[0]).get("busy", 0) == 5)
        still_serves(guest)
        # one of the strangers makes room, and its thread counts it
        wait_for(lambda: sum(refused(listening[0]).values()) == 6)


def test_peers_that_vanish_in_the_middle_leave_no_descriptor_and_no_byte(
    guest: TierConfig, mine: LocalTier, listening: Listening
) -> None:
    still_serves(guest)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        sock = wrapped(listening[1], client_context(guest))
        channel = p.Channel(sock)
        channel.send(p.Hello(p.VERSION))
        channel.answer()
        channel.send(p.Offer("s", f"k{number % 3}", MIB, bytes(16)))
        channel.answer()
        sock.sendall(bytes(1000))
        sock.close()
        wait_for(lambda: listening[0].status()["guests"]["peers"] == 0)  # type: ignore[index]
    server = listening[0]._server
    assert server is not None
    assert len(server._partials) == 3
    for partial in server._partials.values():
        partial.touched -= servers.PARTIAL_SECONDS + 1
    server.tidy()
    assert not server._partials
    assert len(os.listdir("/proc/self/fd")) <= before
    listening[0].local_tier.tidy()
    assert listening[0].local_tier.used() == 0


def test_keys_and_what_they_protect_are_in_no_text(
    guest: TierConfig, certificates: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.key"
    secret = certificates / "127.0.0.2.key"
    os.system(f"openssl ec -in {secret} -aes256 -passout pass:hunter22 -out {locked} 2>/dev/null")
    for broken in (replace(guest, key=locked), replace(guest, key=certificates / "127.0.0.1.key")):
        with pytest.raises(UsageError) as error:
            client_context(broken)
        assert "hunter22" not in str(error.value)
    text = secret.read_text().splitlines()[1]
    still_serves(guest)
    assert text not in caplog.text + repr(guest) + str(guest)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_buddy_without_its_files_is_refused_by_name(guest: TierConfig, name: str) -> None:
    absent: dict[str, Any] = {name: None}
    with pytest.raises(UsageError, match=f"a buddy needs tls_{name}"):
        replace(guest, **absent).check()
    absent[name] = Path("/nowhere/x.pem")
    with pytest.raises(UsageError, match=f"a buddy needs tls_{name}"):
        TierService(replace(guest, **absent))


def test_settings_of_buddies_are_checked() -> None:
    assert address("off") is None
    assert str(address("node-1.example:9470")) == "node-1.example:9470"
    assert str(address("[::1]:9470")) == "[::1]:9470"
    for wrong in ("node", "node:", ":1", "node:x", "node:70000", "a b:1", "::1:80", "node/evil:1"):
        with pytest.raises(UsageError, match="is not of the form host:port"):
            address(wrong)
    assert names("a, b") == ("a", "b")
    with pytest.raises(UsageError):
        names("a,,b")
    with pytest.raises(UsageError, match="buddy_listen needs buddy_names"):
        TierConfig(
            Path("/x"), listen=Address("::", 1), cert=Path(__file__), key=Path(__file__), ca=Path(__file__)
        ).check()
    assert same_name("2001:DB8::1", "2001:db8:0::1")
    assert not same_name("*.example", "a.example")


def test_two_that_send_the_same_object_at_once_do_not_mix(
    guest: TierConfig, mine: LocalTier, listening: Listening
) -> None:
    outcomes: list[str] = []

    def send() -> None:
        with connect(guest) as buddy:
            try:
                buddy.offer(mine, "s", "packs/1")
                outcomes.append("stored")
            except CapacityError:
                outcomes.append("busy")

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert set(outcomes) <= {"stored", "busy"}
    assert "stored" in outcomes
    assert len(outcomes) == 4
    assert whole(listening[0].local_tier.open("s", "packs/1")) == DATA


def test_what_is_kept_is_sent_by_itself_and_recalled(
    guest: TierConfig,
    mine: LocalTier,
    listening: Listening,
    open_tier: Callable[[TierConfig], TierService],
    tmp_path: Path,
) -> None:
    peer = listening[0].local_tier
    near = open_tier(guest)
    wait_for(lambda: [r.step for r in peer.records()] == [1])
    assert whole(peer.open("s", "packs/1")) == DATA
    mine.put_record(record("s", 1, ["packs/1"], committed=9.0))
    wait_for(lambda: peer.records()[0].committed == 9.0)
    wait_for(lambda: near.status()["buddy"]["waiting"] == 0)  # type: ignore[index]
    shown: Any = near.status()["buddy"]
    assert (shown["trouble"], shown["waiting"], shown["sent_bytes"]) == ("", 0, len(DATA))
    assert [(c["run"], c["step"]) for c in shown["copies"]] == [("run", 1)]
    new = open_tier(replace(guest, folder=tmp_path / "new"))
    assert new.recall("s", "")
    assert [(r.step, r.guest) for r in new.local_tier.records()] == [(1, True)]
    assert new.recall("s", "packs/1")
    assert not new.recall("s", "packs/9")
    assert whole(new.local_tier.open("s", "packs/1")) == DATA
    assert new.status()["recalled"] == {"found": 2, "absent": 1, "failed": 0}


def test_a_buddy_that_is_gone_is_said_once_and_found_again(
    guest: TierConfig,
    mine: LocalTier,
    open_tier: Callable[[TierConfig], TierService],
    caplog: pytest.LogCaptureFixture,
    certificates: Path,
    tmp_path: Path,
) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    alone = open_tier(replace(guest, buddy=Address("127.0.0.1", port)))
    wait_for(lambda: "refused" in alone.status()["buddy"]["trouble"])  # type: ignore[index]
    assert not alone.recall("s", "packs/2")
    back = open_tier(config(tmp_path / "late", certificates, listen=Address("127.0.0.1", port), names=("127.0.0.2",)))
    wait_for(lambda: back.local_tier.records())
    assert caplog.text.count("the buddy receives no copies") == 1
    wait_for(lambda: alone.status()["buddy"]["trouble"] == "")  # type: ignore[index]
