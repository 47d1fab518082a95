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

from headrace.dataio.core.errors import CorruptionError, TransientError, UnsupportedError
from headrace.dataio.shards import tar
from tests.attacks.tars import ATTACKS, GOOD, archive
from tests.support.written_media import ReadTar


def scan(data: bytes) -> list[tar.TarMember]:
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


def test_webdataset_reads_samples(tmp_path: Path, read_with_webdataset: ReadTar) -> None:
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
    with (tmp_path / "sparse.tar").open("wb") as sparse:  # a hole, so it costs no space
        sparse.write(header)
        sparse.truncate(len(header) + tar.padded(size) + len(tar.END))
    with (tmp_path / "sparse.tar").open("rb") as file:

        def read_at(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        (entry,) = tar.scan(read_at, (tmp_path / "sparse.tar").stat().st_size, "shard")
    assert (entry.length, entry.offset) == (size, len(header))


@given(
    st.text(st.sampled_from("aé/."), max_size=3).map(lambda text: text + "x" * 50),
    st.integers(0, 120),
    st.sampled_from([0, 1, 512, (8 << 30) - 1, 8 << 30]),
)
def test_the_bytes_of_a_member_are_those_that_it_takes(name: str, longer: int, length: int) -> None:
    name += "y" * longer
    assert tar.member_bytes(name, length) == len(tar.header_for(name, length)) + tar.padded(length)


@pytest.mark.parametrize("data", [b"", b"12", b"1234"])
def test_a_payload_of_another_length_stops_the_writing(data: bytes) -> None:
    placed, _ = tar.layout([("a.txt", 3)])
    with pytest.raises(TransientError, match=r"a\.txt changed"):
        list(tar.stream(placed, [[data]]))


# --- attacks: each is refused, with the shard and the offset of the header


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
