"""A field that names a path, column or tensor that no sample has is an error of use, and one sample without it is bad."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataio import index
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.loaders import Bytes, Clip, Json, Loader, Npy, Rows, Safetensors, Text, Video
from headrace.loaders.quarantine.quarantine import TRIES, Quarantine
from headrace.loaders.quarantine.records import SkippedSample
from tests.support import numbered_video
from tests.support.batches import take
from tests.support.shared_folder import shared_folder

SAMPLES, LACKING = 40, 7
"""The number of samples, and the one without the values."""


def _safetensors(name: str) -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(2)


def _files(number: int) -> dict[str, bytes]:
    values: dict[str, Any] = {"camera": {"pose": [1.0, 2.0], "\x1b[31mhostile": "x" * 100}, "captions": ["a dog"]}
    has_them = number != LACKING
    return {
        "json": json.dumps(values if has_them else {"camera": {}}).encode(),
        "safetensors": _safetensors("emb" if has_them else "other"),
        "class.npy": _npy(np.array([number])),
    }


def _npy(array: Any) -> bytes:
    np.save(target := io.BytesIO(), array)
    return target.getvalue()


def _rows(column: str) -> bytes:
    pq.write_table(pa.table({"timestamp": [0.0, 1.0], column: [1.0, 2.0]}), target := io.BytesIO())
    return target.getvalue()


def _write(folder: Path, name: str, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(folder / f"{name}.tar", "w") as tar:
        for key, files in samples.items():
            for ext, data in files.items():
                member = tarfile.TarInfo(f"{key}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    index(str(folder / f"{name}.tar"), str(folder / name), workers=1).close()


def _make(folder: Path) -> None:
    samples = {f"{number:02}": _files(number) for number in range(SAMPLES)}
    _write(folder, "many", samples)
    lacking = samples.pop(f"{LACKING:02}")
    _write(folder, "all", samples)
    _write(folder, "none", {"07": lacking})
    clip = numbered_video.make(10)
    columns = {0: "state", 1: "state", 2: "other"}
    _write(
        folder, "robots", {str(number): {"mp4": clip, "rows.parquet": _rows(columns[number])} for number in range(3)}
    )


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Loader]]:
    folder = shared_folder(tmp_path_factory, "missing-values", _make)
    loaders = []

    def loader(fields: Any, batch_size: int = 4, name: str = "many", **options: Any) -> Loader:
        settings = {"num_threads": 2, "sidecar": None, "trust_mounts": True} | options
        loaders.append(Loader(folder / name, batch_size, fields=fields, **settings))
        return loaders[-1]

    yield loader
    for one in loaders:
        one.close()


MISNAMED: dict[str, tuple[Any, str, str]] = {
    "a path of JSON": (Json("camera.pse"), ".json has no 'camera.pse'", "'camera' has"),
    "a tensor of JSON": (Json("camera.pse", dtype="float32"), ".json has no 'camera.pse'", "'pose'"),
    "a text of JSON": (Text(path="caption"), ".json has no 'caption'", "the document has 'camera', 'captions'"),
    "weights": (
        Text(path="captions", choose="random", weights="scores"),
        ".json has no 'scores'",
        "the document has 'camera', 'captions'",
    ),
    "a tensor": (Safetensors("safetensors", "nme"), ".safetensors has no tensor 'nme'", "it has 'emb'; required=False"),
    "a text for numbers": (Json("captions", dtype="float32"), "'captions' in .json is not a tensor", "of type str"),
    "an object for a text": (Text(path="camera", required=False), "'camera' in .json is not a text", "of type dict"),
    "a text for weights": (
        Text(path="captions", choose="random", weights="captions"),
        "'captions' in .json is not a list of numbers",
        "not negative",
    ),
}
OPTION_HELPS = ("a path of JSON", "a tensor of JSON", "a text of JSON", "a tensor")
"""The cases in which `required=False` keeps the samples."""


@pytest.mark.parametrize("on_error", ["replace", "skip"])
@pytest.mark.parametrize("case", MISNAMED)
def test_a_name_that_no_sample_has_is_an_error_of_use(make: Callable[..., Loader], case: str, on_error: Any) -> None:
    field, missing, names = MISNAMED[case]
    loader = make({"label": Npy("class.npy"), "it": field}, name="all", on_error=on_error, max_bad_samples=3)
    with pytest.raises(UsageError) as caught:
        take(loader, 4)
    for part in (missing, names, "field 'it'", "none has a value that the field can use"):
        assert part in str(caught.value)
    assert ("required=False keeps" in str(caught.value)) == (case in OPTION_HELPS)
    assert "headrace verify" not in str(caught.value)
    assert not isinstance(caught.value, CorruptionError)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_the_names_that_exist_are_bounded_and_escaped(make: Callable[..., Loader]) -> None:
    with pytest.raises(UsageError) as caught:
        take(make({"it": Json("camera.pse")}, name="all"), 1)
    assert "'\\x1b[31mhostile', 'pose'" in str(caught.value)


def test_a_column_that_no_table_has_is_an_error_of_use(make: Callable[..., Loader]) -> None:
    video = Video(Clip(2), (16, 16))
    for wrong, missing in ((Rows("rows.parquet", "stat", like="v"), "stat"), (_other_time(), "time")):
        with pytest.raises(UsageError) as caught:
            take(make({"v": video, "r": wrong}, 2, "robots"), 1)
        assert f".rows.parquet has no column '{missing}'" in str(caught.value)
        assert "'timestamp'" in str(caught.value)
    rows = Rows("rows.parquet", "state", like="v", required=False)
    chunks = Rows("rows.parquet", "state", like="v", required=False, offsets=[0.0, 0.5])
    (batch,) = take(make({"v": video, "r": rows, "c": chunks}, 3, "robots"), 1)
    present = [key != "2" for key in batch["key"]]
    assert batch["r.present"].tolist() == batch["c.present"].tolist() == present
    assert batch["c"].any(dim=1).tolist() == present
    assert batch["c.pad"].all(dim=1).tolist() == [not one for one in present]


def _other_time() -> Rows:
    """An optional field whose column of times does not exist: that is no missing value, but a wrong option."""
    return Rows("rows.parquet", "timestamp", like="v", time="time", required=False)


@pytest.mark.parametrize("field", [Json("camera.pose"), Safetensors("safetensors", "emb"), Text(path="captions")])
def test_a_single_sample_without_the_value_is_a_bad_sample(make: Callable[..., Loader], field: Any) -> None:
    loader = make({"it": field}, max_bad_samples=1)
    keys = [key for batch in loader for key in batch["key"]]
    assert len(keys) == SAMPLES
    assert f"{LACKING:02}" not in keys
    assert [(one.key, one.code) for one in loader.quarantine] == [(f"{LACKING:02}", "missing_value")]
    strict = make({"it": field}, max_bad_samples=0, batch_size=SAMPLES)
    with pytest.raises(CorruptionError, match="more than 0 samples are damaged"):
        take(strict, 1)


@pytest.mark.parametrize(
    ("field", "nothing"),
    [
        (Json("camera.pose", dtype="float32", required=False), None),
        (Json("camera.pose", dtype="float32", collate="pad", required=False), None),
        (Json("camera.pose", dtype="float32", collate=tuple, required=False), None),
        (Safetensors("safetensors", "emb", required=False), None),
        (Npy("absent.npy", required=False), None),
        (Json("camera.pose", required=False), [None]),
        (Text(path="captions", required=False), [None]),
        (Bytes("absent.bin", required=False), [None]),
    ],
    ids=["stack", "pad", "a function", "a tensor", "a file", "a list", "a text", "a listed file"],
)
def test_a_batch_in_which_no_sample_has_an_optional_value_has_none_or_a_list(
    make: Callable[..., Loader], field: Any, nothing: Any
) -> None:
    (batch,) = make({"it": field, "label": Npy("class.npy")}, 1, "none")
    assert batch["it"] == nothing
    assert batch["it.present"].tolist() == [False]
    lengths = {name: batch[name].tolist() for name in ("it.lengths", "it.offsets") if name in batch}
    assert lengths == ({"it.lengths": [0]} if getattr(field, "collate", "") == "pad" else {})


def _skipped(number: int, code: str = "missing_value") -> SkippedSample:
    return SkippedSample(
        id=number, key=str(number), shard="s", offset=0, code=code, reason=f"has no {number}", permanent=False
    )


def test_too_many_bad_samples_are_an_error_of_use_only_if_nothing_else_was_found() -> None:
    with pytest.raises(UsageError, match=r"tried 2 samples, and none has .* '1': has no 1"):
        Quarantine(1).deliver([_skipped(1), _skipped(2)], has_samples=False)
    with pytest.raises(UsageError, match="tried 1 sample, and"):
        Quarantine(0).deliver([_skipped(1)], has_samples=False)
    with pytest.raises(CorruptionError):
        Quarantine(1).deliver([_skipped(1), _skipped(2, "corruption")], has_samples=False)
    with pytest.raises(CorruptionError):
        Quarantine(1).deliver([_skipped(1), _skipped(2)], has_samples=True)
    many = Quarantine(100)
    many.deliver(map(_skipped, range(TRIES)), has_samples=False)
    with pytest.raises(UsageError, match=f"tried {TRIES + 1} samples"):
        many.deliver([_skipped(TRIES)], has_samples=False)
    many.load(())
    many.deliver(map(_skipped, range(100)), has_samples=False)
    with pytest.raises(UsageError, match="tried 101 samples"):
        many.deliver([_skipped(100)], has_samples=False)
    seen = Quarantine(1)
    seen.deliver([], has_samples=True)
    with pytest.raises(CorruptionError):
        seen.deliver([_skipped(1), _skipped(2)], has_samples=False)
