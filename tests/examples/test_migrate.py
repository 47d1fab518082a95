"""The converters of examples/migrate run on data sets that the real libraries wrote, and lose nothing.

`recorded` has these data sets, with what the libraries read from them (`expected.json`). With a library installed, its own
reader is compared as well.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, open_store
from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from tests.support.migrations import RECORDED, SCRIPTS, run_script

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]
pytestmark = pytest.mark.slow


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script, compare its exit code with `code`, and return what it prints."""

    def start(script: str, *arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        found = run_script(script, *arguments)
        output = capsys.readouterr()
        assert found == code, output.out + output.err
        return output.out + output.err

    return start


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hide a library that may be installed."""
    import importlib.util

    real = importlib.util.find_spec

    def hide(name: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda each, *more: None if each == name else real(each, *more)
        )

    return hide


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expected(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RECORDED / name / "expected.json").read_text())
    return found


def rows_of(dataset: Path | str, arrays: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The samples of a converted dataset in the form of `expected.json`: media by digest, arrays as lists."""
    rows = list[dict[str, Any]]()
    with Dataset(dataset) as found:
        for number, sample in enumerate(found):
            assert sample.key == f"{number:010}"
            row = json.loads(found.read(sample, "json"))
            row |= {"clip": digest(found.read(sample, "mp4")), "still": digest(found.read(sample, "jpg"))}
            for name in arrays:
                array = np.load(io.BytesIO(found.read(sample, f"{name}.npy")), allow_pickle=False)
                row[name] = [str(array.dtype), array.tolist()]
            assert sample.text == row.get("caption")
            rows.append(row)
    return rows


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(RECORDED / name, folder / name))


# --- MDS


@pytest.mark.parametrize("name", ["mds", "mds-zstd"])
def test_shards_of_mds_become_tars_with_the_same_bytes_and_values(name: str, tmp_path: Path, run: Run) -> None:
    output = run("from_mds.py", RECORDED / name, tmp_path / "set", "--file", "clip=mp4", "--check")
    rows = rows_of(tmp_path / "set", arrays=("tokens", "pair"))
    assert rows == expected(name)
    assert f"{len(rows)} samples with" in output
    assert "; 0 are not" in output
    assert len(list((tmp_path / "set" / "tars").iterdir())) == len(list((RECORDED / name).glob("shard.*"))) > 1


@pytest.mark.s3
def test_shards_in_a_bucket_are_converted_into_a_bucket(s3_url: str, run: Run) -> None:
    with open_store(f"{s3_url}/mds") as store:
        for path in (RECORDED / "mds").iterdir():
            store.put(path.name, path.read_bytes())
    output = run("from_mds.py", f"{s3_url}/mds", f"{s3_url}/set", "--file", "clip=mp4", "--check")
    assert "8 samples with" in output
    assert rows_of(f"{s3_url}/set", arrays=("tokens", "pair")) == expected("mds")


def test_a_conversion_that_failed_continues_with_the_tar_that_is_missing(tmp_path: Path, run: Run) -> None:
    source, target = copy_of("mds", tmp_path), tmp_path / "set"
    shard = source / "shard.00001.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(CorruptionError, match="a shard has no bytes"):
        run("from_mds.py", source, target, "--file", "clip=mp4")
    assert [path.name for path in (target / "tars").iterdir()] == ["000000.tar"]
    before = (target / "tars" / "000000.tar").stat()
    shard.write_bytes(whole)
    output = run("from_mds.py", source, target, "--file", "clip=mp4", "--check")
    assert "tars/000000.tar" not in output
    assert os.path.samestat(before, (target / "tars" / "000000.tar").stat())
    assert rows_of(target, arrays=("tokens", "pair")) == expected("mds")
    assert "tars/" not in run("from_mds.py", source, target, "--file", "clip=mp4", "--check")


@pytest.mark.process
@pytest.mark.parametrize(("point", "tars"), [("store.posix.written#2", 1), ("store.posix.named#2", 2)])
def test_a_conversion_that_was_killed_continues_and_loses_nothing(
    point: str, tars: int, tmp_path: Path, run: Run
) -> None:
    target, mark = tmp_path / "set", tmp_path / "mark"
    command = [sys.executable, *map(str, [SCRIPTS / "from_mds.py", RECORDED / "mds", target]), "--file", "clip=mp4"]
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=os.environ | crash, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    assert mark.read_text().strip() == point.partition("#")[0]
    before = {path.name: path.stat().st_ino for path in target.glob("tars/*.tar")}
    assert len(before) == tars
    run("from_mds.py", RECORDED / "mds", target, "--file", "clip=mp4", "--check")
    assert before.items() <= {path.name: path.stat().st_ino for path in target.glob("tars/*.tar")}.items()
    assert rows_of(target, arrays=("tokens", "pair")) == expected("mds")


def test_the_check_names_samples_that_differ_are_missing_or_are_too_many(tmp_path: Path, run: Run) -> None:
    source, target = copy_of("mds", tmp_path), tmp_path / "set"
    arguments = ["from_mds.py", source, target, "--file", "clip=mp4"]
    run(*arguments)
    shard = source / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # the last sample of this shard
    shard.write_bytes(data)
    last = json.loads((source / "index.json").read_text())["shards"][0]["samples"] - 1
    assert f"{last:010} differs" in run(*arguments, "--check", code=1)
    with Dataset(target) as dataset:
        dataset.remove(["0000000001"]).close()
    assert "0000000001 is missing" in run(*arguments, "--check", code=1)
    document = json.loads((source / "index.json").read_text())
    (source / "index.json").write_text(json.dumps({**document, "shards": document["shards"][:1]}))
    assert f"{last + 1:010} is not in the source" in run(*arguments, "--check", code=1)


def change_index(source: Path, **changes: Any) -> None:
    """Change the first shard's entry in index.json."""
    document = json.loads((source / "index.json").read_text())
    document["shards"][0] |= changes
    (source / "index.json").write_text(json.dumps(document))


def test_what_a_hostile_index_of_mds_names_is_refused(tmp_path: Path, run: Run) -> None:
    source = copy_of("mds", tmp_path)
    arguments = ["from_mds.py", source, tmp_path / "set", "--file", "clip=mp4"]
    (tmp_path / "secret").write_bytes(b"secret")
    change_index(source, raw_data={"basename": "../secret", "bytes": 6, "hashes": {}})
    with pytest.raises(UsageError, match="not a valid object key"):
        run(*arguments)
    first = {"basename": "shard.00000.mds", "bytes": 0, "hashes": {}}
    change_index(source, raw_data=first, samples=1_000_000_000)
    with pytest.raises(CorruptionError, match="has no bytes"):
        run(*arguments)
    change_index(source, samples=1)
    with pytest.raises(CorruptionError, match=r"index\.json says 1"):
        run(*arguments)


def test_a_compressed_shard_with_more_bytes_than_the_index_says_is_refused(tmp_path: Path, run: Run) -> None:
    source = copy_of("mds-zstd", tmp_path)
    change_index(source, raw_data={"basename": "shard.00000.mds", "bytes": 1000, "hashes": {}})
    with pytest.raises(CorruptionError, match=r"more than the 1000 bytes of index\.json"):
        run("from_mds.py", source, tmp_path / "set", "--file", "clip=mp4")


def test_columns_that_cannot_be_converted_are_named(tmp_path: Path, run: Run) -> None:
    source = copy_of("mds", tmp_path)
    with pytest.raises(UsageError, match="which format") as error:
        run("from_mds.py", source, tmp_path / "set")
    assert "--file clip=EXTENSION" in str(error.value)
    with pytest.raises(UsageError, match="names label"):
        run("from_mds.py", source, tmp_path / "set", "--file", "clip=mp4", "--file", "label=txt")
    with pytest.raises(UsageError, match="two files"):
        run("from_mds.py", source, tmp_path / "set", "--file", "clip=mp4", "--file", "still=mp4")
    with pytest.raises(UsageError, match="COLUMN=EXTENSION"):
        run("from_mds.py", source, tmp_path / "set", "--file", "clip=../mp4")
    kinds = json.loads((source / "index.json").read_text())["shards"][0]["column_encodings"]
    change_index(source, column_encodings=["pkl" if kind == "json" else kind for kind in kinds])
    with pytest.raises(UnsupportedError, match="the kinds pkl"):
        run("from_mds.py", source, tmp_path / "set", "--file", "clip=mp4")


def test_streaming_reads_the_same_samples(tmp_path: Path, run: Run) -> None:
    streaming = pytest.importorskip("streaming")
    run("from_mds.py", RECORDED / "mds", tmp_path / "set", "--file", "clip=mp4")
    source = streaming.StreamingDataset(local=str(RECORDED / "mds"), batch_size=1)
    with Dataset(tmp_path / "set") as dataset:
        assert len(dataset) == len(source)
        for row, sample in zip(source, dataset, strict=True):
            assert row["clip"] == dataset.read(sample, "mp4")
            assert row["caption"] == sample.text
            np.testing.assert_array_equal(row["tokens"], np.load(io.BytesIO(dataset.read(sample, "tokens.npy"))))


# --- litData


def test_plain_chunks_of_litdata_become_tars_with_the_same_bytes_and_values(
    tmp_path: Path, run: Run, without: Callable[[str], None]
) -> None:
    without("litdata")
    options = ["--file", "raw=bin", "--text-field", "about_caption", "--check"]
    output = run("from_litdata.py", RECORDED / "litdata", tmp_path / "set", *options)
    with Dataset(tmp_path / "set") as dataset:
        assert [sample.text for sample in dataset] == [row["about_caption"] for row in expected("litdata")]
        for row, sample in zip(expected("litdata"), dataset, strict=True):
            assert (
                json.loads(dataset.read(sample, "json"))
                | {
                    "raw": digest(dataset.read(sample, "bin")),
                    "still": digest(dataset.read(sample, "jpg")),
                }
                == row
            )
    assert "; 0 are not" in output
    assert len(list((tmp_path / "set" / "tars").iterdir())) == 2


def test_chunks_that_only_litdata_can_read_are_refused_without_it(
    tmp_path: Path, run: Run, without: Callable[[str], None]
) -> None:
    without("litdata")
    source = copy_of("litdata", tmp_path)
    index = source / "index.json"
    document = json.loads(index.read_text())
    for change in ({"compression": "zstd"}, {"encryption": {"algorithm": "fernet"}}):
        index.write_text(json.dumps({**document, "config": {**document["config"], **change}}))
        with pytest.raises(UnsupportedError, match="need litData") as error:
            run("from_litdata.py", source, tmp_path / "set", "--file", "raw=bin")
        assert "pip install litdata" in str(error.value)
    for name, value in (("item_loader", "TokensLoader"), ("data_spec", None)):
        index.write_text(json.dumps({**document, "config": {**document["config"], name: value}}))
        with pytest.raises(UnsupportedError, match="not of samples"):
            run("from_litdata.py", source, tmp_path / "set", "--file", "raw=bin")
    spec = (
        document["config"]["data_spec"]
        .replace("about", "even")
        .replace("caption", "x")
        .replace('\\"even\\"]', '\\"even_x\\"]')
    )
    index.write_text(json.dumps({**document, "config": {**document["config"], "data_spec": spec}}))
    with pytest.raises(UnsupportedError, match="the same path"):
        run("from_litdata.py", source, tmp_path / "set", "--file", "raw=bin")
    formats = ["pickle" if kind == "int" else kind for kind in document["config"]["data_format"]]
    index.write_text(json.dumps({**document, "config": {**document["config"], "data_format": formats}}))
    with pytest.raises(UnsupportedError, match="formats pickle"):
        run("from_litdata.py", source, tmp_path / "set", "--file", "raw=bin")


def test_what_hostile_chunks_of_litdata_claim_is_refused(
    tmp_path: Path, run: Run, without: Callable[[str], None]
) -> None:
    without("litdata")
    source = copy_of("litdata", tmp_path)
    arguments = ["from_litdata.py", source, tmp_path / "set", "--file", "raw=bin"]
    document = json.loads((source / "index.json").read_text())
    name = document["chunks"][0]["filename"]
    data = bytearray((source / name).read_bytes())
    data[8:12] = (2**32 - 1).to_bytes(4, "little")  # the end of the first row
    (source / name).write_bytes(data)
    with pytest.raises(CorruptionError, match="has no bytes"):
        run(*arguments)
    document["chunks"][0]["filename"] = "/etc/passwd"
    (source / "index.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="not a valid object key"):
        run(*arguments)


def test_litdata_reads_its_own_chunks_with_arrays_audio_and_compression(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("litdata")
    subprocess.run([sys.executable, Path(__file__).with_name("write_litdata.py"), tmp_path / "source"], check=True)
    run("from_litdata.py", tmp_path / "source", tmp_path / "set", "--file", "raw=bin", "--check")
    with Dataset(tmp_path / "set") as dataset:
        assert len(dataset) == 8
        for number, sample in enumerate(dataset):
            assert sorted(member.ext for member in sample.members) == ["bin", "json", "matrix.npy", "vector.npy", "wav"]
            assert dataset.read(sample, "bin") == bytes([number] * 5)
            assert json.loads(dataset.read(sample, "json")) == {"label": number, "caption": f"number {number}"}
            matrix = np.load(io.BytesIO(dataset.read(sample, "matrix.npy")))
            np.testing.assert_array_equal(matrix, np.full((2, 3), number, np.float32))
    run("from_litdata.py", RECORDED / "litdata", tmp_path / "recorded", "--file", "raw=bin", "--check")


# --- Energon and WebDataset


def test_the_splits_of_energon_become_datasets_over_its_tars(tmp_path: Path, run: Run) -> None:
    source = copy_of("energon", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    output = run("from_energon.py", source, tmp_path / "sets")
    assert output == "train: 3 tars, 9 samples, 0 excluded\nval: 1 tars, 3 samples, 0 excluded\n"
    for split, numbers in (("train", range(9)), ("val", range(9, 12))):
        with Dataset(tmp_path / "sets" / split, trust_mounts=True) as dataset:
            assert list(dataset.keys) == [f"{n:06}" for n in numbers]
            assert [digest(dataset.read(sample, "jpg")) for sample in dataset] == [
                expected("energon")[n]["jpg"] for n in numbers
            ]
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert run("from_energon.py", source, tmp_path / "sets") == output


def test_tars_and_samples_that_energon_excludes_are_left_out(tmp_path: Path, run: Run) -> None:
    source = copy_of("energon", tmp_path)
    text = (source / ".nv-meta" / "split.yaml").read_text()
    excluded = "exclude: [shard_001.tar, 'shard_002.tar/{1..2}']"
    (source / ".nv-meta" / "split.yaml").write_text(text.replace("exclude: []", excluded))
    output = run("from_energon.py", source, tmp_path / "sets")
    assert output.startswith("train: 2 tars, 4 samples, 2 excluded\n")
    with Dataset(tmp_path / "sets" / "train", trust_mounts=True) as dataset:
        assert list(dataset.keys) == ["000000", "000001", "000002", "000006"]
    assert run("from_energon.py", source, tmp_path / "sets") == output


def test_a_tar_with_another_number_of_samples_than_energon_counted_is_named(tmp_path: Path, run: Run) -> None:
    source = copy_of("energon", tmp_path)
    info = source / ".nv-meta" / ".info.json"
    info.write_text(info.read_text().replace('"shard_003.tar": 3', '"shard_003.tar": 5'))
    assert "shard_003.tar has 3 samples here, and 5 in Energon" in run(
        "from_energon.py", source, tmp_path / "s", code=1
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves tars open
def test_tars_are_compared_with_what_webdataset_reads(tmp_path: Path, run: Run) -> None:
    tars = f"{copy_of('energon', tmp_path)}/shard_{{000..003}}.tar"
    output = run("from_webdataset.py", tars, tmp_path / "set")
    assert output.startswith("version 1: 12 samples\nshards stay in file://")
    assert "pass trust_mounts=True (--trust-mounts on the command line)\n12 samples with " in output
    first = tars.replace("{000..003}", "{000..002}")
    output = run("from_webdataset.py", tars, tmp_path / "set", "--read", first, code=1)
    assert "9 samples with" in output
    assert "; 3 are not\n000009 is not in the source\n000010 is not" in output
    output = run("from_webdataset.py", tars, tmp_path / "set", "--read", f"pipe:exit 3; cat {tars}", code=1)
    assert output.count("cannot be read by webdataset") == 4
    assert "0 samples with 0 bytes are equal; 12 are not" in output


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("keys", ["member", "shard"])
def test_a_tar_that_is_missing_is_named_and_the_others_are_compared(tmp_path: Path, run: Run, keys: str) -> None:
    source = copy_of("energon", tmp_path)
    tars = f"{source}/shard_{{000..003}}.tar"
    run("from_webdataset.py", tars, source, "--keys", keys)
    (source / "shard_001.tar").unlink()
    output = run("from_webdataset.py", tars, source, code=1)
    assert "trust_mounts" not in output
    assert f"{source}/shard_001.tar cannot be read by webdataset: No such file or directory\n" in output
    assert "9 samples with" in output
    assert "; 3 are not\n" in output
    assert output.count("is not in the source\n") == 3


def test_urls_that_webdataset_cannot_read_need_a_command(tmp_path: Path, run: Run) -> None:
    output = run("from_webdataset.py", "s3://bucket/{0..1}.tar", tmp_path / "set", code=1)
    assert "webdataset cannot read s3: URLs" in output
    assert "--read 'pipe:aws s3 cp s3://bucket/{0..1}.tar -'" in output
    assert not (tmp_path / "set").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tars_that_number_their_samples_from_zero_are_compared_by_shard(tmp_path: Path, run: Run) -> None:
    for name in ("a", "b"):
        shutil.copy(RECORDED / "energon" / "shard_000.tar", tmp_path / f"{name}.tar")
    tars = f"{tmp_path}/{{a,b}}.tar"
    assert "--keys shard" in run("from_webdataset.py", tars, tmp_path / "set", code=1)
    assert "6 samples with" in run("from_webdataset.py", tars, tmp_path / "set", "--keys", "shard")
    with Dataset(tmp_path / "set", trust_mounts=True) as dataset:
        assert list(dataset.keys)[2:4] == ["a/000002", "b/000000"]
    again = run("from_webdataset.py", tars, tmp_path / "set")  # the dataset knows its keys
    assert "6 samples with" in again
    assert "; 0 are not" in again


def shared_part() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / "tars.py"), run_name="tars")


def test_extensions_are_in_lower_case_and_never_meet() -> None:
    choose = shared_part()["choose_extensions"]
    kinds = {"Image": "jpg", "Mask/left": "jpg", "Tokens": "npy", "raw": None}
    found = {"Image": "jpg", "Mask/left": "mask_left.jpg", "Tokens": "tokens.npy", "raw": "bin"}
    assert choose(kinds, {"raw": "BIN"}) == found
    with pytest.raises(UsageError, match="two files have the extension"):
        choose({"a": "npy", "A": "npy"}, {})
    with pytest.raises(UsageError, match="two files have the extension json"):
        choose({"a": None}, {"a": "json"})


def test_numbers_that_json_does_not_have_are_kept_as_texts() -> None:
    fields = {"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}], "d": 0.1, "e": "é", "f": None, "g": True}
    found = json.loads(shared_part()["json_of"](fields))
    assert found == {**fields, "a": "nan", "b": ["inf", {"c": "-inf"}]}


def test_tars_that_are_converted_are_as_tarfile_writes_them() -> None:
    tars = shared_part()
    data = b"".join(tars["tar_parts"]([("a", {"bin": b"x" * 1000, "json": b"{}"}), ("b", {"bin": b""})]))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(info.name, info.size) for info in tar] == [("a.bin", 1000), ("a.json", 2), ("b.bin", 0)]
    assert len(data) % tarfile.RECORDSIZE == 0
