"""A store in memory that counts what is read, and can be told to wait or to fail."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from headrace.dataio.core.errors import NotFoundError, TransientError
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store


class MemoryStore(Store):
    def __init__(self, name: str = "one", /, **objects: bytes) -> None:
        self.name, self.objects = name, dict(objects)
        self.reads: list[tuple[str, int, int]] = []
        self.stats = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failing = 0
        self.stuck = 0
        self.let_go = threading.Event()
        self._lock = threading.Lock()

    @property
    def location(self) -> Location:
        return Location(f"memory://{self.name}", {}, False)

    @property
    def bytes_read(self) -> int:
        return sum(length for _, _, length in self.reads)

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.reads.append((key, offset, len(buffer)))
            stuck, self.stuck = self.stuck, max(0, self.stuck - 1)
        if stuck:
            assert self.let_go.wait(150)
        assert self.gate.wait(150)
        if self.failing:
            self.failing -= 1
            raise TransientError(f"{key}: the store is down")
        buffer[:] = self.objects[key][offset : offset + len(buffer)]

    def stat(self, key: str) -> ObjectInfo:
        self.stats += 1
        if key not in self.objects:
            raise NotFoundError(f"{key} is absent")
        return ObjectInfo(key, len(self.objects[key]), 1.0)

    def get(self, key: str, *, max_bytes: int = 0) -> bytes:
        raise NotImplementedError

    def put(self, key: str, data: Buffer) -> None:
        raise NotImplementedError

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        raise NotImplementedError

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        raise NotImplementedError

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise NotImplementedError

    def delete_many(self, keys: Iterable[str]) -> None:
        raise NotImplementedError
