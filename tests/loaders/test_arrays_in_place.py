"""Arrays that are read directly into the batch: the same values as decoded ones, whatever the files hold."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataio import index
from headrace.dataio.core.errors import UsageError
from headrace.loaders.field_loader import Loader
from headrace.loaders.fields import arrays
from headrace.loaders.fields.arrays import Npy
from headrace.loaders.fields.base import Field
from headrace.loaders.fields.text import Text

SAMPLES = 24
Make = Callable[[Sequence[Mapping[str, Any]]], Path]
FIELDS = {"latent": Npy("latent.npy"), "emb": Npy("emb.npy")}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def latent(number: int, shape: tuple[int, ...] = (4, 6), dtype: Any = np.float16) -> np.ndarray:
    return (np.arange(np.prod(shape)) + 7 * number).astype(dtype).reshape(shape)


def sample(number: int, **files: Any) -> dict[str, Any]:
    """The files of a sample; None leaves a file out."""
    usual = {"latent.npy": latent(number), "emb.npy": latent(number, (3,), np.float32), "title.txt": f"title {number}"}
    return usual | files


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(samples: Sequence[Mapping[str, Any]]) -> Path:
        (tmp_path / "shards").mkdir()
        with tarfile.open(tmp_path / "shards" / "0.tar", "w") as tar:
            for number, files in enumerate(samples):
                for ext, value in files.items():
                    if value is None:
                        continue
                    data = npy(value) if isinstance(value, np.ndarray) else str(value).encode()
                    member = tarfile.TarInfo(f"{number:03}.{ext}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        index([str(tmp_path / "shards")], str(tmp_path / "ds")).close()
        return tmp_path

    return made


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded."""
    names, read = list[str](), arrays.read_npy

    def counted(data: memoryview, what: str = "the array") -> Any:
        names.append(what)
        return read(data, what)

    monkeypatch.setattr(arrays, "read_npy", counted)
    return names


def epoch(folder: Path, fields: Mapping[str, Field], batch_size: int = 8, **options: Any) -> dict[int, dict[str, Any]]:
    """The values of one epoch by the samples' ids."""
    options = {"sidecar": None, "num_threads": 2, "drop_last": False, "trust_mounts": True, "seed": 3} | options
    found: dict[int, dict[str, Any]] = {}
    with Loader(str(folder / "ds"), batch_size, fields=fields, **options) as loader:
        for batch in loader:
            for place, number in enumerate(batch["id"].tolist()):
                found[number] = {name: batch[name][place] for name in fields}
    return found


def test_only_the_first_arrays_of_a_group_are_decoded(make: Make, decoded: list[str]) -> None:
    folder = make([sample(number) for number in range(SAMPLES)])
    found = epoch(folder, FIELDS | {"title": Text(file="title.txt")})
    assert sorted(found) == list(range(SAMPLES))
    for number, values in found.items():
        assert torch.equal(values["latent"], torch.from_numpy(latent(number)))
        assert torch.equal(values["emb"], torch.from_numpy(latent(number, (3,), np.float32)))
        assert values["title"] == f"title {number}"
    assert {decoded.count(name) for name in set(decoded)} <= set(range(3, 7)), (
        "one of each batch, and of three prefetched"
    )


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"latent": Npy("latent.npy"), "same": Npy("latent.npy")}, {}),
        ({"latent": Npy("latent.npy", dtype="float32")}, {}),
        ({"latent": Npy("latent.npy", collate="list")}, {}),
        ({"latent": Npy("latent.npy")}, {"transform": lambda values, _: values}),
    ],
)
def test_values_that_are_needed_are_decoded(
    fields: Mapping[str, Field], options: dict[str, Any], make: Make, decoded: list[str]
) -> None:
    found = epoch(make([sample(number) for number in range(SAMPLES)]), fields, **options)
    for number, values in found.items():
        assert all(np.array_equal(value, latent(number)) for value in values.values())
    assert len(decoded) >= SAMPLES * len(fields)


def test_batches_may_have_different_shapes(make: Make, decoded: list[str]) -> None:
    shapes = [(4, 6), (6, 4), (2, 3)]  # two of them have files of the same length
    folder = make([sample(number, **{"latent.npy": latent(number, shapes[number % 3])}) for number in range(SAMPLES)])
    for number, values in epoch(folder, FIELDS, batch_size=1).items():
        assert torch.equal(values["latent"], torch.from_numpy(latent(number, shapes[number % 3])))
    with pytest.raises(UsageError, match="has latent of"):
        epoch(folder, FIELDS)


def test_other_dtypes_are_refused_unless_the_field_has_one(make: Make) -> None:
    dtypes = [np.float16, np.int16]
    folder = make([sample(number, **{"latent.npy": latent(number, dtype=dtypes[number % 2])}) for number in range(8)])
    with pytest.raises(UsageError, match="give the field a dtype"):
        epoch(folder, FIELDS)
    for number, values in epoch(folder, {"latent": Npy("latent.npy", dtype="float16")}).items():
        assert np.array_equal(values["latent"].numpy(), latent(number))


@pytest.mark.parametrize("order", ["fortran", "big-endian", "bool", "empty"])
def test_arrays_that_are_stored_otherwise_are_decoded(order: str, make: Make, decoded: list[str]) -> None:
    def stored(number: int) -> np.ndarray:
        array = latent(number)
        return {
            "fortran": np.asfortranarray(array),
            "big-endian": array.astype(">f2"),
            "bool": array > 100,
            "empty": array[:0],
        }[order]

    folder = make([sample(number, **{"latent.npy": stored(number)}) for number in range(SAMPLES)])
    for number, values in epoch(folder, FIELDS).items():
        assert np.array_equal(values["latent"].numpy(), stored(number))
    assert decoded.count(".latent.npy") >= SAMPLES


def test_samples_may_lack_an_optional_array(make: Make, decoded: list[str]) -> None:
    lacking = {2, 3, 11, 12, 13}
    folder = make([sample(n, **({"emb.npy": None} if n in lacking else {})) for n in range(SAMPLES)])
    fields = {"latent": Npy("latent.npy"), "emb": Npy("emb.npy", required=False)}
    for number, values in epoch(folder, fields).items():
        expected = np.zeros(3) if number in lacking else latent(number, (3,), np.float32)
        assert np.array_equal(values["emb"].numpy(), expected)
        assert np.array_equal(values["latent"].numpy(), latent(number))


@pytest.mark.parametrize("at", [20, 140], ids=["header", "data"])
@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_damaged_arrays_are_skipped(at: int, num_threads: int, make: Make) -> None:
    damaged = {1, 5, 6, 17}
    folder = make([sample(number) for number in range(SAMPLES)])
    path = folder / "shards" / "0.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        for number in damaged:
            data[tar.getmember(f"{number:03}.latent.npy").offset_data + at] ^= 1
    path.write_bytes(data)
    found = epoch(folder, FIELDS, num_threads=num_threads, on_error="skip", max_bad_samples=10)
    assert found.keys() == set(range(SAMPLES)) - damaged
    assert all(np.array_equal(values["latent"].numpy(), latent(number)) for number, values in found.items())
    replaced = epoch(folder, FIELDS, num_threads=num_threads, max_bad_samples=10)
    assert all(np.array_equal(values["latent"].numpy(), latent(number)) for number, values in replaced.items())
