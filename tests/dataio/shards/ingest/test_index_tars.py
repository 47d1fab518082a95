"""Indexing tars in place: the samples, the skipped samples with their reasons, and the locations of shards."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from headrace.dataio import Dataset, index
from headrace.dataio.core.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.imports import MissingExtraError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest import tar_scanner, unique_keys
from headrace.dataio.shards.ingest.index_tars import IndexProgress
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.tar import dali_index
from headrace.dataio.store.open import open_location, open_store
from tests.support import headrace_command
from tests.support.pictures import picture

Members = list[tuple[str, bytes]]


def tar_of(members: Members, form: int = tarfile.GNU_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from tests.support.written_media import write_clip

    return write_clip(tmp_path_factory.mktemp("clip") / "a.mp4").read_bytes()


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """`put(name, members or bytes)` writes a tar into the folder `from`."""

    def write(name: str, content: Members | bytes) -> Path:
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else tar_of(content))
        return path

    return write


def skipped(dataset: Dataset) -> dict[str, tuple[str, str]]:
    assert dataset.report is not None
    return {item.path.rpartition("/from/")[2]: (item.code, item.reason) for item in dataset.report.skipped}


def test_samples_of_a_downloader_s_shards_are_found_with_their_facts(
    put: Callable[..., Path], tmp_path: Path, clip: bytes
) -> None:
    meta = json.dumps({"url": "http://x", "status": "success", "duration": 0.4, "clips": [[0, 1]]}).encode()
    for shard in ("00000", "00001"):
        put(
            f"{shard}.tar",
            [(f"{shard}000{i}.{e}", d) for i in (0, 1) for e, d in (("mp4", clip), ("json", meta), ("txt", b"a dog"))],
        )
        put(f"{shard}.parquet", b"PAR1")
        put(f"{shard}_stats.json", b"{}")
    with index(tmp_path / "from", tmp_path / "set", name="mine") as dataset:
        assert list(dataset.keys) == ["000000000", "000000001", "000010000", "000010001"]
        sample = dataset.find("000010000")
        assert sample.video is not None
        assert (sample.video.codec, sample.video.frames, sample.text) == ("h264", 12, "a dog")
        video, color = probe(clip, ext="mp4").video, sample.video.color
        assert video is not None
        assert color is not None
        assert color == video.color
        assert list(dataset.where(f"color_space = '{color.space}'")) == list(dataset)
        assert sample.fields == {"url": "http://x", "status": "success", "duration": 0.4}
        assert [dataset.read(sample, e) for e in ("mp4", "json", "txt")] == [clip, meta, b"a dog"]
        assert dataset.report is not None
        assert len(dataset.report.ignored) == 4
        assert (dataset.report.samples, dataset.report.files, dataset.report.shards) == (4, 12, 2)
        assert (dataset.name, dataset.report.skipped) == ("mine", ())
    with Dataset(tmp_path / "set", trust_mounts=True) as again:
        assert again.read(again.sample(3), "mp4") == clip


def test_pictures_and_data_are_samples_too(put: Callable[..., Path], tmp_path: Path) -> None:
    put(
        "a.tar",
        [
            ("x/1.bin", b"one"),
            ("x/1.cls", b"7"),
            ("x/2.jpg", picture("jpg")),
            ("x/2.json", b'{"w": 3}'),
            ("README", b""),
        ],
    )
    with index(tmp_path / "from" / "a.tar", tmp_path / "set") as dataset:
        one, two = dataset
        assert (one.video, one.audio, one.duration, two.fields) == (None, None, 0.0, {"w": 3})
        assert [m.ext for m in one.members] == ["bin", "cls"]
        assert dataset.read(two, "jpg") == picture("jpg")
        assert two.video is not None
        assert two.video.frames == 1


def test_subtitles_are_the_text_of_a_sample_without_one_as_in_pack(
    put: Callable[..., Path], tmp_path: Path, clip: bytes
) -> None:
    subtitles = b"WEBVTT\n\n00:00.000 --> 00:00.300\nfirst <b>words</b>\n"
    put(
        "s.tar",
        [
            *(("a.mp4", clip), ("a.vtt", subtitles), ("b.txt", b"text"), ("b.vtt", subtitles), ("c.vtt", subtitles)),
            *(("d.mp4", clip), ("d.vtt", b"no subtitles")),
        ],
    )
    with index(tmp_path / "from" / "s.tar", tmp_path / "set") as dataset:
        assert {sample.key: sample.text for sample in dataset} == {"a": "first words", "b": "text", "c": "first words"}
        ((path, (code, _)),) = skipped(dataset).items()
        assert (path.split(" at offset ")[0], code) == ("s.tar: d.vtt", "corruption")


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_gnu_tar_with_long_names_and_folders(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "in" / ("deep" * 12) / ("deeper" * 10)
    folder.mkdir(parents=True)
    long = "n" * (90 if form == "ustar" else 150)
    (folder / f"{long}.bin").write_bytes(b"1" * 1000)
    (folder / "ü.bin").write_bytes(b"2")
    subprocess.run(
        ["tar", f"--format={form}", "--sort=name", "-C", tmp_path, "-cf", tmp_path / "a.tar", "in"], check=True
    )
    with index(tmp_path / "a.tar", tmp_path / "set") as dataset:
        base = str(folder.relative_to(tmp_path))
        assert list(dataset.keys) == [f"{base}/{long}", f"{base}/ü"]
        assert [dataset.read(sample, "bin") for sample in dataset] == [b"1" * 1000, b"2"]


def test_a_bad_sample_is_skipped_with_its_shard_and_offset(
    put: Callable[..., Path], tmp_path: Path, clip: bytes
) -> None:
    members = [
        *(("a.mp4", clip), ("bad.mp4", clip[:-100]), ("bad.txt", b"x"), ("c.mp4", clip), ("d.json", b'{"x": NaN}')),
        *(("e.jpg", b"1"), ("e.jpg", b"2"), ("a.wav", b"again"), ("f.bin", b"good")),
    ]
    put("s.tar", members)
    with index(tmp_path / "from" / "s.tar", tmp_path / "set") as dataset:
        assert list(dataset.keys) == ["a", "c", "f"]
        found = {path.split(" at offset ")[0]: why for path, why in skipped(dataset).items()}
        assert all(" at offset " in path for path in skipped(dataset))
    codes = {path: code for path, (code, _) in found.items()}
    assert codes == {f"s.tar: {name}": "corruption" for name in ("bad.mp4", "d.json", "e", "a")}
    assert "truncated" in found["s.tar: bad.mp4"][1]
    assert "NaN" in found["s.tar: d.json"][1]
    assert "second member" in found["s.tar: e"][1]
    assert "occurred before, at offset 0" in found["s.tar: a"][1]
    with pytest.raises(CorruptionError, match=r"s\.tar: .* at offset \d+: .*without strict"):
        index(tmp_path / "from" / "s.tar", tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict" / "versions").exists()


def test_a_bad_shard_is_skipped_whole_and_the_others_are_indexed(put: Callable[..., Path], tmp_path: Path) -> None:
    good = tar_of([("a.bin", b"1" * 2000), ("b.json", b"[]")])
    put("0.tar", tar_of([("k.bin", b"1")]))
    put("1.tar", good[:1500])
    put("2.tar", b"")
    put("3.tar", tar_of([("../evil.bin", b"1")]))
    put("4.tar", tar_of([]))
    with index(str(tmp_path / "from" / "{0..6}.tar"), tmp_path / "set") as dataset:
        assert list(dataset.keys) == ["k"]
        why = skipped(dataset)
        assert {path: code for path, (code, _) in why.items()} == {
            "1.tar": "corruption",
            "2.tar": "corruption",
            "3.tar": "unsupported",
            "5.tar": "not_found",
            "6.tar": "not_found",
        }
        assert "truncated" in why["1.tar"][1]
        assert dataset.report is not None
        assert dataset.report.notes == (f"file://{tmp_path}/from/4.tar: no samples were taken from it",)
        assert (dataset.report.files, [s.samples for s in dataset.document.shards]) == (1, [1])


@pytest.mark.parametrize(
    ("program", "squeeze"),
    [
        ("gzip", gzip.compress),
        ("bzip2", bz2.compress),
        ("xz", lzma.compress),
        ("zstd", lambda data: zstandard.ZstdCompressor().compress(data)),
    ],
)
def test_a_compressed_tar_is_refused_by_its_content(
    put: Callable[..., Path], tmp_path: Path, program: str, squeeze: Callable[[bytes], bytes]
) -> None:
    path = put("a.tar", squeeze(tar_of([("a.bin", b"1")])))
    with pytest.raises(
        UsageError, match=rf"nothing to index.*a\.tar is compressed by {program} at offset 0.*decompress"
    ):
        index(path, tmp_path / "set")
    with pytest.raises(UnsupportedError, match=f"compressed by {program}"):
        index(path, tmp_path / "other", strict=True)


@pytest.mark.parametrize("hashes", [1 << 24, 3, 0])
def test_equal_keys_in_two_shards_are_refused_unless_the_shard_is_put_in_front(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: int
) -> None:
    monkeypatch.setattr(unique_keys, "MAX_HASHES", hashes)
    for shard in ("a/0.tar", "b/0.tar", "b/1.tar"):
        put(shard, [("./00.bin", shard.encode()), ("01.bin", b"1")])
    pattern = str(tmp_path / "from" / "{a,b}" / "*.tar")
    with pytest.raises(UsageError, match=r"0\.tar and .*\.tar hold samples of the same key.*--keys shard"):
        index([pattern.replace("{a,b}", "b")], tmp_path / "set")
    with index(str(tmp_path / "from"), tmp_path / "good", keys="shard") as dataset:
        assert list(dataset.keys) == ["a/0/00", "a/0/01", "b/0/00", "b/0/01", "b/1/00", "b/1/01"]
        assert dataset.read(dataset.find("b/1/00"), "bin") == b"b/1.tar"


def test_without_duckdb_many_keys_are_refused_early_and_finished_units_are_kept(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in "ab":
        put(f"{shard}.tar", [(f"{shard}.bin", b"1")])
    monkeypatch.setattr(unique_keys, "MAX_HASHES", 1)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "duckdb", None)
        with pytest.raises(MissingExtraError, match=r"headrace\[sql\]"):
            index(str(tmp_path / "from"), tmp_path / "set")
    with index(str(tmp_path / "from"), tmp_path / "set") as dataset:
        assert list(dataset.keys) == ["a", "b"]
        assert dataset.report is not None
        assert dataset.report.resumed > 0


def test_shards_below_the_dataset_need_no_mount_and_move_with_it(put: Callable[..., Path], tmp_path: Path) -> None:
    put("shards/a.tar", [("a.bin", b"1")])
    with index(tmp_path / "from" / "shards", tmp_path / "from") as dataset:
        assert [shard.key for shard in dataset.document.shards] == ["shards/a.tar"]
        assert dataset.document.mounts == ()
    (tmp_path / "from").rename(tmp_path / "moved")
    with Dataset(tmp_path / "moved") as moved:
        assert moved.read(moved.sample(0), "bin") == b"1"


def test_shards_of_several_places_are_one_dataset_that_opens_anywhere(
    put: Callable[..., Path], tmp_path: Path, store_url: str, clip: bytes
) -> None:
    put("a.tar", [("a.mp4", clip)])
    with open_store(store_url + "-tars/deep") as store:
        store.put("b.tar", tar_of([("b.bin", b"two"), ("c.mp4", clip)]))
    with index([tmp_path / "from" / "a.tar", f"{store_url}-tars/deep/b.tar"], store_url) as dataset:
        assert sorted(dataset.keys) == ["a", "b", "c"]
        assert len(dataset.document.mounts) == 2
        assert "key" not in json.dumps([mount.options for mount in dataset.document.mounts]).lower()
        expected = {sample.key: dataset.read(sample, sample.members[0].ext) for sample in dataset}
        location, digest = dataset.store.location, dataset.digest
    assert expected == {"a": clip, "b": b"two", "c": clip}
    with Dataset(store_url, trust_mounts=True) as again:
        assert again.digest == digest
        assert again.store.location == location
        assert {s.key: again.read(s, s.members[0].ext) for s in again} == expected
    with open_location(location) as store:
        member = next(s for s in again if s.key == "b").members[0]
        piece = bytearray(member.length)
        store.get_into(next(s for s in again if s.key == "b").shard, member.offset, memoryview(piece))
        assert piece == b"two"


def test_a_dataset_opened_with_a_store_leaves_that_open(put: Callable[..., Path], tmp_path: Path) -> None:
    put("a.tar", [("a.bin", b"1")])
    with open_store(tmp_path / "set") as store:
        with index(tmp_path / "from", store) as dataset:
            assert dataset.read(dataset.sample(0), "bin") == b"1"
        with Dataset(store, trust_mounts=True) as dataset:
            assert dataset.read(dataset.sample(0), "bin") == b"1"
        assert store.exists("dataset.json")


def test_a_shard_that_changed_since_is_damage_named_by_its_own_address(
    put: Callable[..., Path], tmp_path: Path
) -> None:
    path = put("a.tar", [("a.bin", b"1" * 600), ("b.bin", b"2")])
    with index(path, tmp_path / "set") as dataset:
        data = bytearray(path.read_bytes())
        data[600] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=r"from/a\.tar: the checksum does not match"):
            dataset.read(dataset.find("a"), "bin")
        assert dataset.read(dataset.find("b"), "bin") == b"2"
        path.write_bytes(b"short")
        with pytest.raises(CorruptionError, match=r"from/a\.tar"):
            dataset.read(dataset.find("b"), "bin")
        path.unlink()
        with pytest.raises(CorruptionError, match=r"from/a\.tar"):
            dataset.read(dataset.find("b"), "bin")


def test_a_shard_that_changes_meanwhile_stops_the_indexing(put: Callable[..., Path], tmp_path: Path) -> None:
    path = put("a.tar", [("a.bin", b"1")])

    def touch(_: IndexProgress) -> None:
        path.write_bytes(path.read_bytes() + bytes(512))

    with pytest.raises(TransientError, match=r"a\.tar changed while it was indexed"):
        index(path, tmp_path / "set", progress=touch)
    assert not (tmp_path / "set" / "versions").exists()


def test_an_existing_dataset_is_left_alone(put: Callable[..., Path], tmp_path: Path) -> None:
    path = put("a.tar", [("a.bin", b"1")])
    index(path, tmp_path / "set").close()
    with pytest.raises(ConflictError, match="already holds a dataset"):
        index(path, tmp_path / "set")


def test_nothing_to_index_says_why(put: Callable[..., Path], tmp_path: Path) -> None:
    put("a.tar", [("README", b"1")])
    with pytest.raises(UsageError, match="the shards hold no samples"):
        index(tmp_path / "from", tmp_path / "set")
    with pytest.raises(NotFoundError, match="matches no tar"):
        index(tmp_path / "none.tar", tmp_path / "set")


def test_what_is_set_aside_for_probing_is_bounded_and_removed(
    put: Callable[..., Path], tmp_path: Path, clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(tar_scanner, "SPOOL_BYTES", 3 * len(clip))
    path = put("a.tar", [(f"{i:03}.mp4", clip) for i in range(20)])
    most = 0

    def look(_: IndexProgress) -> None:
        nonlocal most
        most = max(most, sum(file.stat().st_size for file in (tmp_path / "tmp").rglob("*.mp4")))

    with index(path, tmp_path / "set", progress=look, workers=2) as dataset:
        assert len(dataset) == 20
        assert list(dataset.keys) == sorted(dataset.keys)
    assert len(clip) <= most <= 4 * len(clip)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_full_temporary_folder_is_said_so(put: Callable[..., Path], tmp_path: Path, clip: bytes) -> None:
    path = put("a.tar", [("a.mp4", clip)])
    program = (
        "import resource, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from headrace.dataio import index\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from headrace.dataio.core.errors import CapacityError\n"
        "try: index(sys.argv[1], sys.argv[2])\n"
        "except CapacityError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, path, tmp_path / "set"], capture_output=True, text=True, check=True
    )
    assert "could not be copied" in done.stdout
    assert "TMPDIR" in done.stdout


def test_samples_and_members_without_end_are_refused(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_scanner, "MAX_SHARD_SAMPLES", 5)
    monkeypatch.setattr(tar, "MAX_SAMPLE_MEMBERS", 5)
    put("0.tar", [("ok.bin", b"")])
    put("1.tar", [(f"{i}.bin", b"") for i in range(6)])
    put("2.tar", [(f"a.{i}", b"") for i in range(6)])
    with index(tmp_path / "from", tmp_path / "set") as dataset:
        assert list(dataset.keys) == ["ok"]
        assert {path: code for path, (code, _) in skipped(dataset).items()} == {
            "1.tar": "unsupported",
            "2.tar": "unsupported",
        }
        (indexed,) = [reason for path, (_, reason) in skipped(dataset).items() if path == "2.tar"]
    (packed,) = gather([tmp_path / "from" / "2.tar"]).skipped
    assert packed.reason in indexed
    assert "'a' has more than 5 members" in packed.reason


def test_index_parts_are_cut(put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 3)
    for shard in range(4):
        put(f"{shard}.tar", [(f"{shard}-{i}.bin", b"x") for i in range(2)])
    with index(tmp_path / "from", tmp_path / "set") as dataset:
        assert [part.rows for part in dataset.document.index] == [3, 3, 2]
        assert [sample.id for sample in dataset] == list(range(8))


def test_progress_ends_at_all_bytes(put: Callable[..., Path], tmp_path: Path) -> None:
    put("a.tar", [("a.bin", b"1" * 5000), ("b.json", b"no")])
    reports: list[IndexProgress] = []
    with index(tmp_path / "from", tmp_path / "set", progress=reports.append) as dataset:
        size = dataset.document.shards[0].size
    assert [p.bytes for p in reports] == sorted(p.bytes for p in reports)
    assert reports[-1] == IndexProgress(1, 1, size, size, 1, 1)


def test_dali_s_index_names_members_by_extension_offset_and_length(put: Callable[..., Path], tmp_path: Path) -> None:
    path = put("a.tar", [("a.bin", b"12345"), ("a.txt", b"t"), ("b.bin", b"")])
    with index(path, tmp_path / "set") as dataset:
        (shard,) = dataset.document.shards
        assert dali_index(dataset, shard.key) == "v1.1 2\nbin 512 5 txt 1536 1\nbin 2560 0\n"
        with pytest.raises(NotFoundError, match="no shard"):
            dali_index(dataset, "none")
    odd = put("odd.tar", [("a.b c", b"1")])
    with index(odd, tmp_path / "odd") as dataset, pytest.raises(UnsupportedError, match="extension 'b c'"):
        dali_index(dataset, dataset.document.shards[0].key)


def test_the_loader_reads_clips_that_were_indexed_in_place(
    put: Callable[..., Path], tmp_path: Path, clip: bytes
) -> None:
    loaders = pytest.importorskip("loaders")
    put("a.tar", [(f"{i}.mp4", clip) for i in range(4)])
    index(tmp_path / "from", tmp_path / "set").close()
    options = {"batch_size": 2, "clip": loaders.Clip(frames=4), "shuffle": False, "sidecar": None}
    with loaders.VideoLoader(str(tmp_path / "set"), trust_mounts=True, **options) as loader:
        batches = list(loader)
    assert [key for batch in batches for key in batch["key"]] == ["0", "1", "2", "3"]


# --- the command


def run(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    return headrace_command.run("index", *arguments)


def test_the_command_reports_and_its_exit_code_says_that_something_was_skipped(
    put: Callable[..., Path], tmp_path: Path
) -> None:
    put("a.tar", [("a.bin", b"1"), ("b.json", b"no")])
    put("a.parquet", b"")
    done = run(tmp_path / "from", tmp_path / "set", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, b"")
    assert (report["samples"], len(report["skipped"]), len(report["ignored"])) == (1, 1, 1)
    assert list(report["mounts"].values()) == [f"file://{tmp_path}/from"]
    again = run(tmp_path / "from", tmp_path / "set")
    assert (again.returncode, again.stdout) == (5, b"")
    text = run(str(tmp_path / "from" / "{a,b}.tar"), tmp_path / "two", "--keys", "shard")
    assert text.returncode == 1
    for words in (
        "1 sample from 1 file",
        "skipped: 2",
        "there is no such object",
        f"shards stay in file://{tmp_path}/from; to open them, if you made the dataset",
        "trust_mounts=True (--trust-mounts on the command line)",
    ):
        assert words in text.stdout.decode()
    below = run(str(tmp_path / "from" / "a.tar"), tmp_path)
    assert b"mount" not in below.stdout, "a folder below the dataset needs no trust"
    failed = run("pipe:cat x.tar", tmp_path / "three")
    assert failed.returncode == 2
    assert b"is a command, not" in failed.stderr
