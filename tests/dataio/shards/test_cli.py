"""`headrace pack`, `info`, `ls` and `cat` as processes: output, exit codes and errors without tracebacks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.dataio import Dataset, pack
from tests.support import headrace_command
from tests.support.written_media import MakeWav, write_clip, write_wav

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_CRASH", "HEADRACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


headrace = headrace_command.run


def write_clips(root: Path) -> Path:
    write_clip(root / "a.mp4", frames=5)
    (root / "a.txt").write_text("caption")
    write_clip(root / "b.webm", "libvpx", frames=5)
    write_wav(root / "c.wav", seconds=1)
    return root


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    return write_clips(tmp_path / "clips")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that no test changes."""
    folder = tmp_path_factory.mktemp("packed")
    pack(write_clips(folder / "clips"), folder / "ds").close()
    return folder / "ds"


@pytest.fixture
def dataset(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "ds"))


def test_pack_prints_a_plain_summary_and_returns_0(clips: Path, store_url: str) -> None:
    done = headrace("pack", clips, store_url)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0] == f"{store_url} version 1: 3 samples from 4 files"
    assert lines[1].startswith("1 shard, ")
    assert "MB/s" in lines[1]
    assert len(lines) == 2
    assert done.stderr == b""
    with Dataset(store_url) as opened:
        assert list(opened.keys) == ["a", "b", "c"]


def test_pack_returns_1_and_lists_what_it_skipped(clips: Path, tmp_path: Path) -> None:
    (clips / "empty.mp4").touch()
    (clips / "evil\x1b[31m.mp4").write_text("not a video")
    done = headrace("pack", clips, tmp_path / "ds")
    assert done.returncode == 1
    text = done.stdout.decode()
    assert "skipped: 2" in text
    assert f"  {clips}/empty.mp4: the file is empty (zero length)" in text
    assert "evil?[31m.mp4: not a readable media file" in text
    assert "\x1b" not in text


def test_pack_json_is_one_object(clips: Path, tmp_path: Path) -> None:
    (clips / "empty.mp4").touch()
    done = headrace("pack", clips, tmp_path / "ds", "--json", "--shard-size", "4KiB", "--name", "set", "--workers", "1")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["samples"], found["files"], found["version"]) == (3, 4, 1)
    assert found["shards"] > 1
    assert found["skipped"] == [
        {"path": str(clips / "empty.mp4"), "code": "corruption", "reason": "the file is empty (zero length)"}
    ]
    with Dataset(tmp_path / "ds") as opened:
        assert opened.name == "set"


def test_pack_strict_returns_4_and_leaves_no_dataset(clips: Path, tmp_path: Path) -> None:
    (clips / "empty.mp4").touch()
    done = headrace("pack", "--strict", clips, tmp_path / "ds")
    assert done.returncode == 4
    assert b"empty.mp4: the file is empty" in done.stderr
    assert done.stdout == b""
    assert headrace("info", tmp_path / "ds").returncode == 2


def test_pack_into_a_dataset_returns_5(clips: Path, dataset: Path) -> None:
    done = headrace("pack", clips, dataset)
    assert done.returncode == 5
    assert b"already holds a dataset" in done.stderr
    assert b"next: " in done.stderr


@pytest.mark.parametrize(
    "args", [("pack", "only-one"), ("pack", "a", "b", "--workers", "0"), ("pack", "missing.mp4", "ds"), ("ls",)]
)
def test_wrong_use_returns_2(args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = headrace(*args)
    assert done.returncode == 2
    assert done.stderr
    assert not list(tmp_path.iterdir())


def test_a_wrong_size_names_itself(clips: Path, tmp_path: Path) -> None:
    done = headrace("pack", clips, tmp_path / "ds", "--shard-size", "12parsec")
    assert done.returncode == 2
    assert b"'12parsec' is not a size" in done.stderr


def test_progress_goes_to_the_terminal_only(clips: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace.dataio.cli", "pack", str(clips), str(tmp_path / "ds")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO is how a terminal ends
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    stdout, _ = process.communicate(timeout=150)
    assert process.returncode == 0
    assert b"packing" in shown
    assert b"\x1b" not in stdout


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_a_clear_error(clips: Path, s3_url: str) -> None:
    done = headrace("pack", clips, "s3://no-such-bucket-here/ds")
    assert done.returncode == 2
    assert b"no-such-bucket-here" in done.stderr
    assert b"next: " in done.stderr


@pytest.mark.s3
def test_wrong_credentials_are_a_clear_error_that_shows_none(clips: Path, s3_url: str) -> None:
    done = headrace("pack", clips, s3_url, AWS_ACCESS_KEY_ID="stranger", AWS_SECRET_ACCESS_KEY="hush-hush")
    assert done.returncode == 2
    assert b"headrace pack: error: " in done.stderr
    assert b"next: " in done.stderr
    assert b"hush-hush" not in done.stderr + done.stdout
    assert json.loads(headrace("info", s3_url, "--json", AWS_SECRET_ACCESS_KEY="hush-hush").stdout)["error"][
        "code"
    ] == ("access_denied")


def test_info_prints_the_statistics(dataset: Path) -> None:
    text = headrace("info", dataset).stdout.decode()
    assert "samples                 3, 1 with text" in text
    assert "message                 packed\n" in text
    assert "video codecs            h264 (1), vp8 (1)" in text
    assert "sizes (width x height)  64x48 (2)" in text
    assert "JSON fields             " in text
    found = json.loads(headrace("info", dataset, "--json").stdout)
    assert (found["samples"], found["video_frames"], found["audio_codecs"]) == (3, 10, {"pcm_s16le": 1})
    assert found["seconds"] == pytest.approx(5 / 30 * 2 + 1, abs=0.01)
    with Dataset(dataset) as opened:
        assert found["digest"] == opened.digest


def test_info_says_where_a_version_comes_from(dataset: Path) -> None:
    with Dataset(dataset) as opened:
        saved = opened.where("has_video").save("pictures only")
        saved.tag("pictures")
    text = headrace("info", dataset, "--version", "pictures").stdout.decode()
    for row in (
        "message                 pictures only",
        "made from               ds version 1",
        "view                    a saved view",
    ):
        assert f"{row}\n" in text
    assert "where                   has_video" in text
    assert "tags                    pictures" in text
    found = json.loads(headrace("info", dataset, "--version", "2", "--json").stdout)
    assert (found["tags"], found["where"], found["trunk"]) == (["pictures"], ["has_video"], False)


def test_ls_lists_samples_in_order_up_to_a_limit(dataset: Path) -> None:
    lines = headrace("ls", dataset).stdout.decode().splitlines()
    assert [line.split("\t")[:2] for line in lines] == [["0", "a"], ["1", "b"], ["2", "c"]]
    assert "h264 64x48 5 frames" in lines[0]
    objects = [json.loads(line) for line in headrace("ls", dataset, "--json", "--limit", "2").stdout.splitlines()]
    assert [(o["key"], o["text"]) for o in objects] == [("a", "caption"), ("b", None)]
    assert objects[0]["video"]["fps"] == "30"


def test_ls_json_says_how_many_pieces_a_long_file_has_and_not_their_digests(tmp_path: Path, make_wav: MakeWav) -> None:
    make_wav(tmp_path / "in" / "a.wav", seconds=100)
    (tmp_path / "in" / "a.txt").write_text("caption")
    pack(tmp_path / "in", tmp_path / "ds", workers=1).close()
    text, sound = json.loads(headrace("ls", tmp_path / "ds", "--json").stdout)["members"]
    assert sound["pieces"] == {"size": 64 << 10, "digests": 25, "head": sound["pieces"]["head"], "marks": 0}
    assert all(first >= 0 and count >= 1 for first, count in sound["pieces"]["head"])
    assert list(text) == ["ext", "offset", "length", "xxh3"]


def test_cat_gives_the_bytes_of_a_member(dataset: Path, packed: Path) -> None:
    clips = packed.parent / "clips"
    assert headrace("cat", dataset, "a").stdout == (clips / "a.mp4").read_bytes()
    assert headrace("cat", dataset, "a", "--ext", "txt").stdout == b"caption"
    assert headrace("cat", dataset, "c").stdout == (clips / "c.wav").read_bytes()


def test_cat_shows_a_terminal_text_only(dataset: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace.dataio.cli", "cat", str(dataset), "a"]
    refused = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=120, check=False)
    assert refused.returncode == 2
    assert b"mp4 of 'a' is not text, so it is not written to a terminal" in refused.stderr
    shown = subprocess.run([*command, "--ext", "txt"], stdout=theirs, timeout=120, check=False)
    assert shown.returncode == 0
    assert os.read(ours, 1000) == b"caption"
    os.close(theirs)
    os.close(ours)


def test_cat_of_a_damaged_member_gives_no_byte_and_returns_4(dataset: Path) -> None:
    with Dataset(dataset) as opened:
        member = opened.find("a").member("mp4")
        shard = dataset / opened.find("a").shard
    with shard.open("r+b") as file:
        file.seek(member.offset + member.length // 2)
        file.write(b"\xde\xad")
    done = headrace("cat", dataset, "a")
    assert (done.returncode, done.stdout) == (4, b"")
    assert b"checksum" in done.stderr


def test_cat_of_a_missing_member_lists_the_existing_ones(dataset: Path) -> None:
    done = headrace("cat", dataset, "a", "--ext", "jpg")
    assert done.returncode == 2
    assert b"it has mp4, txt" in done.stderr
    assert headrace("cat", dataset, "zzz").returncode == 2
    missing = headrace("ls", dataset, "--version", "7")
    assert missing.returncode == 2
    assert b"it has 1" in missing.stderr


def test_errors_name_the_next_step(dataset: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(tmp_path / "refusals"))
    for args, code, said in (
        (("pack", clips, tmp_path / "x", "--workers", "100000000"), 2, b"is not a whole number from 1 to 1024"),
        (("info", dataset, "--where", "duration >"), 2, b"next: write one SQL expression, such as"),
        (("preview", dataset, "-o", tmp_path / "none" / "p.html"), 2, b"next: make the folder first"),
        (("quarantine", tmp_path / "none"), 2, b"there is not a dataset at"),
    ):
        done = headrace(*args)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_preview_and_export_speak_json(dataset: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = json.loads(headrace("preview", dataset, "-o", page, "--limit", "1", "--json").stdout)
    assert found == found | {"page": str(page), "bytes": page.stat().st_size, "shown": 1}
    lines = [
        json.loads(line) for line in headrace("export", dataset, "a", tmp_path / "out", "--json").stdout.splitlines()
    ]
    assert {line["member"] for line in lines} == {"a.mp4", "a.txt"}
    assert all(Path(line["path"]).is_file() for line in lines)
