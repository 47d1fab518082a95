"""`headrace log`, `filter`, `remove`, `merge`, `tag`, `diff` and `--where`: output, exit codes, errors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from headrace.dataio.cli import main
from headrace.dataio.store.open import open_store
from tests.support.indexed_datasets import make


@pytest.fixture
def root(tmp_path: Path) -> str:
    make(open_store(tmp_path / "set"), range(20))
    return str(tmp_path / "set")


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> list[str]:
    found = main(args)
    out, err = capsys.readouterr()
    assert found == code, err
    assert "bug in Headrace" not in err
    return (out if code in (0, 1) else err).splitlines()


def test_a_filter_is_looked_at_then_saved_and_tagged(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run(capsys, "ls", root, "--where", "duration >= 15", "--json")
    assert [json.loads(line)["key"] for line in listed] == [f"k{n:05}" for n in range(15, 20)]
    assert [json.loads(line)["id"] for line in listed] == [*range(15, 20)], "the numbers are those of the dataset"
    lines = run(capsys, "ls", root, "--where", "duration >= 15", "--limit", "2")
    assert [line.split("\t")[:2] for line in lines] == [["15", "k00015"], ["16", "k00016"]]
    assert json.loads("\n".join(run(capsys, "info", root, "--where", "duration >= 15", "--json")))["samples"] == 5
    made = run(capsys, "filter", root, "duration >= 15", "-m", "long ones", "--tag", "long")
    assert made == [f"file://{root} version 2: 5 samples, long ones"]
    assert len(run(capsys, "ls", root, "--version", "long")) == 5
    lines = run(capsys, "ls", root, "--version", "long", "--where", "duration >= 17")
    assert [line.split("\t")[:2] for line in lines] == [["2", "k00017"], ["3", "k00018"], ["4", "k00019"]]
    assert len(run(capsys, "ls", root)) == 20
    assert run(capsys, "tag", root) == ["long\tversion 2"]
    assert json.loads("\n".join(run(capsys, "tag", root, "first", "--version", "1", "--json"))) == {"first": 1}


def test_samples_are_removed_by_key_file_and_condition(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "remove", root, "k00003") == [
        f"file://{root} version 1: 1 sample would be removed",
        "nothing was changed; --apply makes the version without them",
    ]
    assert json.loads("\n".join(run(capsys, "remove", root, "k00003", "--json")))["applied"] is False
    assert len(run(capsys, "log", root)) == 1
    assert run(capsys, "remove", "--apply", root, "k00003") == [
        f"file://{root} version 2: 19 samples (version 1: 20), removed 1 sample"
    ]
    (tmp_path / "keys").write_text("k00004\n\nk00005\n")
    run(capsys, "remove", "--apply", root, "--keys-from", str(tmp_path / "keys"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"k00006\n")))
    run(capsys, "remove", "--apply", root, "--keys-from", "-")
    found = json.loads(
        "\n".join(run(capsys, "remove", "--apply", root, "--where", "duration > 17", "-m", "bad", "--json"))
    )
    assert (found["version"], found["parent"], found["samples"], found["message"]) == (5, 4, 14, "bad")
    assert "either keys or --where" in run(capsys, "remove", root, code=2)[0]
    assert "no sample 'k00003'" in run(capsys, "remove", root, "k00003", code=2)[0]
    assert "No such file" in run(capsys, "remove", root, "--keys-from", str(tmp_path / "none"), code=2)[0]
    monkeypatch.setattr("headrace.dataio.shards.cli_versions._KEYS_BYTES", 5)
    (tmp_path / "long").write_text("äää", encoding="utf-8")  # 6 bytes
    assert "larger than 5 B" in run(capsys, "remove", root, "--keys-from", str(tmp_path / "long"), code=6)[0]


def test_the_log_is_newest_first_and_marks_views(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "filter", root, "duration >= 15", "--tag", "long")
    run(capsys, "remove", "--apply", root, "k00003", "-m", "bad")
    lines = run(capsys, "log", root)
    assert [line.split()[0] for line in lines] == ["3", "2*", "1"]
    assert lines[0].endswith("19 samples  bad")
    assert lines[1].endswith("5 samples  where duration >= 15 [long]")
    entry = json.loads(run(capsys, "log", root, "--json", "--limit", "1")[0])
    assert (entry["version"], entry["parent"], entry["lineage"]["operation"]) == (3, 1, "remove")


def test_differing_versions_are_exit_code_1(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(open_store(tmp_path / "two"), range(20, 22), name="two")
    run(capsys, "remove", "--apply", root, "k00003")
    made = run(capsys, "merge", root, str(tmp_path / "two"), "-m", "both")
    assert made == [f"file://{root} version 3: 21 samples (version 2: 19), both"]
    assert run(capsys, "diff", root, "--trust-mounts", "1", code=1) == [
        *("+ k00020", "+ k00021", "- k00003", "2 added, 1 removed, 0 changed, 19 unchanged")
    ]
    assert run(capsys, "diff", root, "--trust-mounts", "3", "3") == ["0 added, 0 removed, 0 changed, 21 unchanged"]
    last = json.loads(run(capsys, "diff", root, "--trust-mounts", "1", "2", "--json", code=1)[-1])
    assert last == {"old": 1, "new": 2, "added": 0, "removed": 1, "changed": 0, "unchanged": 19}
    two = run(capsys, "diff", root, "--trust-mounts", "1", "--other", str(tmp_path / "two"), "--summary", code=1)
    assert two == ["2 added, 20 removed, 0 changed, 0 unchanged"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ls", "{}", "--where", "heigth > 2"], "did you mean height"),
        (["filter", "{}", "key in (select 1)"], "a sub-query"),
        (["log", "{}/nothing"], "no dataset"),
        (["tag", "{}", "7"], "is not a valid tag"),
        (["ls", "{}", "--version", "nope"], "no version tagged 'nope'"),
        (["diff", "{}", "1", "9"], "no version 9"),
    ],
)
def test_mistakes_are_one_clear_line(
    root: str, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert words in " ".join(run(capsys, *(arg.format(root) for arg in args), code=2))


def test_a_tag_that_cannot_be_given_leaves_no_version_behind(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "tag", root, "taken")
    run(capsys, "filter", root, "duration > 0", "--tag", "9x", code=2)
    run(capsys, "filter", root, "duration > 0", "--tag", "taken", code=5)
    assert len(run(capsys, "log", root)) == 1
