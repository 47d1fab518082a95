"""Reads with O_DIRECT, and the state of the disk after a write has returned."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from headrace.dataio.core.errors import CapacityError
from headrace.dataio.store import direct_io
from headrace.dataio.store.direct_io import (
    ALIGN,
    LEAST_BYTES,
    aligned_part,
    fill_directly,
    fill_together,
    mostly_cached,
    pieces,
)
from headrace.dataio.store.hidden_files import TEMPORARY
from headrace.dataio.store.open import open_location, open_store
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.testing.conformance import some_bytes

MIB = 1 << 20


@given(offset=st.integers(0, 1 << 40), address=st.integers(0, 1 << 47), length=st.integers(0, 1 << 32))
def test_only_what_is_aligned_in_file_and_memory_is_read_directly(offset: int, address: int, length: int) -> None:
    start, stop = aligned_part(offset, address, length)
    assert 0 <= start <= stop <= length
    if stop > start:
        assert stop - start >= LEAST_BYTES
        assert [(offset + start) % ALIGN, (address + start) % ALIGN, (stop - start) % ALIGN] == [0, 0, 0]
        assert start < ALIGN
        assert length - stop < ALIGN
    elif (address + (-offset % ALIGN)) % ALIGN == 0:
        assert length < LEAST_BYTES + 2 * ALIGN


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    filled: list[tuple[int, int]] = []

    def watch(fd: int, offset: int, buffer: memoryview) -> tuple[int, int]:
        filled.append(fill_directly(fd, offset, buffer))
        return filled[-1]

    monkeypatch.setattr("headrace.dataio.store.posix.fill_directly", watch)
    return filled


@pytest.mark.parametrize(
    ("offset", "shift", "length"),
    [(0, 0, 4 * MIB), (0, 0, 4 * MIB + 5), (5, 5, 3 * MIB), (4096, 0, MIB), (7, 0, 2 * MIB), (0, 0, 100), (3, 3, 0)],
)
def test_a_direct_read_gives_the_same_bytes(
    tmp_path: Path, offset: int, shift: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = _watched(monkeypatch)
    monkeypatch.setattr(direct_io, "mostly_cached", lambda *_: False)
    store, body = open_store(tmp_path / "store", storage_options={"direct": True}), some_bytes(5 * MIB)
    store.put("k", body)
    with mmap.mmap(-1, 8 * MIB) as memory, memoryview(memory) as whole, whole[shift : shift + length] as buffer:
        store.get_into("k", offset, buffer)
        assert buffer == body[offset : offset + length]
        assert bytes(whole[shift + length :]) == bytes(8 * MIB - shift - length)
    assert open_location(store.location).location == store.location
    ((start, stop),) = filled
    if length >= 2 * MIB and stop == 0:
        pytest.skip("this file system has no O_DIRECT; the bytes were right without it")
    assert (stop > start) == (length >= MIB)
    if (offset - shift) % ALIGN:
        assert (start, stop) in ((0, length), (0, 0)), "through the aligned buffer, to the last byte"


def _drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_is_in_the_page_cache_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = _watched(monkeypatch)
    store, body = open_store(tmp_path / "store"), some_bytes(3 * MIB)
    store.put("packs/k", body)
    path, buffer = tmp_path / "store" / "packs" / "k", bytearray(len(body))
    store.get_into("packs/k", 0, memoryview(buffer))
    assert filled == [], "it was not asked for"
    store.read_once("packs/")
    path.read_bytes()
    with path.open("rb") as file:
        if not mostly_cached(file.fileno(), 0, len(body)):
            pytest.skip("the kernel does not say what is in the page cache, or keeps nothing there")
    store.get_into("packs/k", 0, memoryview(buffer))
    assert filled == [(0, 0)]
    _drop_from_cache(path)
    with path.open("rb") as file:
        if mostly_cached(file.fileno(), 0, len(body)):
            pytest.skip("a memory file system")
    store.get_into("packs/k", 0, memoryview(buffer))
    assert buffer == body


def test_advice_is_bounded(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for number in range(100):
        store.read_once(f"{number}/")
    assert len(store._once) < 100


def test_a_file_that_became_shorter_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "mostly_cached", lambda *_: False)
    path = tmp_path / "short"
    path.write_bytes(some_bytes(2 * MIB + 100))
    buffer = bytearray(4 * MIB)
    with path.open("rb") as file:
        start, stop = fill_directly(file.fileno(), 5, memoryview(buffer))
    assert (start, stop) in ((0, 2 * MIB + 95), (0, 0))
    assert bytes(buffer[:stop]) == path.read_bytes()[5 : 5 + stop]


@given(st.lists(st.tuples(st.integers(0, 3 * 10**5), st.integers(0, 9 * 10**6)), max_size=8))
def test_ranges_are_cut_into_reads_that_have_room_and_hold_every_byte_once(gaps: list[tuple[int, int]]) -> None:
    ranges, end = [], 0
    for gap, length in gaps:
        ranges.append((end + gap, memoryview(bytes(length))))
        end += gap + length
    found = [part for piece in pieces(ranges) for part in piece]
    assert sum(len(view) for _, view in found) == sum(len(view) for _, view in ranges)
    ends = [(offset, offset + len(view)) for offset, view in found]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    assert all(any(a <= start and stop <= a + len(view) for a, view in ranges) for start, stop in ends)
    for piece in pieces(ranges):
        first, (last, tail) = piece[0][0], piece[-1]
        assert last + len(tail) - first // ALIGN * ALIGN <= direct_io._BOUNCE_BYTES


def test_what_lies_close_together_is_read_at_once_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, body = open_store(tmp_path / "store"), some_bytes(11 * MIB)
    store.put("packs/k", body)
    store.read_once("packs/")
    monkeypatch.setattr(direct_io, "mostly_cached", lambda *_: False)
    reads: list[tuple[bool, int]] = []
    preadv = os.preadv

    def watched(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), offset))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    spans = [(5, 300_000), (300_005, 1), (304_000, 5 * MIB), (9 * MIB, 100), (9 * MIB + 8192, 0), (10 * MIB, MIB - 3)]
    rooms = [(offset, memoryview(bytearray(length + 2))[1:-1]) for offset, length in spans]
    store.get_ranges_into("packs/k", rooms)
    assert [bytes(room) for _, room in rooms] == [body[offset : offset + length] for offset, length in spans]
    if not any(straight for straight, _ in reads):
        pytest.skip("this file system has no O_DIRECT; the bytes were right without it")
    assert reads == [(True, 0), (True, 4 * MIB), (False, 9 * MIB), (False, 10 * MIB)]


def test_a_piece_of_a_file_that_became_shorter_is_left_to_whoever_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "mostly_cached", lambda *_: False)
    path = tmp_path / "short"
    path.write_bytes(some_bytes(MIB))
    parts = [(0, memoryview(bytearray(MIB))), (MIB, memoryview(bytearray(100)))]
    with path.open("rb") as file:
        assert fill_together(file.fileno(), parts) == parts


def test_a_refusal_of_o_direct_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, refused = fcntl.fcntl, []

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return control(fd, command, flags)

    store, body = open_store(tmp_path / "store", storage_options={"direct": True}), some_bytes(3 * MIB)
    store.put("k", body)
    monkeypatch.setattr(direct_io, "mostly_cached", lambda *_: False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    buffer = bytearray(len(body))
    store.get_into("k", 0, memoryview(buffer))
    assert buffer == body
    assert len(refused) == 1


def _read_direct(root: Path) -> None:
    store, body = open_store(root, storage_options={"direct": True}), some_bytes(3 * MIB)
    store.put("k", body)
    with mmap.mmap(-1, 3 * MIB) as memory, memoryview(memory) as buffer:
        store.get_into("k", 0, buffer)
        assert buffer == body


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_it_works_on_a_memory_file_system(tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"headrace-{os.getpid()}-{tmp_path.name}"
    try:
        _read_direct(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_ON_RAMFS = """
import fcntl, mmap, os, sys
from headrace.dataio.store.open import open_store
store = open_store(sys.argv[1], storage_options={"direct": True})
store.put("k", bytes(range(256)) * 8192)
fd = os.open(sys.argv[1] + "/k", os.O_RDONLY)
try: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
except OSError as error: print("refused", error.errno)
memory = mmap.mmap(-1, 2 << 20)
store.get_into("k", 0, memoryview(memory))
print("equal", memory[:] == bytes(range(256)) * 8192)
"""


def test_it_works_on_a_file_system_without_o_direct(tmp_path: Path) -> None:
    (tmp_path / "ram").mkdir()
    inside = 'mount -t ramfs none "$0" && exec "$1" -c "$2" "$0"'
    command = ["unshare", "-Urm", "sh", "-c", inside, str(tmp_path / "ram"), sys.executable, _ON_RAMFS]
    if shutil.which("unshare") is None or (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip("no user namespace in which a ramfs can be mounted")
    if "refused" not in done.stdout:
        pytest.skip("ramfs takes O_DIRECT in this kernel")
    assert done.stdout.split() == ["refused", str(errno.EINVAL), "equal", "True"]


# what is on the disk


@pytest.fixture
def traced(tmp_path: Path) -> list[str]:
    """The system calls on files of a program that makes a store and writes a/b/c, by strace, with descriptors resolved."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    log = tmp_path / "trace"
    program = f"from headrace.dataio.store.open import open_store\nopen_store({str(tmp_path / 'store')!r}).put('a/b/c', b'body')"
    calls = "trace=write,fsync,rename,renameat,renameat2,mkdir,mkdirat"
    done = subprocess.run(["strace", "-f", "-y", "-e", calls, "-o", str(log), sys.executable, "-B", "-c", program])
    if done.returncode or "fsync" not in log.read_text():
        pytest.skip("strace may not trace here")
    return [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if str(tmp_path / "store") in line]


def test_bytes_are_on_the_disk_before_they_are_named_and_the_names_before_the_write_returns(
    traced: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "store"

    def at(pattern: str) -> int:
        found = [n for n, line in enumerate(traced) if re.search(pattern, line)]
        assert found, (pattern, traced)
        return found[-1]

    wrote, synced, named = at(r"^write\(.*\"body\""), at(rf"^fsync\(.*{TEMPORARY}/"), at(r"^rename")
    assert wrote < synced < named
    for folder in (root / "a" / "b", root / "a", root):
        assert at(rf"^fsync\(\d+<{re.escape(str(folder))}>\)") > named
    made = [re.findall(r'"([^"]*)"', line)[0] for line in traced if line.startswith("mkdir")]
    assert {str(root), str(root / "a"), str(root / "a" / "b")} <= set(made)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_write_whose_fsync_fails_is_not_reported_as_done(tmp_path: Path, nth: int) -> None:
    """fsync of the new file, then of its folder, fails with EIO in the kernel's answer: strace injects it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    root, log = tmp_path / "store", tmp_path / "trace"
    open_store(root).put("k", b"old")
    program = (
        "import sys\nfrom headrace.dataio.store.posix import PosixStore\nfrom headrace.dataio.core.errors import TransientError\n"
        f"try: PosixStore({str(root)!r}).put('k', b'new')\nexcept TransientError as error: print(error)\n"
    )
    inject = f"inject=fsync:error=EIO:when={nth}"
    command = ["strace", "-f", "-e", "trace=fsync", "-e", inject, "-o", str(log), sys.executable, "-B", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not log.exists():
        pytest.skip("strace may not trace here")
    assert log.read_text().count("INJECTED") == 1
    assert "Input/output error" in done.stdout
    assert open_store(root).get("k") == (b"old" if nth == 1 else b"new")
    assert os.listdir(root / TEMPORARY) == []


def aligned(size: int, shift: int = 0) -> memoryview:
    """Random bytes that begin `shift` bytes behind a page's beginning; the map lives as long as the view."""
    area = mmap.mmap(-1, size + shift + ALIGN)
    view = memoryview(area)[shift : shift + size]
    view[:] = some_bytes(size)
    return view


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize(
    "sizes",
    [
        (4 * MIB, 4 * MIB),
        (8 * MIB,),
        (20 * MIB + 1, 0, 7),
        (4 * MIB + 100, ALIGN - 100, 3 * MIB),
        (100, 2 * MIB),
        (LEAST_BYTES - 1, 0, 5 * MIB),
        (LEAST_BYTES - 1,),
        (),
    ],
)
def test_what_is_written_past_the_cache_is_what_was_given(
    sizes: tuple[int, ...], shift: int, read_only: bool, tmp_path: Path
) -> None:
    parts = [aligned(size, shift) for size in sizes]
    with open_store(tmp_path / "s") as store:
        size = store.put_multipart("pack", [part.toreadonly() if read_only else part for part in parts])
        assert store.get("pack", max_bytes=64 * MIB) == b"".join(parts)
        assert size == sum(sizes)


def test_a_part_may_change_once_the_next_is_asked_for(tmp_path: Path) -> None:
    area, expected = bytearray(3 * MIB), bytearray()

    def parts() -> Iterator[memoryview]:
        for number in range(9):
            area[:] = bytes([number]) * len(area)
            expected.extend(area)
            yield memoryview(area)

    with open_store(tmp_path / "s") as store:
        store.put_multipart("pack", parts())
        assert store.get("pack", max_bytes=64 * MIB) == expected


def _pwrites(monkeypatch: pytest.MonkeyPatch, error: Callable[[bool, int], int | None]) -> list[tuple[bool, int]]:
    """(past the cache, length) of every `os.pwritev`; `error(past the cache, how many before)` is an errno to fail with."""
    seen: list[tuple[bool, int]] = []
    pwritev, one = os.pwritev, threading.Lock()

    def watched(fd: int, parts: list[memoryview], offset: int) -> int:
        with one:
            straight, before = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(seen)
            seen.append((straight, sum(map(len, parts))))
        if (failed := error(straight, before)) is not None:
            raise OSError(failed, os.strerror(failed))
        return pwritev(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    return seen


def test_large_files_are_written_in_whole_blocks_past_the_cache_but_for_their_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _pwrites(monkeypatch, lambda *_: None)
    with open_store(tmp_path / "s") as store:
        store.put_multipart("pack", [aligned(300 * 1024)] * 40 + [b"tail"])
    if not seen:
        pytest.skip("a memory file system")
    assert sorted(seen[:2]) == [(True, 12_288_000 - 8 * MIB), (True, 8 * MIB)]  # both at once
    assert seen[2:] == [(False, 4)]


def test_a_read_only_part_is_written_from_where_it_lies_and_any_other_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[int] = []
    pwritev = os.pwritev

    def watched(fd: int, parts: list[memoryview], offset: int) -> int:
        sources.extend(address(part) for part in parts)
        return pwritev(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    stays, small, skewed = aligned(2 * MIB), aligned(64 << 10), aligned(2 * MIB, 16)
    with open_store(tmp_path / "s") as store:
        parts = [stays.toreadonly(), small.toreadonly(), skewed.toreadonly(), stays]
        store.put_multipart("pack", parts)
        assert store.get("pack", max_bytes=64 * MIB) == b"".join(parts)
    if not sources:
        pytest.skip("a memory file system")
    assert sources.count(address(stays)) == 1
    assert not {address(small), address(skewed)} & {*sources}


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_block_is_written_while_the_one_before_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, both = os.pwritev, threading.Barrier(2, timeout=150)

    def held(fd: int, parts: list[memoryview], offset: int) -> int:
        both.wait()
        return pwritev(fd, parts, offset)

    with open_store(tmp_path / "s") as store:
        monkeypatch.setattr(os, "pwritev", held)
        store.put_multipart("pack", [aligned(4 * MIB)] * 8)
        assert store.stat("pack").size == 32 * MIB


def test_what_a_write_leaves_over_is_written_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, cut = os.pwritev, iter([ALIGN, 3 * MIB, 4 * MIB])

    def short(fd: int, parts: list[memoryview], offset: int) -> int:
        return pwritev(fd, [parts[0][:most]] if (most := next(cut, 0)) else parts, offset)

    parts = [aligned(4 * MIB).toreadonly() for _ in range(4)]
    with open_store(tmp_path / "s") as store:
        monkeypatch.setattr(os, "pwritev", short)
        store.put_multipart("pack", parts)
        assert store.get("pack", max_bytes=64 * MIB) == b"".join(parts)


def test_a_refusal_to_write_past_the_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _pwrites(monkeypatch, lambda straight, _: errno.EINVAL if straight else None)
    part = aligned(2 * MIB)
    with open_store(tmp_path / "s") as store:
        store.put_multipart("pack", [part])
        assert store.get("pack", max_bytes=64 * MIB) == part
    if not seen:
        pytest.skip("a memory file system")
    assert seen == [(True, 2 * MIB), (False, 2 * MIB)]


def test_a_write_that_fails_behind_the_back_of_the_one_who_gives_parts_is_raised_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _pwrites(monkeypatch, lambda _, before: errno.ENOSPC if before == 1 else None)
    with open_store(tmp_path / "s") as store:
        store.put("pack", b"old")
        with pytest.raises(CapacityError):
            store.put_multipart("pack", [aligned(4 * MIB)] * 20)
        assert store.get("pack") == b"old"
    assert 2 <= len(seen) < 10  # two are on their way when the next would follow
    assert os.listdir(tmp_path / "s" / TEMPORARY) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-write")]


def test_an_error_of_the_one_who_gives_parts_waits_for_the_write_in_flight(tmp_path: Path) -> None:
    def parts() -> Iterator[memoryview]:
        yield aligned(20 * MIB)
        raise KeyError("no more")

    with open_store(tmp_path / "s") as store, pytest.raises(KeyError):
        store.put_multipart("pack", parts())
    assert os.listdir(tmp_path / "s" / TEMPORARY) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-write")]
