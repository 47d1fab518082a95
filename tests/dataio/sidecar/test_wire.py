"""Frames, with and without descriptors, whole, in pieces and as garbage."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core import limits
from headrace.dataio.core.errors import ConflictError, HeadraceError, UsageError
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(points)]


@given(st.lists(st.binary(max_size=300), max_size=10), st.lists(st.integers(0, 5000), max_size=10))
def test_frames_come_out_as_they_went_in_however_they_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    framer, out = wire.Framer(), list[bytes]()
    for piece in pieces(b"".join(map(wire.frame, payloads)), cuts):
        out += [frame.payload for frame in framer.feed(piece)]
    assert out == payloads


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5))
def test_garbage_raises_one_error_and_is_bounded(chunks: list[bytes]) -> None:
    framer = wire.Framer()
    try:
        for chunk in chunks:
            for frame in framer.feed(chunk):
                assert len(frame.payload) <= limits.MESSAGE_BYTES
                m.decode_from_client(frame.payload)
    except UsageError:
        pass
    assert len(framer._data) <= limits.MESSAGE_BYTES + 5


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=300))
def test_a_payload_that_is_no_message_raises_one_error(payload: bytes) -> None:
    for decode in (m.decode_from_client, m.decode_from_daemon):
        with contextlib.suppress(UsageError):
            assert isinstance(decode(payload), m.Message)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_damaged_message_decodes_or_is_refused(data: st.DataObject) -> None:
    message = m.Open(1, m.Where("file:///x", {"a": {"b": 1}}), "key", [(0, 10), (5, 7)], 3.0, 2)
    payload = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UsageError):
        assert isinstance(m.decode_from_client(bytes(payload)), m.Message)


def test_an_oversize_frame_is_refused_by_its_header() -> None:
    with pytest.raises(UsageError, match="65537 bytes; the most is 65536"):
        wire.Framer().feed(struct.pack("<IB", 65537, 0))
    with pytest.raises(UsageError):
        wire.frame(b"x" * 65537)


def test_deep_nesting_is_refused() -> None:
    payload = msgspec.msgpack.encode({"t": "open", "id": 1})[:-1] + b"\x91" * 60_000
    with pytest.raises(UsageError):
        m.decode_from_client(payload)


def test_descriptors_arrive_with_their_frame() -> None:
    ours, peer = socket.socketpair()
    with ours, peer, open("/dev/null", "rb") as null:
        before = open_descriptors()
        wire.send(ours, wire.frame(b"plain"))
        wire.send(ours, wire.frame(b"two", 2), (null.fileno(), null.fileno()))
        wire.send(ours, wire.frame(b"plain"))
        framer, frames = wire.Framer(), list[wire.Frame]()
        while len(frames) < 3:
            frames += framer.feed(*wire.receive(peer))
        assert [(f.payload, len(f.descriptors)) for f in frames] == [(b"plain", 0), (b"two", 2), (b"plain", 0)]
        assert open_descriptors() == before + 2
        wire.close_all(frames[1].descriptors)
        assert open_descriptors() == before


@pytest.mark.parametrize(("declared", "sent"), [(0, 1), (1, 0), (1, 2), (2, 1), (3, 0), (200, 2), (0, 100)])
def test_descriptors_that_do_not_fit_their_frame_are_closed(declared: int, sent: int) -> None:
    ours, peer = socket.socketpair()
    with ours, peer, open("/dev/null", "rb") as null:
        before = open_descriptors()
        data = struct.pack("<IB", 4, declared) + b"body"
        wire.send(ours, data, [null.fileno()] * sent)
        framer = wire.Framer()
        with pytest.raises(UsageError):
            framer.feed(*wire.receive(peer))
        assert open_descriptors() == before


def test_descriptors_of_a_frame_that_never_ends_are_closed() -> None:
    ours, peer = socket.socketpair()
    with ours, peer, open("/dev/null", "rb") as null:
        before = open_descriptors()
        wire.send(ours, wire.frame(b"body", 1)[:-1], [null.fileno()])
        framer = wire.Framer()
        assert framer.feed(*wire.receive(peer)) == []
        assert open_descriptors() == before + 1
        framer.close()
        assert open_descriptors() == before


def test_an_error_keeps_its_class_over_the_wire() -> None:
    error = ConflictError("somebody was first", hint="look who")
    rebuilt = m.error_of(*m.error_fields(error))
    assert (type(rebuilt), rebuilt.message, rebuilt.hint) == (ConflictError, error.message, error.hint)
    assert type(m.error_of("of the future", "x", "")) is HeadraceError
    assert m.error_fields(KeyError("x"))[0] == "error"


def test_the_largest_answers_fit_a_message() -> None:
    runs = [(1 << 61, 1 << 62)] * 256
    wire.frame(m.encode(m.Opened(1 << 62, 1 << 62, 1 << 62, runs)))
    wire.frame(m.encode(m.Failed(1 << 62, *m.error_fields(UsageError("€" * 9000, hint="€" * 9000)))))
    wire.frame(m.encode(m.Done("x" * 64, "€" * (32 << 10 // 3))))
    ranges = [(1 << 61, 1 << 61)] * m.RANGES
    wire.frame(m.encode(m.Open(1 << 62, m.Where("u" * 4096, {}), "k" * 1024, ranges, 1.0, 1 << 62)))
