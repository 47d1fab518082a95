"""One object, once, forwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import TransientError
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.posix import PosixStore

DATA = bytes(range(256)) * 40
WINDOW = 1000


class Counting(PosixStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: list[tuple[int, int]] = []

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.requests.append((offset, len(buffer)))
        super().get_into(key, offset, buffer)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counting]:
    with Counting(tmp_path) as made:
        made.put("k", DATA)
        yield made


def test_reads_forwards_ask_for_every_window_once(store: Counting) -> None:
    with ReadAhead(store, "k", len(DATA), WINDOW) as ahead:
        for start in range(0, len(DATA), 300):
            length = min(900, len(DATA) - start)
            assert ahead.read_at(start, length) == DATA[start : start + length]
            assert len(ahead._windows) <= 4
    assert store.requests == [(at, min(WINDOW, len(DATA) - at)) for at in range(0, len(DATA), WINDOW)]


def test_parts_hold_a_window_at_most(store: Store) -> None:
    with ReadAhead(store, "k", len(DATA), WINDOW) as ahead:
        pieces = [bytes(piece) for piece in ahead.parts(500, 5000)]
        assert b"".join(pieces) == DATA[500:5500]
        assert [len(piece) for piece in pieces] == [500, 1000, 1000, 1000, 1000, 500]
        assert ahead.read_at(len(DATA), 0) == b""


def test_an_object_that_shrinks_meanwhile_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("k", DATA)
    with ReadAhead(store, "k", len(DATA), WINDOW) as ahead:
        ahead.read_at(0, 10)
        store.put("k", b"short")
        with pytest.raises(TransientError, match=r"/k changed while it was read"):
            ahead.read_at(5000, 10)
