"""A store whose shards' sizes a version says is asked for none, and unknown objects are asked after side by side."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.objects import KnownSizes
from headrace.dataio.cache.plan.events import Drop
from headrace.dataio.cache.readers.cached import CachedReader
from headrace.dataio.core.errors import NotFoundError, RangeError
from headrace.dataio.store.base import ObjectInfo
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for

BLOCK = 4096
SIZE = 3 * BLOCK
NAMES = "abcdef"


class Meeting(MemoryStore):
    """A store that answers after the first `parties` objects when it is asked after all of them at once."""

    def __init__(self, parties: int, /, **objects: bytes) -> None:
        super().__init__(**objects)
        self.meeting, self._first = threading.Barrier(parties, timeout=150), NAMES[:parties]

    def stat(self, key: str) -> ObjectInfo:
        if key in self._first:
            self.meeting.wait()
        return super().stat(key)


class Short(MemoryStore):
    """It raises an error for a missing object, as stores do."""

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if key not in self.objects:
            raise NotFoundError(f"{key} is absent")
        if offset + len(buffer) > len(self.objects[key]):
            raise RangeError(f"{key} has only {len(self.objects[key])} bytes")
        super().get_into(key, offset, buffer)


def payload(name: str) -> bytes:
    return random.Random(name).randbytes(SIZE)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine(tmp_path, 64 * BLOCK, threads=4, block_bytes=BLOCK)) as made:
        yield made


def test_who_is_told_the_sizes_asks_for_none(engine: Engine) -> None:
    store = Short(**{name: payload(name) for name in NAMES})
    sized = KnownSizes(store, lambda: {name: SIZE for name in NAMES if name != "f"})
    with closing(CachedReader(sized, engine)) as reader:
        reader.announce([(name, 10, 100) for name in NAMES])
        for name in NAMES:
            assert reader.read(name, [(10, 100)]) == [store.objects[name][10:110]]
    assert store.stats == 1, "the size of f is not known"


def test_of_an_object_that_is_shorter_than_was_said_what_is_there_is_read(engine: Engine) -> None:
    store = Short(a=payload("a")[: BLOCK + 100])
    with closing(CachedReader(KnownSizes(store, lambda: {"a": SIZE, "gone": SIZE}), engine)) as reader:
        assert reader.read("a", [(5, 100)]) == [store.objects["a"][5:105]]
        assert reader.read("a", [(BLOCK + 50, 50)]) == [store.objects["a"][-50:]]
        with pytest.raises(RangeError, match="a has only 4196 bytes"):
            reader.read("a", [(BLOCK + 50, 60)])
        with pytest.raises(RangeError, match="which has 12288 bytes"):
            reader.read("a", [(SIZE, 1)])
        with pytest.raises(NotFoundError):
            reader.read("gone", [(0, 1)])


def test_objects_that_are_announced_are_asked_after_side_by_side_and_each_once(engine: Engine) -> None:
    store = Meeting(3, **{name: payload(name) for name in NAMES})  # one that announces, and half of the threads
    with closing(CachedReader(store, engine)) as reader:
        reader.announce([(name, 10, 100) for name in NAMES])
        wait_for(lambda: len(store.reads) == len(NAMES))
    assert store.stats == len(NAMES)


def test_who_asks_after_the_same_object_at_once_asks_the_store_once(engine: Engine) -> None:
    store = Meeting(2, a=payload("a"))
    with closing(CachedReader(store, engine)) as reader, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(reader.read, "a", [(0, 10)]) for _ in range(3)]
        time.sleep(0.05)  # the others come meanwhile
        wait_for(lambda: store.meeting.n_waiting == 1)
        store.meeting.wait()
        for one in asked:
            assert one.result() == [store.objects["a"][:10]]
    assert store.stats == 1


def test_the_engine_knows_from_which_stores_it_fetches(engine: Engine) -> None:
    go, reading = threading.Event(), threading.Event()

    class Held(MemoryStore):
        def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
            reading.set()
            assert go.wait(150)
            super().get_into(key, offset, buffer)

    held, other = Held(a=payload("a")), MemoryStore(a=payload("a"))
    future = engine.open(held, "a", [(0, SIZE)])
    assert reading.wait(150)
    assert engine.fetches_from(held)
    assert not engine.fetches_from(other)
    go.set()
    assert future.result(150) is not None
    wait_for(lambda: not engine.fetches_from(held))


def test_a_listener_hears_of_a_drop_although_another_one_unsubscribes_meanwhile(engine: Engine) -> None:
    heard = list[tuple[str, int]]()
    leave = engine.subscribe(lambda file: heard.append(("leaving", file)))
    engine.subscribe(lambda file: heard.append(("staying", file)))

    class Meanwhile:
        """A value that is false, and is looked at while the engine goes through its listeners."""

        def __bool__(self) -> bool:
            leave()
            return False

    once: Any = Meanwhile()
    engine._run([Drop(1, once)])
    engine._run([Drop(2, False)])
    assert heard == [("leaving", 1), ("staying", 1), ("staying", 2)]
