"""What is written is read by everyone; what is read is not trusted."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.core import limits
from dataio.core.errors import CorruptionError, MillraceError, TransientError, UnsupportedError
from dataio.shards import tar


def archive(members: list[tuple[str, bytes]]) -> bytes:
    placed, size = tar.layout((name, len(data)) for name, data in members)
    whole = b"".join(tar.stream(placed, ([data] for _, data in members)))
    assert len(whole) == size
    return whole


def scan(data: bytes) -> list[tar.Entry]:
    def read_at(offset: int, length: int) -> bytes:
        assert offset >= 0
        assert offset + length <= len(data)
        return data[offset : offset + length]

    return list(tar.scan(read_at, len(data), "shard"))


part = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="./\\"), min_size=1, max_size=60)
key = st.lists(part, min_size=1, max_size=4).map("/".join)
member = st.tuples(st.tuples(key, st.sampled_from(["mp4", "json", "txt", "cls.npy"])), st.binary(max_size=1500))


@given(st.lists(member, max_size=6))
def test_what_is_written_is_read_back(members: list[tuple[tuple[str, str], bytes]]) -> None:
    data = archive([(f"{k}.{ext}", payload) for (k, ext), payload in members])
    found = [((e.key, e.ext), data[e.offset : e.offset + e.length]) for e in scan(data)]
    assert found == members


@given(st.lists(member, max_size=6))
def test_pythons_tarfile_reads_the_same(members: list[tuple[tuple[str, str], bytes]]) -> None:
    data = archive([(f"{k}.{ext}", payload) for (k, ext), payload in members])
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        infos = file.getmembers()
        assert [(i.name, i.offset_data) for i in infos] == [(e.name, e.offset) for e in scan(data)]
        assert {(i.mtime, i.uid, i.gid, i.mode, i.uname, i.gname) for i in infos} <= {(0, 0, 0, 0o644, "", "")}


def test_gnu_tar_reads_long_and_foreign_names(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("d" * 120 + "/" + "é" * 80 + ".txt", b"22"), ("ü.json", b"{}")]
    (tmp_path / "s.tar").write_bytes(archive(members))
    subprocess.run(["tar", "xf", "s.tar"], cwd=tmp_path, check=True, env={"LC_ALL": "C.UTF-8", "PATH": "/bin:/usr/bin"})
    assert [(tmp_path / name).read_bytes() for name, _ in members] == [data for _, data in members]


def test_webdataset_reads_samples(tmp_path: Path, read_with_webdataset) -> None:
    (tmp_path / "s.tar").write_bytes(archive([("d/a.json", b"{}"), ("d/a.mp4", b"video"), ("d/b.mp4", b"w")]))
    samples = read_with_webdataset(tmp_path / "s.tar")
    assert [(s["__key__"], s["mp4"]) for s in samples] == [("d/a", b"video"), ("d/b", b"w")]


@pytest.mark.parametrize("program_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_other_programs_are_read(program_format: int) -> None:
    sink = io.BytesIO()
    names = [
        "./x/a.MP4",
        "x/a.seg.json",
        "long/" * 15 + "name" * (5 if program_format == tarfile.USTAR_FORMAT else 40) + ".txt",
    ]
    with tarfile.open(fileobj=sink, mode="w", format=program_format) as file:
        folder = tarfile.TarInfo("x")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
        for name in [*names, "README", "x/.hidden"]:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 5, 1.5 if program_format == tarfile.PAX_FORMAT else 1
            file.addfile(info, io.BytesIO(b"12345"))
    found = scan(sink.getvalue())
    assert [e.name for e in found] == names
    assert [(e.key, e.ext) for e in found[:2]] == [("./x/a", "mp4"), ("x/a", "seg.json")]
    assert {sink.getvalue()[e.offset : e.offset + e.length] for e in found} == {b"12345"}


def test_sizes_above_8_gib_are_written_and_read(tmp_path: Path) -> None:
    size = 9 << 30
    header = tar.header_for("big.mp4", size)
    with (tmp_path / "sparse.tar").open("wb") as file:  # a hole, so it costs no space
        file.write(header)
        file.truncate(len(header) + tar.padded(size) + len(tar.END))
    with (tmp_path / "sparse.tar").open("rb") as file:

        def read_at(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        (entry,) = tar.scan(read_at, (tmp_path / "sparse.tar").stat().st_size, "shard")
    assert (entry.length, entry.offset) == (size, len(header))


@pytest.mark.parametrize("data", [b"", b"12", b"1234"])
def test_a_payload_of_another_length_stops_the_writing(data: bytes) -> None:
    placed, _ = tar.layout([("a.txt", 3)])
    with pytest.raises(TransientError, match=r"a\.txt changed"):
        list(tar.stream(placed, [[data]]))


# --- attacks: each is refused, with the shard and the offset of the header


def header(name: str = "b.mp4", kind: bytes = b"0", size: int | bytes = 4, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[-512:])
    if isinstance(size, bytes):
        block[124:136] = size.ljust(12, b"\0")
    else:
        block[124:136] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return header("pax", kind, len(records)) + records.ljust(tar.padded(len(records)), b"\0")


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


GOOD = archive([("a.mp4", b"good")])[: -len(tar.END)]
BODY = b"evil".ljust(512, b"\0")
ATTACKS: dict[str, tuple[bytes, type[MillraceError], str]] = {
    "dot dot": (header("../b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "dot dot inside": (header("a/../../b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "absolute": (header("/etc/b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "backslash": (header("..\\b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "no name": (header("") + BODY, UnsupportedError, "leave its folder"),
    "symbolic link": (header(kind=b"2", size=0, link="/etc/passwd"), UnsupportedError, "symbolic link"),
    "hard link": (header(kind=b"1", size=0, link="a.mp4"), UnsupportedError, "hard link"),
    "character device": (header(kind=b"3", size=0), UnsupportedError, "device"),
    "block device": (header(kind=b"4", size=0), UnsupportedError, "device"),
    "pipe": (header(kind=b"6", size=0), UnsupportedError, "pipe"),
    "gnu sparse": (header(kind=b"S") + BODY, UnsupportedError, "sparse"),
    "unknown kind": (header(kind=b"Z") + BODY, UnsupportedError, "kind b'Z'"),
    "gnu long link": (header("././@LongLink", b"K", 4) + BODY, UnsupportedError, "kind b'K'"),
    "volume": (header(kind=b"V", size=0), UnsupportedError, "kind b'V'"),
    "huge": (header(size=0o77777777777) + BODY, CorruptionError, "truncated"),
    "huge in base 256": (header(size=b"\x80" + b"\x3f" * 11) + BODY, CorruptionError, "impossible number"),
    "negative": (header(size=b"\xff" * 11 + b"\xfe") + BODY, CorruptionError, "impossible number"),
    "no number": (header(size=b"12x4") + BODY, CorruptionError, "where a number belongs"),
    "minus sign": (header(size=b"-4") + BODY, CorruptionError, "where a number belongs"),
    "damaged": (b"\x01" + header()[1:] + BODY, CorruptionError, "checksum"),
    "pax dot dot": (pax(record("path", "../b.mp4")) + header() + BODY, UnsupportedError, "leave its folder"),
    "pax nul": (pax(record("path", "b\0.mp4")) + header() + BODY, UnsupportedError, "leave its folder"),
    "pax negative": (pax(record("size", "-5")) + header() + BODY, CorruptionError, "impossible size"),
    "pax huge": (pax(record("size", "9" * 30)) + header() + BODY, CorruptionError, "impossible size"),
    "pax beyond": (pax(record("size", "9999")) + header() + BODY, CorruptionError, "truncated"),
    "pax sparse": (pax(record("GNU.sparse.major", "1")) + header() + BODY, UnsupportedError, "sparse"),
    "pax global path": (pax(record("path", "b.mp4"), b"g") + header() + BODY, UnsupportedError, "global"),
    "pax lies on length": (pax(b"99 path=b.mp4\n") + header() + BODY, CorruptionError, "malformed"),
    "pax without equals": (pax(b"8 path\n\n") + header() + BODY, CorruptionError, "pax record|malformed"),
    "pax not utf-8": (pax(b"13 path=\xff\xff\xff\xff\n") + header() + BODY, CorruptionError, "damaged extended"),
    "pax at the end": (pax(record("path", "b.mp4")), CorruptionError, "after an extended header"),
    "gnu long dot dot": (
        header("././@LongLink", b"L", 9) + b"../b.mp4\0".ljust(512, b"\0") + header() + BODY,
        UnsupportedError,
        "leave its folder",
    ),
    "oversize header": (
        header("pax", b"x", limits.TAR_HEADER_BYTES + 1) + bytes(limits.TAR_HEADER_BYTES + 512),
        UnsupportedError,
        "larger than",
    ),
    "many headers": (
        (header("pax", b"g", limits.TAR_HEADER_BYTES // 2) + bytes(limits.TAR_HEADER_BYTES // 2)) * 3,
        (CorruptionError, UnsupportedError),
        "larger than|malformed",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_with_its_offset(attack: str) -> None:
    evil, error, words = ATTACKS[attack]
    data = GOOD + evil + tar.END
    with pytest.raises(error, match=words) as caught:
        scan(data)
    offsets = [int(n) for n in re.findall(r"offset (\d+)", str(caught.value))]
    assert offsets
    assert all(len(GOOD) <= offset < len(data) for offset in offsets)
    assert str(caught.value).startswith("shard: ")


@given(st.integers(0, 10_000))
def test_every_truncation_is_found(cut: int) -> None:
    data = archive([("a.mp4", b"x" * 700), ("n" * 150 + ".txt", b"y"), ("b.mp4", b"z" * 512)])
    with pytest.raises(CorruptionError, match=r"truncated|ends after"):
        scan(data[: cut % len(data)])


@given(st.data())
def test_no_damage_makes_it_read_outside_or_raise_anything_unexpected(data: st.DataObject) -> None:
    whole = bytearray(archive([("a.mp4", b"x" * 700), ("n" * 150 + ".txt", b"y"), ("b.mp4", b"z" * 512)]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        entries = scan(bytes(whole))
    except (CorruptionError, UnsupportedError):
        return
    assert all(0 <= e.offset <= e.offset + e.length <= len(whole) for e in entries)
