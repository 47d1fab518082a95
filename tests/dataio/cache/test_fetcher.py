"""Blocks of files of this machine, which go several at once; on real files, by the fetcher's own threads."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from operator import contains
from pathlib import Path

import pytest

from headrace.dataio.cache.blocks import IDLE_SECONDS, BlockDirectory, BlockFile, DescriptorPool, UnnamedFile
from headrace.dataio.cache.disks import DiskError
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.fetcher import BATCH_BLOCKS, BatchedFetch, Fetcher, FetchResult, FetchTask
from headrace.dataio.cache.plan.events import Fetch
from headrace.dataio.cache.readers.cached import CachedReader
from headrace.dataio.core.clock import SYSTEM_CLOCK
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import ManualClock
from tests.support.memory_store import MemoryStore

BLOCK = 4096
BLOCKS = 12


@pytest.fixture
def data() -> bytes:
    return random.Random(1).randbytes(BLOCKS * BLOCK - 100)


@pytest.fixture
def store(tmp_path: Path, data: bytes) -> Iterator[Store]:
    (tmp_path / "store").mkdir()
    for key in "ab":
        (tmp_path / "store" / key).write_bytes(data)
    with open_store(str(tmp_path / "store")) as found:
        yield found


class Node:
    """One thread that fetches into one file, and all that it told, in order."""

    def __init__(self, folder: Path, store: Store, size: int) -> None:
        self.store, self.file = store, BlockDirectory(folder, DescriptorPool(16)).create(size)
        self.messages: list[list[FetchResult]] = []
        self._over, self._left = threading.Event(), 0
        self._fetcher = Fetcher(threads=1, buffers=2, block_bytes=BLOCK, clock=SYSTEM_CLOCK, on_fetched=self._landed)

    def fetch(self, blocks: Sequence[int], wanted: Sequence[int] = (), file: BlockFile | None = None) -> None:
        """All at once, as far as the thread can see."""
        gate, self._left = threading.Event(), len(blocks)
        self._over.clear()
        self._fetcher.submit(partial(self._wait, gate))
        for block in blocks:
            length = min(BLOCK, self.file.size - block * BLOCK)
            fetch = Fetch(1, block, block * BLOCK, length)
            is_wanted = partial(contains, wanted, block)
            self._fetcher.start(FetchTask(fetch, file or self.file, self.store, "a", (), is_wanted))
        gate.set()
        assert self._over.wait(150)

    def _wait(self, gate: threading.Event) -> None:
        assert gate.wait(150)

    def blocks(self) -> list[list[int]]:
        return [[fetch.block for fetch, _, _ in landed] for landed in self.messages]

    def errors(self) -> list[BaseException]:
        return [error for landed in self.messages for _, error, _ in landed if error is not None]

    def bytes(self, block: int) -> bytes:
        length = min(BLOCK, self.file.size - block * BLOCK)
        found = bytearray(length)
        self.file.read(block * BLOCK, memoryview(found))
        return bytes(found)

    def forget(self) -> None:
        """Keep no file open."""
        self._fetcher._batched._open_files.clear()

    def close(self) -> None:
        self._fetcher.close()

    def _landed(self, landed: Sequence[FetchResult]) -> None:
        self.messages.append(list(landed))
        self._left -= len(landed)
        if not self._left:
            self._over.set()


@pytest.fixture
def node(tmp_path: Path, store: Store, data: bytes) -> Iterator[Node]:
    made = Node(tmp_path, store, len(data))
    made.fetch([0])  # and so it is known that the store's objects are files
    made.messages.clear()
    yield made
    made.close()


def test_several_blocks_are_told_of_at_once_and_are_the_objects_bytes(node: Node, data: bytes) -> None:
    node.fetch(range(1, BLOCKS))
    assert all(len(landed) <= BATCH_BLOCKS for landed in node.messages)
    assert node.blocks()[:2] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert all(node.bytes(block) == data[block * BLOCK :][:BLOCK] for block in range(BLOCKS))


def test_what_somebody_waits_for_goes_first_and_waits_for_none_of_the_others(node: Node) -> None:
    node.fetch([1, 2, 3, 4], wanted=[3])
    assert node.blocks() == [[3], [1, 2, 4]]


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_what_cannot_be_read_is_left_to_the_store_whose_error_it_is(
    node: Node, tmp_path: Path, data: bytes, damage: str
) -> None:
    if damage == "shorter":
        os.truncate(tmp_path / "store" / "a", 3 * BLOCK)
    else:
        (tmp_path / "store" / "a").unlink()
        node.forget()
    node.fetch([1, 2, 3, 4])
    assert sorted(block for landed in node.blocks() for block in landed) == [1, 2, 3, 4]
    assert len(node.errors()) == (2 if damage == "shorter" else 4)
    assert not any(isinstance(error, DiskError) for error in node.errors())
    (tmp_path / "store" / "a").write_bytes(data)
    node.messages.clear()
    node.fetch([5, 6])
    assert (node.blocks(), node.errors()) == ([[5, 6]], []), "and for other blocks nothing has changed"


def test_a_file_that_was_read_amiss_is_opened_anew(node: Node, data: bytes, tmp_path: Path) -> None:
    os.truncate(tmp_path / "store" / "a", BLOCK)
    (tmp_path / "new").write_bytes(data)
    (tmp_path / "new").rename(tmp_path / "store" / "a")
    node.fetch([1, 2])
    node.fetch([3, 4])
    assert node.errors() == []
    assert all(node.bytes(block) == data[block * BLOCK :][:BLOCK] for block in range(1, 5))


class FullFile(UnnamedFile):
    def write(self, offset: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space")


def test_a_full_disk_is_told_from_trouble_with_the_source(node: Node) -> None:
    full = FullFile(DescriptorPool(16), node.file.writer(), node.file.size)
    node.fetch([1, 2], file=full)
    assert [isinstance(error, DiskError) for error in node.errors()] == [True, True]


def test_objects_that_are_no_files_and_blocks_that_lie_here_already_go_by_themselves(
    node: Node, tmp_path: Path, store: Store
) -> None:
    def flight(source: Store, adopted: bool = False) -> FetchTask:
        return FetchTask(Fetch(1, 0, 0, BLOCK, (), adopted), node.file, source, "a", (), lambda: False)

    found = BatchedFetch(SYSTEM_CLOCK)
    assert not found.fits(flight(store)), "no thread has looked yet"
    assert found.accepts(flight(store))
    assert found.fits(flight(store))
    assert not found.accepts(flight(store, adopted=True))
    assert not found.accepts(flight(MemoryStore(a=bytes(BLOCK))))
    assert not found.fits(flight(MemoryStore(a=bytes(BLOCK))))


def test_what_is_prefetched_so_is_adopted_by_the_next_engine(tmp_path: Path, store: Store, data: bytes) -> None:
    for fetched in (2 * len(data), 0):
        engine = Engine(tmp_path, 1 << 20, threads=4, block_bytes=BLOCK, keep=True)
        reader = CachedReader(store, engine)
        ranges = [(BLOCK * block, min(BLOCK, len(data) - BLOCK * block)) for block in range(BLOCKS)]
        reader.announce([(key, *one) for key in "ab" for one in ranges])
        for key in "ab":
            assert b"".join(reader.read(key, ranges)) == data
        assert engine.stats()["fetched_bytes"] == fetched
        reader.close()
        engine.close()


def test_files_that_are_not_asked_for_are_closed(node: Node, store: Store, tmp_path: Path) -> None:
    clock = ManualClock()
    found, buffer = BatchedFetch(clock), memoryview(bytearray(BLOCK))
    one = FetchTask(Fetch(1, 0, 0, BLOCK), node.file, store, "b", (), lambda: False)
    assert found.fetch(one, buffer) is not None
    assert is_open(tmp_path / "store" / "b")
    found.close_idle()
    assert is_open(tmp_path / "store" / "b"), "it was asked for a moment ago"
    clock.now += IDLE_SECONDS
    found.close_idle()
    assert not is_open(tmp_path / "store" / "b")


def is_open(path: Path) -> bool:
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return str(path) in [os.readlink(link) for link in links if link.is_symlink()]
