"""A page holds the samples that were written, or reading it raises an error that names the part and the row."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import pages, row_codec
from headrace.dataio.shards.index.pages import short_digest
from headrace.dataio.shards.pieces import piece_size
from headrace.dataio.shards.sample import AudioInfo, AudioMark, Files, KeyFrame, Member, Pieces, Sample
from headrace.dataio.store.mounts import PREFIX
from tests.support.indexed_datasets import sample, video
from tests.support.sample_strategies import SHARD, SIZE, samples, with_page_fields, without_overlaps

OFFSET = 4096
NAME = "index/x"


def opened(
    written: list[Sample], stored: bytes, directory: bytes
) -> tuple[pages.Directory, Callable[[int], list[msgspec.Raw]]]:
    section = pages.section_at(OFFSET, stored, directory)
    found = pages.Directory(section, directory, len(written), NAME)

    def page(number: int) -> list[msgspec.Raw]:
        start, end = found.range(number)
        return found.unpack(number, stored[start - OFFSET : end - OFFSET])

    return found, page


def rows(sizes: dict[str, int] | None = None, prefix: str = "") -> row_codec.RowDecoder:
    return row_codec.RowDecoder(NAME, sizes or {SHARD: SIZE}, prefix=prefix, unprefixed=PREFIX)


def all_of(written: list[Sample]) -> list[Sample]:
    directory, page = opened(written, *pages.write(written))
    raws = [raw for number in range(len(directory)) for raw in page(number)]
    return [rows().sample(raw, at, at) for at, raw in enumerate(raws)]


@given(st.lists(samples.flatmap(with_page_fields), max_size=4).map(without_overlaps))
def test_samples_come_back_as_they_were_written(written: list[Sample]) -> None:
    assert all_of(written) == [replace(one, id=number) for number, one in enumerate(written)]
    assert pages.write(written) == pages.write(iter(written))
    for one in written:
        plain = pages.without_page_fields(one)
        assert rows().files(msgspec.Raw(row_codec.encode_row(one)), 0) == Files(one.shard, list(plain.members))


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=300))
def test_every_row_is_found_in_a_page_that_is_neither_long_nor_large(lengths: list[int]) -> None:
    few = [length if number % 40 == 0 else 10 for number, length in enumerate(lengths)]
    written = [replace(sample(n, SHARD, n), text="x" * length) for n, length in enumerate(few)]
    directory, page = opened(written, *pages.write(written))
    page_numbers, inside = directory.find(np.arange(len(written)))
    for number in range(len(directory)):
        held = page(number)
        here = [written[row] for row in np.flatnonzero(page_numbers == number)]
        assert [rows().sample(raw, one.id, one.id) for raw, one in zip(held, here, strict=True)] == here
        assert inside[page_numbers == number].tolist() == list(range(len(here)))
        assert len(held) <= pages.PAGE_ROWS
        assert sum(len(bytes(raw)) for raw in held[:-1]) < pages.PAGE_BYTES  # the last one may be of any length
        assert directory.unpacked(number) >= sum(len(bytes(raw)) for raw in held)


def test_a_shard_of_another_dataset_gets_its_prefix_unless_it_is_mounted_itself() -> None:
    own, mounted = sample(0, "shards/a.tar", 0), sample(0, "mounts/m2/b.tar", 0)
    made = rows({"mounts/m1/shards/a.tar": SIZE, "mounts/m2/b.tar": SIZE}, "mounts/m1/")
    assert made.sample(msgspec.Raw(row_codec.encode_row(own)), 0, 0) == replace(own, shard="mounts/m1/shards/a.tar")
    assert made.files(msgspec.Raw(row_codec.encode_row(mounted)), 0).shard == "mounts/m2/b.tar"


GOOD = sample(1, SHARD, 1, audio=AudioInfo("wav", 0, "pcm_s16le", 16000, 1, 16000))
VIDEO = video(1)


def with_video(**changes: Any) -> Sample:
    return replace(GOOD, video=replace(VIDEO, **changes))


def with_members(*members: tuple[int, int]) -> Sample:
    return replace(GOOD, members=tuple(Member("mp4", offset, length, 1) for offset, length in members))


def with_pieces(size: int, digests: bytes, *head: tuple[int, int]) -> Sample:
    """`GOOD` of a longer file."""
    return replace(GOOD, members=(Member("mp4", 512, 100, 1, Pieces(size, digests, head)),))


EIGHT = b"8bytes__"
LONG = replace(with_pieces(64, EIGHT * 2, (0, 1)), video=replace(VIDEO, key_frames=(KeyFrame(0, 0, 40),)))


INVALID = {
    "pieces of no size": (with_pieces(0, b""), "Expected `int` >= 1"),
    "pieces of an odd size": (with_pieces(96, EIGHT * 2), "pieces of member 'mp4': pieces of 96 bytes"),
    "too few pieces": (with_pieces(64, EIGHT), "pieces of member 'mp4': 8 bytes of digests for 2 pieces"),
    "a head behind the end": (with_pieces(64, EIGHT * 2, (1, 2)), "pieces of member 'mp4': runs of pieces"),
    "a head of nothing": (with_pieces(64, EIGHT * 2, (1, 0)), "Expected `int` >= 1"),
    "a key frame in front of the file": (with_video(key_frames=(KeyFrame(0, 0, -2), KeyFrame(9, 9, 5))), ">= -1"),
    "foreign shard": (replace(GOOD, shard="../../etc/passwd"), "shard is not a shard of this dataset version"),
    "no members": (replace(GOOD, members=()), "members is empty"),
    "behind the end": (with_members((SIZE + 1, 0)), "outside its shard"),
    "across the end": (with_members((SIZE - 5, 6)), "outside its shard"),
    "negative offset": (with_members((-512, 10)), "Expected `int` >= 0"),
    "negative length": (with_members((512, -1)), "Expected `int` >= 0"),
    "overlap": (with_members((512, 600), (1024, 10)), "overlaps the next member"),
    "twice the same range": (with_members((512, 600), (512, 600)), "overlaps the next member"),
    "a further video without a file": (
        replace(GOOD, videos=(replace(VIDEO, ext="cam1.mp4"),)),
        "a further video belongs to no member",
    ),
    "a further video without frames": (replace(GOOD, videos=(replace(VIDEO, frames=0),)), "Expected `int` >= 1"),
    "overlap, the later one first": (with_members((1024, 10), (512, 600)), "overlaps the next member"),
    "no key": (replace(GOOD, key=""), "length >= 1"),
    "negative duration": (replace(GOOD, duration=-1.0), "Expected `float` >= 0"),
    "infinite duration": (replace(GOOD, duration=float("inf")), "duration is not finite"),
    "nan duration": (replace(GOOD, duration=float("nan")), "duration is not finite|Expected `float` >= 0"),
    "no width": (with_video(width=0), "Expected `int` >= 1"),
    "no frames": (with_video(frames=0), "Expected `int` >= 1"),
    "no key frames": (with_video(key_frames=()), "key_frames is empty"),
    "a key frame behind the end": (with_video(key_frames=(KeyFrame(0, 0), KeyFrame(9, 91))), "outside the video"),
    "a negative key frame": (with_video(key_frames=(KeyFrame(0, -1),)), "Expected `int` >= 0"),
    "no samples": (replace(GOOD, audio=AudioInfo("wav", 0, "pcm", 16000, 1, 0)), "Expected `int` >= 1"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_row_is_refused_by_its_number(fault: str) -> None:
    wrong, words = INVALID[fault]
    directory, page = opened([GOOD, wrong], *pages.write([GOOD, wrong]))
    raws = page(0)
    assert rows().sample(raws[0], 0, 1) == GOOD
    with pytest.raises(CorruptionError, match=rf"index/x: row 1: .*({words})"):
        rows().sample(raws[1], 1, 1)
    assert len(directory) == 1


def test_a_row_names_the_member_of_its_pieces_and_the_position_of_every_key_frame() -> None:
    for change, words in (
        (lambda row: row[-1][0].__setitem__(0, 1), "pieces belong to no member"),
        (lambda row: row[4][-1].append(7), "key_frames has another number of positions"),
    ):
        stored = msgspec.msgpack.decode(row_codec.encode_row(LONG))
        assert rows().sample(msgspec.Raw(msgspec.msgpack.encode(stored)), 7, LONG.id) == LONG
        change(stored)
        with pytest.raises(CorruptionError, match=f"index/x: row 7: .*{words}"):
            rows().sample(msgspec.Raw(msgspec.msgpack.encode(stored)), 7, 0)


OLD = bytes.fromhex(
    "98b67368617264732f30303030303030302d61612e7461729194a36d7034cd12006501a66b3030303031cb3ff0000000000000dc0011a3"
    "6d703400a468323634cd0500cd02d0cd7530cd03e95a01cd753000ce00015f90a77975763432307000c09100910096a377617600a97063"
    "6d5f7331366c65cd3e8001cd3e80a761206361742031d93d7b224f6464204e616d65223a20747275652c20226c6162656c223a20226f64"
    "64222c20226e756d626572223a20312c202273636f7265223a20302e317d"
)
"""The row of `GOOD` as Headrace wrote it before there were pieces."""


def test_rows_without_pieces_are_as_they_were_before_there_were_any() -> None:
    assert row_codec.encode_row(GOOD) == OLD
    assert rows().sample(msgspec.Raw(OLD), 0, GOOD.id) == GOOD
    assert rows().files(msgspec.Raw(OLD), 0).members == list(GOOD.members)


class OldRow(row_codec._Files, array_like=True):
    """A row as Headrace read it before there were pieces."""

    key: str
    duration: float
    video: row_codec._Video | None
    audio: row_codec._Audio | None
    text: str | None
    fields: str | None


def test_an_older_headrace_reads_rows_with_pieces_and_places_as_if_they_had_none() -> None:
    read = msgspec.msgpack.decode(row_codec.encode_row(LONG), type=OldRow)
    assert (
        msgspec.msgpack.encode(read)
        == row_codec.encode_row(pages.without_page_fields(LONG))
        != row_codec.encode_row(LONG)
    )


class OldLongRow(row_codec._Files, array_like=True):
    """A row with pieces as Headrace read it before there were marks."""

    key: str
    duration: float
    video: row_codec._VideoWithPositions | None
    audio: row_codec._Audio | None
    text: str | None
    fields: str | None
    pieces: list[row_codec._Pieces] | None = None


def test_an_older_headrace_reads_rows_with_marks_as_if_they_had_none() -> None:
    (member,) = LONG.members
    assert member.pieces is not None
    marked = replace(LONG, members=(replace(member, pieces=replace(member.pieces, marks=((3, 0), (70, 1152)))),))
    read = msgspec.msgpack.decode(row_codec.encode_row(marked), type=OldLongRow)
    assert msgspec.msgpack.encode(read) == row_codec.encode_row(LONG) != row_codec.encode_row(marked)
    assert rows().sample(msgspec.Raw(row_codec.encode_row(marked)), 0, LONG.id) == marked


def test_an_older_headrace_reads_rows_that_say_where_sound_begins_as_if_they_did_not() -> None:
    sound = AudioInfo(
        "ogg", 0, "opus", 48_000, 2, 999, Fraction(1, 48_000), -312, (AudioMark(99, -312), AudioMark(7000, 648))
    )
    with_start = replace(GOOD, audio=sound)
    read = msgspec.msgpack.decode(row_codec.encode_row(with_start), type=OldRow)
    assert (
        msgspec.msgpack.encode(read)
        == row_codec.encode_row(pages.without_page_fields(with_start))
        != row_codec.encode_row(with_start)
    )
    assert rows().sample(msgspec.Raw(row_codec.encode_row(with_start)), 0, GOOD.id) == with_start


CAMERAS = replace(GOOD, video=replace(VIDEO, origin_pts=90), videos=(replace(VIDEO, origin_pts=-5), VIDEO))


def test_an_older_headrace_reads_rows_with_further_videos_as_if_they_had_none() -> None:
    for one in (CAMERAS, replace(CAMERAS, members=LONG.members)):
        read = msgspec.msgpack.decode(row_codec.encode_row(one), type=OldRow)
        assert (
            msgspec.msgpack.encode(read)
            == row_codec.encode_row(pages.without_page_fields(one))
            != row_codec.encode_row(one)
        )
        assert rows().sample(msgspec.Raw(row_codec.encode_row(one)), 0, GOOD.id) == one


@pytest.mark.parametrize("length", [limits.MIB, 128 * limits.MIB, 4 * limits.GIB])
def test_pieces_and_places_take_less_than_two_ten_thousandths_of_a_long_files_bytes(length: int) -> None:
    """With a key frame every 150 KiB, which is one a second at 1.2 Mbit/s."""
    keys = tuple(KeyFrame(512 * n, 12 * n, 150 * limits.KIB * n + 99) for n in range(length // (150 * limits.KIB)))
    size = piece_size(length)
    assert size is not None
    member = Member("mp4", 512, length, 1, Pieces(size, b"8bytes__" * -(-length // size), ((0, 2),)))
    film = replace(GOOD, members=(member,), video=replace(VIDEO, frames=2**30, key_frames=keys))
    assert len(row_codec.encode_row(film)) - len(row_codec.encode_row(pages.without_page_fields(film))) < length / 5_000


@pytest.mark.parametrize("fields", ["{", "[1]", '{"a": NaN}', '{"a":' * 100_000])
def test_fields_that_are_no_json_object_are_refused(fields: str) -> None:
    stored = msgspec.msgpack.decode(row_codec.encode_row(GOOD))
    stored[-1] = fields
    with pytest.raises(CorruptionError, match=f"sample '{GOOD.key}'"):
        rows().sample(msgspec.Raw(msgspec.msgpack.encode(stored)), 0, 0)


NOT_UTF8 = row_codec.encode_row(GOOD).replace(GOOD.key.encode(), b"\xff" * len(GOOD.key.encode()))


def test_a_row_whose_text_is_not_utf8_is_refused() -> None:
    with pytest.raises(CorruptionError, match="index/x: row 7: is not a row"):
        rows().sample(msgspec.Raw(NOT_UTF8), 7, 0)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({}), msgspec.msgpack.encode([SHARD]), b"\x91" * 4096]
)
def test_bytes_that_are_not_a_row_are_refused(data: bytes) -> None:
    for read in (lambda raw: rows().sample(raw, 7, 0), lambda raw: rows().files(raw, 7)):
        with pytest.raises(CorruptionError, match="index/x: row 7: is not a row"):
            read(msgspec.Raw(data))


def one_page(stored: bytes, declared_rows: int, declared_size: int) -> Callable[[], list[msgspec.Raw]]:
    """A page with these bytes, and a directory with the matching digests."""
    entry = np.array(
        [(declared_rows, len(stored), declared_size, short_digest(stored))], pages._DIRECTORY_ENTRY
    ).tobytes()
    found = pages.Directory(pages.section_at(OFFSET, stored, entry), entry, declared_rows, NAME)
    return lambda: found.unpack(0, stored)


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


ROW = row_codec.encode_row(GOOD)
PAGE = b"\x91" + ROW
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(PAGE)
PAGES = {
    "more rows than it holds": (packed(PAGE), 2, len(PAGE), "holds 1 rows, the directory says 2"),
    "another size": (packed(PAGE), 1, len(PAGE) - 1, "another size"),
    "a size that it does not say": (UNSIZED, 1, len(PAGE), "another size"),
    "a bomb": (packed(bytes(1 << 26)), 1, len(PAGE), "another size"),
    "no zstd": (PAGE, 1, len(PAGE), "cannot be unpacked"),
    "half a frame": (packed(PAGE)[:-3], 1, len(PAGE), "cannot be unpacked"),
    "no msgpack": (packed(b"\xc1"), 1, 1, "cannot be unpacked"),
    "no list": (packed(ROW[:0] + b"\x80"), 1, 1, "cannot be unpacked"),
    "something behind": (packed(PAGE + b"x"), 1, len(PAGE) + 1, "cannot be unpacked"),
}


@pytest.mark.parametrize("attack", PAGES)
def test_a_forged_page_is_refused_before_it_fills_the_memory(attack: str) -> None:
    stored, declared_rows, declared_size, words = PAGES[attack]
    with pytest.raises(CorruptionError, match=f"index/x: page 0 of its rows: .*{words}"):
        one_page(stored, declared_rows, declared_size)()
    assert one_page(packed(PAGE), 1, len(PAGE))() == [msgspec.Raw(ROW)]


def test_a_page_that_says_to_hold_more_than_any_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_UNPACKED_BYTES", len(PAGE) - 1)
    with pytest.raises(CorruptionError, match="another size"):
        one_page(packed(PAGE), 1, len(PAGE))()


def test_a_directory_that_is_not_the_versions_is_refused() -> None:
    stored, directory = pages.write([GOOD])
    section = pages.section_at(OFFSET, stored, directory)
    with pytest.raises(CorruptionError, match="BLAKE3 digest of the directory"):
        pages.Directory(section, bytes(len(directory)), 1, NAME)
    with pytest.raises(CorruptionError, match="does not match the rows and bytes"):
        pages.Directory(section, directory, 2, NAME)
    with pytest.raises(CorruptionError, match="does not match the rows and bytes"):
        pages.Directory(replace(section, pages=section.pages + 1), directory, 1, NAME)
    empty = np.array([(0, 0, 0, b""), (1, len(stored), 0, b"")], pages._DIRECTORY_ENTRY).tobytes()
    with pytest.raises(CorruptionError, match="does not match the rows and bytes"):
        pages.Directory(pages.section_at(OFFSET, stored, empty), empty, 1, NAME)
