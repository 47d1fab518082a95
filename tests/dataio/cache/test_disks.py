"""What one engine leaves, the next adopts, and trusts nothing of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from headrace.dataio.cache.announcements import Forecast
from headrace.dataio.cache.blocks import DescriptorPool
from headrace.dataio.cache.disks import adopt
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.readers.cached import CachedReader
from headrace.dataio.cache.scheduling import MIN_SAMPLES, FetchWindow
from tests.support.memory_store import MemoryStore

BLOCK = 4096


def payload(name: str, size: int = 10 * BLOCK + 100) -> bytes:
    return random.Random(name).randbytes(size)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(a=payload("a"), b=payload("b"))


def engine(directory: Path, budget: int = 64 * BLOCK) -> Engine:
    return Engine(directory, budget, threads=4, block_bytes=BLOCK, keep=True)


def read(
    directory: Path, store: MemoryStore, key: str = "a", ranges: tuple[tuple[int, int], ...] = ((0, 41060),)
) -> bytes:
    """Through an engine that lives for this read alone."""
    made = engine(directory)
    reader = CachedReader(store, made)
    got = b"".join(bytes(view) for view in reader.read(key, ranges))
    reader.close()
    made.close()
    return got


def test_the_next_engine_reads_from_disk_what_the_last_one_fetched(tmp_path: Path, store: MemoryStore) -> None:
    read(tmp_path, store, ranges=((0, 3 * BLOCK), (10 * BLOCK, 100)))
    before = store.bytes_read
    assert (
        read(tmp_path, store, ranges=((5, 100), (10 * BLOCK, 100)))
        == store.objects["a"][5:105] + store.objects["a"][-100:]
    )
    assert store.bytes_read == before
    assert read(tmp_path, store) == store.objects["a"]
    assert store.bytes_read == len(store.objects["a"]), "only what was missing"


def test_what_rotted_meanwhile_is_fetched_again(tmp_path: Path, store: MemoryStore) -> None:
    read(tmp_path, store)
    (path,) = tmp_path.glob("*.blocks")
    with path.open("r+b") as file:
        file.seek(2 * BLOCK + 7)
        file.write(b"rot")
    before = store.bytes_read
    assert read(tmp_path, store) == store.objects["a"]
    assert store.bytes_read == before + BLOCK
    assert read(tmp_path, store) == store.objects["a"]
    assert store.bytes_read == before + BLOCK, "and is right on the disk from then on"


def test_an_object_that_changed_meanwhile_is_fetched_anew(tmp_path: Path, store: MemoryStore) -> None:
    read(tmp_path, store)
    store.objects["a"] = payload("other", 41061)
    assert read(tmp_path, store, ranges=((0, 41061),)) == store.objects["a"]
    assert len(list(tmp_path.glob("*.blocks"))) == 1, "the old one is gone"


@pytest.mark.parametrize("damage", ["cut", "head", "size", "no map", "no file", "link", "torn"])
def test_files_that_do_not_fit_are_removed_and_nothing_is_lost(tmp_path: Path, store: MemoryStore, damage: str) -> None:
    read(tmp_path, store)
    (blocks,), (map_path,) = tmp_path.glob("*.blocks"), tmp_path.glob("*.map")
    match damage:
        case "cut":
            os.truncate(map_path, 20)
        case "head":
            map_path.write_bytes(b"x" * 200)
        case "size":
            os.truncate(blocks, 5)
        case "no map":
            map_path.unlink()
        case "no file":
            blocks.unlink()
        case "link":
            outside = tmp_path / "elsewhere"
            outside.write_bytes(blocks.read_bytes())
            blocks.unlink()
            blocks.symlink_to(outside)
        case "torn":
            os.truncate(map_path, map_path.stat().st_size - 5)
    assert len(list(adopt(tmp_path, BLOCK, DescriptorPool(16)))) == (1 if damage == "torn" else 0)
    assert read(tmp_path, store) == store.objects["a"]
    assert len(list(tmp_path.glob("*.blocks"))) == len(list(tmp_path.glob("*.map"))) == 1


def test_what_is_evicted_leaves_no_file(tmp_path: Path, store: MemoryStore) -> None:
    made = engine(tmp_path, budget=14 * BLOCK)
    reader = CachedReader(store, made)
    for key in "abab":
        reader.read(key, [(0, 41060)])
    assert len(list(tmp_path.glob("*.blocks"))) == len(list(tmp_path.glob("*.map"))) == 1
    reader.close()
    made.close()


def test_what_is_above_a_smaller_budget_is_removed(tmp_path: Path, store: MemoryStore) -> None:
    for key in "ab":
        read(tmp_path, store, key)
    made = engine(tmp_path, budget=14 * BLOCK)
    assert made.stats()["adopted_bytes"] == 41060
    assert len(list(tmp_path.glob("*.blocks"))) == 1
    made.close()


def test_a_late_fetch_is_asked_for_again_and_the_first_answer_counts(tmp_path: Path) -> None:
    store = MemoryStore(a=payload("a", 40 * BLOCK))
    made = Engine(tmp_path, 64 * BLOCK, threads=4, block_bytes=BLOCK)
    reader = CachedReader(store, made)
    for block in range(MIN_SAMPLES):
        reader.read("a", [(block * BLOCK, BLOCK)])
    made._fetcher.window.fetches = 1000  # of which a few may be asked for twice
    store.stuck = 1
    assert bytes(reader.read("a", [(30 * BLOCK, BLOCK)])[0]) == store.objects["a"][30 * BLOCK : 31 * BLOCK]
    assert store.reads.count(("a", 30 * BLOCK, BLOCK)) == 2
    assert made.prefetch_stats()["hedged"] >= 1
    store.let_go.set()
    made.close()


def test_the_window_is_bandwidth_times_latency_and_stops_growing_when_more_requests_only_wait() -> None:
    window, size = FetchWindow(2, 10**9), 1000
    for _ in range(10):  # four at once, each 0.1 s: 40 kB/s
        before = window.delivered
        for _ in range(4):
            window.fetched(size, 0.1, before)
            window.stored(0.1)
    assert window.bytes() == pytest.approx(2 * 40_000 * 0.1)
    for _ in range(10):  # eight at once take twice as long
        before = window.delivered
        for _ in range(8):
            window.fetched(size, 0.2, before)
            window.stored(0.2)
    assert window.bytes() <= 2 * 40_000 * 0.2 + 1


def test_what_is_being_written_to_the_cache_is_in_flight_too() -> None:
    window = FetchWindow(1, 10**9)
    window.fetched(1000, 0.1, 0)
    assert window.bytes() == 1, "nothing was written yet"
    window.stored(0.3)
    assert window.bytes() == pytest.approx(2 * 10_000 * 0.3)


def test_hedging_is_bounded_by_a_share_of_all_fetches() -> None:
    window = FetchWindow(1, 10)
    assert window.late_after() is None, "nothing is known yet"
    for _ in range(MIN_SAMPLES):
        window.fetched(1, 0.1, 0)
    assert window.late_after() is None, "one in a hundred"
    window.fetches = 1000
    assert window.late_after() == pytest.approx(0.1)
    window.hedges = 10
    assert window.late_after() is None


def test_a_loader_s_pace_says_when_its_reads_are_due_and_how_wrong_that_was() -> None:
    forecast, reads = Forecast(), [("a", n) for n in range(100)]
    forecast.announced(1, reads[:20], 0.0)
    due = forecast.announced(1, reads[10:30], 1.0)
    assert due.at(0) == pytest.approx(1.1)
    assert due.from_to(9, 10) == [pytest.approx(2.0)]
    forecast.announced(1, reads[20:40], 2.5)  # half a second later than foreseen
    report = forecast.report()
    assert report["forecasts"] == 10
    assert report["forecast_error_median_s"] == pytest.approx(0.95)
    assert forecast.announced(1, [("b", 0)], 3.0).count == 1, "a loader that was moved is judged by nothing"
    assert forecast.report()["forecasts"] == 10
