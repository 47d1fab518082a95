"""Several tiers on real directories: small file systems that are really full, read-only or gone."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.dataio.cache.disks import RECOVER_SECONDS, TierDirectory
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.readers.cached import CachedReader
from headrace.dataio.testing.system import ManualClock
from tests.support.disks import disk, read_only
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.slow

BLOCK = 4096
SIZE = 20 * BLOCK
WHOLE = [(0, SIZE)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(**{name: random.Random(name).randbytes(SIZE) for name in "abcdef"})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    fast.mkdir()
    slow.mkdir()
    return fast, slow


Made = tuple[Engine, CachedReader]


@pytest.fixture
def tiers(store: MemoryStore, folders: tuple[Path, Path]) -> Iterator[Callable[..., Made]]:
    """Engines of two tiers with these budgets in blocks, and readers."""
    with contextlib.ExitStack() as stack:

        def make(fast: int = 30, slow: int = 100, clock: ManualClock | None = None, *, keep: bool = False) -> Made:
            engine = Engine(
                folders[0],
                fast * BLOCK,
                threads=4,
                block_bytes=BLOCK,
                clock=clock or ManualClock(),
                keep=keep,
                slower=[TierDirectory(folders[1], slow * BLOCK, keep)],
            )
            stack.callback(engine.close)
            reader = CachedReader(store, engine)
            stack.callback(reader.close)
            return engine, reader

        yield make


@pytest.fixture
def file_system(folders: tuple[Path, Path]) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of its own, in memory, on the fast tier's directory; says why where that is not allowed."""
    with contextlib.ExitStack() as stack:
        yield lambda options: stack.enter_context(disk(folders[0], options))
        gc.collect()


def used(engine: Engine) -> list[object]:
    return [tier["used_bytes"] for tier in engine.tier_stats()]


def read(reader: CachedReader, store: MemoryStore, key: str) -> None:
    assert bytes(reader.read(key, WHOLE)[0]) == store.objects[key]


def test_memory_is_filled_first_and_each_budget_is_kept(
    tiers: Callable[..., Made], store: MemoryStore, folders: tuple[Path, Path]
) -> None:
    engine, reader = tiers(30, 70, keep=True)
    for key in "abcdef" * 2:
        read(reader, store, key)
        gc.collect()
        for folder, budget in zip(folders, (30, 70), strict=True):
            assert sum(path.stat().st_blocks * 512 for path in folder.glob("*.blocks")) <= budget * BLOCK
    assert [tier["directory"] for tier in engine.tier_stats()] == [str(folder) for folder in folders]
    assert all(used(engine))
    hits = [int(str(tier["hit_bytes"])) for tier in engine.tier_stats()]
    assert all(hits)
    assert sum(hits) == engine.stats()["hit_bytes"]


def test_what_is_unlinked_and_still_held_counts_in_its_tier(tiers: Callable[..., Made], store: MemoryStore) -> None:
    engine, reader = tiers(30, 30)
    views = [reader.read(key, WHOLE)[0] for key in "ab"]
    reader.close()
    for key in "cdef":
        assert engine.open(store, key, WHOLE).result(60) is None, "the slow tier is full of what is held"
    engine.stats()
    assert used(engine) == [SIZE, SIZE]
    assert engine.stats()["dropped_but_held_bytes"] == SIZE, "and the fast one is not emptied for nothing"
    assert [bytes(view) for view in views] == [store.objects["a"], store.objects["b"]]
    del views
    gc.collect()
    assert engine.stats()["used_bytes"] == SIZE
    assert engine.open(store, "c", WHOLE).result(60) is not None, "its room is free again"


def test_a_tier_that_is_full_before_its_budget_is_gone_around(
    tiers: Callable[..., Made],
    store: MemoryStore,
    file_system: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file_system(f"size={5 * BLOCK}")
    engine, reader = tiers()
    with caplog.at_level(logging.WARNING):
        read(reader, store, "a")
    assert "No space left on device" in caplog.text, "the fault fired"
    read(reader, store, "a")
    assert used(engine)[1] == SIZE


def test_a_tier_that_becomes_read_only_is_gone_around_and_used_again_later(
    tiers: Callable[..., Made],
    store: MemoryStore,
    folders: tuple[Path, Path],
    file_system: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file_system(f"size={100 * BLOCK}")
    clock = ManualClock()
    engine, _ = tiers(clock=clock)
    with read_only(folders[0]):
        with caplog.at_level(logging.WARNING):
            assert engine.open(store, "a", WHOLE).result(60) is None, "this one read is sent to the store"
        assert "Read-only file system" in caplog.text, "the fault fired"
        lease = engine.open(store, "b", WHOLE).result(60)
        assert lease is not None
        assert [tier["paused"] for tier in engine.tier_stats()] == [True, False]
        assert used(engine)[1] == SIZE
    clock.now += RECOVER_SECONDS + 1
    assert engine.open(store, "c", [(0, BLOCK)]).result(60) is not None
    assert [tier["paused"] for tier in engine.tier_stats()] == [False, False]


def test_a_tier_that_vanishes_is_gone_around_and_without_any_the_store_is_read(
    tiers: Callable[..., Made], store: MemoryStore, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine, reader = tiers()
    folders[0].rmdir()
    with caplog.at_level(logging.WARNING):
        read(reader, store, "a")  # this one finds it out
        read(reader, store, "b")
    assert "using the other tiers" in caplog.text
    assert used(engine) == [0, SIZE]
    folders[1].rmdir()
    read(reader, store, "c")
    read(reader, store, "b")
    assert used(engine) == [0, SIZE], "what was there is still served"


def test_both_tiers_are_adopted_by_the_next_engine(tiers: Callable[..., Made], store: MemoryStore) -> None:
    engine, reader = tiers(keep=True)
    for key in "abc":
        read(reader, store, key)
    before = used(engine)
    reader.close()
    engine.close()
    after, again = tiers(keep=True)
    assert used(after) == before
    asked = store.bytes_read
    for key in "abc":
        read(again, store, key)
    assert store.bytes_read == asked, "nothing is fetched again"
