"""Imports: files of other tools become steps that restore bit by bit; hostile and damaged files are refused by name."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer, export, import_checkpoint, read
from headrace.checkpoint.exchange import pickle_tuples
from headrace.checkpoint.exchange.importing import ImportReport
from headrace.checkpoint.repository import check
from headrace.dataio.core.errors import (
    ConflictError,
    CorruptionError,
    HeadraceError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.store.open import open_store

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def made(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(60, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 60, bias=False))
    model[2].weight = model[0].weight
    return model.bfloat16()


def same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    states = one.state_dict(), two.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def restored(repository: Path, run: str, state: dict[str, Any]) -> None:
    with Checkpointer(repository, run=run, sidecar=None) as checkpointer:
        assert checkpointer.restore(state) == 0


def imported(source: Path, repository: Path, **options: Any) -> ImportReport:
    return import_checkpoint(source, repository, run="in", **options)


@pytest.mark.parametrize("kind", ["file", "folder", "shards", "index"])
def test_safetensors_are_restored_into_a_tied_model(tmp_path: Path, kind: str) -> None:
    model, source = made(), tmp_path / "m"
    with Checkpointer(tmp_path / "a", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"model": model}).result(60)
    export(tmp_path / "a", source, run="exp", max_shard_size=100 if kind in ("shards", "index") else None)
    given = {"file": source / "model.safetensors", "index": source / "model.safetensors.index.json"}.get(kind, source)
    report = imported(given, tmp_path / "r")
    assert (report.tensors, report.tied) == (3, {"2.weight": "0.weight"})
    other = made(1)
    restored(tmp_path / "r", "in", {"model": other})
    assert same(model, other)
    with open_store(tmp_path / "r") as store:
        assert check.check(store, None).clean


def test_a_tied_weight_that_a_file_holds_once_is_restored(tmp_path: Path) -> None:
    model, other = made(), made(1)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "2.weight"}
    safetensors.save_file(state, tmp_path / "m.safetensors")  # no metadata says which name is missing
    imported(tmp_path / "m.safetensors", tmp_path / "r")
    restored(tmp_path / "r", "in", {"model": other})
    assert same(model, other)


@pytest.mark.parametrize("name", ["m.pt", "folder"])
def test_torch_files_are_restored_with_optimizer_and_values(tmp_path: Path, name: str) -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(9)).float().sum().backward()
    optimizer.step()
    content: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "args": {"lr": 0.1}}
    source = tmp_path / name
    if name == "folder":
        source.mkdir()
        content = model.state_dict()
        torch.save(content, source / "pytorch_model.bin")
        (source / "config.json").write_text("{}")
    else:
        torch.save(content, source)
    imported(source, tmp_path / "r")
    other = made(1)
    state: dict[str, Any] = {"model": other}
    if name != "folder":
        state |= {"optimizer": torch.optim.AdamW(other.parameters()), "epoch": 0, "args": {"lr": 0.0}}
    restored(tmp_path / "r", "in", state)
    assert same(model, other)
    if name != "folder":
        slots = state["optimizer"].state_dict()["state"]
        assert all(torch.equal(slots[i]["exp_avg"], optimizer.state_dict()["state"][i]["exp_avg"]) for i in slots)
        assert (state["epoch"], state["args"]) == (3, {"lr": 0.1})


def test_shards_of_pytorch_model_bin_are_joined(tmp_path: Path) -> None:
    places = {}
    for number in (1, 2):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({f"w{number}": torch.full((3,), float(number))}, tmp_path / name)
        places[f"w{number}"] = name
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    imported(tmp_path, tmp_path / "r")
    with read(tmp_path / "r", run="in") as step:
        assert torch.equal(step["model/w2"].read(), torch.full((3,), 2.0))


def test_sparse_tensors_of_a_torch_file_are_restored(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "s": torch.eye(50).to_sparse(),
        "d": torch.arange(3),
        "e": torch.empty(0, 2),
        "n": {"x": {1, 2}},
    }
    torch.save(content, tmp_path / "m.pt")
    imported(tmp_path / "m.pt", tmp_path / "r")
    state: dict[str, Any] = {
        "s": torch.zeros(50, 50).to_sparse(),
        "d": torch.zeros(3).long(),
        "e": torch.empty(0, 2),
        "n": {"x": set()},
    }
    restored(tmp_path / "r", "in", state)
    assert torch.equal(state["s"].to_dense(), torch.eye(50))
    assert torch.equal(state["d"], torch.arange(3))
    assert state["n"] == {"x": {1, 2}}


def test_names_entry_and_base(tmp_path: Path) -> None:
    safetensors.save_file({"module.a": torch.arange(100_000), "module.b": torch.ones(2)}, tmp_path / "m.safetensors")
    imported(tmp_path / "m.safetensors", tmp_path / "r", entry="teacher", rename={"module.": ""})
    with read(tmp_path / "r", run="in", step=0) as step:
        assert list(step) == ["teacher/a", "teacher/b"]
    report = import_checkpoint(tmp_path / "m.safetensors", tmp_path / "r", run="two", step=5, base="in")
    assert report.bytes_written == 0
    assert report.bytes_deduplicated > 800_000
    with pytest.raises(NotFoundError, match=r"there is no such run at .*; there are: two, in"):
        import_checkpoint(tmp_path / "m.safetensors", tmp_path / "r", run="three", base="twoo")
    with pytest.raises(NotFoundError, match="run two has no step 4"):
        import_checkpoint(tmp_path / "m.safetensors", tmp_path / "r", run="three", base=("two", 4))
    with pytest.raises(UsageError, match=r"module.a and module.b would both be called 'x'"):
        imported(tmp_path / "m.safetensors", tmp_path / "r", step=1, rename=lambda name: "x")
    with pytest.raises(UsageError, match="rules without a match: 'q'"):
        imported(tmp_path / "m.safetensors", tmp_path / "r", step=1, rename={"q": ""})
    with pytest.raises(UsageError, match="entry is empty"):
        imported(tmp_path / "m.safetensors", tmp_path / "r", step=1, entry="")


def test_a_pattern_may_have_the_entry_in_front_of_a_name_of_the_file(tmp_path: Path) -> None:
    weights = {"model.body": torch.ones(2), "model.head": torch.zeros(2), "lm_head": torch.ones(3)}
    safetensors.save_file(weights, tmp_path / "m.safetensors")
    for step, (pattern, left) in enumerate(
        {
            "model/model.*": ["lm_head"],
            "model.*": ["lm_head"],
            "model*": ["lm_head"],  # without a slash, it is a name of the file
            "*/lm_*": ["model.body", "model.head"],
        }.items()
    ):
        imported(tmp_path / "m.safetensors", tmp_path / "r", step=step, exclude=pattern)
        with read(tmp_path / "r", run="in", step=step) as saved:
            assert sorted(saved) == [f"model/{name}" for name in left]
    with pytest.raises(UsageError, match="all entries are excluded"):
        imported(tmp_path / "m.safetensors", tmp_path / "r", step=9, exclude="model/*")
    with pytest.raises(UsageError, match=r"'other/\*' \(the source has 'lm_head', 'model.body', 'model.head'\)"):
        imported(tmp_path / "m.safetensors", tmp_path / "r", step=9, exclude="other/*")
    imported(tmp_path / "m.safetensors", tmp_path / "r", step=9, exclude="net/lm_*", entry="net")


def test_the_names_in_an_error_about_patterns_are_bounded(tmp_path: Path) -> None:
    torch.save({f"{n:03}{'x' * 1000}": torch.ones(1) for n in range(200)}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="and 192 more") as error:
        imported(tmp_path / "m.pt", tmp_path / "r", exclude="y")
    assert len(str(error.value)) < 1200


def test_a_dry_run_lists_what_would_be_saved_and_stores_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    safetensors.save_file(model.state_dict(), tmp_path / "m.safetensors")
    options: dict[str, Any] = {"rename": {"weight": "kernel"}, "exclude": "bias", "entry": "net"}
    plan = imported(tmp_path / "m.safetensors", tmp_path / "r", dry_run=True, **options)
    assert not (tmp_path / "r").exists()
    (kernel,) = plan.contents
    assert (kernel.path, kernel.source, kernel.dtype, kernel.shape) == ("net/kernel", "weight", "bfloat16", [3, 4])
    assert (plan.left_out, plan.values, plan.entries) == (["bias"], [], ["net"])
    assert (plan.bytes_state, plan.bytes_written, plan.bytes_deduplicated) == (24, 0, 0)
    report = imported(tmp_path / "m.safetensors", tmp_path / "r", **options)
    assert report.bytes_written > 0
    assert (report.contents, report.left_out, report.bytes_state) == (plan.contents, plan.left_out, 24)


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_a_dry_run_lists_the_tensors_and_values_of_a_nested_state_by_their_paths_in_the_step(
    tmp_path: Path, format: str
) -> None:
    state = {"model": torch.nn.Linear(4, 3), "history": [torch.ones(2), 5], "epoch": 3, "note": "x"}
    with Checkpointer(tmp_path / "a", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)
    export(tmp_path / "a", tmp_path / "source", run="exp", format=format)
    options: dict[str, Any] = {"exclude": ["note", "model/bias"], "rename": {"model/": "net/"}}
    plan = imported(tmp_path / "source", tmp_path / "r", dry_run=True, **options)
    assert {each.path: (each.source, each.dtype, each.shape) for each in plan.contents} == {
        "net/weight": ("model/weight", "float32", [3, 4]),
        "history/0": ("history/0", "float32", [2]),
    }
    assert plan.values == ["history/1", "epoch"]
    assert sorted(plan.left_out) == ["model/bias", "note"]
    imported(tmp_path / "source", tmp_path / "r", **options)
    with read(tmp_path / "r", run="in") as saved:
        assert set(saved) == {each.path for each in plan.contents} | set(plan.values)
        for each in plan.contents:
            assert (saved[each.path].dtype, [*saved[each.path].shape]) == (getattr(torch, each.dtype), each.shape)


def test_a_dry_run_is_refused_where_the_import_would_be(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    imported(tmp_path / "m.pt", tmp_path / "r", step=5)
    with pytest.raises(ConflictError, match="has step 5"):
        imported(tmp_path / "m.pt", tmp_path / "r", step=5, dry_run=True)
    with pytest.raises(NotFoundError, match="nothing"):
        imported(tmp_path / "m.pt", tmp_path / "r", step=6, base="nothing", dry_run=True)
    whole = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(whole[:-50])
    with pytest.raises(CorruptionError, match="cut off"):
        imported(tmp_path / "m.pt", tmp_path / "r", step=6, dry_run=True)


def test_an_import_never_hides_a_step(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    with Checkpointer(tmp_path / "r", run="in", sidecar=None) as checkpointer:
        checkpointer.save(10, {"w": torch.zeros(3)}).result(60)
    for step in (0, 10):
        with pytest.raises(ConflictError, match=f"run in has step 10, so step {step} is not imported"):
            imported(tmp_path / "m.pt", tmp_path / "r", step=step)
    imported(tmp_path / "m.pt", tmp_path / "r", step=11)
    with Checkpointer(tmp_path / "r", run="in", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [10, 11]


def test_views_that_share_memory_are_stored_once(tmp_path: Path) -> None:
    base = torch.arange(100_000)
    torch.save({"a": base[:80_000], "b": base[20_000:], "t": base[:90_000].view(300, 300).t()}, tmp_path / "m.pt")
    report = imported(tmp_path / "m.pt", tmp_path / "r")
    assert report.bytes_state == base.nbytes
    state = {"a": torch.zeros(80_000).long(), "b": torch.zeros(80_000).long(), "t": torch.zeros(300, 300).long()}
    restored(tmp_path / "r", "in", {"model": state})
    assert torch.equal(state["b"], base[20_000:])
    assert torch.equal(state["t"], base[:90_000].view(300, 300).t())


# what is refused


def packed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(first: int, last: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


HOSTILE = {
    "empty": b"",
    "header of a terabyte": packed({}, length=1 << 40),
    "header beyond the end": packed({"a": entry(0, 4, [1])}, b"1234", length=1 << 20),
    "header of two to the 64": packed({}, length=(1 << 64) - 1),
    "not json": packed(b"{'a': 1}"),
    "not utf-8": packed(b'{"\xff": {}}'),
    "depth bomb": packed(b"[" * 100_000),
    "a list": packed([1]),
    "name twice": packed(b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 4, [1])).encode(),) * 2), b"1234"),
    "overlap": packed({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "gap": packed({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)),
    "first gap": packed({"a": entry(4, 8, [1])}, bytes(8)),
    "same bytes": packed({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, bytes(8)),
    "beyond the end": packed({"a": entry(0, 1 << 40, [1 << 38])}, bytes(8)),
    "trailing bytes": packed({"a": entry(0, 4, [1])}, bytes(12)),
    "cut off": packed({"a": entry(0, 400, [100])}, bytes(399)),
    "size is not that of the shape": packed({"a": entry(0, 8, [3])}, bytes(8)),
    "negative size": packed({"a": entry(8, 4, [-1])}, bytes(8)),
    "negative shape": packed({"a": entry(0, 4, [-1, -1])}, bytes(4)),
    "shape that overflows": packed({"a": entry(0, 0, [1 << 61, 1 << 61, 0])}, b""),
    "shape of booleans": packed({"a": entry(0, 4, [True])}, bytes(4)),
    "shape of floats": packed({"a": entry(0, 4, [1.0])}, bytes(4)),
    "sixty-five dimensions": packed({"a": entry(0, 4, [1] * 65)}, bytes(4)),
    "no shape": packed({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "entry is a text": packed({"a": "b"}),
    "unknown type": packed({"a": entry(0, 4, [1], "F7")}, bytes(4)),
    "type is a list": packed({"a": entry(0, 4, [1]) | {"dtype": []}}, bytes(4)),
    "metadata is a list": packed({"__metadata__": []}),
    "metadata of numbers": packed({"__metadata__": {"a": 1}}),
    "lone surrogate": packed(b'{"\\ud800":' + json.dumps(entry(0, 4, [1])).encode() + b"}", bytes(4)),
    "no tensors": packed({}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_are_refused_and_nothing_is_stored(tmp_path: Path, name: str) -> None:
    source = tmp_path / "m.safetensors"
    source.write_bytes(HOSTILE[name])
    with pytest.raises((CorruptionError, UnsupportedError, UsageError), match=r"m.safetensors"):
        imported(source, tmp_path / "r")
    assert not (tmp_path / "r" / "runs").exists()


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/headrace-was-here",)


def test_pickled_code_is_named_and_does_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "m.pt")
    with pytest.raises(
        UnsupportedError, match=r"m.pt needs the code posix.system: .*docs/howto/migrate/checkpoints.md"
    ):
        imported(tmp_path / "m.pt", tmp_path / "r")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UnsupportedError, match=r"torch.nn.modules.linear.Linear"):
        imported(tmp_path / "module.pt", tmp_path / "r")
    assert not Path("/tmp/headrace-was-here").exists()


def test_torch_files_that_are_no_checkpoints_are_named(tmp_path: Path) -> None:
    for content, message in ((torch.ones(2), "holds a Tensor"), ([1], "holds a list"), ({}, "holds a dict")):
        torch.save(content, tmp_path / "m.pt")
        with pytest.raises(UsageError, match=message):
            imported(tmp_path / "m.pt", tmp_path / "r")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="not in the zip format"):
        imported(tmp_path / "old.bin", tmp_path / "r")
    for text, message in (("", "none.pt is empty"), ("no checkpoint", "none.pt is not a file of torch.save")):
        (tmp_path / "none.pt").write_text(text)
        with pytest.raises(HeadraceError, match=message):
            imported(tmp_path / "none.pt", tmp_path / "r")
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "big.pt")
    with pytest.raises(UnsupportedError, match="elements of the tensor 'a' share memory"):
        imported(tmp_path / "big.pt", tmp_path / "r")
    deep: Any = torch.ones(1)
    for _ in range(200):
        deep = [deep]
    torch.save({"a": deep}, tmp_path / "deep.pt")
    with pytest.raises(UsageError, match="nested deeper than 64"):
        imported(tmp_path / "deep.pt", tmp_path / "r", rename=str.upper)


def rewritten(source: Path, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The same archive with other records."""
    with zipfile.ZipFile(source) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    top = next(iter(records)).partition("/")[0]
    with zipfile.ZipFile(source, "w", compression) as archive:
        for name, data in (records | {f"{top}/{name}": data for name, data in change.items()}).items():
            archive.writestr(name, data)


def test_damaged_torch_files_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "m.pt"
    torch.save({"w": torch.arange(100_000)}, source)
    whole = source.read_bytes()
    for cut in (4, 1000, len(whole) // 2, len(whole) - 10):
        source.write_bytes(whole[:cut])
        with pytest.raises(CorruptionError, match=r"m.pt is cut off or damaged"):
            imported(source, tmp_path / "r")
    changes: list[tuple[dict[str, bytes], int]] = [
        ({"byteorder": b"big"}, 0),
        ({"data.pkl": b"garbage"}, 0),
        ({"data.pkl": pickle.dumps({"w": 1})[:5]}, 0),
        ({"data/0": b"short"}, 0),
        ({"data/0": b"short", "data/1": bytes(900_000)}, 0),
        ({}, zipfile.ZIP_DEFLATED),
    ]
    for change, compression in changes:
        source.write_bytes(whole)
        rewritten(source, change, compression)
        with pytest.raises((CorruptionError, UnsupportedError, UsageError), match=r"m.pt"):
            imported(source, tmp_path / "r")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/b", b"c")
    source.write_bytes(buffer.getvalue())
    with pytest.raises(UsageError, match=r"is not a file of torch.save"):
        imported(source, tmp_path / "r")


def test_keys_that_take_forever_to_hash_are_refused(tmp_path: Path) -> None:
    doubled = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    rewritten(tmp_path / "m.pt", {"data.pkl": b"\x80\x02}" + doubled + b"K\x01s."})
    with pytest.raises(CorruptionError, match=r"m.pt has a tuple of more than 1000000 objects"):
        imported(tmp_path / "m.pt", tmp_path / "r")
    torch.save({"w": torch.ones(2), ("a", (1, 2)): tuple(range(3000))}, tmp_path / "m.pt")
    imported(tmp_path / "m.pt", tmp_path / "r")


@given(st.binary(max_size=200))
def test_any_bytes_are_checked_or_refused_with_our_error(data: bytes) -> None:
    for program in (data, b"\x80\x02" + data + b".", pickle.dumps([data, (data, {(1, 2): {3}})], 2)[: len(data)]):
        with contextlib.suppress(CorruptionError):
            pickle_tuples.check_tuples(program, "it")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    safetensors.save_file({"a": torch.ones(2)}, folder / "x.safetensors")
    safetensors.save_file({"b": torch.ones(2)}, folder / "y.safetensors")
    indexed(folder, {"a": "x.safetensors", "b": "y.safetensors"})
    return folder


def indexed(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", "sub/x.safetensors", "a\0b"])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, sharded: Path, name: str) -> None:
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    indexed(sharded, {"a": name})
    with pytest.raises(CorruptionError, match="which is not a file of this folder"):
        imported(sharded, tmp_path / "r")


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, sharded: Path) -> None:
    for places, message in (
        ({"a": "x.safetensors", "c": "y.safetensors"}, "disagree about tensor 'b'"),
        ({"a": "x.safetensors", "b": "z.safetensors"}, "z.safetensors does not exist"),
        ({"a": 3}, "weight_map is malformed"),
        ([], "weight_map is malformed"),
        ({}, "weight_map is malformed"),
    ):
        indexed(sharded, places)
        with pytest.raises((CorruptionError, NotFoundError), match=message):
            imported(sharded, tmp_path / "r")
    safetensors.save_file({"a": torch.ones(2)}, sharded / "y.safetensors")
    indexed(sharded, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CorruptionError, match="tensor 'a' is in another shard too"):
        imported(sharded, tmp_path / "r")
    (sharded / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CorruptionError, match="is not an index"):
        imported(sharded, tmp_path / "r")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_one_of_several_shards_is_refused_and_the_name_of_the_whole_is_their_index(tmp_path: Path, kind: str) -> None:
    places = {f"w{number}": f"m-{number:05d}-of-00002.{kind}" for number in (1, 2)}
    for name, file in places.items():
        save = safetensors.save_file if kind == "safetensors" else torch.save
        save({name: torch.ones(2)}, tmp_path / file)
    with pytest.raises(
        UsageError, match=rf"one of 2 files.*download all of them, and their index m\.{kind}\.index\.json"
    ):
        imported(tmp_path / f"m-00001-of-00002.{kind}", tmp_path / "r")
    index = tmp_path / f"m.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UsageError, match=rf"one of 2 files.*import .*/m\.{kind}\.index\.json"):
        imported(tmp_path / f"m-00002-of-00002.{kind}", tmp_path / "r")
    assert imported(tmp_path / f"m.{kind}", tmp_path / "r").tensors == 2
    assert imported(index, tmp_path / "r", step=1).tensors == 2


def model_named(folder: Path, name: str, value: float, shards: str = "") -> None:
    """Write a model whose tensors have this value: a file, or an index `name` with two shards named by a pattern."""
    folder.mkdir(exist_ok=True)
    names = [shards.format(number) for number in (1, 2)] if shards else [name]
    for number, file in enumerate(names):
        tensors = {f"w{number}": torch.full((2,), value)}
        if file.endswith(".bin"):
            torch.save(tensors, folder / file)
        else:
            safetensors.save_file(tensors, folder / file)
    if shards:
        (folder / name).write_text(json.dumps({"weight_map": {f"w{n}": file for n, file in enumerate(names)}}))


VARIANTS = {  # names of transformers and diffusers: the default, or a variant
    "model.safetensors": "",
    "model.fp16.safetensors": "",
    "model.safetensors.index.fp16.json": "model.fp16-0000{}-of-00002.safetensors",
    "model.fp16.safetensors.index.json": "model.fp16-0000{}-of-00002.safetensors",
    "pytorch_model.bin.index.fp16.json": "pytorch_model.fp16-0000{}-of-00002.bin",
    "pytorch_model.fp16.bin": "",
    "diffusion_pytorch_model.safetensors": "",
    "diffusion_pytorch_model.fp16.safetensors": "",
    "diffusion_pytorch_model.bin": "",
    "diffusion_pytorch_model.safetensors.index.json": "diffusion_pytorch_model-0000{}-of-00002.safetensors",
    "diffusion_pytorch_model.safetensors.index.fp16.json": "diffusion_pytorch_model-0000{}-of-00002.fp16.safetensors",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_models_with_the_names_of_transformers_and_diffusers_are_found(tmp_path: Path, name: str) -> None:
    shards = VARIANTS[name]
    model_named(folder := tmp_path / "m", name, 1.0, shards)
    (folder / "config.json").write_text("{}")
    tensors = 2 if shards else 1
    assert imported(folder, tmp_path / "r").tensors == tensors
    assert imported(folder / name, tmp_path / "r", step=1).tensors == tensors
    for shard in [shards.format(number) for number in (1, 2)] if shards else []:
        with pytest.raises(UsageError, match=rf"is one of 2 files.*import .*/{name}, which names all of them"):
            imported(folder / shard, tmp_path / "r", step=2)


@pytest.mark.parametrize("default", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
@pytest.mark.parametrize("divided", ["default", "variant", "both", "none"])
def test_of_several_models_in_a_folder_the_one_without_a_variant_is_imported(
    tmp_path: Path, default: str, divided: str
) -> None:
    stem, folder = default.removesuffix(".safetensors"), tmp_path / "m"
    for value, variant in ((1.0, ""), (2.0, ".fp16"), (3.0, ".bf16")):
        if divided == "both" or divided == ("variant" if variant else "default"):
            shards = f"{stem}{variant}-0000{{}}-of-00002.safetensors"
            model_named(folder, f"{stem}.safetensors.index{variant}.json", value, shards)
        else:
            model_named(folder, f"{stem}{variant}.safetensors", value)
    imported(folder, tmp_path / "r")
    imported(
        folder / f"{stem}.fp16.safetensors", tmp_path / "r", step=1
    )  # stands for its index if there is no such file
    for step, value in ((0, 1.0), (1, 2.0)):
        with read(tmp_path / "r", run="in", step=step) as saved:
            assert torch.equal(saved["model/w0"].read(), torch.full((2,), value))


def test_variants_of_which_none_is_the_default_are_named(tmp_path: Path) -> None:
    for variant in ("bf16", "fp16"):
        shards = f"model.{variant}-0000{{}}-of-00002.safetensors"
        model_named(tmp_path / "m", f"model.safetensors.index.{variant}.json", 1.0, shards)
    names = r"model\.safetensors\.index\.bf16\.json, model\.safetensors\.index\.fp16\.json"
    with pytest.raises(UsageError, match=rf"none of them has a default name: {names} .name the one to import"):
        imported(tmp_path / "m", tmp_path / "r")


def test_shards_without_their_index_are_named(tmp_path: Path) -> None:
    model_named(folder := tmp_path / "m", "index", 1.0, "model.fp16-0000{}-of-00002.safetensors")
    with pytest.raises(UsageError, match=r"is one of 2 files.*and their index model\.safetensors\.index\.fp16\.json"):
        imported(folder, tmp_path / "r")


def test_a_folder_with_one_shard_of_several_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "m").mkdir()
    safetensors.save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match="is one of 2 files"):
        imported(folder, tmp_path / "r")
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert imported(folder, tmp_path / "r").tensors == 1


def test_links_lead_into_the_folder_or_the_blobs_of_a_hub_cache(tmp_path: Path, sharded: Path) -> None:
    (tmp_path / "other").mkdir()
    (sharded / "x.safetensors").rename(tmp_path / "other" / "x.safetensors")
    (sharded / "x.safetensors").symlink_to(tmp_path / "other" / "x.safetensors")
    with pytest.raises(UsageError, match=r"is a link to .*/other/x.safetensors, outside its folder"):
        imported(sharded, tmp_path / "r")
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (tmp_path / "other").rename(cache / "blobs")
    sharded.rename(cache / "snapshots" / "0123")
    (cache / "snapshots" / "0123" / "x.safetensors").unlink()
    (cache / "snapshots" / "0123" / "x.safetensors").symlink_to("../../blobs/x.safetensors")
    assert imported(cache / "snapshots" / "0123", tmp_path / "r").tensors == 2


def test_sources_that_are_not_recognised_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        imported(tmp_path / "nothing", tmp_path / "r")
    with pytest.raises(UsageError, match=r"s3://bucket/hf is a URL: import reads local files .copy it to a disk first"):
        import_checkpoint("s3://bucket/hf", tmp_path / "r", run="in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"is not recognised: .*\(nothing\)"):
        imported(tmp_path / "empty", tmp_path / "r")
    for name in ("a", "b"):
        safetensors.save_file({"a": torch.ones(2)}, tmp_path / "empty" / f"{name}.safetensors")
    with pytest.raises(
        UsageError, match=r"has several models.* a\.safetensors, b\.safetensors .name the one to import"
    ):
        imported(tmp_path / "empty", tmp_path / "r")
    (tmp_path / "pipeline" / "unet").mkdir(parents=True)
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is a pipeline of diffusers.*one by one, such as .*/unet"):
        imported(tmp_path / "pipeline", tmp_path / "r")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        imported(tmp_path / "pipe", tmp_path / "r")


def test_a_file_that_becomes_shorter_is_an_error_and_no_step(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    safetensors.save_file({"a": torch.arange(4_000_000)}, source)

    def cut(progress: object) -> None:
        os.truncate(source, 1000)

    with pytest.raises(CorruptionError, match=r"ends at byte .* before a tensor does"):
        imported(source, tmp_path / "r", progress=cut, rename=lambda name: (os.truncate(source, 100_000), name)[1])
    with pytest.raises(NotFoundError):
        read(tmp_path / "r", run="in")
