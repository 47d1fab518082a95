"""Exports: each format is read by its own library and compared bit by bit; targets, names, and full disks."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.checkpoint import RNG, Checkpointer, export, import_checkpoint
from headrace.checkpoint.exchange import dcp_format, output, writing
from headrace.checkpoint.exchange.exporting import ExportReport
from headrace.dataio.core.errors import CapacityError, CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.core.limits import KIB
from tests.support.disks import disk

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.inner = torch.nn.Linear(16, 16, bias=False)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.inner(model.embed(torch.arange(9)))).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "rng": RNG(),
        "epoch": 3,
        "size": torch.Size([2, 3]),
        "path": Path("/data"),
        "other": {"big": torch.randn(300, 1000).bfloat16(), "none": None, "list": [torch.arange(3), (1, "a")]},
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    where, state = tmp_path_factory.mktemp("repo"), made()
    with Checkpointer(where, run="exp", sidecar=None) as checkpointer:
        checkpointer.save(7, state).result(60)
    return where, state


Saved = tuple[Path, dict[str, Any]]


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


def run(saved: Saved, target: Path, **options: Any) -> ExportReport:
    return export(saved[0], target, run="exp", **options)


def test_hf_writes_the_module_once_and_names_tied_weights(saved: Saved, tmp_path: Path) -> None:
    report = run(saved, tmp_path / "m")
    found = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    expected = dict(saved[1]["model"].state_dict())
    del expected["head.weight"]
    assert same(found, expected)
    assert report.tied == {"head.weight": "embed.weight"}
    assert {"optimizer", "rng", "epoch", "other"} <= set(report.left_out)
    with safetensors.safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.safetensors"]
    model = Tied()
    safetensors.load_model(model, tmp_path / "m" / "model.safetensors")
    assert same(model.state_dict(), saved[1]["model"].state_dict())


def test_hf_divides_into_shards_with_an_index(saved: Saved, tmp_path: Path) -> None:
    report = run(saved, tmp_path / "m", max_shard_size=4 * KIB)
    names = [Path(file).name for file in report.files]
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "m" / names[-1]).read_text())
    found = {name: safetensors.load_file(tmp_path / "m" / file)[name] for name, file in index["weight_map"].items()}
    expected = dict(saved[1]["model"].state_dict())
    del expected["head.weight"]
    assert same(found, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("m.safetensors", "safetensors"),
        ("m.pt", "torch"),
        ("m.pth", "torch"),
        ("m.pt/", "hf"),
        ("m", "hf"),
        ("m-3.1-8b", "hf"),
    ],
)
def test_an_export_without_a_format_takes_it_from_the_name(
    saved: Saved, tmp_path: Path, name: str, format: str
) -> None:
    report = export(saved[0], f"{tmp_path}/{name}", run="exp", include="scalar")
    assert (report.format, (tmp_path / name).is_dir()) == (format, format == "hf")


def test_a_suffix_that_no_format_has_is_refused(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"m.bin ends in .bin, .*name a file with .safetensors, .pt, .pth"):
        export(saved[0], tmp_path / "m.bin", run="exp", include="scalar")
    (tmp_path / "m.bin").mkdir()
    assert export(saved[0], tmp_path / "m.bin", run="exp", include="scalar").format == "hf"


@pytest.mark.parametrize("size", [4 * KIB, "4KiB", "4096"])
def test_the_size_of_shards_may_be_a_text(saved: Saved, tmp_path: Path, size: int | str) -> None:
    assert len(run(saved, tmp_path / "m", max_shard_size=size).files) == 3


@pytest.mark.parametrize("size", ["5 GiBi", "many", "", 5e9, True, "0"])
def test_a_size_of_shards_that_is_none_is_refused(saved: Saved, tmp_path: Path, size: object) -> None:
    with pytest.raises(UsageError, match=r"is not a size|max_shard_size is"):
        run(saved, tmp_path / "m", max_shard_size=size)
    assert not (tmp_path / "m").exists()


def test_safetensors_holds_any_tensors_that_are_included(saved: Saved, tmp_path: Path) -> None:
    report = run(saved, tmp_path / "a.safetensors", format="safetensors", include=["other", "scalar", "empty", "epoch"])
    found = safetensors.load_file(tmp_path / "a.safetensors")
    assert list(found)
    assert torch.equal(found["other.big"], saved[1]["other"]["big"])
    assert torch.equal(found["other.list.0"], torch.arange(3))
    assert found["empty"].shape == (0, 4)
    assert found["scalar"] == 2.5
    assert found["scalar"].dtype == torch.float64
    assert report.left_out == ["epoch", "other/none", "other/list/1/0", "other/list/1/1"]


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_keeps_the_structure_and_the_values(saved: Saved, tmp_path: Path, mapped: bool) -> None:
    report = run(saved, tmp_path / "all.pt", format="torch")
    assert report.left_out == ["path"]  # torch.load(weights_only=True) refuses it
    found = torch.load(tmp_path / "all.pt", weights_only=True, mmap=mapped)
    state = saved[1]
    assert same(found["model"], state["model"].state_dict())
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert (found["epoch"], found["size"], found["other"]["none"]) == (3, torch.Size([2, 3]), None)
    assert found["other"]["list"][1] == (1, "a")
    assert torch.equal(found["other"]["big"], state["other"]["big"])
    assert found["empty"].shape == (0, 4)
    optimizer = torch.optim.AdamW(Tied().parameters())
    optimizer.load_state_dict(found["optimizer"])
    expected = state["optimizer"].state_dict()["state"]
    assert all(same(optimizer.state_dict()["state"][i], expected[i]) for i in expected)
    RNG().load_state_dict(found["rng"])
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None  # the checksums of all records are right


def test_views_share_their_memory_in_a_torch_file(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    state = {"a": base[:600], "b": base[400:], "t": base[:900].view(30, 30).t(), "bytes": base.view(torch.uint8)[:80]}
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)
    export(tmp_path / "r", tmp_path / "v.pt", run="exp", format="torch")
    found = torch.load(tmp_path / "v.pt", weights_only=True)
    assert same(found, state)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    with pytest.raises(UnsupportedError, match="t: the tensor is a view that is not contiguous"):
        export(tmp_path / "r", tmp_path / "v.safetensors", run="exp", format="safetensors")
    export(tmp_path / "r", tmp_path / "v.safetensors", run="exp", format="safetensors", exclude="t")
    assert same(safetensors.load_file(tmp_path / "v.safetensors"), {key: state[key] for key in ("a", "b", "bytes")})


def test_dcp_loads_the_folder(saved: Saved, tmp_path: Path) -> None:
    run(saved, tmp_path / "d", format="dcp")
    state, model = saved[1], Tied()
    torch.nn.init.zeros_(model.embed.weight)
    into: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": {
            "state": {i: {key: torch.zeros_like(t) for key, t in s.items()} for i, s in slots(state).items()}
        },
        "epoch": 0,
        "other": {"big": torch.zeros(300, 1000).bfloat16(), "none": 1, "list": [torch.zeros(3, dtype=torch.int64), ()]},
    }
    dcp.load(into, checkpoint_id=tmp_path / "d", no_dist=True)
    assert same(model.state_dict(), state["model"].state_dict())
    assert all(same(into["optimizer"]["state"][i], slots(state)[i]) for i in slots(state))
    assert (into["epoch"], into["other"]["none"], into["other"]["list"][1]) == (3, None, (1, "a"))
    assert torch.equal(into["other"]["big"], state["other"]["big"])


def test_dcp_reads_a_large_tensor_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_format, "CHUNK_BYTES", 100 * KIB)
    torch.manual_seed(0)
    tensor = torch.randn(301, 20, 10)
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(
            1, {"a": tensor, "tied": tensor, "row": torch.ones(1, 50_000), "one": torch.tensor(3)}
        ).result(60)
    for dtype in (None, "bf16"):
        export(tmp_path / "r", tmp_path / f"d{dtype}", run="exp", format="dcp", dtype=dtype)
        into = {"a": torch.zeros(301, 20, 10), "tied": torch.zeros(301, 20, 10), "row": torch.zeros(1, 50_000)}
        into["one"] = torch.tensor(0)
        dcp.load(into, checkpoint_id=tmp_path / f"d{dtype}", no_dist=True)
        expected = tensor if dtype is None else tensor.bfloat16().float()
        assert torch.equal(into["a"], expected)
        assert torch.equal(into["tied"], expected)
        assert torch.equal(into["row"], torch.ones(1, 50_000))
        assert into["one"] == 3
    assert (tmp_path / "dNone" / "__0_0.distcp").stat().st_size < 1.2 * tensor.nbytes + 4 * 50_000


def slots(state: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    return state["optimizer"].state_dict()["state"]


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_dtype_converts_floating_point_tensors_only(
    saved: Saved, tmp_path: Path, short: str, dtype: torch.dtype
) -> None:
    run(saved, tmp_path / "m", dtype=short)
    found = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in found.items():
        expected = saved[1]["model"].state_dict()[name]
        assert torch.equal(tensor, expected.to(dtype) if expected.is_floating_point() else expected)
    run(saved, tmp_path / "m.pt", dtype=short, format="torch")
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert loaded["other"]["big"].dtype == loaded["scalar"].dtype == dtype
    assert loaded["other"]["list"][0].dtype == torch.int64


def test_rename_takes_prefixes_names_patterns_and_functions(saved: Saved, tmp_path: Path) -> None:
    rules = {"embed.": "wte.", "mask": "attention_mask", "*.weight": "base.*.kernel"}
    run(saved, tmp_path / "a", rename=rules)
    assert set(safetensors.load_file(tmp_path / "a" / "model.safetensors")) == {
        "wte.weight",
        "base.inner.kernel",
        "attention_mask",
    }
    run(saved, tmp_path / "b", rename=str.upper)
    assert "INNER.WEIGHT" in safetensors.load_file(tmp_path / "b" / "model.safetensors")
    run(saved, tmp_path / "c.pt", format="torch", rename={"model/": "", "optimizer/": "train/optim/"})
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert "embed.weight" in found
    assert list(found["train"]["optim"]["state"]) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": lambda name: "same"}, "model/mask and model/embed.weight would both be called 'same'"),
        ({"rename": {"embed.": "inner."}}, "would both be called 'inner.weight'"),
        ({"rename": {"nothing.": ""}}, "rules without a match: 'nothing.'"),
        ({"rename": {"a": "*"}}, "which has more stars"),
        ({"rename": lambda name: 3}, "rename returned 3"),
        ({"include": "modle"}, "include has patterns without a match: 'modle'"),
        ({"exclude": "x/*"}, "exclude has patterns without a match"),
        ({"include": "epoch"}, "hold no tensors"),
        ({"format": "onnx"}, "choose one of: safetensors, hf, dcp, torch"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"rank": -1}, "rank -1 does not exist"),
        ({"rank": 3}, "step 7 has no rank 3 .its ranks are 0 to 0"),
        ({"format": "torch", "max_shard_size": 5}, "it divides safetensors files only"),
        ({"format": "torch", "rename": {"model/": "epoch/"}}, "would both be called 'epoch'"),
        ({"format": "dcp", "rename": {"scalar": "model.mask"}}, "DCP would give two entries one name"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_mistakes_are_named_and_nothing_is_written(
    saved: Saved, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(saved, tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_step_or_run_that_is_missing_is_named(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no step 8"):
        run(saved, tmp_path / "m", step=8)
    with pytest.raises(NotFoundError, match="there are: exp"):
        export(saved[0], tmp_path / "m", run="exq")


def test_sparse_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        state = {"s": torch.eye(3).to_sparse(), "d": torch.ones(2), "m": torch.empty(2, device="meta")}
        checkpointer.save(1, state).result(60)
    for kind in ("safetensors", "torch"):
        with pytest.raises(UsageError, match=r"s: a tensor of kind coo cannot be exported .*--exclude 's'"):
            export(tmp_path / "r", tmp_path / "x", run="exp", format=kind)
        with pytest.raises(UsageError, match="m: a tensor on the meta device"):
            export(tmp_path / "r", tmp_path / "x", run="exp", format=kind, exclude="s")
        export(tmp_path / "r", tmp_path / kind, run="exp", format=kind, exclude=["s", "m"])


def test_types_that_safetensors_lacks_are_refused_and_torch_keeps_them(tmp_path: Path) -> None:
    state = {"c": torch.ones(3, dtype=torch.complex128), "f": torch.ones(4).to(torch.float8_e5m2)}
    state["u"] = torch.tensor([1, 2, 65535], dtype=torch.uint16)
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result(60)
    with pytest.raises(UnsupportedError, match="c: safetensors has no type complex128"):
        export(tmp_path / "r", tmp_path / "x.safetensors", run="exp", format="safetensors")
    export(tmp_path / "r", tmp_path / "x.safetensors", run="exp", format="safetensors", exclude="c", dtype="fp32")
    found = safetensors.load_file(tmp_path / "x.safetensors")
    assert found["f"].dtype == torch.float8_e5m2
    assert torch.equal(found["u"], state["u"])
    export(tmp_path / "r", tmp_path / "x.pt", run="exp", format="torch")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(torch.equal(loaded[k].view(torch.uint8), state[k].view(torch.uint8)) for k in state)


# targets


def test_a_target_that_exists_is_kept_unless_it_is_to_be_overwritten(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_text("precious")
    with pytest.raises(UsageError, match=r"m.pt exists already .*--overwrite, or overwrite=True in Python"):
        run(saved, tmp_path / "m.pt", format="torch")
    assert (tmp_path / "m.pt").read_text() == "precious"
    run(saved, tmp_path / "m.pt", format="torch", overwrite=True)
    assert torch.load(tmp_path / "m.pt", weights_only=True)["epoch"] == 3

    run(saved, tmp_path / "m", max_shard_size=4 * KIB)
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="exists already and holds"):
        run(saved, tmp_path / "m")
    run(saved, tmp_path / "m", overwrite=True)  # shards of the earlier export go, other files stay
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


def test_a_target_of_the_wrong_kind_is_refused(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"is a file .format hf needs a folder"):
        run(saved, tmp_path / "file", overwrite=True)
    with pytest.raises(UsageError, match=r"is a folder .format torch needs a file"):
        run(saved, tmp_path, format="torch", overwrite=True)
    with pytest.raises(UsageError, match="is not a path"):
        export(saved[0], "s3://bucket/x", run="exp")


def test_a_link_stays_and_its_target_is_written(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "m.pt")
    run(saved, tmp_path / "link", format="torch")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "m.pt").is_file()


def test_an_export_that_failed_continues_where_it_stopped(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WINDOW_BYTES", 64 * KIB)
    reads = 0
    real = output.read_window

    def failing(*arguments: Any) -> None:
        nonlocal reads
        reads += 1
        if reads == 6:
            raise OSError(28, "full")
        real(*arguments)

    monkeypatch.setattr(writing, "read_window", failing)
    with pytest.raises(CapacityError, match=r"writing .*m.pt: No space left"):
        run(saved, tmp_path / "m.pt", format="torch")
    assert not (tmp_path / "m.pt").exists()
    damaged = tmp_path / "m.pt.partial"
    with open(damaged, "r+b") as file:  # one of the windows that were written is lost
        file.seek(70 * KIB)
        file.write(b"damage")
    monkeypatch.setattr(writing, "read_window", real)
    with pytest.raises(UsageError, match="unfinished export of something else"):
        run(saved, tmp_path / "m.pt", format="torch", exclude="rng")
    report = run(saved, tmp_path / "m.pt", format="torch")
    assert report.bytes - report.bytes_written == 4 * 64 * KIB  # of five, one was damaged
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None
    assert same(torch.load(tmp_path / "m.pt", weights_only=True)["model"], saved[1]["model"].state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt"]


def test_shards_that_are_complete_are_not_written_again(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writing._publish
    monkeypatch.setattr(writing, "_publish", lambda *_: (_ for _ in ()).throw(OSError(5, "lost")))
    with pytest.raises(Exception, match="writing"):
        run(saved, tmp_path / "m", max_shard_size=4 * KIB)
    monkeypatch.setattr(writing, "_publish", real)
    report = run(saved, tmp_path / "m", max_shard_size=4 * KIB)
    assert (report.bytes_written, len(report.files)) == (0, 3)


def test_a_full_disk_is_a_capacity_error_and_the_same_call_continues(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WINDOW_BYTES", 64 * KIB)
    (tmp_path / "small").mkdir()
    with disk(tmp_path / "small", "size=1200k") as small:
        (small / "ballast").write_bytes(bytes(800 * KIB))
        with pytest.raises(CapacityError, match="No space left on device"):
            run(saved, small / "m.safetensors", format="safetensors", include="other/big")
        (small / "ballast").unlink()
        report = run(saved, small / "m.safetensors", format="safetensors", include="other/big")
        assert 0 < report.bytes_written < report.bytes
        assert torch.equal(safetensors.load_file(small / "m.safetensors")["big"], saved[1]["other"]["big"])


def test_two_exports_to_one_target_do_not_mix(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = []
    real = output.read_window

    def second(*arguments: Any) -> None:
        try:
            run(saved, tmp_path / "m.pt", format="torch")
        except UsageError as error:
            errors.append(error)
        real(*arguments)

    monkeypatch.setattr(writing, "read_window", second)
    run(saved, tmp_path / "m.pt", format="torch")
    assert "another process is exporting" in str(errors[0])


def test_progress_counts_every_byte(saved: Saved, tmp_path: Path) -> None:
    seen: list[writing.Progress] = []
    report = run(saved, tmp_path / "m", max_shard_size=4 * KIB, progress=seen.append)
    assert seen[-1].bytes == seen[-1].bytes_total == report.bytes
    assert [each.bytes for each in seen] == sorted(each.bytes for each in seen)


# the repository


@pytest.mark.parametrize("compression", ["zstd", "auto", "delta"])
def test_compressed_steps_are_exported(tmp_path: Path, compression: str) -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 1000).bfloat16(), "z": torch.zeros(500, 1000)}
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None, compression=compression) as checkpointer:
        checkpointer.save(1, state).result(60)
        state["w"] += 0.001
        checkpointer.save(2, state).result(60)
    export(tmp_path / "r", tmp_path / "x.safetensors", run="exp", format="safetensors")
    assert same(safetensors.load_file(tmp_path / "x.safetensors"), state)


def test_a_damaged_chunk_is_named_and_the_target_gets_no_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", run="exp", sidecar=None) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(100_000), "v": torch.ones(3)}).result(60)
    (pack,) = (tmp_path / "r" / "packs").rglob("*.pack")
    with open(pack, "r+b") as file:
        file.seek(pack.stat().st_size // 2)
        file.write(b"damage")
    with pytest.raises(CorruptionError, match="step 1 of run exp is damaged: tensor 'w'"):
        export(tmp_path / "r", tmp_path / "x.pt", run="exp", format="torch")
    assert not (tmp_path / "x.pt").exists()
    export(tmp_path / "r", tmp_path / "v.pt", run="exp", format="torch", include="v")  # what is not damaged is exported


def test_from_s3_and_back(s3_url: str, saved: Saved, tmp_path: Path) -> None:
    run(saved, tmp_path / "m.pt", format="torch", include="model")
    import_checkpoint(tmp_path / "m.pt", s3_url, run="in")
    report = export(s3_url, tmp_path / "hf", run="in")
    found = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert report.tied == {"head.weight": "embed.weight"}
    assert torch.equal(found["inner.weight"], saved[1]["model"].inner.weight)
