"""Files of this machine, read without a cache: real files that are replaced, truncated and removed meanwhile."""

from __future__ import annotations

import errno
import functools
import gc
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.dataio.cache.blocks import FILES, TRUSTED_SECONDS
from headrace.dataio.cache.readers import local
from headrace.dataio.cache.readers.base import open_local_reader
from headrace.dataio.cache.readers.bypass import BypassReader
from headrace.dataio.cache.readers.cached import PrivateReader
from headrace.dataio.cache.readers.local import MIN_SAMPLES, DirectReader
from headrace.dataio.core import files
from headrace.dataio.core.errors import CapacityError, NotFoundError, UsageError
from headrace.dataio.store import posix
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import JoinedObject, write_list
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import ManualClock
from headrace.loaders.fetch.sample_reader import StoreReader

SIZE = 300_000


@functools.cache
def payload(name: object, size: int = SIZE) -> bytes:
    return random.Random(str(name)).randbytes(size)


def never() -> Any:
    raise AssertionError("another reader was asked for")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "set"
    made.mkdir()
    for name in "abc":
        (made / name).write_bytes(payload(name))
    return made


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with open_store(folder) as opened:
        yield opened


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reader(store: Store, clock: ManualClock) -> Iterator[DirectReader]:
    made = DirectReader(store, never, clock)
    yield made
    made.close()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, SIZE)],
        [(10, 20), (30, 5), (35 + 512, 1000)],  # neighbours, touching and with a header between
        [(200_000, 50), (100, 50), (100, 50), (120, 0), (SIZE - 1, 1), (SIZE, 0)],
        [(100, 50), (120, 60), (120, 60), (130, 5)],  # over each other, in order
        [(n * 100, 60) for n in range(1500)],
    ],
)
def test_the_bytes_are_those_of_the_file(reader: DirectReader, ranges: Sequence[tuple[int, int]]) -> None:
    expected = [payload("a")[offset : offset + length] for offset, length in ranges]
    views = reader.read("a", ranges)
    assert [bytes(view) for view in views] == expected
    assert all(view.readonly for view in views)
    memory = [memoryview(bytearray(length)) for _, length in ranges]
    reader.read_into("a", [(offset, buffer) for (offset, _), buffer in zip(ranges, memory, strict=True)])
    assert [bytes(buffer) for buffer in memory] == expected


def test_neighbours_are_read_by_one_call_in_whatever_order_they_are_wanted(
    reader: DirectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, preadv = list[int](), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: calls.append(offset) or preadv(fd, buffers, offset))
    views = reader.read("a", [(5000, 300), (1000, 2000), (3512, 1000), (4600, 400)])
    assert [bytes(view) for view in views] == [
        payload("a")[offset : offset + length]
        for offset, length in [(5000, 300), (1000, 2000), (3512, 1000), (4600, 400)]
    ]
    assert calls == [1000]


def test_a_view_keeps_its_bytes_for_as_long_as_it_is_held_and_memory_that_is_not_held_is_used_again(
    reader: DirectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[int]()
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda size, dtype: made.append(size) or empty(size, dtype))
    held = reader.read("a", [(0, 1000), (5000, 1000)])[1][10:20]
    for offset in range(50):
        assert bytes(reader.read("b", [(offset, 1000)])[0]) == payload("b")[offset : offset + 1000]
    assert bytes(held) == payload("a")[5010:5020]
    assert len(made) <= 3  # nothing, that of what is held, and one for all others


@pytest.mark.parametrize(
    "array_of",
    [
        lambda view: np.ndarray(
            len(view), np.uint8, buffer=view
        ),  # numpy leaves out views between an array and its owner
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.asarray(view)[:],
    ],
)
def test_an_array_over_a_view_keeps_its_bytes(reader: DirectReader, array_of: Any) -> None:
    array = array_of(reader.read("a", [(100, 1000)])[0])
    for offset in range(3):
        reader.read("b", [(offset, 1000)])
    assert array.tobytes() == payload("a")[100:1100]


def test_threads_read_side_by_side(reader: DirectReader) -> None:
    def some(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            name, offset = draw.choice("abc"), draw.randrange(SIZE - 5000)
            views = reader.read(name, [(offset, 2000), (offset + 2500, 2000)])
            assert b"".join(views) == payload(name)[offset : offset + 2000] + payload(name)[offset + 2500 :][:2000]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(some, range(4)))


def test_a_file_that_becomes_shorter_is_the_stores_plain_error_and_no_crash(reader: DirectReader, folder: Path) -> None:
    whole = reader.read("a", [(0, SIZE)])[0]
    os.truncate(folder / "a", 1000)
    with pytest.raises(UsageError, match="1000"):
        reader.read("a", [(0, SIZE)])
    with pytest.raises(UsageError, match="1000"):
        reader.read_into("a", [(990, memoryview(bytearray(20)))])
    assert bytes(reader.read("a", [(0, 1000)])[0]) == payload("a", SIZE)[:1000]
    assert bytes(whole[:4]) == payload("a")[:4]


def test_a_file_that_is_replaced_or_gone_is_noticed_after_a_while(
    reader: DirectReader, folder: Path, clock: ManualClock
) -> None:
    reader.read("a", [(0, 10)])
    reader.read("b", [(0, 10)])
    (folder / "new").write_bytes(payload("new"))
    os.replace(folder / "new", folder / "a")
    (folder / "b").unlink()
    assert bytes(reader.read("a", [(0, 10)])[0]) == payload("a")[:10]  # the old one, whole
    assert bytes(reader.read("b", [(0, 10)])[0]) == payload("b")[:10]
    clock.now += TRUSTED_SECONDS
    assert bytes(reader.read("a", [(0, 10)])[0]) == payload("new")[:10]
    with pytest.raises(NotFoundError, match="does not exist"):
        reader.read("b", [(0, 10)])


def test_a_bad_disk_is_asked_once_more_by_the_store(reader: DirectReader, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, failed = os.preadv, list[int]()

    def once(fd: int, buffers: Any, offset: int) -> int:
        if not failed:
            failed.append(offset)
            raise OSError(errno.EIO, "bad sector")
        return preadv(fd, buffers, offset)

    reader.read("a", [(0, 1)])
    monkeypatch.setattr(os, "preadv", once)
    assert bytes(reader.read("a", [(70, 10)])[0]) == payload("a")[70:80]
    assert failed == [70]


def test_descriptors_are_bounded_and_given_back(tmp_path: Path) -> None:
    for number in range(FILES + 20):
        (tmp_path / str(number)).write_bytes(b"0123456789")
    before = descriptors()
    with open_store(tmp_path) as store:
        reader = DirectReader(store, never)
        for number in range(FILES + 20):
            assert bytes(reader.read(str(number), [(3, 2)])[0]) == b"34"
        assert descriptors() == before + FILES
        reader.close()
    assert descriptors() == before


def test_where_too_many_files_are_open_ours_are_given_back_first(
    reader: DirectReader, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.read("a", [(0, 1)])
    before, tries = descriptors(), list[int]()
    opened = type(store).open_file

    def scarce(self: Store, key: str) -> int | None:
        tries.append(descriptors())
        if tries[-1] >= before:
            raise CapacityError("too many open files")
        return opened(self, key)

    monkeypatch.setattr(type(store), "open_file", scarce)
    assert bytes(reader.read("b", [(0, 4)])[0]) == payload("b")[:4]
    assert tries == [before, before - 1]


def test_an_evicted_file_stays_open_for_who_is_reading_it(
    reader: DirectReader, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, reading, go_on = os.preadv, threading.Event(), threading.Event()

    def slow(fd: int, buffers: Any, offset: int) -> int:
        if offset == 77:
            reading.set()
            assert go_on.wait(150)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.read, "a", [(77, 10)])
        assert reading.wait(150)
        clock.now += TRUSTED_SECONDS
        reader.read("a", [(0, 10)])  # opened anew
        reader.close()
        go_on.set()
        assert bytes(found.result()[0]) == payload("a")[77:87]


def test_announced_ranges_are_named_to_the_kernel_once_and_only_where_it_has_them_not(
    reader: DirectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, cached = list[tuple[int, int]](), False
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: output.append((offset, length)))
    monkeypatch.setattr(local, "mostly_cached", lambda fd, offset, length: cached)
    upcoming = [("a", 1000 * n, 500) for n in range(6)]
    reader.announce(upcoming[:4])
    reader.announce([*upcoming[2:], ("gone", 0, 10)])
    assert output == [(1000 * n, 500) for n in range(6)]
    cached, before = True, len(output)
    reader.announce([("b", 1000 * n, 500) for n in range(100)])
    assert len(output) == before


def test_no_more_is_named_than_the_page_cache_should_be_asked_for(
    reader: DirectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = list[int]()
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: output.append(length))
    monkeypatch.setattr(local, "mostly_cached", lambda *_: False)
    reader.announce([("a", n, local.ADVISED_BYTES // 4) for n in range(10)])
    assert len(output) == 4


def test_where_all_is_there_few_ranges_are_looked_at_and_what_is_not_there_is_found_again(
    reader: DirectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, output, cached = list[int](), list[int](), True
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: output.append(offset))
    monkeypatch.setattr(local, "mostly_cached", lambda fd, offset, length: looked.append(offset) or cached)
    upcoming = [("a", n, 1) for n in range(40 * MIN_SAMPLES)]
    for first in range(0, 20 * MIN_SAMPLES, 10):
        reader.announce(upcoming[first : first + 25])
    assert looked[:MIN_SAMPLES] == list(range(MIN_SAMPLES))
    assert set(np.diff(looked[MIN_SAMPLES - 1 :])) == {MIN_SAMPLES}
    assert looked[-1] > 19 * MIN_SAMPLES
    cached, before = False, looked[-1]
    reader.announce(upcoming[20 * MIN_SAMPLES :])
    assert output[0] - before <= MIN_SAMPLES
    assert output == list(range(output[0], 40 * MIN_SAMPLES))


def test_what_lies_beyond_the_limit_is_named_when_its_turn_comes(
    reader: DirectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = list[int]()
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: output.append(offset))
    monkeypatch.setattr(local, "mostly_cached", lambda *_: False)
    upcoming = [("a", n, local.ADVISED_BYTES // 4) for n in range(10)]
    for first in range(10):
        reader.announce(upcoming[first:])
        assert output == list(range(min(10, first + 4)))


def test_files_of_a_network_go_through_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = folder.parent / "mountinfo"
    mounts.write_text("22 1 0:9 / / rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(posix, "is_local", lambda path: files.is_local(path, mounts))
    made = list[str]()
    leased = PrivateReader._get_lease
    monkeypatch.setattr(
        PrivateReader, "_get_lease", lambda self, key, ranges: made.append(key) or leased(self, key, ranges)
    )
    with open_store(folder) as store:
        assert store.open_file("a") is None
        reader = open_local_reader(store)
        reader.announce([("a", 0, 10)])
        assert bytes(reader.read("a", [(5, 10)])[0]) == payload("a")[5:15]
        memory = memoryview(bytearray(10))
        reader.read_into("a", [(5, memory)])
        assert bytes(memory) == payload("a")[5:15]
        reader.close()
    assert made == ["a", "a"]


def test_of_what_is_announced_only_that_lies_elsewhere_is_left_to_the_other_reader(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(StoreReader):
        output: ClassVar[list[Any]] = []

        def announce(self, upcoming: Any) -> None:
            self.output.append(list(upcoming))

    with open_store(tmp_path, storage_options={"mounts": {"far": {"url": f"file://{folder}"}}}) as store:
        (tmp_path / "near").write_bytes(payload("near"))
        far = type(store).open_file
        monkeypatch.setattr(
            type(store), "open_file", lambda self, key: None if key.startswith("mounts/far/") else far(self, key)
        )
        reader = DirectReader(store, lambda: Other(store))
        assert bytes(reader.read("mounts/far/a", [(3, 5)])[0]) == payload("a")[3:8]
        reader.announce([("near", 0, 5), ("mounts/far/a", 7, 5), ("gone", 0, 5), ("mounts/far/b", 0, 9)])
        assert Other.output == [[("mounts/far/a", 7, 5), ("mounts/far/b", 0, 9)]]
        reader.close()


def test_what_the_store_follows_no_link_to_is_not_opened_either(reader: DirectReader, folder: Path) -> None:
    (folder / "link").symlink_to(folder / "a")
    with pytest.raises(Exception, match="symbolic link"):
        reader.read("link", [(0, 1)])


@pytest.mark.parametrize("kind", ["directory", "mounted", "bucket"])
def test_who_reads_is_chosen_by_where_the_objects_are(kind: str, folder: Path) -> None:
    options: dict[str, Any] = {"mounts": {"near": {"url": f"file://{folder}"}}} if kind == "mounted" else {}
    url = str(folder) if kind == "directory" else "s3://bucket/prefix"
    with open_store(url, storage_options=options) as store:
        reader = open_local_reader(store)
        assert isinstance(reader, BypassReader if kind == "bucket" else DirectReader)
        if kind == "mounted":
            assert bytes(reader.read("mounts/near/a", [(1, 3)])[0]) == payload("a")[1:4]
        reader.close()


# joined shards


@pytest.fixture
def joined(tmp_path: Path, folder: Path) -> Iterator[tuple[Mounts, str, bytes]]:
    """A store with a joined shard of three local files, the shard, and its bytes."""
    with Mounts(open_store(tmp_path / "dataset"), {"m1": open_store(folder)}, joined=True) as store:
        shard, _ = write_list(store, 0, [JoinedObject(key=f"mounts/m1/{name}", size=SIZE) for name in "abc"])
        yield store, shard, b"".join(map(payload, "abc"))


def test_a_joined_shard_of_local_files_is_read_from_them(joined: tuple[Mounts, str, bytes]) -> None:
    store, shard, data = joined
    reader = DirectReader(store, never)
    ranges = [(0, 10), (SIZE - 7, 7), (SIZE, 100), (2 * SIZE + 5, SIZE - 5), (3, 0)]
    expected = [data[at : at + length] for at, length in ranges]
    assert [bytes(view) for view in reader.read(shard, ranges)] == expected
    buffers = [bytearray(length) for _, length in ranges]
    pieces = [(at, memoryview(b)) for (at, _), b in zip(ranges, buffers, strict=True)]
    reader.announce([(shard, at, length) for at, length in ranges if length])
    for _ in reader.read_each([(shard, pieces), (shard, pieces)]):
        assert [bytes(b) for b in buffers] == expected
    reader.close()


def test_a_missing_file_of_a_joined_shard_fails_alone(joined: tuple[Mounts, str, bytes], folder: Path) -> None:
    store, shard, data = joined
    (folder / "b").unlink()
    reader = DirectReader(store, never)
    assert bytes(reader.read(shard, [(5, 10)])[0]) == data[5:15]
    reader.announce([(shard, SIZE, 10)])
    with pytest.raises(NotFoundError):
        reader.read(shard, [(SIZE, 10)])
    (folder / "c").write_bytes(b"short")
    with pytest.raises(UsageError):
        reader.read(shard, [(2 * SIZE, 10)])
    reader.close()
