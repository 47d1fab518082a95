"""Files in memory that libraries read by their descriptor."""

from __future__ import annotations

import os

import pytest

from headrace.loaders.audio.excerpts import base


@pytest.mark.parametrize("count", [0, 1, 3, 1024, 1025, 5000])
def test_a_file_holds_all_parts_in_order_and_is_at_its_beginning(count: int) -> None:
    parts: list[bytes | memoryview] = [memoryview(number.to_bytes(4, "big") * (number % 3)) for number in range(count)]
    with base.memfd(parts) as descriptor:
        assert os.read(descriptor, 1 << 20) == b"".join(parts)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_full_memory_is_an_error_and_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = os.listdir("/proc/self/fd"), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, at: write(descriptor, [parts[0][:2]], at))
    with pytest.raises(OSError, match="not enough memory for 6 bytes"), base.memfd([b"abc", b"def"]):
        pytest.fail("a file that is not whole")
    assert os.listdir("/proc/self/fd") == before
