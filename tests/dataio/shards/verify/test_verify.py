"""`verify` finds every kind of damage, and repairs it from a copy that is intact there."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.dataio import Dataset, cli, index, open_store, pack
from headrace.dataio.core.errors import CorruptionError, DeadlineError, NotFoundError, TransientError, UsageError
from headrace.dataio.shards import tar
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.query.tables import PartReader
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.verify import shard_units
from headrace.dataio.shards.verify.dataset_check import verify
from headrace.dataio.shards.verify.report import VerifyProgress, VerifyReport
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.workers import jobs
from headrace.dataio.shards.workers.jobs import decode_sample
from headrace.dataio.shards.workers.worker_pool import WorkerPool
from headrace.dataio.store.base import Store
from tests.support import headrace_command


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of four shards of the same size and names of the same length."""
    root = tmp_path_factory.mktemp("verify")
    for i in range(8):
        folder = root / "in"
        folder.mkdir(exist_ok=True)
        make_tone(folder / f"s{i}.wav", i)
        (folder / f"s{i}.txt").write_text(f"caption {i}")
    with pack(root / "in", root / "ds", shard_bytes=9000, workers=1) as dataset:
        assert len(dataset.document.shards) == 4
    return root / "ds"


def make_tone(path: Path, number: int, seconds: float = 0.125) -> None:
    import wave

    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes((j * (number + 3)) % 251 for j in range(int(seconds * 16000))))


@pytest.fixture
def ds(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "ds")
    return tmp_path / "ds"


def shards(root: Path) -> list[Path]:
    return sorted((root / "shards").iterdir())


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def codes(report: VerifyReport) -> dict[str, set[str]]:
    return {found.object: {finding.code for finding in found.findings} for found in report.damaged}


def first_member(root: Path, shard: Path) -> tuple[int, int]:
    with Dataset(root) as dataset:
        member = next(s for s in dataset if s.shard.endswith(shard.name)).members[1]
    return member.offset, member.length


def test_a_sound_dataset_has_nothing_to_report(original: Path) -> None:
    report = verify(original, decode="100%", workers=2)
    assert not report.damaged
    assert report.orphans == ()
    of_shards = [o for o in report.objects if o.kind == "shard"]
    assert sum(o.members for o in of_shards) == 16
    assert sum(o.decoded for o in of_shards) == 8
    assert {o.object for o in report.objects} >= {"dataset.json", "versions/00000001.json"}
    assert report.bytes > sum(p.stat().st_size for p in shards(original))


Damage = Callable[[Path], str]


def test_tars_in_their_own_folder_are_sound_with_the_shard_in_front_of_the_keys(tmp_path: Path) -> None:
    def write(name: str, *members: str) -> None:
        with tarfile.open(tmp_path / name, "w") as shard:
            for key in members:
                member = tarfile.TarInfo(key)
                member.size = 4
                shard.addfile(member, io.BytesIO(name.encode()[:4]))

    for name in ("0000.tar", "0001.tar"):
        write(name, "./000000.bin", "000001.bin")
    with index(tmp_path / "{0000..0001}.tar", tmp_path, keys="shard") as dataset:
        assert list(dataset.keys) == ["0000/000000", "0000/000001", "0001/000000", "0001/000001"]
    assert not verify(tmp_path, workers=1).damaged
    write("0001.tar", "./000000.bin", "000002.bin")
    assert codes(verify(tmp_path, workers=1)) == {"0001.tar": {"header"}}


def _payload(root: Path) -> str:
    shard = shards(root)[1]
    offset, length = first_member(root, shard)
    flip(shard, offset + length // 2)
    return "checksum"


def _header(root: Path) -> str:
    flip(shards(root)[1], 3)
    return "structure"


def _renamed_header(root: Path) -> str:
    shard = shards(root)[1]
    data = shard.read_bytes()
    with Dataset(root) as dataset:
        member = next(s for s in dataset if s.shard.endswith(shard.name)).members[0]
    header = tar.header_for("zz.txt", member.length)
    assert member.offset == len(header)
    shard.write_bytes(header + data[len(header) :])
    return "header"


def _truncated(root: Path) -> str:
    shard = shards(root)[1]
    os.truncate(shard, shard.stat().st_size // 2)
    return "size"


def _cut_end(root: Path) -> str:
    shard = shards(root)[1]
    os.truncate(shard, shard.stat().st_size - 512)
    return "size"


def _extended(root: Path) -> str:
    with shards(root)[1].open("ab") as file:
        file.write(bytes(512))
    return "size"


def _missing(root: Path) -> str:
    shards(root)[1].unlink()
    return "missing"


@pytest.mark.parametrize("damage", [_payload, _header, _renamed_header, _truncated, _cut_end, _extended, _missing])
def test_a_damaged_shard_is_found_alone_and_repaired(ds: Path, original: Path, damage: Damage) -> None:
    shard = shards(ds)[1]
    code = damage(ds)
    found = codes(verify(ds))
    assert list(found) == [f"shards/{shard.name}"]
    assert code in found[f"shards/{shard.name}"]
    report = verify(ds, repair=original)
    assert not report.damaged
    assert [o.object for o in report.repaired] == [f"shards/{shard.name}"]
    assert shard.read_bytes() == (original / "shards" / shard.name).read_bytes()


def test_swapped_shards_are_both_found_and_repaired(ds: Path, original: Path) -> None:
    one, two = shards(ds)[:2]
    assert one.stat().st_size == two.stat().st_size
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    found = codes(verify(ds))
    assert set(found) == {f"shards/{one.name}", f"shards/{two.name}"}
    assert all({"header", "checksum"} <= kinds for kinds in found.values())
    assert not verify(ds, repair=original).damaged
    assert one.read_bytes() == first


def test_a_damaged_header_costs_no_sample_that_is_still_there(ds: Path) -> None:
    flip(shards(ds)[0], 3)
    shard = next(o for o in verify(ds).damaged)
    assert {finding.code for finding in shard.findings} == {"structure"}
    assert shard.members == 4


@pytest.mark.parametrize(
    "name", ["dataset.json", "versions/00000001.json", "index/*.parquet", "tags/first.json", "shards/00000001*.tar"]
)
@pytest.mark.parametrize("change", ["flip", "truncate", "remove"])
def test_every_kind_of_object_is_checked_and_repaired(ds: Path, tmp_path: Path, name: str, change: str) -> None:
    with Dataset(ds) as dataset:
        dataset.tag("first")
        dataset.remove(["s1"], message="so that version 1 is not the newest")
    shutil.copytree(ds, tmp_path / "copy")
    path = next(ds.glob(name))
    whole = path.read_bytes()
    if change == "flip":
        flip(path, min(len(whole) - 8, 700))
    elif change == "truncate":
        path.write_bytes(whole[:-1])
    else:
        path.unlink()
    if not (name.startswith("tags") and change == "remove"):  # a tag that is gone is known only to the copy
        assert str(path.relative_to(ds)) in codes(verify(ds))
    report = verify(ds, repair=tmp_path / "copy")
    assert not report.damaged
    assert [o.object for o in report.repaired] == [str(path.relative_to(ds))]
    assert path.read_bytes() == whole


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one file that has pieces."""
    root = tmp_path_factory.mktemp("film")
    make_tone(root / "long.wav", 1, seconds=80)
    pack(root / "long.wav", root / "ds", workers=1).close()
    return root / "ds"


def rewritten(root: Path, change: Callable[[Sample], Sample]) -> str:
    """As a writer would have made the index that gets its rows wrong, and all digests of the index right; the new part."""
    with Dataset(root) as dataset:
        (part,) = part_writer.store_parts(dataset.store, [change(one) for one in dataset], 0)
        document = msgspec.structs.replace(dataset.document, index=(part,))
        dataset.store.put(versions.version_key(1), versions.encode(document))
    return part.key


def with_pieces(one: Sample, **changes: object) -> Sample:
    (member,) = one.members
    assert member.pieces is not None
    changed = msgspec.structs.replace(member.pieces, **changes)
    return msgspec.structs.replace(one, members=(msgspec.structs.replace(member, pieces=changed),))


def test_a_digest_of_a_piece_that_is_not_of_its_bytes_is_the_indexs_fault_and_no_reason_to_repair(
    film: Path, tmp_path: Path
) -> None:
    assert not verify(film, decode="100%", workers=1).damaged
    shutil.copytree(film, tmp_path / "ds")
    with Dataset(film) as dataset:
        pieces = dataset.sample(0).members[0].pieces
    assert pieces is not None
    digests = bytearray(pieces.digests)
    digests[8 * 3] ^= 1
    rewritten(tmp_path / "ds", lambda one: with_pieces(one, digests=bytes(digests)))
    report = verify(tmp_path / "ds", repair=film, decode="100%", workers=1)
    (shard,) = report.damaged
    assert [(one.code, one.key, one.ext) for one in shard.findings] == [("pieces", "long", "wav")]
    assert "its checksum matches, but the index has another digest of its piece 3 of" in shard.findings[0].message
    assert not report.repaired
    assert shard.decoded == 1  # the whole is right


def test_rows_that_no_page_gives_are_taken_from_the_tables(film: Path, tmp_path: Path) -> None:
    shutil.copytree(film, tmp_path / "ds")
    part = rewritten(tmp_path / "ds", lambda one: with_pieces(one, size=96))
    shard = shards(tmp_path / "ds")[0]
    flip(shard, 5000)
    report = verify(tmp_path / "ds", workers=1)
    assert {one.object: [found.code for found in one.findings] for one in report.damaged} == {
        part: ["pages"],
        f"shards/{shard.name}": ["checksum"],
    }


def test_each_row_of_the_tables_is_read_once(ds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = list[int](), PartReader.read

    def counted(self: PartReader, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> Any:
        found = original(self, columns, groups)
        read.append(0 if columns is not None else found.num_rows)
        return found

    monkeypatch.setattr(PartReader, "read", counted)
    verify(ds, workers=1)
    assert sum(read) == 8


@given(place=st.integers(0, 10**9), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_flipped_bit_of_every_object_is_found(original: Path, tmp_path: Path, place: int, bit: int) -> None:
    root = tmp_path / "flipped"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(original, root)
    files = sorted(p for p in root.rglob("*") if p.is_file())
    at = place % sum(p.stat().st_size for p in files)
    for path in files:
        if at < path.stat().st_size:
            break
        at -= path.stat().st_size
    flip(path, at, bit)
    try:
        assert str(path.relative_to(root)) in codes(verify(root, workers=1))
    except CorruptionError:
        assert path.parent.name == "versions"


def test_zero_workers_are_an_error_not_the_default(original: Path) -> None:
    with pytest.raises(UsageError, match="workers=0"):
        verify(original, workers=0)


def test_without_its_document_a_version_cannot_be_verified(ds: Path) -> None:
    flip(ds / "versions/00000001.json", 100)
    with pytest.raises(CorruptionError, match="digest does not match"):
        verify(ds)


def test_a_damaged_index_part_leaves_the_tars_checked_but_not_repaired(
    ds: Path, original: Path, tmp_path: Path
) -> None:
    part = next(ds.glob("index/*"))
    flip(part, 100)
    flip(shards(ds)[2], 3)
    shutil.copytree(original, tmp_path / "copy")
    flip(tmp_path / "copy" / "index" / part.name, 101)
    report = verify(ds, repair=tmp_path / "copy")
    refused = {o.object: o.unrepaired for o in report.damaged}
    assert "in the copy is damaged, too" in refused[f"index/{part.name}"]
    assert "the index is damaged" in refused[f"shards/{shards(ds)[2].name}"]
    assert not report.repaired


def test_two_copies_damaged_in_different_members_make_a_whole_one(ds: Path, original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "copy")
    with Dataset(original) as dataset:
        one, two = [s for s in dataset if s.shard == dataset.document.shards[0].key]
    flip(ds / one.shard, one.members[1].offset)
    flip(tmp_path / "copy" / one.shard, two.members[1].offset)
    assert not verify(ds, repair=tmp_path / "copy").damaged
    assert (ds / one.shard).read_bytes() == (original / one.shard).read_bytes()


def test_a_copy_that_is_bad_in_the_same_place_changes_nothing(ds: Path, original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "copy")
    with Dataset(original) as dataset:
        sample = dataset.sample(0)
    flip(ds / sample.shard, sample.members[1].offset)
    flip(tmp_path / "copy" / sample.shard, sample.members[1].offset, bit=1)
    before = (ds / sample.shard).read_bytes()
    report = verify(ds, repair=tmp_path / "copy")
    assert "1 member damaged in both" in report.damaged[0].unrepaired
    assert not report.repaired
    assert (ds / sample.shard).read_bytes() == before


def test_good_objects_are_never_written(ds: Path, original: Path) -> None:
    _payload(ds)
    damaged = shards(ds)[1]
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in ds.rglob("*") if p.is_file()}
    verify(ds, repair=original)
    after = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in before}
    assert [p for p in before if before[p] != after[p]] == [damaged]


def test_another_dataset_and_the_dataset_itself_are_no_copies(ds: Path, tmp_path: Path) -> None:
    make_tone(tmp_path / "t.wav", 1)
    pack(tmp_path / "t.wav", tmp_path / "other", workers=1).close()
    with pytest.raises(UsageError, match="is another dataset"):
        verify(ds, repair=tmp_path / "other")
    with pytest.raises(UsageError, match="the dataset itself"):
        verify(ds, repair=ds)
    with pytest.raises(UsageError, match="cannot repair the dataset"):
        verify(ds, repair=tmp_path / "nothing")
    with pytest.raises(NotFoundError, match="no dataset"):
        verify(tmp_path / "nothing")


def test_objects_that_no_version_names_are_listed(ds: Path) -> None:
    (ds / "shards" / "00000099-dead.tar").write_bytes(bytes(1024))
    (ds / "index" / "00000099-dead.parquet").touch()
    report = verify(ds)
    assert report.orphans == ("shards/00000099-dead.tar", "index/00000099-dead.parquet")
    assert not report.damaged


def test_an_object_that_only_another_version_names_is_not_an_orphan(ds: Path) -> None:
    with Dataset(ds) as dataset:
        dataset.remove(["s1"])
    assert verify(ds, 1).orphans == verify(ds).orphans == ()


def test_progress_adds_up(ds: Path) -> None:
    seen = list[VerifyProgress]()
    verify(ds, progress=seen.append, workers=2)
    assert seen[-1].shards == seen[-1].shards_total == 4
    assert seen[-1].bytes == seen[-1].bytes_total
    assert [p.bytes for p in seen] == sorted(p.bytes for p in seen)


def test_images_decode_and_are_not_damaged(tmp_path: Path) -> None:
    from tests.support.pictures import picture

    (tmp_path / "in").mkdir()
    for kind in ("jpg", "png", "webp"):
        (tmp_path / "in" / f"{kind}.{kind}").write_bytes(picture(kind))
    pack(tmp_path / "in", tmp_path / "ds", workers=1).close()
    assert not verify(tmp_path / "ds", decode="100%", workers=1).damaged


def test_a_video_that_breaks_off_inside_is_found_by_decoding_only(
    media: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"youtube_clip.mp4", "README.md"}
    pack([path for path in media.iterdir() if path.name not in long], tmp_path / "ds", workers=1).close()
    assert not verify(tmp_path / "ds").damaged
    report = verify(tmp_path / "ds", decode="100%")
    assert codes(report) == {report.damaged[0].object: {"decode"}}
    assert {finding.key for finding in report.damaged[0].findings} == {"corrupted"}
    assert cli.main(["verify", str(tmp_path / "ds"), "--decode", "100%"]) == 1
    said = capsys.readouterr().out
    assert "as they were packed; headrace remove" in said
    assert "--repair" not in said, "no copy has other bytes"


def test_an_error_ends_the_check_without_waiting_for_a_decoder(
    ds: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs.py"
    hello = f"import struct; os.write(1, struct.pack('>I', {len(jobs.HELLO)}) + {jobs.HELLO!r})"
    hangs.write_text(f"import os, time; {hello}; time.sleep(600)")
    first, asked, ended = f"shards/{shards(ds)[0].name}", threading.Event(), list[type[Exception]]()

    def decode(store: Store, sample: Sample, pool: WorkerPool) -> tuple[str, ...]:
        if sample.shard == first:
            assert asked.wait(60)
            raise TransientError("the store is away")
        asked.set()
        try:
            return decode_sample(store, sample, pool)
        except Exception as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(shard_units, "decode_sample", decode)
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, str(hangs)))
    with pytest.raises(TransientError, match="away"):
        verify(ds, decode="100%", workers=2)
    assert ended
    assert DeadlineError not in ended  # which would have been a minute later


def test_the_same_samples_are_chosen_every_time_and_about_as_many_as_asked_for() -> None:
    keys = [f"k{i}" for i in range(10_000)]

    def chosen(amount: str) -> int:
        largest = shard_units.largest_chosen_hash(amount, lambda: iter(keys))
        return sum(shard_units.key_hash(key) <= largest for key in keys)

    assert 60 < chosen("1%") < 140
    assert [chosen(amount) for amount in ("100", "0", "0%", "100%")] == [100, 0, 0, 10_000]


@pytest.mark.parametrize("amount", ["", "-1", "101%", "1.5", "many", "2000000"])
def test_an_amount_that_is_none_is_refused(amount: str, ds: Path) -> None:
    with pytest.raises(UsageError, match="not a number or share of samples"):
        verify(ds, decode=amount)


@pytest.mark.s3
def test_damage_in_a_bucket_is_found_and_repaired(original: Path, s3_url: str) -> None:
    with open_store(original) as source, open_store(s3_url) as target:
        for info in source.list():
            target.put(info.key, source.get(info.key))
        with Dataset(original) as dataset:
            first, second, third = (shard.key for shard in dataset.document.shards[:3])
        data = bytearray(source.get(first))
        data[1300] ^= 1
        target.put(first, data)
        target.put(second, source.get(second)[:-600])
        target.delete_many([third])
        found = codes(verify(s3_url))
        assert set(found) == {first, second, third}
        assert not verify(s3_url, repair=original).damaged
        assert all(target.get(info.key) == source.get(info.key) for info in source.list())


# --- the command


headrace = headrace_command.run


def test_the_command_lists_the_damage_and_returns_1_until_it_is_repaired(ds: Path, original: Path) -> None:
    done = headrace("verify", ds)
    assert done.returncode == 0
    assert "--decode 1% also finds media" in done.stdout.decode()
    assert "next:" not in headrace("verify", ds, "--decode", "1").stdout.decode()
    _payload(ds)
    done = headrace("verify", ds, "--decode", "2")
    assert done.returncode == 1
    text = done.stdout.decode()
    assert "DAMAGED (1)" in text
    assert "checksum: s2.wav: " in text
    assert "1 damaged object; " in text
    found = json.loads(headrace("verify", ds, "--json").stdout)
    assert (found["damaged"], found["objects"][-3]["findings"][0]["code"]) == (1, "checksum")
    done = headrace("verify", ds, "--repair", original, "--apply")
    assert done.returncode == 0
    assert "everything is right, 1 repaired" in done.stdout.decode()


def test_the_command_returns_4_without_a_version_to_check_against(ds: Path) -> None:
    flip(ds / "versions/00000001.json", 100)
    done = headrace("verify", ds)
    assert done.returncode == 4
    assert b"00000001.json" in done.stderr


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    make_tone(tmp_path / "in/s.wav", 1)
    with (tmp_path / "in/s.bin").open("wb") as file:
        file.truncate(256 << 20)
    pack(tmp_path / "in", tmp_path / "ds", workers=1).close()
    program = (
        "import resource, sys\nfrom headrace.dataio.shards.verify.dataset_check import verify\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\nreport = verify(sys.argv[1], workers=1)\n"
        "print(report.bytes, len(report.damaged), peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "ds")], capture_output=True, timeout=120)
    size, damaged, grown = map(int, done.stdout.split())
    assert size > 256 << 20
    assert not damaged
    assert grown < 100 << 10, f"{grown} KiB for a shard of 256 MiB"


def test_shards_indexed_in_place_are_checked_where_they_are_and_never_written(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original / "shards", tmp_path / "tars")
    index(tmp_path / "tars", tmp_path / "ds", keys="shard", workers=1).close()
    shutil.copytree(tmp_path / "ds", tmp_path / "copy")
    assert not verify(tmp_path / "ds", decode="100%", trust_mounts=True).damaged
    tar_file = shards(original)[0].name
    flip(tmp_path / "tars" / tar_file, 3)
    before = (tmp_path / "tars" / tar_file).read_bytes()
    report = verify(tmp_path / "ds", repair=tmp_path / "copy", trust_mounts=True)
    assert [found.object.endswith(tar_file) for found in report.damaged] == [True]
    assert "indexed in place" in report.damaged[0].unrepaired
    assert (tmp_path / "tars" / tar_file).read_bytes() == before


def test_the_bitmaps_of_removed_samples_are_checked_and_repaired(ds: Path, tmp_path: Path) -> None:
    with Dataset(ds) as dataset:
        made = dataset.remove(["s1", "s6"])
        key = next(part.bitmap.key for part in made.document.index if part.bitmap)
    assert not verify(ds).orphans
    shutil.copytree(ds, tmp_path / "copy")
    flip(ds / key, 4)
    assert codes(verify(ds))[key] == {"digest"}
    report = verify(ds, repair=tmp_path / "copy")
    assert not report.damaged
    assert [found.object for found in report.repaired] == [key]
    (ds / key).unlink()
    assert not verify(ds, repair=tmp_path / "copy").damaged
