"""What a worker writes down, and a second worker that goes on from it."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.format import chunking, pack
from headrace.checkpoint.format.manifest import PackName
from headrace.checkpoint.format.pack import Entry
from headrace.checkpoint.repository import check
from headrace.checkpoint.saving import progress
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.plan import Event, PutPlan, Released
from headrace.checkpoint.saving.progress import ProgressFile, RecordingStore
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped, begin, latest, load, make, manifest_of

STATE = {f"t{n}": os.urandom(200 * KIB) for n in range(8)}


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up after it."""


class Dying(Wrapped):
    """Dies when the pack after `packs` is begun; counts the packs."""

    def __init__(self, inner: Store, packs: int) -> None:
        super().__init__(inner)
        self.left, self.written = packs, list[str]()

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        if not self.left:
            raise Killed
        self.left -= 1
        self.written.append(key)
        return super().put_multipart(key, parts)


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pack, "PACK_BYTES", chunking.CHUNK_BYTES + chunking.ALIGN + 100 * KIB
    )  # so that one tensor fills a pack


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "progress", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_packs_that_are_complete_are_not_written_again(tmp_path: Path, fd: int) -> None:
    with open_store(tmp_path / "store") as store:
        made = make(store, STATE, step=1, number=begin(store))
        first = Dying(store, 5)
        with pytest.raises(Killed):
            commit_staged(
                made.arena, made.plan, lambda _: None, store=RecordingStore(first, b := ProgressFile(fd)), progress=b
            )
        second = Dying(store, 100)
        result = commit_staged(
            made.arena, made.plan, lambda _: None, store=RecordingStore(second, b := ProgressFile(fd)), progress=b
        )
        assert len(first.written) == 5
        assert len(second.written) == 3
        assert not set(first.written) & set(second.written)
        found = latest(store)
        assert found is not None
        assert load(store, found) == STATE
        assert len(manifest_of(store, found).packs) == 8
        assert result["bytes_written"] == sum(map(len, STATE.values()))
        assert result["bytes_deduplicated"] == 0
        assert check.check(store).clean


def test_a_pack_that_is_gone_from_the_store_is_written_again(tmp_path: Path, fd: int) -> None:
    with open_store(tmp_path / "store") as store:
        made = make(store, STATE, step=1, number=begin(store))
        first = Dying(store, 5)
        with pytest.raises(Killed):
            commit_staged(
                made.arena, made.plan, lambda _: None, store=RecordingStore(first, b := ProgressFile(fd)), progress=b
            )
        store.delete_many(first.written[1:3])
        second = Dying(store, 100)
        commit_staged(
            made.arena, made.plan, lambda _: None, store=RecordingStore(second, b := ProgressFile(fd)), progress=b
        )
        assert len(second.written) == 5
        found = latest(store)
        assert found is not None
        assert load(store, found) == STATE


def finished(store: Store, fd: int) -> PutPlan:
    """A worker that ended when the arena was released; the plan."""
    made = make(store, STATE, step=1, number=begin(store))

    def emit(event: Event) -> None:
        if isinstance(event, Released):
            raise Killed

    with pytest.raises(Killed):
        commit_staged(made.arena, made.plan, emit, store=RecordingStore(store, b := ProgressFile(fd)), progress=b)
    assert latest(store) is None
    return made.plan


def test_after_the_release_the_arena_is_not_needed(tmp_path: Path, fd: int) -> None:
    with open_store(tmp_path / "store") as store:
        plan = finished(store, fd)
        commit_staged(None, plan, lambda _: None, store=store, progress=ProgressFile(fd))
        found = latest(store)
        assert found is not None
        assert load(store, found) == STATE


@pytest.mark.parametrize("records", [0, 1, 4, None])
def test_where_progress_cannot_be_written_the_arena_is_held_until_the_manifest_is_in_the_store(
    tmp_path: Path, fd: int, records: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk of the daemon is full, or fails (None: at the sync); that of the store is another."""
    inner, written = progress._write_all, 0

    def torn(fd: int, data: bytes) -> None:
        nonlocal written
        written += 1
        full = records is not None and written > records
        inner(fd, data[: len(data) // 2] if full else data)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_store(tmp_path / "store") as store:
        made, there = make(store, STATE, step=1, number=begin(store)), list[bool]()

        def emit(event: Event) -> None:
            if isinstance(event, Released):
                there.append(any(info.key.endswith(".manifest") for info in store.list("runs/")))

        with monkeypatch.context() as patched:
            patched.setattr(progress, "_write_all", torn)
            if records is None:
                patched.setattr(progress, "_sync", broken)
            commit_staged(made.arena, made.plan, emit, store=RecordingStore(store, b := ProgressFile(fd)), progress=b)
        assert there == [True]
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        assert (found := latest(store)) is not None
        assert load(store, found) == STATE
        commit_staged(made.arena, made.plan, emit, store=store, progress=ProgressFile(fd))  # what is there does no harm
        assert check.check(store).clean


def test_a_manifest_whose_packs_are_gone_is_never_committed(tmp_path: Path, fd: int) -> None:
    with open_store(tmp_path / "store") as store:
        plan = finished(store, fd)
        store.delete_many([next(store.list("packs/")).key])
        with pytest.raises(TransientError, match="was not stored before its worker ended"):
            commit_staged(None, plan, lambda _: None, store=store, progress=ProgressFile(fd))
        assert latest(store) is None


def test_without_arena_and_manifest_the_step_is_lost_and_that_is_said(tmp_path: Path, fd: int) -> None:
    with open_store(tmp_path / "store") as store:
        made = make(store, STATE, step=1, number=begin(store))
        book = ProgressFile(fd)
        book.begun("packs/x", "no such upload")
        with pytest.raises(TransientError, match="step 1 of run exp is lost"):
            commit_staged(None, made.plan, lambda _: None, store=store, progress=book)
        assert book.unfinished == {}
        assert latest(store) is None


PACK = PackName("01M862H48BV5SXSPNCAQGWFXX2", "0-0123abcd-0")


def fill(book: ProgressFile) -> None:
    book.begun(PACK.key, "id")
    book.packing(PACK, Entry(b"d" * 32, 0, 5, 5))
    book.ended(PACK.key, 10)
    book.checked(PACK.key)
    book.begun("packs/b", "id2")
    book.finished(b"manifest")


@given(st.integers(0, 2000), st.booleans())
def test_a_file_cut_anywhere_is_a_shorter_history_and_goes_on(cut: int, flip: bool) -> None:
    fd = os.memfd_create("progress")
    try:
        fill(ProgressFile(fd))
        size = os.fstat(fd).st_size
        if flip:
            at = cut % size
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ 4]), at)
        else:
            os.ftruncate(fd, min(cut, size))
        second = ProgressFile(fd)
        assert second.manifest in (None, b"manifest")
        if second.manifest:
            assert second.unfinished == {"packs/b": "id2"}
        fill(second)
        third = ProgressFile(fd)
        assert third.manifest == b"manifest"
        assert third.unfinished == {"packs/b": "id2"}
    finally:
        os.close(fd)


def old_record(tag: str, **fields: object) -> bytes:
    payload = msgspec.msgpack.encode({"type": tag, **fields})
    return struct.pack("<IQ", len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def test_a_file_of_version_0_1_gives_its_manifest_and_its_uploads_and_none_of_its_packs(
    tmp_path: Path, fd: int
) -> None:
    """Its workers shared a name, so another body of a pack may still be on its way."""
    entry = [b"d" * 32, 0, 5, 5]
    os.write(fd, old_record("committed_by", name="0123abcd"))
    os.write(fd, old_record("begun", key=PACK.key, id="id", nonce="n"))
    os.write(fd, old_record("sent", key=PACK.key, number=1, size=10, etag="e", digest=b"d"))
    os.write(fd, old_record("filled", key=PACK.key, entries=[entry]))
    os.write(fd, old_record("ended", key=PACK.key, size=10))
    os.write(fd, old_record("begun", key="packs/b", id="id2", nonce="n"))
    os.write(fd, old_record("finished", manifest=b"manifest"))
    book = ProgressFile(fd)
    assert book.manifest == b"manifest"
    assert book.unfinished == {PACK.key: "id", "packs/b": "id2"}
    with open_store(tmp_path / "store") as store:
        made = make(store, STATE, step=1, attempt=PACK.attempt)
        store.put(PACK.key, b"ten bytes!")
        assert book.stored(store, made.plan) == {}


@pytest.mark.parametrize("first", ["checked", "stored"])
def test_a_pack_is_written_down_once_it_is_stored_and_checked(fd: int, first: str) -> None:
    """With a tier another thread stores it."""
    book, entry = ProgressFile(fd), Entry(b"d" * 32, 0, 5, 5)
    book.packing(PACK, entry)
    for what in (first, "stored" if first == "checked" else "checked"):
        assert os.fstat(fd).st_size == 0
        if what == "stored":
            book.ended(PACK.key, 10)
        else:
            book.checked(PACK.key)
    assert ProgressFile(fd)._packed[PACK.key].entries == (entry,)


def test_each_worker_of_one_job_names_its_packs_anew(tmp_path: Path, fd: int) -> None:
    made = make(open_store(tmp_path), STATE, step=1)
    assert len({ProgressFile(fd).name(made.plan, 0) for _ in range(4)}) == 4
