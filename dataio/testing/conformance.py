"""The store contract as tests that a test class inherits, for Headrace's back ends and for others.

Use: subclass `StoreConformance` in a test module with two fixtures. `store` is an empty, open store. `store_url` is a
URL from which `open_store` opens the same store in another process. Subclass `StoreMachine` and implement `open_empty`
to compare a store with a model under random operations.

Invariant: each test checks a sentence of `headrace.dataio.store.base`.

Failure behaviour: a store that breaks the contract fails a test.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import subprocess
import threading
from collections.abc import Iterator
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from headrace.dataio.core.errors import CapacityError, NotFoundError, UsageError
from headrace.dataio.core.programs import environment, run_module
from headrace.dataio.store.base import CONDITIONAL_BYTES, Store, is_after
from headrace.dataio.store.open import open_location
from headrace.dataio.testing.folder_conformance import FolderConformance

MIB = 1 << 20
BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\nb", "a\0", "a\\b", "\ud800", "x" * 1025]
ODD_KEYS = [
    "a/b",
    "a-b",
    "a.b/c",
    "a",
    "ab",
    "a b",
    "ä/ß",
    "日本/語",
    "x=1/y+z",
    "q?r#s%41",
    "z/~",
    "A",
    "a0",
    "b/c/d/e/f",
]


def some_bytes(n: int, seed: int = 0) -> bytes:
    """Return `n` random bytes, the same for the same `seed`."""
    return random.Random(seed).randbytes(n)


class StoreConformance(FolderConformance):
    """One test for each sentence of the contract. Those about `list_folders` are in `folder_conformance`.

    `many` is the number of keys that the paging test writes. `racers` is the number of threads that race for a key.
    """

    many: ClassVar[int] = 2500
    racers: ClassVar[int] = 8

    # whole objects

    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 3, some_bytes(3 * MIB)], ids=len)
    def test_what_was_put_is_read_back(self, store: Store, body: bytes) -> None:
        store.put("folder/object", body)
        assert store.get("folder/object") == body
        assert store.stat("folder/object").size == len(body)
        assert store.exists("folder/object")

    def test_put_replaces_the_whole_object(self, store: Store) -> None:
        store.put("k", b"a long first body")
        store.put("k", b"short")
        assert store.get("k") == b"short"

    def test_any_kind_of_buffer_is_taken(self, store: Store) -> None:
        for kind in (bytes, bytearray, memoryview):
            store.put("k", kind(b"body"))
            assert store.get("k") == b"body"
            assert store.put_multipart("k", [kind(b"bo"), kind(b"dy")]) == 4
            assert store.get("k") == b"body"

    def test_an_object_above_the_readers_limit_is_a_capacity_error(self, store: Store) -> None:
        store.put("k", b"12345")
        assert store.get("k", max_bytes=5) == b"12345"
        with pytest.raises(CapacityError, match="k"):
            store.get("k", max_bytes=4)

    def test_an_absent_object_is_not_found_and_named(self, store: Store) -> None:
        store.put("there", b"1")
        for read in (store.get, store.stat, lambda k: store.get_into(k, 0, memoryview(bytearray(1)))):
            with pytest.raises(NotFoundError, match="not/there"):
                read("not/there")
        with pytest.raises(NotFoundError):
            store.get_into("not/there", 0, memoryview(bytearray()))
        assert not store.exists("not/there")

    @pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
    def test_a_malformed_key_is_refused_by_every_operation(self, store: Store, key: str) -> None:
        buffer = memoryview(bytearray(1))
        for operation in (
            lambda: store.get(key),
            lambda: store.get_into(key, 0, buffer),
            lambda: store.put(key, b""),
            lambda: store.put_if_absent(key, b""),
            lambda: store.put_multipart(key, [b""]),
            lambda: store.stat(key),
            lambda: store.delete_many([key]),
        ):
            with pytest.raises(UsageError):
                operation()
        assert list(store.list()) == []

    # ranges

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 0), (0, 1), (0, 1000), (1, 998), (333, 333), (999, 1), (1000, 0), (500, 0)]
    )
    def test_a_range_fills_the_buffer(self, store: Store, offset: int, length: int) -> None:
        body = some_bytes(1000)
        store.put("k", body)
        buffer = bytearray(length)
        store.get_into("k", offset, memoryview(buffer))
        assert buffer == body[offset : offset + length]

    @pytest.mark.parametrize(("offset", "length"), [(999, 2), (1000, 1), (5000, 10), (1001, 0), (-1, 1)])
    def test_a_range_past_the_end_is_a_usage_error(self, store: Store, offset: int, length: int) -> None:
        store.put("k", some_bytes(1000))
        with pytest.raises(UsageError, match=rf"k.*{offset}"):
            store.get_into("k", offset, memoryview(bytearray(length)))

    def test_many_ranges_of_any_order_size_and_overlap_are_filled(self, store: Store) -> None:
        body = some_bytes(20 * MIB)
        store.put("k", body)
        ranges = [
            (0, 10),
            (10, 10),
            (30, 5),
            (5, 20),
            (19 * MIB, MIB),
            (MIB + 1, 17 * MIB),
            (300_000, 0),
            (200_000, 70_001),
        ]
        buffers = [bytearray(length) for _, length in ranges]
        store.get_ranges_into("k", [(at, memoryview(b)) for (at, _), b in zip(ranges, buffers, strict=True)])
        for (offset, length), buffer in zip(ranges, buffers, strict=True):
            assert buffer == body[offset : offset + length]

    def test_a_buffer_that_cannot_be_filled_is_refused(self, store: Store) -> None:
        store.put("k", b"12345")
        for buffer in (memoryview(b"xx"), memoryview(bytearray(4))[::2]):
            with pytest.raises(UsageError):
                store.get_into("k", 0, buffer)

    # parts

    @pytest.mark.parametrize(
        "sizes",
        [[], [0], [1, 0, 2], [8 * MIB], [8 * MIB, 1], [3 * MIB + 1] * 7, [20 * MIB]],
        ids=lambda s: f"{sum(s)}in{len(s)}",
    )
    def test_parts_of_any_size_become_one_object(self, store: Store, sizes: list[int]) -> None:
        parts = [some_bytes(size, seed) for seed, size in enumerate(sizes)]
        assert store.put_multipart("k", iter(parts)) == sum(sizes)
        assert store.get("k") == b"".join(parts)

    def test_a_part_may_be_reused_by_its_owner_at_once(self, store: Store) -> None:
        def parts() -> Iterator[memoryview]:
            buffer = bytearray(5 * MIB)
            for value in range(4):
                buffer[:] = bytes([value]) * len(buffer)
                yield memoryview(buffer)

        store.put_multipart("k", parts())
        assert store.get("k") == b"".join(bytes([value]) * 5 * MIB for value in range(4))

    @pytest.mark.parametrize("before", [None, b"old"])
    @pytest.mark.parametrize("parts", [0, 1, 5])
    def test_a_failing_stream_of_parts_leaves_what_was_there(
        self, store: Store, before: bytes | None, parts: int
    ) -> None:
        def failing() -> Iterator[bytes]:
            for _ in range(parts):
                yield bytes(4 * MIB)
            raise RuntimeError("the disk of the source broke")

        if before is not None:
            store.put("k", before)
        with pytest.raises(RuntimeError, match="source broke"):
            store.put_multipart("k", failing())
        assert [info.key for info in store.list()] == ([] if before is None else ["k"])
        assert before is None or store.get("k") == before

    def test_a_killed_writer_leaves_what_was_there(self, store: Store, store_url: str) -> None:
        store.put("k", b"old")
        for key in ("k", "new"):
            with _writer("stream", store_url, key) as process:
                _wait_for(process, "part 20")
                process.kill()
            assert process.wait() == -9
        assert [info.key for info in store.list()] == ["k"]
        assert store.get("k") == b"old"

    # listing and deleting

    def test_keys_are_listed_in_order_with_sizes(self, store: Store) -> None:
        keys = [key for key in ODD_KEYS if key not in ("a", "b")]  # a directory cannot hold both a and a/b
        for size, key in enumerate(keys):
            store.put(key, bytes(size))
        assert [info.key for info in store.list()] == sorted(keys)
        assert {info.key: info.size for info in store.list()} == {key: size for size, key in enumerate(keys)}

    def test_a_prefix_is_any_string(self, store: Store) -> None:
        keys = ["run-1/a", "run-10/a", "run/b", "run/c/d", "runs.json", "s"]
        for key in keys:
            store.put(key, b"")
        for prefix in (
            "",
            "r",
            "run",
            "run/",
            "run-1",
            "run-1/",
            "run/c",
            "run/c/d",
            "run/c/d/",
            "t",
            "../r",
            "/",
            "run//",
            "s",
        ):
            assert [info.key for info in store.list(prefix)] == sorted(k for k in keys if k.startswith(prefix)), prefix

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list()) == []
        assert list(store.list("no/such")) == []

    def test_more_keys_than_a_page_are_listed_and_deleted(self, store: Store) -> None:
        keys = [f"many/{i % 7}/{i:05}" for i in range(self.many)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        assert [info.key for info in store.list("many/")] == sorted(keys)
        store.delete_many(iter(keys[1:]))
        assert [info.key for info in store.list()] == keys[:1]

    def test_deleting_what_is_absent_is_no_error(self, store: Store) -> None:
        store.put("a/b", b"")
        store.delete_many(["a/b", "a/b", "never/was", "a"])
        store.delete_many([])
        assert list(store.list()) == []

    # one winner

    def test_a_lost_race_returns_false_and_changes_nothing(self, store: Store) -> None:
        assert store.put_if_absent("a/k", b"mine")
        for body in (b"his", b"", b"mine and more", b"his!"):
            assert not store.put_if_absent("a/k", body)
        assert store.get("a/k") == b"mine"

    def test_a_conditional_write_repeated_with_its_body_has_still_won(self, store: Store) -> None:
        assert store.put_if_absent("k", b"nonce 1")
        assert store.put_if_absent("k", b"nonce 1")

    def test_a_deleted_key_can_be_won_again(self, store: Store) -> None:
        assert store.put_if_absent("k", b"1")
        store.delete_many(["k"])
        assert store.put_if_absent("k", b"2")
        assert store.get("k") == b"2"

    def test_a_large_body_cannot_be_written_conditionally(self, store: Store) -> None:
        with pytest.raises(CapacityError, match="k"):
            store.put_if_absent("k", bytes(CONDITIONAL_BYTES + 1))
        assert not store.exists("k")

    def test_of_many_threads_one_wins(self, store: Store) -> None:
        bodies = [f"writer {i}".encode() for i in range(self.racers)]
        barrier = threading.Barrier(self.racers)

        def write(body: bytes) -> bool:
            barrier.wait(60)
            return store.put_if_absent("race/k", body)

        with concurrent.futures.ThreadPoolExecutor(self.racers) as pool:
            outcomes = list(pool.map(write, bodies))
        assert outcomes.count(True) == 1
        assert store.get("race/k") == bodies[outcomes.index(True)]

    def test_of_many_processes_one_wins(self, store: Store, store_url: str) -> None:
        writers = [_writer("race", store_url, "race/k", f"writer {i}") for i in range(4)]
        for writer in writers:
            _wait_for(writer, "ready")
        answers = [writer.communicate(b"go\n", timeout=100)[0].decode().strip() for writer in writers]
        assert sorted(answers) == ["False"] * 3 + ["True"]
        assert store.get("race/k") == f"writer {answers.index('True')}".encode()

    # sharing

    def test_a_reader_sees_an_old_or_a_new_object_and_never_a_mixture(self, store: Store) -> None:
        bodies = [bytes([value]) * 300_000 for value in range(2)]
        store.put("k", bodies[0])
        stop = threading.Event()

        def replace() -> None:
            for turn in range(40):
                store.put("k", bodies[turn % 2])
            stop.set()

        def read() -> int:
            reads = 0
            while not stop.is_set():
                assert store.get("k") in bodies
                reads += 1
            return reads

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            pool.submit(replace).result()
            assert all(reader.result() for reader in readers)

    def test_its_location_opens_the_same_store(self, store: Store) -> None:
        store.put("k", b"body")
        assert store.location.shareable
        with open_location(store.location) as other:
            assert other.get("k") == b"body"
            assert other.location == store.location

    def test_it_works_inside_a_running_event_loop(self, store: Store) -> None:
        async def use() -> bytes:
            store.put("k", b"body")
            return await asyncio.to_thread(store.get, "k")

        assert asyncio.run(use()) == b"body"


class _writer(subprocess.Popen[bytes]):
    """A process that runs `headrace.dataio.testing.writer` with these arguments."""

    def __init__(self, *arguments: str) -> None:
        command = run_module("headrace.dataio.testing.writer", *arguments)
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())


def _wait_for(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.decode().strip() == line:
            return
    raise AssertionError(f"the writer ended before it printed {line!r}")


_SEGMENT = st.sampled_from(["a", "a-b", "b", "0", "ä", "a b"])
_KEYS = st.lists(_SEGMENT, min_size=1, max_size=3).map(lambda s: "/".join([*s[:-1], s[-1] + ".x"]))
_BODIES = st.binary(max_size=200)


class StoreMachine(RuleBasedStateMachine):
    """Applies random operations to a store and to a dictionary, which must agree after each operation."""

    keys: Bundle[str] = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_empty()
        self.model: dict[str, bytes] = {}

    def open_empty(self) -> Store:
        """Open a new empty store. Subclasses implement it."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.store.close()

    @rule(target=keys, key=_KEYS)
    def name(self, key: str) -> str:
        return key

    @rule(key=keys, body=_BODIES)
    def put(self, key: str, body: bytes) -> None:
        self.store.put(key, body)
        self.model[key] = body

    @rule(key=keys, body=_BODIES)
    def put_if_absent(self, key: str, body: bytes) -> None:
        assert self.store.put_if_absent(key, body) == (self.model.setdefault(key, body) == body)

    @rule(key=keys, parts=st.lists(_BODIES, max_size=4), fails=st.booleans())
    def put_multipart(self, key: str, parts: list[bytes], fails: bool) -> None:
        def stream() -> Iterator[bytes]:
            yield from parts
            if fails:
                raise RuntimeError("no more")

        if fails:
            with pytest.raises(RuntimeError):
                self.store.put_multipart(key, stream())
        else:
            assert self.store.put_multipart(key, stream()) == sum(map(len, parts))
            self.model[key] = b"".join(parts)

    @rule(doomed=st.lists(keys, max_size=3))
    def delete(self, doomed: list[str]) -> None:
        self.store.delete_many(doomed)
        for key in doomed:
            self.model.pop(key, None)

    @rule(key=keys, offset=st.integers(0, 220), length=st.integers(0, 220))
    def read(self, key: str, offset: int, length: int) -> None:
        buffer = bytearray(length)
        body = self.model.get(key)
        if body is None:
            with pytest.raises(NotFoundError):
                self.store.get_into(key, offset, memoryview(buffer))
        elif offset + length > len(body):
            with pytest.raises(UsageError):
                self.store.get_into(key, offset, memoryview(buffer))
        else:
            self.store.get_into(key, offset, memoryview(buffer))
            assert buffer == body[offset : offset + length]

    @rule(key=keys)
    def get(self, key: str) -> None:
        assert self.store.exists(key) == (key in self.model)
        if key in self.model:
            assert self.store.get(key) == self.model[key]

    @rule(prefix=st.sampled_from(["a", "a/", "a-", "b/a", "ä", "0.x"]))
    def list_some(self, prefix: str) -> None:
        assert [i.key for i in self.store.list(prefix)] == sorted(k for k in self.model if k.startswith(prefix))

    @rule(prefix=st.sampled_from(["", "a/", "b/", "a/a-b/"]), after=st.sampled_from(["", "0", "a", "a-b", "b"]))
    def list_folders(self, prefix: str, after: str) -> None:
        listed = list(self.store.list_folders(prefix, after=after))
        matching = [key for key in self.model if key.startswith(prefix)]
        folders = {key[len(prefix) :].partition("/")[0] for key in matching if "/" in key[len(prefix) :]}
        assert listed == sorted({*listed}, key=lambda name: name + "/")
        assert all(is_after(name, after) for name in listed)
        assert {*listed} >= {name for name in folders if is_after(name, after)}

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert [(i.key, i.size) for i in self.store.list()] == [(k, len(self.model[k])) for k in sorted(self.model)]
