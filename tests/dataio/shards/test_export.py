"""Members of samples as files: whole, in one folder, and never over others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio import Dataset, pack
from headrace.dataio.core.errors import AccessDeniedError, ConflictError, CorruptionError, NotFoundError
from headrace.dataio.shards.export import export, safe_name
from tests.support import headrace_command
from tests.support.written_media import MakeWav


@pytest.fixture
def dataset(tmp_path: Path, make_wav: MakeWav) -> Dataset:
    make_wav(tmp_path / "in/deep/a.wav")
    (tmp_path / "in/deep/a.txt").write_text("caption")
    make_wav(tmp_path / "in/b.wav", seconds=0.1)
    return pack(tmp_path / "in", tmp_path / "ds", workers=1)


def test_members_become_files_of_one_folder(dataset: Dataset, tmp_path: Path) -> None:
    made = dict(export(dataset, ["deep/a", "b"], tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["b.wav", "deep%2Fa.txt", "deep%2Fa.wav"]
    assert made["deep/a.wav"].read_bytes() == (tmp_path / "in/deep/a.wav").read_bytes()
    assert [name for name, _ in export(dataset, ["deep/a"], tmp_path / "txt", ext="txt")] == ["deep/a.txt"]


def test_nothing_is_overwritten_unless_asked_for(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "out/b.wav").symlink_to(tmp_path / "victim")
    with pytest.raises(ConflictError, match=r"b\.wav exists"):
        list(export(dataset, ["b"], tmp_path / "out"))
    list(export(dataset, ["b"], tmp_path / "out", force=True))
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "out/b.wav").read_bytes() == (tmp_path / "in/b.wav").read_bytes()
    assert os.listdir(tmp_path / "out") == ["b.wav"]


def test_a_damaged_member_leaves_no_file(dataset: Dataset, tmp_path: Path) -> None:
    sample = dataset.find("b")
    with (tmp_path / "ds" / sample.shard).open("r+b") as file:
        file.seek(sample.members[0].offset + 50)
        file.write(b"\xff\xee")
    with pytest.raises(CorruptionError):
        list(export(dataset, ["b"], tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == []


def test_a_missing_key_or_member_is_named(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="'zz'"):
        list(export(dataset, ["zz"], tmp_path / "out"))
    with pytest.raises(ConflictError, match="is not a folder"):
        list(export(dataset, ["b"], tmp_path / "ds" / "dataset.json"))


def test_a_folder_that_may_not_be_written_is_no_lack_of_space(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "link", read_only)
    with pytest.raises(AccessDeniedError, match=r"b\.wav: Read-only file system"):
        list(export(dataset, ["b"], tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == []


_PARTS = st.tuples(st.text(min_size=1, max_size=300), st.sampled_from(["mp4", "txt", "a/b", "tar.gz"]))


@given(_PARTS, _PARTS)
def test_names_are_one_safe_component_and_differ(one: tuple[str, str], two: tuple[str, str]) -> None:
    name = safe_name(*one)
    assert os.path.basename(name) == name
    assert name not in (".", "..")
    assert not name.startswith(".")
    assert len(name.encode()) <= 255
    assert all(c.isprintable() for c in name)
    assert (name == safe_name(*two)) == (".".join(one) == ".".join(two))


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "..", "a\\b", "a\0b", "a\nb", "x" * 5000])
def test_keys_are_never_paths(key: str, tmp_path: Path) -> None:
    assert (tmp_path / safe_name(key, "txt")).parent == tmp_path
    (tmp_path / safe_name(key, "txt")).touch()


def test_the_command_prints_what_it_wrote(dataset: Dataset, tmp_path: Path) -> None:
    arguments = ("export", tmp_path / "ds", "b", tmp_path / "out")
    done = headrace_command.run(*arguments)
    assert (done.returncode, done.stdout.decode()) == (0, f"b.wav -> {tmp_path / 'out' / 'b.wav'}\n")
    done = headrace_command.run(*arguments)
    assert done.returncode == 5
    assert b"exists already" in done.stderr
    assert headrace_command.run(*arguments, "--force").returncode == 0
