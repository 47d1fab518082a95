"""Which files are one sample, and what it is called."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.shards.tar import _MEMBER_NAME


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def shape(*sources: str | Path) -> dict[str, list[str]]:
    return {group.key: [ext for ext, _ in group.files] for group in gather(sources).groups}


def test_files_of_the_same_stem_in_one_folder_are_one_sample(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.mp4", "a/x.json", "a/x.txt", "a/x.wav", "b/x.mp4", "b/y.webm")
    assert shape(tmp_path) == {"a/x": ["json", "mp4", "txt", "wav"], "b/x": ["mp4"], "b/y": ["webm"]}


def test_a_file_with_several_dots_belongs_to_the_media_file_with_the_longest_stem(tmp_path: Path) -> None:
    tree(tmp_path, "x.mp4", "x.a.b.NPY", "x.a.bin", "x.a.wav", "x.A.npy", "x.mp4.part", "other.latent.npy", "y.tar.gz")
    gathered = gather([tmp_path])
    assert {group.key: [ext for ext, _ in group.files] for group in gathered.groups} == {
        "x": ["a.npy", "mp4"],
        "x_a": ["b.npy", "bin", "wav"],
    }
    assert [Path(path).name for path in gathered.ignored] == ["other.latent.npy", "x.mp4.part", "y.tar.gz"]


def test_two_files_that_would_be_one_member_are_refused(tmp_path: Path) -> None:
    tree(tmp_path, "x.mp4", "x.a.npy", "x.A.npy")
    with pytest.raises(UsageError, match="would be the same member"):
        gather([tmp_path])


def test_files_given_one_by_one_are_grouped_too(tmp_path: Path) -> None:
    tree(tmp_path, "x.mp4", "x.json")
    assert shape(tmp_path / "x.json", tmp_path / "x.mp4") == {"x": ["json", "mp4"]}


def test_a_sample_of_too_many_files_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_SAMPLE_MEMBERS", 3)
    tree(tmp_path, "x.mp4", "x.a", "x.b", "y.mp4", "y.a", "y.b", "y.c")
    found = gather([tmp_path])
    assert [group.key for group in found.groups] == ["x"]
    (left,) = found.skipped
    assert (left.code, left.reason) == ("unsupported", "the sample 'y' has more than 3 members")


def test_a_glob_gives_keys_relative_to_its_fixed_part(tmp_path: Path) -> None:
    tree(tmp_path, "set/a/1.mp4", "set/b/2.mp4", "set/b/2.txt")
    assert shape(f"{tmp_path}/set/*/*.mp4") == {"a/1": ["mp4"], "b/2": ["mp4"]}
    assert shape(f"{tmp_path}/s*/**/*.mp4") == {"set/a/1": ["mp4"], "set/b/2": ["mp4"]}
    assert shape(f"{tmp_path}/set/[a]") == {"a/1": ["mp4"]}


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    tree(tmp_path, "what [is] this?.mp4")
    assert shape(tmp_path / "what [is] this?.mp4") == {"what [is] this?": ["mp4"]}


def test_dots_and_control_characters_become_underscores(tmp_path: Path) -> None:
    tree(tmp_path, "v1.0/Dr. Who.ep.1.MP4", "v1.0/Dr. Who.ep.1.txt", "a\nb.mp4")
    assert shape(tmp_path) == {"v1_0/Dr_ Who_ep_1": ["mp4", "txt"], "a_b": ["mp4"]}


def test_what_belongs_to_no_media_in_a_folder_is_ignored_and_hidden_files_are_not_seen(tmp_path: Path) -> None:
    tree(tmp_path, "x.mp4", "README.md", "labels.json", ".DS_Store", ".git/x.mp4", "x")
    found = gather([tmp_path])
    assert [Path(name).name for name in found.ignored] == ["README.md", "labels.json", "x"]
    assert [group.key for group in found.groups] == ["x"]
    assert not found.skipped


def test_a_named_file_that_is_no_media_is_skipped_with_the_reason(tmp_path: Path) -> None:
    tree(tmp_path, "notes.md")
    (skipped,) = gather([tmp_path / "notes.md"]).skipped
    assert skipped.path.endswith("notes.md")
    assert "neither a media file" in skipped.reason


def test_broken_links_and_pipes_are_skipped_and_a_loop_of_folders_ends(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.mp4")
    (tmp_path / "a" / "broken.mp4").symlink_to("nowhere.mp4")
    (tmp_path / "a" / "self.mp4").symlink_to("self.mp4")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "a" / "pipe.mp4")
    found = gather([tmp_path])
    assert [group.key for group in found.groups] == ["a/x"]
    assert {Path(s.path).name: s.reason for s in found.skipped} == {
        "broken.mp4": "cannot be read: No such file or directory",
        "self.mp4": "cannot be read: Too many levels of symbolic links",
        "pipe.mp4": "not a regular file",
    }


def test_a_name_that_is_not_utf8_is_skipped(tmp_path: Path) -> None:
    tree(tmp_path, "x.mp4")
    (tmp_path / os.fsdecode(b"\xff.mp4")).write_bytes(b"x")
    assert [s.reason for s in gather([tmp_path]).skipped] == ["the file's name is not UTF-8"]


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.mp4", "a/y.mp4")
    assert shape(tmp_path, tmp_path / "a" / "x.mp4", f"{tmp_path}/a/*.mp4") == {"a/x": ["mp4"], "a/y": ["mp4"]}


def test_two_samples_of_one_key_are_refused_naming_both_files(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.mp4", "b/x.mp4")
    with pytest.raises(UsageError, match=r"a/x\.mp4 and .*b/x\.mp4 would both be the sample 'x'"):
        gather([tmp_path / "a", tmp_path / "b"])


def test_keys_that_become_equal_are_refused(tmp_path: Path) -> None:
    tree(tmp_path, "a.b.mp4", "a_b.mp4")
    with pytest.raises(UsageError, match=r"a\.b\.mp4 and .*a_b\.mp4"):
        gather([tmp_path])


def test_extensions_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    tree(tmp_path, "a.mp4", "a.MP4")
    with pytest.raises(UsageError, match="same member"):
        gather([tmp_path])


def test_a_source_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no file or folder .*missing\.mp4"):
        gather([tmp_path / "missing.mp4"])
    with pytest.raises(NotFoundError, match="nothing matches"):
        gather([f"{tmp_path}/*.mp4"])


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda name: name.strip(".") and len(name.encode()) < 200
)


@settings(max_examples=40)
@given(st.lists(names, min_size=1, max_size=5, unique=True), st.randoms())
def test_keys_are_deterministic_and_safe_whatever_the_names(
    tmp_path_factory: pytest.TempPathFactory, stems: list[str], shuffler: random.Random
) -> None:
    root = tmp_path_factory.mktemp("names")
    paths = [tree(root, f"{stem}.mp4") / f"{stem}.mp4" for stem in stems]
    shuffled = list(paths)
    shuffler.shuffle(shuffled)
    try:
        groups = gather(paths).groups
    except UsageError:
        return  # two names that become one key
    assert gather(shuffled).groups == groups == gather([root, *paths]).groups or any(s.startswith(".") for s in stems)
    for group in groups:
        match = _MEMBER_NAME.fullmatch(f"{group.key}.mp4")
        assert match is not None
        assert match["key"] == group.key
        assert ".." not in group.key.split("/")
