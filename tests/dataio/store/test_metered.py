"""Operations, outcomes and bytes are counted."""

from __future__ import annotations

import contextlib
import gc
import threading
import uuid
from pathlib import Path

import pytest

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.metrics import REGISTRY, store_requests
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.wrappers import MetricsStore


def test_each_operation_is_counted_with_its_outcome_and_its_bytes(tmp_path: Path) -> None:
    backend = uuid.uuid4().hex
    store = MetricsStore(PosixStore(tmp_path / "store"), backend)
    store.put("a", b"12345")
    store.put_multipart("b", [b"12", b"34"])
    assert store.put_if_absent("c", b"1")
    assert not store.put_if_absent("c", b"22")
    store.get("a")
    store.get_into("a", 1, memoryview(bytearray(2)))
    store.get_ranges_into("a", [(0, memoryview(bytearray(1))), (2, memoryview(bytearray(3)))])
    next(iter(store.list()))
    store.delete_many(["b"])
    store.stat("a")
    for key in ("b", "../b"):
        with contextlib.suppress(HeadraceError):
            store.get(key)
    with pytest.raises(ZeroDivisionError):
        store.put_multipart("d", (bytes(1 // 0) for _ in range(1)))

    def requests(operation: str, outcome: str) -> float | None:
        labels = {"backend": backend, "operation": operation, "outcome": outcome}
        return REGISTRY.get_sample_value("headrace_store_requests_total", labels)

    for operation in ("put", "put_multipart", "get", "list", "delete_many", "stat"):
        assert requests(operation, "ok") == 1, operation
    assert requests("put_if_absent", "ok") == requests("get_into", "ok") == 2
    assert requests("get", "not_found") == requests("get", "usage") == requests("put_multipart", "raised") == 1
    for direction, size in (("read", 5 + 2 + 4), ("written", 5 + 4 + 1)):
        labels = {"backend": backend, "direction": direction}
        assert REGISTRY.get_sample_value("headrace_store_bytes_total", labels) == size


def test_a_listing_that_is_forgotten_ends_also_where_the_counters_are_locked(tmp_path: Path) -> None:
    store = MetricsStore(PosixStore(tmp_path), uuid.uuid4().hex)
    store.put("a", b"1")
    circle: list[object] = [store.list()]
    circle.append(circle)
    next(circle[0])  # type: ignore[call-overload]
    collecting = threading.Thread(target=gc.collect)
    with store_requests._lock:  # as the thread that the collector runs in may have it
        del circle
        collecting.start()
        collecting.join(60)
        ended = not collecting.is_alive()
    collecting.join()
    assert ended
