"""Files that are read in part: every byte right, none fetched twice, nothing believed that was not compared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError, RangeError, TransientError
from headrace.dataio.shards.sample import Member, Pieces
from headrace.loaders.decode.mp4_excerpt import Excerpt
from headrace.loaders.decode.trim import ViewFile
from headrace.loaders.fetch import partial_file as partial
from headrace.loaders.fetch.byte_ranges import Runs, merged
from headrace.loaders.fetch.partial_file import HeadCache, MissingPieceError, PartialFile, SentFile

OFFSET = 1000
SIZE = 64


def pieces_of(data: bytes, size: int = SIZE, head: tuple[tuple[int, int], ...] = ()) -> Pieces:
    each = [data[at : at + size] for at in range(0, len(data), size)]
    return Pieces(size, b"".join(xxhash.xxh3_64_intdigest(one).to_bytes(8, "little") for one in each), head)


class Shard:
    """An object that holds a file from `OFFSET` on, and what was read of it."""

    def __init__(self, data: bytes, length: int | None = None) -> None:
        self.bytes = bytes(OFFSET) + data
        self.length = len(self.bytes) if length is None else length
        self.reads = list[tuple[int, int]]()

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        for offset, length in ranges:
            if offset + length > self.length:
                raise RangeError("the object ends before")
        self.reads += [(offset - OFFSET, length) for offset, length in ranges]
        return [memoryview(self.bytes)[offset : offset + length] for offset, length in ranges]


def opened(
    data: bytes, shard: Shard, read_direct: Shard | None = None, heads: HeadCache | None = None, head: Runs = ()
) -> PartialFile:
    member = Member("mp4", OFFSET, len(data), xxhash.xxh3_64_intdigest(data), pieces_of(data, SIZE, head))
    return PartialFile(
        "shards/a.tar",
        member,
        read=shard.read,
        read_direct=(read_direct or Shard(data)).read,
        heads=heads or HeadCache(),
    )


def some(length: int) -> bytes:
    return bytes((7 * n + n // 251) % 256 for n in range(length))


@settings(deadline=None)
@given(st.data(), st.integers(1, 1000))
def test_slices_are_those_of_the_whole_file_and_no_piece_is_fetched_twice(data: st.DataObject, length: int) -> None:
    whole, shard = some(length), Shard(some(length))
    file, last = opened(whole, shard), -(-length // SIZE)
    predicted = data.draw(st.lists(st.tuples(st.integers(0, last - 1), st.integers(1, 3)), max_size=3))
    file.prefetch(merged((first, min(count, last - first)) for first, count in predicted))
    at = st.integers(0, length + 10)
    for start, end in data.draw(st.lists(st.tuples(at, at), max_size=12)):
        assert bytes(file[start:end]) == whole[start:end]
    assert len(file) == length
    assert bytes(file[:]) == whole
    fetched = [n for offset, size in shard.reads for n in range(offset // SIZE, -(-(offset + size) // SIZE))]
    assert sorted(fetched) == list(range(last))


def test_what_was_foreseen_is_read_in_one_go_and_what_was_not_when_it_is_looked_at() -> None:
    shard = Shard(some(640))
    file = opened(some(640), shard)
    file.prefetch(((0, 1), (4, 2)))
    assert shard.reads == [(0, 64), (256, 128)]
    assert bytes(file[10:60]) == some(640)[10:60]
    assert len(shard.reads) == 2
    assert bytes(file[500:501]) == some(640)[500:501]
    assert shard.reads[2:] == [(448, 64)]


def test_reading_on_fetches_twice_as_much_each_time_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "AHEAD_BYTES", 8 * SIZE)
    shard = Shard(some(40 * SIZE))
    file = opened(some(40 * SIZE), shard)
    for at in range(0, 40 * SIZE, 16):
        file[at : at + 16]
    assert [size // SIZE for _, size in shard.reads] == [1, 2, 4, 8, 8, 8, 8, 1]


def test_reading_elsewhere_begins_with_one_piece_again() -> None:
    shard = Shard(some(40 * SIZE))
    file = opened(some(40 * SIZE), shard)
    for piece in (0, 1, 3, 20, 21, 5):
        file[piece * SIZE : piece * SIZE + 1]
    assert [(at // SIZE, size // SIZE) for at, size in shard.reads] == [(0, 1), (1, 2), (3, 4), (20, 1), (21, 2)]


def test_of_a_file_that_is_read_through_only_the_last_of_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "AHEAD_BYTES", 4 * SIZE)
    monkeypatch.setattr(partial, "KEPT_BYTES", 6 * SIZE)
    shard = Shard(some(100 * SIZE))
    file = opened(some(100 * SIZE), shard)
    file.prefetch(((50, 1),))
    for piece in range(100):
        assert bytes(file[piece * SIZE : (piece + 1) * SIZE]) == some(100 * SIZE)[piece * SIZE : (piece + 1) * SIZE]
        assert len(file.sent_pieces().pieces) <= 11
    assert 50 in file.sent_pieces().pieces  # what was foreseen stays
    shard.reads.clear()
    file[99 * SIZE :], file[50 * SIZE : 51 * SIZE]
    assert not shard.reads
    file[:1]
    assert shard.reads == [(0, SIZE)]


def test_wrong_bytes_of_the_cache_are_read_again_from_the_store() -> None:
    wrong, right = bytearray(some(640)), Shard(some(640))
    wrong[300] ^= 1
    file = opened(some(640), Shard(bytes(wrong)), right)
    assert bytes(file[:]) == some(640)
    assert right.reads == [(256, 64)]


def test_wrong_bytes_of_the_store_are_an_error_only_when_they_are_read() -> None:
    wrong = bytearray(some(640))
    wrong[300] ^= 1
    file = opened(some(640), Shard(bytes(wrong)), Shard(bytes(wrong)))
    file.prefetch(((0, 10),))
    assert bytes(file[:256]) == some(640)[:256]
    for _ in range(2):
        with pytest.raises(
            CorruptionError, match=r"shards/a\.tar: the 64 bytes at 1256 are not those that were packed"
        ):
            file[310:311]
    assert bytes(file[320:]) == some(640)[320:]


def test_what_a_shard_that_became_shorter_lacks_is_an_error_when_it_is_looked_at() -> None:
    shard = Shard(some(640), OFFSET + 330)
    file = opened(some(640), shard, shard)
    file.prefetch(((0, 1), (8, 1)))
    assert bytes(file[:320]) == some(640)[:320]
    with pytest.raises(CorruptionError, match=r"shards/a\.tar: the object ends before"):
        file[320:]


def test_trouble_of_the_store_is_no_damage() -> None:
    def fail(_: Sequence[tuple[int, int]]) -> list[memoryview]:
        raise TransientError("the store does not answer")

    member = Member("mp4", OFFSET, 640, 0, pieces_of(some(640)))
    file = PartialFile("shards/a.tar", member, read=fail, read_direct=fail, heads=HeadCache())
    with pytest.raises(TransientError):
        file.prefetch(((0, 1),))
    with pytest.raises(TransientError):
        file[0:1]


def test_another_process_gets_what_is_there_and_right_and_says_what_it_lacks() -> None:
    wrong = bytearray(some(640))
    wrong[70] ^= 1
    file = opened(some(640), Shard(bytes(wrong)))
    file.prefetch(((0, 4),))
    sent = SentFile(file.sent_pieces())
    assert len(sent) == 640
    assert bytes(sent[128:256]) == some(640)[128:256]
    assert bytes(sent[5:3]) == b""
    with pytest.raises(MissingPieceError) as missing:
        sent[60:70]
    assert missing.value.number == 1
    file.load(1)
    assert bytes(SentFile(file.sent_pieces())[:256]) == some(640)[:256]


def test_the_head_of_a_file_is_read_once_for_all_its_clips() -> None:
    shard, heads = Shard(some(640)), HeadCache()
    first = opened(some(640), shard, None, heads, ((0, 2), (9, 1)))
    first.prefetch(((0, 2), (5, 1), (9, 1)))
    assert bytes(first[0:384]) == some(640)[0:384]
    assert [at // SIZE for at, _ in shard.reads] == [0, 5, 9, 2, 3]
    shard.reads.clear()
    other = opened(some(640), shard, None, heads, ((0, 2), (9, 1)))
    other.prefetch(((0, 2), (6, 1), (9, 1)))
    assert bytes(other[0:128]) == some(640)[0:128]
    assert shard.reads == [(384, 64)], "not even the last piece of the head, which the first clip did not look at"
    assert sorted(other.sent_pieces().pieces) == [0, 1, 6, 9]


def test_a_wrong_head_is_not_kept() -> None:
    wrong, heads = bytearray(some(640)), HeadCache()
    wrong[3] ^= 1
    file = opened(some(640), Shard(bytes(wrong)), Shard(bytes(wrong)), heads, ((0, 1),))
    with pytest.raises(CorruptionError):
        file[0:10]
    assert bytes(opened(some(640), Shard(some(640)), None, heads, ((0, 1),))[0:10]) == some(640)[0:10]


def test_heads_are_held_up_to_a_limit_and_the_least_used_go_first() -> None:
    data, heads = some(640), HeadCache(3 * SIZE)
    members = [Member("mp4", offset, 640, 0, pieces_of(data, SIZE, ((0, 1),))) for offset in (0, 1000, 2000, 3000)]
    for member in members[:3]:
        heads.put("a.tar", member, 0, memoryview(data)[:SIZE])
        heads.put("a.tar", member, 1, memoryview(data)[SIZE : 2 * SIZE])  # of no head
    held = heads.get("a.tar", members[0], 0)
    assert held is not None
    assert bytes(held) == data[:SIZE]
    heads.put("a.tar", members[3], 0, memoryview(data)[:SIZE])
    assert [heads.get("a.tar", member, 0) is not None for member in members] == [True, False, True, True]
    assert heads.get("b.tar", members[0], 0) is None
    assert heads.get("a.tar", members[0], 1) is None
    assert heads.uncached("a.tar", members[0], ((0, 3), (7, 1))) == ((1, 2), (7, 1))
    assert heads.uncached("a.tar", members[1], ((0, 3),)) == ((0, 3),)


def test_a_decoder_that_asks_for_too_much_gets_what_is_there() -> None:
    data = some(10 * SIZE)
    shard = Shard(data)
    file = opened(data, shard)
    file.prefetch(((2, 3),))
    shard.reads.clear()
    view = ViewFile(file)
    view.seek(2 * SIZE + 5)
    assert view.read(1 << 16) == data[2 * SIZE + 5 : 5 * SIZE]
    assert shard.reads == [], "nothing behind the clip is fetched"
    assert view.read(7) == data[5 * SIZE : 5 * SIZE + 7], "but what is needed is"
    assert shard.reads == [(5 * SIZE, SIZE)]
    view.seek(9 * SIZE)
    assert view.read(1 << 16) == data[9 * SIZE :]
    assert view.read(10) == b""


def test_an_excerpt_ends_a_read_where_the_pieces_end() -> None:
    data = some(10 * SIZE)
    shard = Shard(data)
    file = opened(data, shard)
    file.prefetch(((2, 3),))
    shard.reads.clear()
    cut = Excerpt(b"head", file, b"tail")
    view = ViewFile(cut)
    view.seek(4 + 2 * SIZE)
    assert view.read(1 << 16) == data[2 * SIZE : 5 * SIZE]
    view.seek(4 + 9 * SIZE)
    assert view.read(1 << 16) == data[9 * SIZE :] + b"tail"
    view.seek(len(cut) - 2)
    assert view.read(100) == b"il"
    assert shard.reads == [(9 * SIZE, SIZE)]


def test_pieces_of_the_head_that_no_clip_looks_at_are_fetched_once() -> None:
    data, heads = some(10 * SIZE), HeadCache()
    shard = Shard(data)
    for _ in range(2):
        opened(data, shard, heads=heads, head=((0, 2),)).prefetch(((0, 2), (5, 1)))
    assert shard.reads == [(0, 2 * SIZE), (5 * SIZE, SIZE), (5 * SIZE, SIZE)]
