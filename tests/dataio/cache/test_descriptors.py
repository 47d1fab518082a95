"""Cache files are opened when they are used: how many descriptors are open, and what happens when none is left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.cache.blocks import BlockDirectory, DescriptorPool
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.plan.files import BlockSet
from tests.support.memory_store import MemoryStore

BLOCK = 4096
FILES = 60
POOL = 8


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(**{f"s{n}": bytes([n]) * (2 * BLOCK) for n in range(FILES)})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running(tmp_path) as made:
        yield made


@contextlib.contextmanager
def running(directory: Path, keep: bool = True) -> Iterator[Engine]:
    made = Engine(directory, 1 << 30, threads=2, block_bytes=BLOCK, keep=keep, descriptors=POOL)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened in the block. Open files stay open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_below(directory: Path) -> int:
    """Descriptors of files in `directory`."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(os.fspath(directory))
    return found


def read(engine: Engine, store: MemoryStore, key: str, size: int = 2 * BLOCK) -> bytes | None:
    """Through the cache; None when the engine says to read the store directly."""
    lease = engine.open_present(store, key, [(0, size)]) or engine.open(store, key, [(0, size)]).result(60)
    if lease is None:
        return None
    descriptor = lease.take_descriptor()
    return os.pread(descriptor.fileno(), size, 0)


def test_a_cache_of_many_files_keeps_few_of_them_open(engine: Engine, store: MemoryStore, tmp_path: Path) -> None:
    for key, data in store.objects.items():
        assert read(engine, store, key) == data
    assert engine.stats()["files"] == FILES
    assert open_below(tmp_path) <= POOL


def test_a_restart_opens_none_of_them(store: MemoryStore, tmp_path: Path) -> None:
    with running(tmp_path) as first:
        for key in store.objects:
            read(first, store, key)
    with running(tmp_path) as second:
        assert (second.stats()["files"], open_below(tmp_path)) == (FILES, 0)
        fetched = store.bytes_read
        assert all(read(second, store, key) == data for key, data in store.objects.items())
        assert store.bytes_read == fetched


def test_a_hold_costs_no_descriptor_after_it_was_passed_on(engine: Engine, store: MemoryStore, tmp_path: Path) -> None:
    leases = [engine.open(store, key, [(0, 1)]).result(60) for key in store.objects]
    assert open_below(tmp_path) >= FILES
    for lease in leases:
        assert lease is not None
        lease.take_descriptor()
    assert open_below(tmp_path) <= POOL


def test_an_unnamed_file_costs_one_descriptor(store: MemoryStore, tmp_path: Path) -> None:
    with running(tmp_path, keep=False) as engine:
        for key in store.objects:
            read(engine, store, key)
        assert FILES <= open_below(tmp_path) <= FILES + POOL


def test_a_dropped_file_gives_its_disk_space_back_although_it_was_used_just_now(tmp_path: Path) -> None:
    pool = DescriptorPool(POOL)
    file = BlockDirectory(tmp_path, pool).create(BLOCK)
    reader = file.reader()
    file.unlink()
    again = file.reader()
    del reader, again
    assert len(pool) == 0
    del file
    assert open_below(tmp_path) == 0


def test_without_free_descriptors_reads_bypass_the_cache_and_nothing_is_lost(
    engine: Engine, store: MemoryStore, tmp_path: Path
) -> None:
    first, *others = store.objects
    for key in others:
        read(engine, store, key, BLOCK)
    with no_descriptors():
        assert read(engine, store, others[0], BLOCK) is None, "present, and cannot be opened"
        assert read(engine, store, others[1], 2 * BLOCK) is None, "half of it is present"
        assert read(engine, store, first) is None, "new"
        assert engine.stats()["files"] == len(others)
        assert not engine.stats()["paused"], "the disk has no fault"
    fetched = store.bytes_read
    assert all(read(engine, store, key, BLOCK) == store.objects[key][:BLOCK] for key in others)
    assert store.bytes_read == fetched, "all blocks are still there"
    assert read(engine, store, first) == store.objects[first]


def test_a_restart_without_free_descriptors_fails_and_removes_nothing(store: MemoryStore, tmp_path: Path) -> None:
    with running(tmp_path) as first:
        for key in store.objects:
            read(first, store, key)
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"), running(tmp_path):
        pass
    with pytest.MonkeyPatch.context() as patch:  # the limit is reached in the middle
        plain, opened = os.open, list[str]()

        def scarce(path: str, flags: int, *rest: int) -> int:
            opened.append(path)
            if len(opened) > FILES // 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return plain(path, flags, *rest)

        patch.setattr(os, "open", scarce)
        with pytest.raises(OSError, match="Too many open files"), running(tmp_path):
            pass
    assert len(list(tmp_path.glob("*.blocks"))) == len(list(tmp_path.glob("*.map"))) == FILES


def test_a_file_that_was_deleted_is_dropped_and_fetched_again(
    engine: Engine, store: MemoryStore, tmp_path: Path
) -> None:
    read(engine, store, "s1")
    for path in tmp_path.iterdir():
        path.unlink()
    engine._disks._pool.clear()
    assert read(engine, store, "s1") is None
    assert engine.stats()["files"] == 0
    assert read(engine, store, "s1") == store.objects["s1"]
    assert not engine.stats()["paused"]


def test_a_file_that_was_deleted_while_blocks_are_added_pauses_no_disk(
    engine: Engine, store: MemoryStore, tmp_path: Path
) -> None:
    read(engine, store, "s1", BLOCK)
    for path in tmp_path.iterdir():
        path.unlink()
    engine._disks._pool.clear()
    assert read(engine, store, "s1") is None
    assert not engine.stats()["paused"]
    assert read(engine, store, "s1") == store.objects["s1"]


def test_the_pool_closes_its_own_when_the_process_has_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, plain, failures = DescriptorPool(POOL), os.open, [errno.EMFILE]
    directory = BlockDirectory(tmp_path, pool)
    files = [directory.create(BLOCK) for _ in range(3)]
    for file in files[:2]:
        file.reader()

    def scarce(path: str, flags: int, *rest: int) -> int:
        if failures:
            raise OSError(failures.pop(), "too many open files")
        return plain(path, flags, *rest)

    monkeypatch.setattr(os, "open", scarce)
    assert files[2].reader().fileno() >= 0
    assert len(pool) == 1


def test_the_descriptor_that_was_used_longest_ago_closes_first(tmp_path: Path) -> None:
    pool = DescriptorPool(2)
    directory = BlockDirectory(tmp_path, pool)
    files = [directory.create(BLOCK) for _ in range(3)]
    first, second = files[0].reader(), files[1].reader()
    assert files[0].reader() is first
    files[2].reader()
    assert files[0].reader() is first
    assert files[1].reader() is not second


def test_a_set_of_blocks_is_a_set() -> None:
    blocks = BlockSet([0, 3, 8, 70_000, 3])
    assert (sorted(blocks), len(blocks), bool(blocks), 8 in blocks, 9 in blocks) == (
        [0, 3, 8, 70_000],
        4,
        True,
        True,
        False,
    )
    assert blocks.among([1, 3, 70_000]) == {3, 70_000}
    blocks.discard(3)
    blocks.discard(5)
    blocks.add(5)
    assert sorted(blocks) == [0, 5, 8, 70_000]
    assert (list(BlockSet()), bool(BlockSet()), BlockSet().among([0])) == ([], False, set())
