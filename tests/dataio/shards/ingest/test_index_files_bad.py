"""Bad input of `index` over files: names, links, changes, damage; and runs that are killed."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.dataio import Dataset, index
from headrace.dataio.core import crashpoints
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, NotFoundError, UsageError
from headrace.dataio.shards.ingest import file_units
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.shards.media.messages import Failure
from headrace.dataio.store.open import open_store
from tests.support import headrace_command
from tests.support.written_media import write_clip, write_wav


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_wav(tmp_path / "in" / "good.wav").parent


def skipped(dataset: Dataset) -> dict[str, str]:
    assert dataset.report is not None
    return {os.path.basename(item.path): item.reason for item in dataset.report.skipped}


def test_names_with_dots_spaces_and_unicode(folder: Path, tmp_path: Path) -> None:
    names = [
        "a.b c.wav",
        "ünïcode — 片.wav",
        "#%41?&.wav",
        "a\u0301.wav",
        "'quoted\".wav",
        "..wav.wav",
        "x" * 200 + ".wav",
    ]
    for name in names:
        write_wav(folder / name)
    with index(folder, tmp_path / "set", workers=1) as dataset:
        assert skipped(dataset) == {}
        assert "a_b c" in list(dataset.keys)
        assert len(dataset) == len(names)  # the one that begins with a dot is hidden
        for sample in dataset:
            assert dataset.read(sample, "wav") == (folder / "good.wav").read_bytes()


def test_names_that_no_store_can_have_are_skipped(folder: Path, tmp_path: Path) -> None:
    for name in ("new\nline.wav", "back\\slash.wav", "tab\t.wav"):
        write_wav(folder / name)
    with index(folder, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["good"]
        assert len(skipped(dataset)) == 3
        assert all("rename it" in reason for reason in skipped(dataset).values())
    with pytest.raises(HeadraceError, match="rename it"):
        index(folder, tmp_path / "strict", strict=True, workers=1)


def test_a_link_stands_for_its_target(folder: Path, tmp_path: Path) -> None:
    target = write_clip(tmp_path / "blobs" / "0123456789abcdef.bin.mp4")
    target = target.rename(target.with_name("0123456789abcdef"))
    (folder / "clip.mp4").symlink_to(target)
    (folder / "gone.mp4").symlink_to(tmp_path / "nothing")
    (folder / "loop").symlink_to(folder)
    with index(folder, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["clip", "good"]
        assert dataset.read(dataset.find("clip"), "mp4") == target.read_bytes()
        assert [mount.url for mount in dataset.document.mounts][1] == f"file://{tmp_path}"
        assert set(skipped(dataset)) == {"gone.mp4"}


def test_what_is_no_file_is_skipped(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe.mp4")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "empty").mkdir()
    whole = write_clip(tmp_path / "whole.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) - 500])
    (folder / "text.mp4").write_text("no video")
    (folder / "bad.wav").write_bytes((folder / "good.wav").read_bytes())
    (folder / "bad.json").write_text("{")
    (folder / "clip.mp4.part").write_bytes(whole[:100])
    with index(folder, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["good"]
        assert set(skipped(dataset)) == {"pipe.mp4", "empty.mp4", "cut.mp4", "text.mp4", "bad.json"}
    with pytest.raises(HeadraceError):
        index(folder / "cut.mp4", tmp_path / "only", workers=1, strict=True)
    with pytest.raises(UsageError, match=r"cut\.mp4"):
        index(folder / "cut.mp4", tmp_path / "only", workers=1)


def test_two_files_that_claim_one_member_are_refused(folder: Path, tmp_path: Path) -> None:
    write_wav(folder / "good.WAV")
    with pytest.raises(UsageError, match="same member"):
        index(folder, tmp_path / "set", workers=1)
    (tmp_path / "rows.jsonl").write_text(f'{{"path": "{folder}/good.wav", "key": "k", "two": "{folder}/good.WAV"}}')
    from headrace.dataio import Columns

    with pytest.raises(UsageError, match="same member"):
        index(tmp_path / "rows.jsonl", tmp_path / "set", columns=Columns(files={"wav": "two"}), workers=1)


def test_two_groups_of_one_key_are_refused(folder: Path, tmp_path: Path) -> None:
    other = write_wav(tmp_path / "other" / "good.wav").parent
    with pytest.raises(UsageError, match="would both be the sample 'good'"):
        index([folder, other], tmp_path / "set", workers=1)
    rows = f"path,key\n{folder}/good.wav,k\n{other}/good.wav,k\n"
    (tmp_path / "rows.csv").write_text(rows)
    with pytest.raises(UsageError, match="would both be the sample 'k'"):
        index(tmp_path / "rows.csv", tmp_path / "set", workers=1)


def test_rows_without_an_object_are_skipped(folder: Path, s3_url: str, tmp_path: Path) -> None:
    with open_store(f"{s3_url}/media") as store:
        store.put("here.wav", (folder / "good.wav").read_bytes())
    lines = [f"{s3_url}/media/here.wav", f"{s3_url}/media/gone.wav", f"{folder}/gone.wav"]
    (tmp_path / "rows.csv").write_text("path,key\n" + "\n".join(f"{url},{n}" for n, url in enumerate(lines)))
    with index(tmp_path / "rows.csv", f"{s3_url}/set", workers=1) as dataset:
        assert list(dataset.keys) == ["0"]
        assert len(skipped(dataset)) == 1  # both are called gone.wav
        assert dataset.report is not None
        assert [item.path for item in dataset.report.skipped] == [
            f"{tmp_path}/rows.csv, line {n}: {url}" for n, url in ((3, lines[1]), (4, lines[2]))
        ]


def test_a_url_with_a_query_is_skipped(folder: Path, tmp_path: Path) -> None:
    from headrace.dataio.shards.ingest.placement import place

    url = "https://example.org/a.mp4?token=secret"
    placed = place([Group("a", (("mp4", url),), 1, sizes=(1,), times=(0,))], open_store(tmp_path), (), open_store)
    assert not placed.groups
    assert "secret" not in placed.skipped[0].path + placed.skipped[0].reason.replace("may hold a secret", "")


# changes


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file grow after its media were read, before the indexer compares it."""
    paths = set[Path]()
    original = file_units._ChangeCheck.__call__

    def grow_and_check(self: file_units._ChangeCheck, group: Group) -> Failure | None:
        for path in paths & {Path(path) for _, path in group.files}:
            with path.open("ab") as file:
                file.write(b"more")
            paths.remove(path)
        return original(self, group)

    monkeypatch.setattr(file_units._ChangeCheck, "__call__", grow_and_check)
    return paths.add


def test_a_file_that_grows_is_skipped_and_followed(
    folder: Path, tmp_path: Path, growing: Callable[[Path], None]
) -> None:
    growing(write_clip(folder / "growing.mp4", options={}))
    with index(folder, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["good"]
        assert "changed while it was indexed" in skipped(dataset)["growing.mp4"]
    write_clip(folder / "growing.mp4", frames=20)
    with index(folder, tmp_path / "set", follow=True, workers=1) as dataset:
        assert list(dataset.keys) == ["good", "growing"]
        assert dataset.read(dataset.find("growing"), "mp4") == (folder / "growing.mp4").read_bytes()


def test_an_object_that_changes_while_it_is_indexed_is_skipped(
    folder: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = (folder / "good.wav").read_bytes()
    with open_store(f"{s3_url}/media") as store:
        store.put("a.wav", sound)
        store.put("b.wav", sound)
        original = gather

        def gather_then_change(*arguments: object, **options: object) -> object:
            gathered = original(*arguments, **options)  # type: ignore[arg-type]
            store.put("b.wav", sound + b"more")
            return gathered

        monkeypatch.setattr("headrace.dataio.shards.ingest.index_files.gather", gather_then_change)
        with index(f"{s3_url}/media", f"{s3_url}/set", workers=1) as dataset:
            assert list(dataset.keys) == ["a"]
            assert "changed while" in skipped(dataset)["b.wav"]


@pytest.mark.parametrize("change", ["size", "time and content", "content", "gone"])
def test_an_object_that_changed_is_named(folder: Path, tmp_path: Path, change: str) -> None:
    index(folder, tmp_path / "set", workers=1).close()
    path = folder / "good.wav"
    info, data = path.stat(), bytearray(path.read_bytes())
    if change == "gone":
        path.unlink()
    elif change == "size":
        path.write_bytes(data[:100])
    else:
        data[-1] ^= 1
        path.write_bytes(data)
        times = (info.st_mtime_ns, info.st_mtime_ns) if change == "content" else (10**18, 10**18)
        os.utime(path, ns=times)
    expected = {
        "size": rf"good\.wav \(it has 100 bytes, and had {info.st_size} when it was indexed\)",
        "time and content": r"good\.wav \(it was modified at 2001-09-09",
        "content": r"good\.wav: the checksum does not match",
        "gone": r"good\.wav \(it does not exist any more\)",
    }[change]
    with Dataset(tmp_path / "set", trust_mounts=True) as dataset, pytest.raises(CorruptionError, match=expected):
        dataset.read(dataset.sample(0), "wav")


# killed runs

_FILES = 2 * file_units.UNIT_OBJECTS
"""Three units of small files."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    sound = write_wav(folder / "0000.wav", seconds=0.02).read_bytes()
    for number in range(_FILES):
        (folder / f"{number:04}.wav").write_bytes(sound if number != 300 else sound[:20])
    return folder


def objects(root: Path) -> dict[str, str]:
    files = (p for p in root.rglob("*") if p.is_file() and (p.suffix != ".json" or p.parent.name == "joined"))
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if ".headrace-tmp" not in path.parts
    }


def test_the_points_are_those_that_the_tests_know() -> None:
    assert [name for name in crashpoints.declared() if name.startswith("files.")] == [
        "files.list-stored",
        "files.index-stored",
        "files.version-stored",
    ]


@pytest.mark.parametrize(
    ("point", "resumed"),
    [
        ("files.list-stored#2", 1),
        ("units.recorded#2", 2),
        ("files.index-stored", 3),
        ("files.version-stored", 3),
    ],
)
def test_killed_and_started_again_it_is_equal(many: Path, tmp_path: Path, point: str, resumed: int) -> None:
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
    done = headrace_command.run("index", many, tmp_path / "often", **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if point != "files.version-stored":
        with pytest.raises(NotFoundError, match="no dataset"):
            Dataset(tmp_path / "often")
    with index(many, tmp_path / "often") as often, index(many, tmp_path / "never") as never:
        assert objects(tmp_path / "often") == objects(tmp_path / "never")
        assert (often.document.shards, often.document.index) == (never.document.shards, never.document.index)
        assert len(never) == _FILES - 1
        assert never.report is not None
        assert often.report is not None
        assert often.report.samples == never.report.samples
        assert (len(never.report.skipped), len(often.report.skipped)) == (1, 1)
        if point != "files.version-stored":
            assert often.report.resumed == resumed
        assert not list(often.store.list("packing/"))
    with pytest.raises(ConflictError, match="already holds"):
        index(many, tmp_path / "often")


def test_two_processes_make_one_version(many: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(lambda _: headrace_command.run("index", many, tmp_path / "set"), range(2)))
    codes = sorted(one.returncode for one in done)
    assert codes in ([1, 1], [1, 5], [1, 4]), [one.stderr for one in done]  # 1: a file was skipped
    with Dataset(tmp_path / "set", trust_mounts=True) as dataset:
        assert len(dataset) == _FILES - 1
