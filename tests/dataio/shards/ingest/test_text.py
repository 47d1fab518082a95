"""The text of samples whose captions are in JSON files: `pack`, `append`, `index` and the commands."""

from __future__ import annotations

import io
import json
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Dataset, Recipe, append, index, pack
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.shards.ingest import plan
from headrace.dataio.shards.ingest.index_units import IndexSettings, index_plan
from headrace.dataio.shards.media.messages import TEXT_BYTES
from tests.support import headrace_command
from tests.support.written_media import MakeClip, write_wav

CAPTIONS: dict[str, dict[str, Any]] = {
    "a": {"caption": "a dog", "title": "Dog", "captions": ["a dog", "the dog"]},
    "b": {"caption": None, "title": "Cat", "captions": []},
    "c": {"caption": 3, "title": "Three", "captions": "one caption"},
    "d": {"title": ["", "Many", "titles"]},
}
VTT = b"WEBVTT\n\n00:00.000 --> 00:01.000\nspoken words\n"


def files() -> dict[str, bytes]:
    """Samples as video2dataset and img2dataset write them. "e" has a `.txt` too, and "f" has only subtitles."""
    return (
        {f"{key}.json": json.dumps(document).encode() for key, document in CAPTIONS.items()}
        | {"e.json": b'{"caption": "json", "title": "json"}', "e.txt": b"a text", "f.vtt": VTT, "c.vtt": VTT}
        | {"g.json": b"[" + b"1, " * 9 + b"2]"}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The samples as files, each with a sound."""
    folder = tmp_path / "in"
    folder.mkdir()
    sound = write_wav(folder / "a.wav", seconds=0.02)
    for key in "bcdefg":
        shutil.copy(sound, folder / f"{key}.wav")
    for name, data in files().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def tars(folder: Path, tmp_path: Path) -> Path:
    """The samples in two tars."""
    (tmp_path / "tars").mkdir()
    for number, keys in enumerate(("abc", "defg")):
        with tarfile.open(tmp_path / "tars" / f"{number}.tar", "w") as archive:
            for path in sorted(folder.iterdir()):
                if path.name[0] in keys:
                    info = tarfile.TarInfo(path.name)
                    info.size = path.stat().st_size
                    archive.addfile(info, io.BytesIO(path.read_bytes()))
    return tmp_path / "tars"


def texts(dataset: Dataset) -> dict[str, str | None]:
    return {sample.key: sample.text for sample in dataset}


def notes(dataset: Dataset) -> list[str]:
    assert dataset.report is not None
    return [note for note in dataset.report.notes if "text" in note]


BY_DEFAULT = {"a": "a dog", "b": None, "c": "spoken words", "d": None, "e": "a text", "f": "spoken words"}
BY_TITLE = {"a": "Dog", "b": "Cat", "c": "Three", "d": "Many", "e": "a text", "f": "spoken words"}
BY_CAPTIONS = {"a": "a dog", "b": None, "c": "one caption", "d": None, "e": "a text", "f": "spoken words"}
OF_C = "c: its text is not taken from the .json: 'caption' is a number"


@pytest.mark.parametrize("indexed", [False, True])
def test_captions_in_json_are_the_text_of_samples(folder: Path, tars: Path, tmp_path: Path, indexed: bool) -> None:
    def make(name: str, **options: Any) -> Dataset:
        return index(tars, tmp_path / name, **options) if indexed else pack(folder, tmp_path / name, **options)

    with make("default", workers=1) as dataset:
        assert texts(dataset) == BY_DEFAULT
        assert notes(dataset) == [OF_C]
        assert dataset.report is not None
        assert [item.reason for item in dataset.report.skipped] == ["the JSON of a sample must be an object"]
        assert [sample.key for sample in dataset.where("caption = 'a dog'")] == ["a"]
        assert [sample.key for sample in dataset.where("fields.caption = 'json'")] == ["e"]
        assert dataset.find("a").fields["caption"] == "a dog"
    for name, expected in (("title", BY_TITLE), ("captions", BY_CAPTIONS)):
        with make(name, workers=1, text_field=name) as dataset:
            assert texts(dataset) == expected
            assert notes(dataset) == []


def test_a_file_that_lacks_the_default_name_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_wav(tmp_path / "in" / "a.wav", seconds=0.02)
    (tmp_path / "in" / "a.json").write_text('{"text": "words on a sign"}')
    with pack(tmp_path / "in", tmp_path / "ds", workers=1) as dataset:
        assert texts(dataset) == {"a": None}
        assert notes(dataset) == []
    with pack(tmp_path / "in", tmp_path / "other", workers=1, text_field="text") as dataset:
        assert texts(dataset) == {"a": "words on a sign"}


def test_a_name_that_no_sample_has_is_remarked_once(tmp_path: Path, tars: Path, folder: Path) -> None:
    for name in ("e.txt", "f.vtt", "c.vtt"):
        (folder / name).unlink()
    expected = ["no sample has a text: there is no .txt, and no .json has a text called 'captoin'"]
    with pack(folder, tmp_path / "packed", workers=1, text_field="captoin") as dataset:
        assert set(texts(dataset).values()) == {None}
        assert notes(dataset) == expected
    with pack(folder, tmp_path / "default", workers=1) as dataset:
        assert notes(dataset) == [OF_C]
    (tars / "1.tar").unlink()
    (tars / "0.tar").unlink()
    with tarfile.open(tars / "0.tar", "w") as archive:
        archive.add(folder / "a.wav", "a.wav")
        archive.add(folder / "a.json", "a.json")
    with index(tars, tmp_path / "indexed", workers=1, text_field="captoin") as dataset:
        assert notes(dataset) == expected


def test_appended_samples_have_the_field_that_was_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    shutil.copy(folder / "a.wav", tmp_path / "more" / "z.wav")
    shutil.copy(folder / "a.json", tmp_path / "more" / "z.json")
    pack(folder, tmp_path / "ds", workers=1).close()
    with append(tmp_path / "more", tmp_path / "ds", workers=1, text_field="title") as dataset:
        assert texts(dataset) == BY_DEFAULT | {"z": "Dog"}


def test_a_manifest_s_caption_is_the_text_and_its_other_columns_are_fields(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"path": "a.wav", "caption": "of the manifest", "captions": ["a", "b"]},
        {"path": "b.wav", "caption": None, "captions": ["of the list", "b"]},
    ]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pack(folder / "m.jsonl", tmp_path / "ds", workers=1, text_field="captions") as dataset:
        assert texts(dataset) == {"a": "of the manifest", "b": "of the list"}


def test_clips_of_a_split_sample_have_its_text(make_clip: MakeClip, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    make_clip(tmp_path / "in" / "a.mp4", frames=24, options={"g": "6", "keyint_min": "6", "sc_threshold": "0"})
    (tmp_path / "in" / "a.json").write_text('{"caption": "a dog"}')
    with pack(tmp_path / "in", tmp_path / "ds", workers=1, recipe=Recipe(split=0.2)) as dataset:
        assert len(dataset) > 1
        assert set(texts(dataset).values()) == {"a dog"}


@pytest.mark.parametrize(
    "data", [b'{"caption": "caf\xe9"}', b'{"caption": "\\ud800"}', b'{"caption": "x', b'{"caption": NaN}']
)
def test_a_damaged_caption_skips_its_sample(folder: Path, tmp_path: Path, data: bytes) -> None:
    (folder / "a.json").write_bytes(data)
    with pack(folder, tmp_path / "ds", workers=1) as dataset:
        assert "a" not in texts(dataset)
        assert dataset.report is not None
        assert str(folder / "a.json") in [item.path for item in dataset.report.skipped]
    with pytest.raises(CorruptionError, match=r"a\.json: not JSON"):
        pack(folder, tmp_path / "strict", workers=1, strict=True)


def test_a_caption_that_is_too_long_is_remarked(folder: Path, tmp_path: Path) -> None:
    (folder / "a.json").write_text(json.dumps({"caption": "x" * (TEXT_BYTES + 1)}))
    with pack(folder, tmp_path / "ds", workers=1) as dataset:
        assert texts(dataset)["a"] is None
        assert "a: its text is not taken from the .json: 'caption' is larger than 1.0 MiB" in notes(dataset)


@pytest.mark.parametrize("name", ["", 3, b"caption", ["caption"], "a\nb", "\ud800"])
def test_an_impossible_name_is_refused_before_anything_is_read(tmp_path: Path, name: Any) -> None:
    for make in (pack, index):
        with pytest.raises(UsageError, match="text_field cannot be"):
            make(tmp_path / "missing", tmp_path / "ds", text_field=name)
    with pytest.raises(UsageError, match="text_field cannot be"):
        append(tmp_path / "missing", tmp_path / "ds", text_field=name)
    assert not (tmp_path / "ds").exists()


def test_the_commands_take_the_name(folder: Path, tars: Path, tmp_path: Path) -> None:
    assert headrace_command.run("pack", folder, tmp_path / "packed", "--text-field", "title").returncode == 1
    with Dataset(tmp_path / "packed") as dataset:
        assert texts(dataset) == BY_TITLE
    done = headrace_command.run("index", tars, tmp_path / "indexed", "--text-field", "captions")
    assert done.returncode == 1, done.stderr
    with Dataset(tmp_path / "indexed", trust_mounts=True) as dataset:
        assert texts(dataset) == BY_CAPTIONS
    (tmp_path / "more").mkdir()
    shutil.copy(folder / "a.wav", tmp_path / "more" / "z.wav")
    (tmp_path / "more" / "z.json").write_text('{"title": 5}')
    done = headrace_command.run("pack", "--append", tmp_path / "more", tmp_path / "packed", "--text-field", "title")
    assert b"z: its text is not taken from the .json: 'title' is a number" in done.stdout, done
    assert headrace_command.run("pack", folder, tmp_path / "x", "--text-field", "").returncode == 2


@pytest.mark.parametrize("command", ["pack", "index"])
def test_an_interrupted_call_with_another_name_is_another_plan(
    folder: Path, tars: Path, tmp_path: Path, command: str
) -> None:
    source, root = (folder if command == "pack" else tars), tmp_path / "ds"
    point = {"pack": "pack.index-stored", "index": "index.stored"}[command]
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
    done = headrace_command.run(command, source, root, **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    make: Any = {"pack": pack, "index": index}[command]
    shutil.copytree(root, tmp_path / "same")
    for destination, name in ((root, "title"), (tmp_path / "same", None)):
        with make(source, destination, text_field=name) as dataset:
            assert dataset.report is not None
            assert dataset.report.resumed == (name is None)
            assert texts(dataset) == (BY_TITLE if name else BY_DEFAULT)


def test_the_name_is_part_of_the_plan() -> None:
    names = ["caption", "title", None]
    digests = {plan.digest([], plan.Settings(shard_bytes=1, text_field=name), append=False) for name in names}
    indexed = {index_plan([], IndexSettings(strict=False, prefix_keys=False, text_field=name)).name for name in names}
    assert len(digests) == len(indexed) == 3
