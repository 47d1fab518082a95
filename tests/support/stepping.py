"""Runs real savers and collectors step by step: a test decides which of them performs its next operation on the store.

Each actor runs in a separate thread, and stops before every operation until the test resumes it. Only one actor runs at a
time, so a schedule is repeatable. The store is in memory, and a clock of the test dates its objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from headrace.dataio.core.errors import HeadraceError, NotFoundError
from headrace.dataio.core.limits import SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store, check_range


class MemoryStore(Store):
    """A store in a dict. `now` is the time of each write. With `page`, a listing has pages of this many objects, and each page is
    one operation, as on S3."""

    def __init__(self, page: int = 0) -> None:
        self.page = page
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.now = 1000.0
        self.before: Callable[[str, str], None] = lambda operation, key: None

    @property
    def location(self) -> Location:
        return Location("memory://", {}, shareable=False)

    def _at(self, operation: str, key: str) -> None:
        self.before(operation, key)

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        self._at("get", key)
        return self._find(key)[0]

    def _find(self, key: str) -> tuple[bytes, float]:
        if key not in self.objects:
            raise NotFoundError(f"{key} does not exist")
        return self.objects[key]

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._at("get_into", key)
        data = self._find(key)[0]
        check_range(key, offset, len(buffer), len(data))
        buffer[:] = data[offset : offset + len(buffer)]

    def put(self, key: str, data: Buffer) -> None:
        self._at("put", key)
        self.objects[key] = bytes(data), self.now

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self._at("put_if_absent", key)
        return self.objects.setdefault(key, (bytes(data), self.now))[0] == bytes(data)

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        body = b"".join(bytes(part) for part in parts)
        self._at("put_multipart", key)
        self.objects[key] = body, self.now
        return len(body)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._at("list", prefix)
        found = self._after("", prefix)
        if not self.page:
            return iter(found)
        return self._pages(found, prefix)

    def _after(self, last: str, prefix: str) -> tuple[ObjectInfo, ...]:
        found = sorted((k, v) for k, v in self.objects.items() if k.startswith(prefix) and k > last)
        return tuple(ObjectInfo(key, len(data), modified) for key, (data, modified) in found)

    def _pages(self, found: tuple[ObjectInfo, ...], prefix: str) -> Iterator[ObjectInfo]:
        while found:
            page, more = found[: self.page], len(found) > self.page
            yield from page
            if not more:
                return
            self._at("list", prefix)
            found = self._after(page[-1].key, prefix)

    def document(self, key: str) -> dict[str, Any] | None:
        """A JSON document as it is, without an operation."""
        return json.loads(self.objects[key][0]) if key in self.objects else None

    def stat(self, key: str) -> ObjectInfo:
        self._at("stat", key)
        data, modified = self._find(key)
        return ObjectInfo(key, len(data), modified)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._at("delete", key)
            self.objects.pop(key, None)


class StoreClock:
    """The clock of a machine whose time is the store's."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def monotonic(self) -> float:
        return self._store.now

    def time(self) -> float:
        return self._store.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("no thread sleeps here")


class Killed(BaseException):
    """Ends an actor as SIGKILL would: nothing of it runs any more."""


class Actor:
    """`work` in a thread, one store operation at a time."""

    def __init__(self, store: MemoryStore, work: Callable[[], object]) -> None:
        self.store = store
        self._go, self._came = threading.Semaphore(0), threading.Semaphore(0)
        self._dead = False
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None  # what `work` returned
        self._threads: set[int] = set()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
        _living.append(self)
        self._thread.start()
        self._came.acquire()

    def _run(self) -> None:
        _current.actor = self
        try:
            self.pause()
            self.result = self._work()
        except BaseException as error:
            self.error = error
        self.done = True
        _living.remove(self)
        self._came.release()

    def pause(self) -> None:
        """Called in the actor's thread before it touches the store."""
        self._came.release()
        self._go.acquire()
        if self._dead:
            raise Killed

    def step(self) -> None:
        """Let it do one operation; returns when it stands before the next one."""
        if not self.done:
            self._go.release()
            self._came.acquire()

    def kill(self) -> None:
        """It does nothing any more."""
        while not self.done:
            self._dead = True
            self.step()

    def end(self) -> None:
        """Killed if it is not done, and its thread gone."""
        self.kill()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def finish(self) -> None:
        """All the way."""
        while not self.done:
            self.step()


_living: list[Actor] = []


def end_all() -> None:
    """No thread does anything any more, also where a search ended with one in the middle."""
    for actor in list(_living):
        actor.end()


class _Current(threading.local):
    actor: Actor | None = None


_current = _Current()


def stepping(store: MemoryStore) -> None:
    """From now on actors stop before every operation; other threads do not."""

    def before(operation: str, key: str) -> None:
        if _current.actor is not None:
            _current.actor.pause()

    store.before = before


def drive_to_end(actors: Sequence[Actor], check: Callable[[], None]) -> None:
    """Run all actors to their end, one after the other, with `check` after every operation. Errors must be the library's own."""
    for actor in actors:
        while not actor.done:
            actor.step()
            check()
        assert actor.error is None or isinstance(actor.error, HeadraceError | Killed), repr(actor.error)
