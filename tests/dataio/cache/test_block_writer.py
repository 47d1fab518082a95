"""Bytes that go from a store into a cache file piece by piece."""

from __future__ import annotations

import concurrent.futures
import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.dataio.cache import disks
from headrace.dataio.cache.blocks import BlockFile, DescriptorPool
from headrace.dataio.cache.disks import DiskError, PendingBlock, SupersededError
from headrace.dataio.cache.plan.events import ObjectId
from headrace.dataio.core.errors import NotFoundError, TransientError, UsageError
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store
from headrace.dataio.store.retry import Policy, Retry
from headrace.dataio.store.wrappers import Wrapper
from tests.support.memory_store import MemoryStore

BODY = random.Random(4).randbytes((5 << 20) + 123)
Take = Callable[[int, memoryview], None]


@pytest.fixture
def file(tmp_path: Path) -> disks.PersistentFile:
    return disks.create_persistent(tmp_path, ObjectId("s", "k", len(BODY), 0.0), 8 << 20, DescriptorPool(16))


def content(file: BlockFile) -> bytes:
    found = bytearray(len(BODY))
    file.read(0, memoryview(found))
    return bytes(found)


def listed(tmp_path: Path) -> dict[int, int | None]:
    (found,) = disks.adopt(tmp_path, 8 << 20, DescriptorPool(16))
    return {block: disks.newest_digest(found.file.records, block) for block in found.blocks}


@pytest.mark.parametrize("direct", [False, True])
def test_a_directory_gives_pieces_that_are_the_objects_bytes(tmp_path: Path, direct: bool) -> None:
    store, buffer = open_store(tmp_path, storage_options={"direct": direct}), memoryview(bytearray(len(BODY) - 7))
    store.put("k", BODY)
    pieces: list[tuple[int, bytes]] = []
    store.get_pieces("k", 7, buffer, lambda at, piece: pieces.append((at, bytes(piece))))
    assert b"".join(piece for _, piece in pieces) == BODY[7:]
    assert [at for at, _ in pieces] == [7 + sum(len(p) for _, p in pieces[:n]) for n in range(len(pieces))]
    with pytest.raises(UsageError, match=str(len(BODY))):
        store.get_pieces("k", 8, buffer, lambda *_: None)
    with pytest.raises(NotFoundError):
        store.get_pieces("other", 0, buffer, lambda *_: None)
    mounted = Mounts(open_store(tmp_path / "base"), {"a": store})
    pieces.clear()
    mounted.get_pieces("mounts/a/k", 7, buffer, lambda at, piece: pieces.append((at, bytes(piece))))
    assert b"".join(piece for _, piece in pieces) == BODY[7:]


@pytest.mark.s3
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_s3_gives_pieces_that_are_the_objects_bytes(s3_url: str, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if client == "obstore":
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
    monkeypatch.setenv("HEADRACE_S3", client)
    with open_store(s3_url) as store, concurrent.futures.ThreadPoolExecutor(1) as pool:
        store.put("k", BODY)
        for offset, size in ((0, len(BODY)), (5, 1000), (3, 2 << 20)):
            pieces: list[tuple[int, bytes]] = []
            buffer = memoryview(bytearray(size))
            take: Take = lambda at, piece, pieces=pieces: pieces.append((at, bytes(piece)))  # type: ignore[misc]  # noqa: E731
            pool.submit(store.get_pieces, "k", offset, buffer, take).result(60)
            assert b"".join(piece for _, piece in pieces) == BODY[offset : offset + size]
            assert pieces[0][0] == offset
        with pytest.raises(UsageError, match=str(len(BODY))):
            pool.submit(store.get_pieces, "k", len(BODY) - 1, memoryview(bytearray(9)), lambda *_: None).result(60)


class Breaks(Wrapper):
    """Ends in the middle, `times` times."""

    times = 2

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Take) -> None:
        self.inner.get_into(key, offset, buffer)
        middle = len(buffer) // 2
        take(offset, memoryview(bytes(middle)) if self.times else buffer[:middle])
        self.times -= 1
        if self.times >= 0:
            raise TransientError("it broke")
        take(offset + middle, buffer[middle:])


def test_a_read_that_begins_again_leaves_the_bytes_and_the_digest_of_its_last_try(
    file: disks.PersistentFile, tmp_path: Path
) -> None:
    store = Retry(Breaks(MemoryStore(k=BODY)), Policy(first=0.0))
    part = PendingBlock(file, 0, 0)
    passing = part.start_writer()
    store.get_pieces("k", 0, memoryview(bytearray(len(BODY))), passing.write)
    passing.finish()
    assert content(file) == BODY
    assert listed(tmp_path) == {0: disks.digest(BODY)}


def test_of_two_attempts_the_first_that_is_whole_counts(file: disks.PersistentFile, tmp_path: Path) -> None:
    part, other = PendingBlock(file, 0, 0), bytes(len(BODY))
    slow = part.start_writer()
    slow.write(0, memoryview(other)[:1000])
    part.write_all(memoryview(BODY))
    with pytest.raises(SupersededError):
        slow.write(1000, memoryview(other)[1000:])
    slow.finish()
    part.write_all(memoryview(other))
    assert content(file) == BODY
    assert listed(tmp_path) == {0: disks.digest(BODY)}


def test_trouble_with_the_disk_is_told_from_trouble_with_the_store(
    file: disks.PersistentFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")
    store.put("k", BODY)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(BlockFile, "write", full)
    part = PendingBlock(file, 0, 0)
    with pytest.raises(DiskError) as caught:
        store.get_pieces("k", 0, memoryview(bytearray(len(BODY))), part.start_writer().write)
    assert caught.value.error.errno == errno.ENOSPC
    with pytest.raises(DiskError):
        part.write_all(memoryview(BODY))
