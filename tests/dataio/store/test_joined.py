"""A joined shard reads as the bytes of its objects, one after the other, and a list opens nothing that it may not."""

from __future__ import annotations

import json
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import blake3
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    NotFoundError,
    RangeError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.json import seal
from headrace.dataio.store import joined
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store
from headrace.dataio.store.joined import JoinedObject, write_files, write_list
from headrace.dataio.store.mounts import MAX_MOUNTS, PREFIX, Mounts, describe_damage, open_mounts, url_of
from headrace.dataio.store.open import open_location, open_store
from headrace.dataio.store.wrappers import Wrapper
from headrace.dataio.testing.conformance import StoreConformance


def memory() -> Store:
    """A new store in memory, which counts as remote."""
    return open_store(f"memory://{uuid.uuid4().hex}")


class SplitStore(Store):
    """Stores every object as a joined shard of up to four objects: two of the base, two of a mounted store."""

    def __init__(self, base: Store, other: Store) -> None:
        self.inner, self._other = Mounts(base, {"m1": other}, joined=True), other
        self._keys, self._count = dict[str, str](), 0

    @property
    def location(self) -> Location:
        return self.inner.location

    def put(self, key: str, data: Buffer) -> None:
        data, objects = bytes(data), []
        cuts = sorted(random.Random(self._count).choices(range(len(data) + 1), k=3))
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True)):
            name = f"parts/{self._count}-{number}"
            (self._other if number % 2 else self.inner).put(name, data[start:end])
            prefix = "mounts/m1/" if number % 2 else ""
            objects.append(JoinedObject(key=prefix + name, size=end - start, modified=1.5))
        self._keys[key], _ = write_list(self.inner, self._count, objects)
        self._count += 1

    def _of(self, key: str) -> str:
        if key not in self._keys:
            raise NotFoundError(f"{key} does not exist")
        return self._keys[key]

    def get(self, key: str, *, max_bytes: int = 64 << 20) -> bytes:
        try:
            return self.inner.get(self._of(key), max_bytes=max_bytes)
        except CapacityError as error:
            raise CapacityError(f"{key}: {error.message}") from error

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        try:
            self.inner.get_into(self._of(key), offset, buffer)
        except RangeError as error:
            raise RangeError(f"{key}: {error.message}") from error

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.inner.get_ranges_into(self._of(key), ranges)

    def stat(self, key: str) -> ObjectInfo:
        return self.inner.stat(self._of(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise NotImplementedError

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        raise NotImplementedError

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        raise NotImplementedError

    def delete_many(self, keys: Iterable[str]) -> None:
        raise NotImplementedError


@pytest.fixture(params=["posix", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def split(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SplitStore]:
    if request.param == "s3":
        url = request.getfixturevalue("s3_url")
        base, other = open_store(f"{url}/base"), open_store(f"{url}/other")
    elif request.param == "posix":
        base, other = open_store(tmp_path / "base"), open_store(tmp_path / "other")
    else:
        base, other = memory(), memory()
    with SplitStore(base, other) as store:
        yield store
        store.inner.close()


class TestReads:
    """The reads of the store contract."""

    @pytest.fixture
    def store(self, split: SplitStore) -> SplitStore:
        return split

    test_what_was_put_is_read_back = StoreConformance.test_what_was_put_is_read_back
    test_an_object_above_the_readers_limit = StoreConformance.test_an_object_above_the_readers_limit_is_a_capacity_error
    test_a_range_fills_the_buffer = StoreConformance.test_a_range_fills_the_buffer
    test_a_range_past_the_end = StoreConformance.test_a_range_past_the_end_is_a_usage_error
    test_many_ranges = StoreConformance.test_many_ranges_of_any_order_size_and_overlap_are_filled
    test_a_buffer_that_cannot_be_filled = StoreConformance.test_a_buffer_that_cannot_be_filled_is_refused


@pytest.fixture
def base(tmp_path: Path) -> Store:
    return open_store(tmp_path / "base")


@pytest.fixture
def clips(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "clips")
    store.put("a b.mp4", b"0123456789")
    store.put("sub/b.mp4", b"abcdef")
    return store


def listed(store: Store, *keys: str) -> list[JoinedObject]:
    infos = [(key, store.stat(key)) for key in keys]
    return [JoinedObject(key=f"mounts/m1/{key}", size=info.size, modified=info.modified) for key, info in infos]


@pytest.fixture
def store(base: Store, clips: Store) -> Iterator[Mounts]:
    with Mounts(base, {"m1": clips}, joined=True) as made:
        yield made


def test_a_shard_is_its_objects_one_after_the_other(store: Mounts, clips: Store) -> None:
    made = write_files(store, 0, b"{}.,")
    shard, size = write_list(store, 0, [made, *listed(clips, "a b.mp4", "sub/b.mp4")])
    assert shard.startswith("mounts/joined/00000000-")
    assert made.key.startswith("files/00000000-")
    assert (size, store.get(shard)) == (20, b"{}.,0123456789abcdef")
    assert store.stat(shard).size == 20
    assert store.stat(shard).modified == clips.stat("sub/b.mp4").modified
    assert [info.key for info in store.list("mounts/joined/")] == [shard]
    assert [info.size for info in store.list("mounts/joined/")] == [20]
    assert list(store.list_folders("mounts/joined/")) == []
    assert "joined" in list(store.list_folders("mounts/"))


def test_pieces_are_passed_on_with_offsets_of_the_shard(store: Mounts, clips: Store) -> None:
    shard, _ = write_list(store, 0, listed(clips, "a b.mp4", "sub/b.mp4"))
    for offset, length in ((2, 3), (12, 4), (8, 6), (0, 0)):
        taken = bytearray(length)

        def take(at: int, piece: memoryview, taken: bytearray = taken, offset: int = offset) -> None:
            taken[at - offset : at - offset + len(piece)] = piece

        store.get_pieces(shard, offset, memoryview(bytearray(length)), take)
        assert taken == b"0123456789abcdef"[offset : offset + length]


def test_only_a_shard_of_one_object_is_a_local_file(store: Mounts, clips: Store) -> None:
    one, _ = write_list(store, 0, listed(clips, "sub/b.mp4"))
    two, _ = write_list(store, 1, listed(clips, "a b.mp4", "sub/b.mp4"))
    descriptor = store.open_file(one)
    assert descriptor is not None
    with os.fdopen(descriptor, "rb") as file:
        assert file.read() == b"abcdef"
    assert store.open_file(two) is None


def test_equal_lists_have_equal_names(store: Mounts, clips: Store) -> None:
    objects = listed(clips, "sub/b.mp4")
    assert write_list(store, 3, objects) == write_list(store, 3, objects)
    assert write_list(store, 4, objects) != write_list(store, 3, objects)


def test_joined_shards_are_read_only(store: Mounts, clips: Store) -> None:
    shard, _ = write_list(store, 0, listed(clips, "sub/b.mp4"))
    assert store.joined is not None
    inner = shard.rpartition("/")[2]
    for target, key in ((store, shard), (store.joined, inner)):
        writes: list[Callable[[Store, str], object]] = [
            lambda target, key: target.put(key, b""),
            lambda target, key: target.put_if_absent(key, b""),
            lambda target, key: target.put_multipart(key, [b""]),
            lambda target, key: target.delete_many([key]),
        ]
        for write in writes:
            with pytest.raises(UnsupportedError, match="read-only"):
                write(target, key)
    assert store.get(shard) == b"abcdef"


def test_its_location_opens_it_again_also_for_another_process(store: Mounts, clips: Store) -> None:
    shard, _ = write_list(store, 0, listed(clips, "a b.mp4"))
    with open_location(store.location) as again:
        assert again.location == store.location
        assert again.get(shard) == b"0123456789"


@pytest.mark.parametrize(
    "described",
    [
        {"joined": {"url": "file:///etc"}},
        {"joined": {"url": ""}},
        {"m1": {"url": "joined:"}},
        {"m1": {"url": "joined://x"}},
    ],
)
def test_the_reserved_name_has_the_reserved_url(base: Store, described: object) -> None:
    with pytest.raises((UsageError, UnsupportedError)):
        open_mounts(base, described, open_store)


def test_the_number_of_mounts_stays_bounded(base: Store, clips: Store) -> None:
    Mounts(base, {f"m{i}": clips for i in range(MAX_MOUNTS)}, joined=True)
    with pytest.raises(UsageError):
        Mounts(base, {f"m{i}": clips for i in range(MAX_MOUNTS + 1)}, joined=True)


# errors name the object


def test_errors_name_the_object_and_its_change(store: Mounts, clips: Store, tmp_path: Path) -> None:
    shard, _ = write_list(store, 0, listed(clips, "a b.mp4", "sub/b.mp4"))
    url = f"file://{tmp_path}/clips/sub/b.mp4"
    assert url_of(store, shard, 12) == url_of(Wrapper(store), shard, 12) == url
    assert url_of(store, shard).endswith(shard)
    assert describe_damage(store, shard, 12) == url
    assert describe_damage(store, "a", 0) == "a"
    clips.put("sub/b.mp4", b"abcdeX")
    os.utime(tmp_path / "clips/sub/b.mp4", (1e9, 1e9))
    assert describe_damage(store, shard, 0, 12).startswith(f"{url} (it was modified at 2001-09-09T01:46:40")
    clips.put("sub/b.mp4", b"abc")
    assert describe_damage(Wrapper(store), shard, 12) == f"{url} (it has 3 bytes, and had 6 when it was indexed)"
    with pytest.raises(RangeError, match=r"clips/sub/b\.mp4.*3 bytes"):
        store.get(shard)
    clips.delete_many(["sub/b.mp4"])
    assert describe_damage(store, shard, 12) == f"{url} (it does not exist any more)"
    with pytest.raises(NotFoundError, match=r"clips/sub/b\.mp4"):
        store.get(shard)


@pytest.mark.parametrize(("remote", "seconds", "said"), [(False, 0.5, True), (True, 0.5, False), (True, 5.0, True)])
def test_times_of_remote_objects_have_few_digits(
    base: Store, clips: Store, remote: bool, seconds: float, said: bool
) -> None:
    other = memory() if remote else clips
    other.put("x", b"x")
    one = JoinedObject(key="mounts/m1/x", size=1, modified=other.stat("x").modified - seconds)
    with Mounts(base, {"m1": other}, joined=True) as store:
        shard, _ = write_list(store, 0, [one])
        assert ("it was modified" in describe_damage(store, shard, 0)) is said


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_missing_object_does_not_damage_its_neighbours(store: Mounts, clips: Store, damage: str) -> None:
    shard, _ = write_list(store, 0, listed(clips, "a b.mp4", "sub/b.mp4", "a b.mp4"))
    clips.delete_many(["sub/b.mp4"])
    if damage == "short":
        clips.put("sub/b.mp4", b"abc")
    block = bytearray(b"x" * 26)
    store.get_into(shard, 0, memoryview(block))
    assert block == b"0123456789" + bytes(6) + b"0123456789"
    pieces = bytearray(b"x" * 12)
    store.get_pieces(shard, 8, memoryview(pieces), lambda at, piece: None)
    assert pieces == b"89" + bytes(6) + b"0123"
    alone = bytearray(6)
    for read in (
        lambda: store.get_into(shard, 10, memoryview(alone)),
        lambda: store.get_ranges_into(shard, [(0, memoryview(block)), (10, memoryview(alone))]),
        lambda: store.get(shard),
    ):
        with pytest.raises((NotFoundError, RangeError), match=r"sub/b\.mp4"):
            read()


def test_a_missing_list_is_named(store: Mounts, clips: Store) -> None:
    shard, _ = write_list(store, 0, listed(clips, "sub/b.mp4"))
    name = shard.rpartition("/")[2]
    store.delete_many([f"joined/{name}.json"])
    with pytest.raises(NotFoundError, match=name):
        store.get(shard)
    assert describe_damage(store, shard, 0) == shard
    for wrong in ("x", "1-0", f"{name}x", f"../{name}", "0" * 40):
        with pytest.raises((NotFoundError, UsageError)):
            store.get("mounts/joined/" + wrong)


# hostile lists


def stored(store: Store, document: object, *, sealed: bool = True) -> str:
    data = json.dumps(document, indent=1).encode() + b"\n"
    data = seal(data) if sealed else data
    name = f"00000000-{blake3.blake3(data).hexdigest(16)}"
    store.put(f"joined/{name}.json", data)
    return f"mounts/joined/{name}"


def entry(**changes: object) -> dict[str, object]:
    return {"key": "mounts/m1/sub/b.mp4", "size": 6, "modified": 1.0, **changes}


HOSTILE: dict[str, Any] = {
    "no objects": [],
    "not a list": 7,
    "too many": [entry()] * (joined.LIST_OBJECTS + 1),
    "a parent": [entry(key="../secret")],
    "an absolute path": [entry(key="/etc/passwd")],
    "a control character": [entry(key="a\nb")],
    "a joined shard": [entry(key="mounts/joined/00000000-" + "0" * 32)],
    "another mount": [entry(key="mounts/m2/x")],
    "a mount itself": [entry(key="mounts/m1")],
    "a negative size": [entry(size=-1)],
    "an immense size": [entry(size=1 << 60)],
    "a size of text": [entry(size="6")],
    "a time of text": [entry(modified="now")],
    "no key": [{"size": 6, "modified": None}],
}


@pytest.mark.parametrize("objects", HOSTILE.values(), ids=HOSTILE)
def test_a_list_that_cannot_be_meant_is_refused(store: Mounts, objects: object) -> None:
    shard = stored(store, {"format": 1, "objects": objects})
    for read in (store.get, store.stat, store.open_file):
        with pytest.raises(CorruptionError):
            read(shard)


def test_a_list_is_checked_by_its_digests(store: Mounts) -> None:
    good = stored(store, {"format": 1, "objects": [entry()]})
    assert store.get(good) == b"abcdef"
    with pytest.raises(CorruptionError, match="digest"):
        store.get(stored(store, {"format": 1, "objects": [entry()]}, sealed=False))
    with pytest.raises(UnsupportedError, match="upgrade"):
        store.get(stored(store, {"format": 2, "objects": [entry()]}))
    name = good.rpartition("/")[2]
    other = f"{name[:-1]}{'0' if name[-1] != '0' else '1'}"
    store.put(f"joined/{other}.json", store.get(f"joined/{name}.json"))
    with pytest.raises(CorruptionError, match="its name"):
        store.get(f"mounts/joined/{other}")
    body = b'{\n "format": 1,\n "objects": [],\n "objects": [{"key": "a", "size": 1}]\n}\n'
    data = seal(body)
    twice = f"00000000-{blake3.blake3(data).hexdigest(16)}"
    store.put(f"joined/{twice}.json", data)
    with pytest.raises(CorruptionError):
        store.get(f"mounts/joined/{twice}")


def test_a_long_list_is_refused_before_it_is_read(store: Mounts) -> None:
    shard = stored(store, {"format": 1, "objects": [entry()], "more": "x" * joined.LIST_BYTES})
    with pytest.raises(CapacityError):
        store.get(shard)


def test_the_writer_refuses_what_readers_refuse(store: Mounts) -> None:
    one = JoinedObject(key="a", size=1)
    for objects in ([], [one] * (joined.LIST_OBJECTS + 1), [JoinedObject(key="a//b", size=1)]):
        with pytest.raises(UsageError):
            write_list(store, 0, objects)
    infinite = JoinedObject(key="a", size=1, modified=float("inf"))
    with pytest.raises(UsageError):
        write_list(store, 0, [infinite])


# memory and requests


def test_lists_in_memory_are_bounded(store: Mounts, clips: Store, base: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[str]()
    monkeypatch.setattr(joined, "LIST_CACHE_BYTES", 2500)
    shards = [write_list(store, number, listed(clips, "sub/b.mp4"))[0] for number in range(8)]
    original = base.get
    monkeypatch.setattr(base, "get", lambda key, max_bytes: reads.append(key) or original(key, max_bytes=max_bytes))
    for shard in [*shards, shards[-1], shards[-1], shards[0]]:
        assert store.stat(shard).size == 6
    assert len(reads) == 9
    assert store.joined is not None
    assert store.joined._cached_bytes <= 2500


class SlowLists(Wrapper):
    """Counts the reads of lists. The first one waits until `go` is set."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads, self.go, self.failing = 0, threading.Event(), False

    def get(self, key: str, **limits: Any) -> bytes:
        if key.startswith(joined.LIST_FOLDER):
            self.reads += 1
            assert self.go.wait(30)
            if self.failing:
                raise TransientError("the store is gone")
        return self.inner.get(key, **limits)


@pytest.mark.parametrize("failing", [False, True])
def test_threads_that_need_one_list_at_the_same_time_read_it_once(
    base: Store, failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLists(base)
    base.put("a", b"0123456789")
    key, _ = write_list(base, 0, [JoinedObject(key="a", size=10)])
    store, slow.failing, asked = Mounts(slow, {}, joined=True), failing, threading.Semaphore(0)
    objects = joined.JoinedObjects.objects
    monkeypatch.setattr(joined.JoinedObjects, "objects", lambda *given: (asked.release(), objects(*given))[1])
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(store.get, key) for _ in range(8)]
        for _ in reads:
            assert asked.acquire(timeout=30)
        slow.go.set()
        wait(reads)
    assert {type(one.exception()) for one in reads} == {TransientError if failing else type(None)}
    assert failing or slow.reads == 1
    slow.failing = False
    assert store.get(key) == b"0123456789", "an error is not kept"


def test_ranges_of_one_object_are_one_call_and_remote_objects_are_read_at_the_same_time() -> None:
    barrier, calls = threading.Barrier(3, timeout=60), list[tuple[str, int]]()

    class Meeting(Wrapper):
        def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
            calls.append((key, len(ranges)))
            barrier.wait()
            super().get_ranges_into(key, ranges)

    remote = Meeting(memory())
    for name in "abc":
        remote.put(name, name.encode() * 10)
    with Mounts(memory(), {"m1": remote}, joined=True) as store:
        objects = [JoinedObject(key=f"mounts/m1/{name}", size=10) for name in "abc"]
        shard, _ = write_list(store, 0, objects)
        buffers = [bytearray(5), bytearray(14), bytearray(2)]
        store.get_ranges_into(shard, [(at, memoryview(b)) for at, b in zip([0, 8, 28], buffers, strict=True)])
    assert [bytes(b) for b in buffers] == [b"aaaaa", b"aabbbbbbbbbbcc", b"cc"]
    assert sorted(calls) == [("a", 2), ("b", 1), ("c", 2)]


def test_all_reads_have_ended_when_one_fails() -> None:
    started, failed, ended = threading.Event(), threading.Event(), threading.Event()

    class Failing(Wrapper):
        def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
            if key == "a":
                assert started.wait(60)
                failed.set()
                raise NotFoundError("a is not there")
            started.set()
            assert failed.wait(60)
            super().get_ranges_into(key, ranges)
            ended.set()

    remote = Failing(memory())
    remote.put("b", b"b")
    with Mounts(memory(), {"m1": remote}, joined=True) as store:
        shard, _ = write_list(store, 0, [JoinedObject(key=f"mounts/m1/{name}", size=1) for name in "ab"])
        with pytest.raises(NotFoundError):
            store.get(shard)
        assert ended.is_set()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=8),
)
def test_random_ranges_equal_those_of_the_concatenation(sizes: list[int], ranges: list[tuple[float, float]]) -> None:
    base, other, objects, whole = memory(), memory(), list[JoinedObject](), b""
    for number, size in enumerate(sizes):
        data = random.Random(number).randbytes(size)
        (other if number % 2 else base).put(f"o{number}", data)
        objects.append(JoinedObject(key=f"{f'{PREFIX}m1/' if number % 2 else ''}o{number}", size=size))
        whole += data
    with Mounts(base, {"m1": other}, joined=True) as store:
        shard, size = write_list(store, 0, objects)
        assert (size, store.get(shard)) == (len(whole), whole)
        spans = [(int(a * size), int(a * size) + int(b * (size - int(a * size)))) for a, b in ranges]
        buffers = [bytearray(end - start) for start, end in spans]
        store.get_ranges_into(shard, [(s, memoryview(b)) for (s, _), b in zip(spans, buffers, strict=True)])
        assert [bytes(b) for b in buffers] == [whole[start:end] for start, end in spans]
        for start, end in spans:
            piece = bytearray(end - start)
            store.get_into(shard, start, memoryview(piece))
            assert piece == whole[start:end]
