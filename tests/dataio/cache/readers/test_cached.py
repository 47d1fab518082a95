"""The engine and the reader on real files and threads."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.dataio.cache.blocks import BlockDirectory, DescriptorPool
from headrace.dataio.cache.disks import RECOVER_SECONDS
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.objects import STAT_SECONDS
from headrace.dataio.cache.readers.cached import CachedReader, PrivateReader
from headrace.dataio.core.errors import AccessDeniedError, NotFoundError, TransientError, UsageError
from headrace.dataio.core.files import private_directory
from headrace.dataio.core.metrics import REGISTRY
from headrace.dataio.testing.system import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for

BLOCK = 4096


def payload(name: str, size: int = 10 * BLOCK + 100) -> bytes:
    return random.Random(name).randbytes(size)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(a=payload("a"), b=payload("b"), c=payload("c"), empty=b"")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engine(tmp_path: Path, clock: ManualClock) -> Iterator[Engine]:
    made = Engine(tmp_path, 24 * BLOCK, threads=4, block_bytes=BLOCK, clock=clock)
    yield made
    made.close()


@pytest.fixture
def reader(store: MemoryStore, engine: Engine) -> CachedReader:
    return CachedReader(store, engine)


def test_the_bytes_are_those_of_the_object(reader: CachedReader, store: MemoryStore) -> None:
    ranges = [(0, 10), (BLOCK - 5, 10), (3 * BLOCK, 2 * BLOCK), (10 * BLOCK, 100), (7, 0)]
    for _ in range(2):
        views = reader.read("a", ranges)
        assert [bytes(v) for v in views] == [store.objects["a"][o : o + n] for o, n in ranges]
    assert store.stats == 1
    assert store.bytes_read == 4 * BLOCK + 100


def test_the_metrics_have_every_byte_that_was_read_once_somebody_looks(reader: CachedReader, engine: Engine) -> None:
    def messages() -> float:
        engine.stats()
        return sum(
            REGISTRY.get_sample_value("headrace_cache_bytes_total", {"source": s}) or 0 for s in ("cache", "store")
        )

    before = messages()
    for _ in range(3):
        reader.read("a", [(5, 100), (300, 10)])
    assert messages() - before >= 330  # of an engine that another test left there may be more


def test_views_are_read_only(reader: CachedReader) -> None:
    (view,) = reader.read("a", [(0, 10)])
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


def test_an_object_of_no_bytes_reads_as_nothing(reader: CachedReader) -> None:
    assert [bytes(v) for v in reader.read("empty", [(0, 0)])] == [b""]
    assert reader.read("empty", []) == []


def test_threads_that_want_one_block_fetch_it_once(reader: CachedReader, store: MemoryStore) -> None:
    store.gate.clear()
    with ThreadPoolExecutor(16) as pool:
        results = [pool.submit(reader.read, "a", [(5, BLOCK)]) for _ in range(16)]
        wait_for(lambda: len(store.reads) == 2)
        store.gate.set()
        assert {bytes(r.result()[0]) for r in results} == {store.objects["a"][5 : 5 + BLOCK]}
    assert sorted(store.reads) == [("a", 0, BLOCK), ("a", BLOCK, BLOCK)]


def test_a_view_keeps_its_bytes_when_its_file_is_evicted(
    reader: CachedReader, store: MemoryStore, engine: Engine
) -> None:
    (view,) = reader.read("a", [(0, 10 * BLOCK)])
    file = reader._maps._maps.copy().popitem()[0]
    for key in ("b", "c", "b", "c"):
        reader.read(key, [(0, 10 * BLOCK)])
    assert not engine.live(file)
    assert engine.stats()["dropped_but_held_bytes"] == 10 * BLOCK
    assert bytes(view) == store.objects["a"][: 10 * BLOCK]
    del view
    gc.collect()
    assert engine.stats()["dropped_but_held_bytes"] == 0
    assert bytes(reader.read("a", [(0, 10)])[0]) == store.objects["a"][:10]


def test_reads_never_stop_when_every_byte_of_the_cache_is_held(
    reader: CachedReader, store: MemoryStore, engine: Engine
) -> None:
    held = [reader.read(key, [(0, 10 * BLOCK)])[0] for key in ("a", "b", "c", "a", "b", "c")]
    assert [bytes(v) for v in held] == [store.objects[key][: 10 * BLOCK] for key in ("a", "b", "c", "a", "b", "c")]
    assert engine.stats()["used_bytes"] <= 24 * BLOCK


def test_descriptors_are_given_back(reader: CachedReader, store: MemoryStore) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    reader.read("a", [(0, 10)])
    before = count()
    for _ in range(5):
        for key in ("a", "b", "c"):
            reader.read(key, [(0, 10 * BLOCK)])
    reader.close()
    assert count() <= before + 4


def test_a_failed_fetch_raises_for_all_who_wait_and_is_tried_again(reader: CachedReader, store: MemoryStore) -> None:
    store.gate.clear()
    store.failing = 1
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(reader.read, "a", [(0, 10)]) for _ in range(4)]
        wait_for(lambda: len(store.reads) == 1)
        wait_for(lambda: reader._engine.stats()["waiting"] == 4)
        store.gate.set()
        for result in results:
            with pytest.raises(TransientError, match="the store is down"):
                result.result()
    assert bytes(reader.read("a", [(0, 10)])[0]) == store.objects["a"][:10]


def test_a_range_past_the_end_is_refused(reader: CachedReader) -> None:
    with pytest.raises(UsageError, match="a, which has 41060 bytes"):
        reader.read("a", [(0, 10), (41_000, 61)])
    with pytest.raises(UsageError):
        reader.read("a", [(-1, 10)])


def test_an_absent_object_is_not_found(reader: CachedReader) -> None:
    with pytest.raises(NotFoundError):
        reader.read("nothing", [(0, 1)])


def test_a_full_disk_degrades_to_streaming_and_recovers(
    reader: CachedReader,
    store: MemoryStore,
    engine: Engine,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader.read("a", [(0, 10)])
    full = threading.Event()
    write = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if not full.is_set():
            return write(fd, data, offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    full.set()
    for _ in range(3):
        assert bytes(reader.read("b", [(0, BLOCK + 1)])[0]) == store.objects["b"][: BLOCK + 1]
    assert engine.stats()["paused"]
    reads = len(store.reads)
    assert bytes(reader.read("a", [(0, 10)])[0]) == store.objects["a"][:10]  # what is there is still served
    assert len(store.reads) == reads
    assert sum("reading from the store directly" in r.message for r in caplog.records) == 1
    full.clear()
    clock.now += RECOVER_SECONDS
    reader.read("b", [(0, 10)])
    assert not engine.stats()["paused"]
    reads = len(store.reads)
    reader.read("b", [(5, 10)])
    assert len(store.reads) == reads


def test_a_vanished_directory_degrades_to_streaming(store: MemoryStore, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    engine = Engine(directory, 24 * BLOCK, threads=2, block_bytes=BLOCK)
    directory.rmdir()
    reader = CachedReader(store, engine)
    assert bytes(reader.read("a", [(3, BLOCK)])[0]) == store.objects["a"][3 : 3 + BLOCK]
    assert reader.read("empty", [(0, 0)])
    engine.close()


def test_a_rewritten_object_is_noticed(reader: CachedReader, store: MemoryStore, clock: ManualClock) -> None:
    reader.read("a", [(0, 10)])
    store.objects["a"] = payload("new", 5 * BLOCK)
    clock.now += STAT_SECONDS + 1
    assert bytes(reader.read("a", [(0, 10)])[0]) == store.objects["a"][:10]


def test_what_is_announced_is_there_when_it_is_read(reader: CachedReader, store: MemoryStore, engine: Engine) -> None:
    reader.announce([("a", 0, 2 * BLOCK), ("b", 100, 10), ("gone", 0, 10)])
    wait_for(lambda: engine.stats()["fetched_bytes"] == 3 * BLOCK)
    reads = len(store.reads)
    reader.read("a", [(0, 2 * BLOCK)])
    reader.read("b", [(0, BLOCK)])
    assert len(store.reads) == reads


def test_what_is_present_is_opened_at_once_and_anything_else_is_not(
    reader: CachedReader, store: MemoryStore, engine: Engine
) -> None:
    assert engine.open_present(store, "a", [(0, 10)]) is None
    reader.read("a", [(0, 10)])
    for _ in range(1000):
        lease = engine.open_present(store, "a", [(5, 10)])
        assert lease is not None
        assert lease.present == [(0, BLOCK)]
    assert len(engine._ended_holds) <= 300, "ended leases do not pile up"
    assert engine.open_present(store, "a", [(0, 2 * BLOCK)]) is None
    assert engine.open_present(store, "a", [(41_060, 10)]) is None
    assert engine.open_present(store, "b", [(0, 10)]) is None


def test_a_closed_engine_ends_every_wait(store: MemoryStore, tmp_path: Path) -> None:
    engine = Engine(tmp_path, 24 * BLOCK, threads=1, block_bytes=BLOCK)
    store.gate.clear()
    waiting = engine.open(store, "a", [(0, 10)])
    wait_for(lambda: store.reads)
    engine.close()
    with pytest.raises(TransientError, match="closed"):
        waiting.result(150)
    store.gate.set()
    with pytest.raises(TransientError, match="closed"):
        CachedReader(store, engine).read("a", [(0, 10)])


def test_a_private_reader_leaves_nothing_on_disk(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reader = PrivateReader(store)
    (view,) = reader.read("a", [(0, 100)])
    assert os.listdir(tmp_path) == []
    reader.close()
    assert bytes(view) == store.objects["a"][:100]


def mapped_of(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_a_process_that_reads_by_itself_maps_only_what_is_large(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("headrace.dataio.cache.readers.cached.COPIED_BYTES", 2 * BLOCK)
    with contextlib.closing(PrivateReader(store)) as reader:
        small = reader.read("a", [(5, BLOCK), (9 * BLOCK, 100), (7, 0)])
        assert mapped_of(tmp_path) == []
        assert [bytes(view) for view in small] == [
            store.objects["a"][o : o + n] for o, n in ((5, BLOCK), (9 * BLOCK, 100), (7, 0))
        ]
        assert all(view.readonly for view in small)
        (large,) = reader.read("a", [(5, 2 * BLOCK + 1)])
        assert len(mapped_of(tmp_path)) == 1
        assert bytes(large) == store.objects["a"][5 : 6 + 2 * BLOCK]


def test_what_a_failing_cache_disk_has_comes_from_the_store(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def preadv(fd: int, buffers: object, offset: int) -> int:
        failed.append(fd)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with contextlib.closing(PrivateReader(store)) as reader:
        reader.read("a", [(0, 10)])
        monkeypatch.setattr(os, "preadv", preadv)
        assert bytes(reader.read("a", [(3, 100)])[0]) == store.objects["a"][3:103]
    assert failed


@pytest.mark.parametrize("private", [False, True], ids=["mapped", "copied"])
def test_random_reads_under_pressure_are_exact(
    reader: CachedReader, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    if private:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        reader = PrivateReader(store)

    def some(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[tuple[memoryview, bytes]] = []
        for _ in range(150):
            key = rng.choice("abc")
            offset = rng.randrange(10 * BLOCK)
            length = rng.randrange(min(3 * BLOCK, len(store.objects[key]) - offset))
            (view,) = reader.read(key, [(offset, length)])
            kept.append((view, store.objects[key][offset : offset + length]))
            kept = kept[-rng.randrange(1, 20) :]
        for view, expected in kept:
            assert bytes(view) == expected

    with contextlib.closing(reader), ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(some, seed) for seed in range(6)]:
            done.result()


def test_the_descriptor_handed_out_cannot_write(tmp_path: Path) -> None:
    file = BlockDirectory(tmp_path, DescriptorPool(16)).create(100)
    reader = file.reader()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader.fileno(), b"x", 0)
    assert os.fstat(reader.fileno()).st_size == 100
    assert os.listdir(tmp_path) == []


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    assert private_directory(tmp_path / "x" / "y").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(AccessDeniedError, match="not a private directory"):
        private_directory(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "x" / "y")
    with pytest.raises(AccessDeniedError):
        private_directory(tmp_path / "link")


def test_a_forgotten_private_cache_ends_and_not_in_the_thread_that_collects_it(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[int](), Engine.close
    monkeypatch.setattr(Engine, "close", lambda it: (close(it), closed.append(threading.get_ident())))
    reader = PrivateReader(store)
    assert bytes(reader.read("a", [(0, 10)])[0]) == store.objects["a"][:10]
    del reader
    gc.collect()
    wait_for(lambda: closed)
    assert threading.get_ident() not in closed
