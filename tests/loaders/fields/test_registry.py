"""Fields from configuration files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.dataio.core.errors import UsageError
from headrace.loaders.fields import registry
from headrace.loaders.fields.arrays import Npy, Safetensors
from headrace.loaders.fields.audio import Audio
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.fields.pictures import Mask
from headrace.loaders.fields.registry import field_from, field_names, register_field
from headrace.loaders.fields.text import Bytes, Json, Text
from headrace.loaders.fields.video import Video
from headrace.loaders.interfaces import Collate


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(registry, "_registered", {})


@dataclass(frozen=True)
class Points(Field):
    files: tuple[str, ...] = ("bin",)
    collate: Collate = "concat"

    def decode(self, data: FieldInput) -> Any:
        return data.files["bin"]


@pytest.mark.parametrize(
    ("description", "field"),
    [
        ({"field": "npy"}, Npy()),
        ({"field": "npy", "file": "latent.npy", "dtype": "float16"}, Npy("latent.npy", dtype="float16")),
        ({"field": "safetensors", "file": "t5", "name": "emb"}, Safetensors("t5", "emb")),
        ({"field": "text", "required": False}, Text(required=False)),
        ({"field": "json", "path": "camera.pose", "dtype": "float32"}, Json("camera.pose", dtype="float32")),
        ({"field": "bytes", "file": "bin", "collate": "concat"}, Bytes("bin", collate="concat")),
        ({"field": "mask", "size": [64, 48]}, Mask(size=(64, 48))),
    ],
)
def test_a_description_in_json_gives_its_field(description: dict[str, object], field: Field) -> None:
    found = field_from(json.loads(json.dumps(description)))
    assert type(found) is type(field)
    assert found == field


def test_every_built_in_field_is_there() -> None:
    assert field_names() == ["audio", "bytes", "image", "json", "mask", "npy", "rows", "safetensors", "text", "video"]
    for name in field_names():
        assert issubclass(registry._built_in(name), Field | Audio | Video)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("description", "match"),
    [
        ({"field": "npz"}, r"no field 'npz' \(did you mean npy\?\)"),
        ({"field": "npy", "fle": "latent.npy"}, r"no argument 'fle' \(did you mean file\?\)"),
        ({"field": "npy", "files": ["npy"]}, r"no argument 'files'"),
        ({"field": "text", "collate": "list"}, r"no argument 'collate'"),
        ({"field": "safetensors", "file": "t5"}, "needs the argument 'name'"),
        ({"field": "npy", "dtype": "float"}, "did you mean float32"),
        ({"field": "npy", "collate": "sum"}, "collate cannot be 'sum'"),
        ({"file": "latent.npy"}, "does not name its field"),
        ({"field": 3}, "does not name its field"),
        ({}, "does not name its field"),
        ({3: 4, "field": "npy"}, "does not describe a field"),
        ("npy", "does not describe a field"),
        (None, "does not describe a field"),
    ],
)
def test_a_wrong_description_is_refused_with_what_may_be_meant(description: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        field_from(description)


def test_a_custom_field_has_a_name_of_its_own_and_may_replace_another() -> None:
    register_field("points", Points)
    assert field_from({"field": "points", "files": ("pts",)}) == Points(files=("pts",))
    with pytest.raises(UsageError, match="did you mean points"):
        field_from({"field": "point"})
    register_field("npy", lambda **arguments: Points(**arguments))
    assert field_from({"field": "npy", "collate": "list"}) == Points(collate="list")


@pytest.mark.parametrize(("name", "cls"), [("", Points), (3, Points), ("a", dict), ("a", Points()), ("a", "Points")])
def test_what_is_no_field_cannot_be_registered(name: Any, cls: Any) -> None:
    with pytest.raises(UsageError):
        register_field(name, cls)


def test_no_field_of_files_imports_torch_and_the_registry_imports_no_field() -> None:
    code = (
        "import sys\n"
        "from headrace.loaders.fields import registry\n"
        "there = {m for m in sys.modules if m.startswith('headrace.loaders.fields.')}\n"
        "assert there == {'headrace.loaders.fields.' + n for n in ('base', 'registry')}, there\n"
        "assert 'av' not in sys.modules\n"
        "fields = [registry._built_in(name) for name in ('npy', 'safetensors', 'json', 'text', 'bytes')]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
