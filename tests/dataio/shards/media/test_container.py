"""Files that end early are seen by what their container declares."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.media.container import check_complete


def check(data: bytes) -> None:
    check_complete(io.BytesIO(data), len(data))


def box(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", 8 + len(payload)) + kind + payload


@given(st.lists(st.tuples(st.sampled_from([b"ftyp", b"moov", b"mdat", b"free"]), st.binary(max_size=40)), min_size=1))
def test_whole_boxes_pass_and_any_cut_inside_one_is_found(boxes: list[tuple[bytes, bytes]]) -> None:
    data = b"".join(box(kind, payload) for kind, payload in boxes)
    check(data)
    ends, at = set(), 0
    for kind, payload in boxes:
        at += len(box(kind, payload))
        ends.add(at)
    for cut in range(12, len(data)):
        if cut not in ends and any(data[max(e for e in {0, *ends} if e <= cut) : cut]):
            with pytest.raises(CorruptionError, match=r"truncated|impossible"):
                check(data[:cut])


def test_large_sizes_and_open_ends_are_understood() -> None:
    check(box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"mdat", 20) + b"four")
    check(box(b"ftyp", b"isom") + struct.pack(">I4s", 0, b"mdat") + b"to the end")
    check(box(b"ftyp", b"isom") + bytes(4))


def test_an_impossible_box_length_is_found() -> None:
    with pytest.raises(CorruptionError, match="offset 12 has the impossible length 3"):
        check(box(b"ftyp", b"isom") + struct.pack(">I4s", 3, b"mdat"))


def test_a_matroska_segment_that_is_longer_than_the_file_is_found() -> None:
    head = b"\x1a\x45\xdf\xa3\x84abcd"
    check(head + b"\x18\x53\x80\x67\x85abcde")
    check(head + b"\x18\x53\x80\x67\xff" + b"a live recording")
    check(head + b"\x18\x53\x80\x67\x01" + b"\xff" * 7 + b"a live recording")
    with pytest.raises(CorruptionError, match="element 18538067 at offset 9 ends at 19, the file at 16"):
        check(head + b"\x18\x53\x80\x67\x85ab")
    with pytest.raises(CorruptionError, match="header"):
        check(head + b"\x18\x53\x80\x67")


def test_other_containers_are_left_to_their_demuxers() -> None:
    check(b"RIFF\xff\xff\xff\xffWAVE")
    check(b"x")
