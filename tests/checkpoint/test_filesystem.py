"""`headrace://` for fsspec: steps and samples as files of other tools, read-only and verified."""

from __future__ import annotations

import io
import json
import tomllib
import urllib.parse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace import pack
from headrace.checkpoint import Checkpointer, filesystem, tensor_file
from headrace.checkpoint.filesystem import HeadraceFileSystem, encoded
from headrace.checkpoint.tensor_file import TensorFile
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from tests.support.written_media import write_wav

load = pytest.importorskip("safetensors.torch", reason="the package safetensors is not here").load
TABLE = pa.table({"key": ["a", "b"], "score": [1.5, 2.5]})
LARGE = torch.arange(4000 * 100, dtype=torch.int32).reshape(4000, 100)
STATE: dict[str, Any] = {
    "model": {"w": torch.randn(3, 4), "half": torch.arange(4).to(torch.bfloat16), "scalar": torch.tensor(7)},
    "odd": {"..": torch.ones(2), "a/b": torch.zeros(0, 3), "c.d%": torch.tensor([True, False])},
    "large": LARGE,
    "epoch": 3,
}


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    fsspec.register_implementation("headrace", HeadraceFileSystem, clobber=True)
    yield
    HeadraceFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fs") / "ck"
    table = io.BytesIO()
    pa.parquet.write_table(TABLE, table)
    with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        checkpointer.put_artifact(10, "scores.parquet", table.getvalue())
        checkpointer.put_artifact(10, "samples/0.txt", b"hello")
        checkpointer.save(10, STATE).result(60)
        checkpointer.save(20, {"model": {"w": torch.ones(2)}}).result(60)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fs")
    for name in ("a", "b"):
        write_wav(folder / f"{name}.wav")
    pack([folder], folder / "set", workers=1).close()
    return folder / "set"


@pytest.fixture
def fs(repository: Path) -> HeadraceFileSystem:
    return HeadraceFileSystem(url=str(repository), skip_instance_cache=True)


def address(path: Path) -> str:
    return f"headrace://{urllib.parse.quote(str(path), safe='')}"


def test_folders_lead_from_the_runs_to_the_tensors(fs: HeadraceFileSystem) -> None:
    assert fs.ls("", detail=False) == ["runs"]
    assert fs.ls("runs", detail=False) == ["runs/exp42"]
    assert fs.ls("runs/exp42", detail=False) == ["runs/exp42/steps"]
    assert fs.ls("runs/exp42/steps", detail=False) == ["runs/exp42/steps/10", "runs/exp42/steps/20"]
    step = "runs/exp42/steps/10"
    assert fs.ls(step, detail=False) == [f"{step}/artifacts", f"{step}/tensors"]
    assert fs.ls(f"{step}/tensors", detail=False) == [
        f"{step}/tensors/{name}" for name in ("model", "odd", "large.safetensors")
    ]
    assert fs.ls(f"{step}/artifacts", detail=False) == [
        f"{step}/artifacts/{name}" for name in ("samples", "scores.parquet")
    ]
    assert fs.ls(f"{step}/artifacts/samples", detail=False) == [f"{step}/artifacts/samples/0.txt"]
    assert sorted(fs.find(f"{step}/artifacts")) == [
        f"{step}/artifacts/{name}" for name in ("samples/0.txt", "scores.parquet")
    ]
    assert fs.isdir(step)
    assert fs.isfile(f"{step}/tensors/large.safetensors")
    assert fs.info(f"{step}/tensors/large.safetensors")["size"] > LARGE.nbytes
    assert fs.ls(f"{step}/tensors/large.safetensors", detail=False) == [f"{step}/tensors/large.safetensors"]


def test_each_tensor_is_a_safetensors_file_with_the_size_that_was_listed(fs: HeadraceFileSystem) -> None:
    found = fs.find("runs/exp42/steps/10/tensors", detail=True)
    assert len(found) == 7
    read = {}
    for path, entry in found.items():
        data = fs.cat_file(path)
        assert len(data) == entry["size"]
        read.update(load(data))
    expected = {"model/w", "model/half", "model/scalar", "odd/..", "odd/a~1b", "odd/c.d%", "large"}
    assert set(read) == expected
    assert torch.equal(read["model/w"], STATE["model"]["w"])
    assert torch.equal(read["model/half"], STATE["model"]["half"])
    assert read["odd/a~1b"].shape == (0, 3)
    assert torch.equal(read["large"], LARGE)


def test_no_path_leads_out_of_a_folder_into_which_a_step_is_downloaded(fs: HeadraceFileSystem, tmp_path: Path) -> None:
    fs.get("runs/exp42/steps/10/tensors/odd", str(tmp_path / "got"), recursive=True)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["got/%2E%2E.safetensors", "got/a~1b.safetensors", "got/c.d%25.safetensors"]


def test_a_tensor_below_an_empty_key_is_listed_and_read(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "ck", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"model": {"": {"w": torch.arange(3), "": torch.ones(2)}, "%": torch.zeros(1)}}).result(60)
    fs = HeadraceFileSystem(url=str(tmp_path / "ck"), skip_instance_cache=True)
    step = "runs/exp/steps/1/tensors/model"
    assert fs.find(step) == [f"{step}/%/%.safetensors", f"{step}/%/w.safetensors", f"{step}/%25.safetensors"]
    assert torch.equal(load(fs.cat_file(f"{step}/%/w.safetensors"))["model//w"], torch.arange(3))


@given(st.text(min_size=1, max_size=20))
def test_an_encoded_name_is_one_part_and_can_be_decoded(name: str) -> None:
    part = encoded(name)
    assert "/" not in part
    assert part not in (".", "..")
    assert urllib.parse.unquote(part) == name


def test_pandas_and_pyarrow_read_artifacts_by_a_url(repository: Path) -> None:
    url = f"{address(repository)}/runs/exp42/steps/10/artifacts/scores.parquet"
    with fsspec.open(url) as file:
        assert pa.parquet.read_table(file).equals(TABLE)
    files, path = fsspec.url_to_fs(url)
    assert pa.parquet.read_table(path, filesystem=files).equals(TABLE)
    with fsspec.open(f"{address(repository)}/runs/exp42/steps/10/artifacts/samples/0.txt", "rt") as file:
        assert file.read() == "hello"
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    assert list(pandas.read_parquet(url)["score"]) == [1.5, 2.5]


def test_the_latest_step_and_a_tag_have_paths(fs: HeadraceFileSystem, repository: Path) -> None:
    loaded = load(fs.cat_file("runs/exp42/steps/latest/tensors/model/w.safetensors"))
    assert torch.equal(loaded["model/w"], torch.ones(2))
    from headrace.dataio.cli import main

    assert main(["ckpt", "tag", str(repository), "best", "--run", "exp42", "--step", "10"]) == 0
    assert fs.exists("runs/exp42/steps/tag:best/tensors/large.safetensors")


def test_a_large_tensor_is_read_by_rows(fs: HeadraceFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "SMALL_BYTES", 1000)
    reads = []
    original = tensor_file.raw
    monkeypatch.setattr(tensor_file, "raw", lambda tensor: reads.append(tuple(tensor.shape)) or original(tensor))
    path = "runs/exp42/steps/10/tensors/large.safetensors"
    with fs.open(path, block_size=1000) as file:
        assert isinstance(file, TensorFile)
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        assert header["large"]["shape"] == [4000, 100]
        file.seek(8 + size + 400 * 1234 + 8)
        values = np.frombuffer(file.read(8), np.int32)
    assert list(values) == [123_402, 123_403]
    assert reads
    assert all(shape[0] < 20 for shape in reads)
    with fs.open(path) as file:
        assert torch.equal(load(file.read())["large"], LARGE)


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "runs/none/steps",
        "runs/..%2F..%2Fother/steps",
        "runs/none",
        "runs/exp42/nothing",
        "runs/exp42/steps/11",
        "runs/exp42/steps/10/tensors/none",
        "runs/exp42/steps/10/tensors/none.safetensors",
        "runs/exp42/steps/10/artifacts/none",
        "samples/latest",
    ],
)
def test_what_does_not_exist_is_not_found(fs: HeadraceFileSystem, path: str) -> None:
    assert not fs.exists(path)
    with pytest.raises(FileNotFoundError):
        fs.info(path)
    with pytest.raises(FileNotFoundError):
        fs.open(path)


def test_a_version_of_too_many_digits_is_not_found(dataset: Path) -> None:
    fs = HeadraceFileSystem(url=str(dataset), skip_instance_cache=True)
    with pytest.raises((FileNotFoundError, HeadraceError)):
        fs.ls("samples/" + "9" * 5000)


def test_nothing_can_be_written(fs: HeadraceFileSystem, repository: Path) -> None:
    before = sorted(path for path in repository.rglob("*") if path.is_file())
    with pytest.raises(PermissionError, match="read-only"):
        fs.open("runs/exp42/steps/10/artifacts/new", "wb")
    for change in (fs.rm_file, fs.rm, fs.mkdir, fs.makedirs, fs.touch):
        with pytest.raises(PermissionError, match="read-only"):
            change("runs/exp42/steps/10/artifacts/scores.parquet")
    with pytest.raises(PermissionError, match="read-only"):
        fs.pipe({"runs/exp42/steps/10/artifacts/scores.parquet": b"x"})
    assert fs.exists("runs/exp42/steps/10/artifacts/scores.parquet")
    assert sorted(path for path in repository.rglob("*") if path.is_file()) == before


def test_damage_is_reported_and_not_returned(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "ck", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(100_000)}).result(60)
    (stored,) = (tmp_path / "ck" / "packs").rglob("*.pack")
    stored.chmod(0o644)
    data = bytearray(stored.read_bytes())
    data[1000] ^= 1
    stored.write_bytes(data)
    fs = HeadraceFileSystem(url=str(tmp_path / "ck"), skip_instance_cache=True)
    with pytest.raises(CorruptionError):
        fs.cat_file("runs/exp/steps/1/tensors/w.safetensors")


def test_the_files_of_samples_are_those_that_were_packed(dataset: Path) -> None:
    fs = HeadraceFileSystem(skip_instance_cache=True)
    root = urllib.parse.quote(str(dataset), safe="")
    assert fs.ls(root, detail=False) == [f"{root}/samples"]
    assert fs.ls(f"{root}/samples", detail=False) == [f"{root}/samples/latest"]
    samples = fs.ls(f"{root}/samples/1", detail=False)
    assert [path.rpartition("/")[2] for path in samples] == ["a", "b"]
    (file,) = fs.ls(samples[0])
    assert file["name"].endswith("/a/a.wav")
    assert fs.cat_file(file["name"]) == (dataset.parent / "a.wav").read_bytes()
    assert file["size"] == (dataset.parent / "a.wav").stat().st_size
    for wrong in ("a/b.wav", "a/a.mp4", "c", "a/a.wav/x"):
        assert not fs.exists(f"{root}/samples/latest/{wrong}")


def test_a_listing_is_limited(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "MOST_NAMES", 1)
    fs = HeadraceFileSystem(url=str(dataset), skip_instance_cache=True)
    with pytest.raises(CapacityError, match="too many for a listing"):
        fs.ls("samples/latest")
    assert fs.ls("samples/latest/a", detail=False) == ["samples/latest/a/a.wav"]
    assert fs.cat_file("samples/latest/a/a.wav")


def test_listings_of_few_steps_are_kept(fs: HeadraceFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "KEPT_STEPS", 1)
    for step in (10, 20, 10):
        fs.ls(f"runs/exp42/steps/{step}/tensors")
    assert len(fs._listed) == 1


def test_the_project_declares_the_scheme() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["fsspec.specs"]["headrace"].partition(":")
    assert getattr(import_module(module), name) is HeadraceFileSystem
