"""Imports of folders of torch.distributed.checkpoint: what `dcp.load` loads is restored bit by bit, and nothing runs."""

from __future__ import annotations

import contextlib
import copyreg
import enum
import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from headrace.checkpoint import Checkpointer, import_checkpoint, read
from headrace.checkpoint.exchange import dcp_metadata, dcp_source, joined_tensors, torch_source
from headrace.checkpoint.exchange.importing import ImportReport
from headrace.checkpoint.exchange.pickle_reader import Record
from headrace.checkpoint.repository import check
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.store.open import open_store
from tests.support.ranks import launch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def imported(source: Path, repository: Path, **options: Any) -> ImportReport:
    return import_checkpoint(source, repository, run="in", **options)


def restored(repository: Path, state: dict[str, Any]) -> dict[str, Any]:
    with Checkpointer(repository, run="in", sidecar=None) as checkpointer:
        assert checkpointer.restore(state) == 0
    return state


def test_what_ranks_saved_under_fsdp_is_restored_under_tensor_parallelism_as_dcp_loads_it(tmp_path: Path) -> None:
    """Steps that were imported, and steps that were saved through our storage for DCP."""
    for rank in launch(2, "tests.support.dcp_folder_ranks", str(tmp_path)):
        nested, flat = rank
        assert nested == {"equal": [True] * 5, "changed": True, "values": [5, "seed 5"]}
        assert flat == {"equal": [True] * 3, "changed": True, "values": [5, "seed 5"]}
    with open_store(tmp_path / "r") as store:
        assert check.check(store, None).clean


def test_objects_lists_and_values_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    values = {"epoch": 3, "args": {"lr": 0.1, "names": ["a", "b"]}, "size": torch.Size([4]), "raw": b"\0\xff"}
    tensors = {"t": torch.randn(40, 30).t(), "empty": torch.empty(0, 3), "scalar": torch.tensor(7, dtype=torch.int8)}
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), **values, **tensors}
    report = imported(saved(tmp_path / "d", state), tmp_path / "r")
    assert (report.format, sorted(report.entries)) == ("dcp", sorted(state))
    fresh = torch.optim.AdamW(other.parameters())
    blank: dict[str, Any] = {"model": other, "optim": fresh, "epoch": 0, "args": {"lr": 0.0, "names": []}}
    blank |= {"size": torch.Size([]), "raw": b""} | {name: torch.zeros_like(each) for name, each in tensors.items()}
    restored(tmp_path / "r", blank)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    one, two = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert all(torch.equal(one[i][key], two[i][key]) for i in one for key in one[i])
    assert {name: blank[name] for name in values} == values
    assert all(torch.equal(blank[name], tensors[name]) for name in tensors)


def test_tensors_by_name_become_a_module(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    imported(saved(tmp_path / "d", model.state_dict()), tmp_path / "r", rename={"": ""})
    restored(tmp_path / "r", {"model": other})
    assert torch.equal(model.weight, other.weight)


def test_entries_can_be_left_out_in_every_format(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "b": torch.ones(3)}, "epoch": 3}
    torch.save(state, tmp_path / "f.pt")
    for number, source in enumerate([saved(tmp_path / "d", state), tmp_path / "f.pt"]):
        imported(source, tmp_path / "r", exclude=["epoch", "model/b"], step=number)
        with read(tmp_path / "r", run="in") as step:
            assert list(step) == ["model/w"]
        with pytest.raises(UsageError, match="exclude has patterns without a match: 'nothing'"):
            imported(source, tmp_path / "r", exclude="nothing", step=9)
        with pytest.raises(UsageError, match="excluded"):
            imported(source, tmp_path / "r", exclude="*", step=9)


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_tensors, "MAX_OPEN", 1)
    tensors = {f"w{i}": torch.randn(100, 300) for i in range(6)}
    writer = dcp.FileSystemWriter(tmp_path / "d", single_file_per_rank=False)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert len(os.listdir(tmp_path / "d")) > 6
    imported(tmp_path / "d", tmp_path / "r")
    with read(tmp_path / "r", run="in") as step:
        assert all(torch.equal(step[f"model/{name}"].read(), tensors[name]) for name in tensors)


class OldPickler(pickle.Pickler):
    """Writes as older versions of torch and Python did."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):  # Python 3.11.0
            return getattr, (type(value), value.name)
        if isinstance(value, ChunkStorageMetadata):  # a class with slots
            return copyreg.__newobj__, (ChunkStorageMetadata,), (None, dict(vars(value)))  # type: ignore[attr-defined]
        return NotImplemented


@pytest.mark.parametrize("protocol", [3, 5])
def test_metadata_of_older_versions_is_read(tmp_path: Path, protocol: int) -> None:
    folder = saved(tmp_path / "d", {"w": torch.arange(6.0), "n": 3})

    def age(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["w"]
        entry.properties = OldProperties(dtype=torch.float32)
        del metadata.storage_meta, metadata.version  # fields that torch 2.1 did not have
        metadata.planner_data = None

    changed(folder, age, lambda file: OldPickler(file, protocol))
    imported(folder, tmp_path / "r")
    assert restored(tmp_path / "r", {"w": torch.zeros(6), "n": 0})["n"] == 3


# what is refused


def changed(folder: Path, change: Callable[[Any], object], pickler: Callable[[Any], Any] = pickle.Pickler) -> None:
    """Write other metadata into the folder."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    with open(folder / ".metadata", "wb") as file:
        pickler(file).dump(metadata)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/headrace-was-here",)


def chunks(*boxes: tuple[list[int], list[int]], size: Any = None) -> Callable[[Metadata], None]:
    """Replace the chunks of `w`, which is 4 x 6, by these. All have the same place."""

    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["w"]
        place = metadata.storage_data[MetadataIndex("w", [0, 0])]
        entry.size = entry.size if size is None else torch.Size(size) if isinstance(size, list) else size
        entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in boxes]
        metadata.storage_data |= {MetadataIndex("w", at): place for at, _ in boxes}

    return change


def place(**fields: Any) -> Callable[[Metadata], None]:
    """Change the place of `w`."""

    def change(metadata: Metadata) -> None:
        index = MetadataIndex("w", [0, 0])
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return change


def setting(name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata, name, value)


WHOLE = ([0, 0], [4, 6])
HOSTILE: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "code as a path": (setting("planner_data", {"w": Evil()}), "names 'posix.system', which is not read"),
    "code as a version": (setting("version", Evil()), "names 'posix.system'"),
    "another class": (setting("planner_data", io.BytesIO()), "names '_io.BytesIO'"),
    "chunks that overlap": (chunks(([0, 0], [2, 6]), ([1, 0], [2, 6])), "'w' has chunks that overlap"),
    "chunks that overlap in a corner": (
        chunks(([0, 0], [3, 4]), ([2, 3], [2, 3]), ([0, 4], [1, 2]), ([3, 0], [1, 3]), ([1, 5], [1, 1])),
        "'w' has chunks that overlap",
    ),
    "chunks with a gap": (chunks(([0, 0], [2, 6]), ([3, 0], [1, 6])), "do not fill it"),
    "chunk outside": (chunks(([1, 0], [4, 6])), "reaches outside"),
    "chunk that is too large": (chunks(WHOLE, ([0, 0], [2, 6])), r"has two chunks at \(0, 0\)"),
    "no chunks": (chunks(), "do not fill it"),
    "chunk of three dimensions": (chunks(([0, 0, 0], [4, 6, 1])), "another number of dimensions"),
    "terabyte": (chunks(([0, 0], [1 << 20, 1 << 18]), size=[1 << 20, 1 << 18]), "64 times more bytes than the files"),
    "terabytes squared": (chunks(([0, 0], [1 << 40, 1 << 40]), size=[1 << 40, 1 << 40]), "'w' is too large"),
    "another shape": (chunks(([0, 0], [6, 4]), size=[6, 4]), r"shape \[4, 6\]; the metadata says float32 and \[6, 4\]"),
    "negative size": (chunks(WHOLE, size=[-4, 6]), "a size is malformed"),
    "size that is a text": (chunks(WHOLE, size="ab"), "a size is malformed"),
    "no places": (setting("storage_data", {}), "no file has 'w' at"),
    "folder above": (place(relative_path="../secret"), "'../secret', which is not a file of the folder"),
    "absolute path": (place(relative_path="/etc/passwd"), "'/etc/passwd', which is not a file of the folder"),
    "URL": (place(relative_path="s3://bucket/a"), "'s3://bucket/a', which is not a file of the folder"),
    "two dots": (place(relative_path=".."), r"'\.\.', which is not a file of the folder"),
    "file that is missing": (place(relative_path="other"), "other does not exist"),
    "file with a name of a thousand bytes": (
        place(relative_path="\U0001f600" * 250),
        "which is not a file of the folder",
    ),
    "sizes that no tensor has": (chunks(size=[0, 1 << 61, 1 << 61]), "'w' is too large"),
    "path that is a number": (place(relative_path=3), "the place of 'w' is malformed"),
    "offset beyond the file": (place(offset=1 << 40), "and the file has"),
    "length beyond the file": (place(length=1 << 40), "and the file has"),
    "negative offset": (place(offset=-1), "at byte -1 of its file"),
    "length of nothing": (place(length=0), "has 0 bytes"),
    "offset that is a boolean": (place(offset=True), "the place of 'w' is malformed"),
    "offset in an archive": (place(offset=8), "is not an archive of torch.save"),
    "length of a part": (place(length=200), "is cut off or damaged"),
    "compressed": (place(transform_descriptors=["zstd"]), "stored with a transformation such as compression"),
    "path of lists": (setting("planner_data", {"w": (["a"],)}), "the path of 'w' is malformed"),
    "path of nothing": (setting("planner_data", {"w": ()}), "the path of 'w' is malformed"),
    "paths that collide": (setting("planner_data", {"w": ("a",), "n": ("a",)}), "paths of DCP's names collide"),
    "path of five thousand": (setting("planner_data", {"w": ("a",) * 5000}), "has 5000 parts"),
    "no entries": (setting("state_dict_metadata", {}), "holds no entries"),
    "entries in a list": (setting("state_dict_metadata", []), "state_dict_metadata is not a dict"),
    "entry that is a text": (setting("state_dict_metadata", {"w": "x"}), "a TensorStorageMetadata is missing"),
    "value that is a tensor": (
        lambda metadata: metadata.storage_data.update({MetadataIndex("n"): _StorageInfo("__0_0.distcp", 0, 10)}),
        "cut off or damaged",
    ),
    "place that is a text": (
        lambda m: m.storage_data.update({MetadataIndex("w", [0, 0]): "x"}),
        "_StorageInfo is miss",
    ),
    "name that is a number": (setting("state_dict_metadata", {3: BytesStorageMetadata()}), "has no name"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused_by_name_and_nothing_is_stored(tmp_path: Path, name: str) -> None:
    change, message = HOSTILE[name]
    folder = saved(tmp_path / "d", {"w": torch.arange(24.0).view(4, 6), "n": 3})
    changed(folder, change)
    with pytest.raises((CorruptionError, UnsupportedError, UsageError), match=message):
        imported(folder, tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert not Path("/tmp/headrace-was-here").exists()


def offsets_of_equal_hash(count: int) -> list[list[int]]:
    """Offsets in two dimensions. The hash of a tuple of numbers has no secret, so the second number can be computed."""
    first, second, third, fourth = 11400714785074694791, 14029467366897019727, 2870177450012600261, 1 << 64

    def after(number: int) -> int:
        mixed = (third + number * second) % fourth
        return (mixed << 31 | mixed >> 33) * first % fourth

    inverse = pow(second, -1, fourth)
    found: list[list[int]] = [[0, 1]]
    for number in range(1, 1000 * count):
        other = (after(0) + second - after(number)) * inverse % fourth
        if other < (1 << 61) - 1 and len(found) < count:
            found.append([number, other])
    return found


def test_offsets_with_equal_hashes_do_not_make_the_reader_slow() -> None:
    offsets = offsets_of_equal_hash(50)
    assert len(offsets) == 50
    assert len({hash(tuple(offset)) for offset in offsets}) == 1
    index = Record(f"{dcp_metadata._DCP}MetadataIndex", ())
    places = {
        replace(index, state={"fqn": "w", "offset": tuple(offset)}): Record(
            "_StorageInfo", (), {"relative_path": "a", "offset": 0, "length": 1}
        )
        for offset in offsets
    }
    assert len(set(map(hash, dcp_metadata._places(places)))) == 50


def test_folders_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", {"w": torch.arange(2400.0), "n": 3})
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 97):
        (folder / ".metadata").write_bytes(whole[:length])
        with pytest.raises(HeadraceError, match=r"\.metadata: "):
            imported(folder, tmp_path / "r")
    (folder / ".metadata").write_bytes(whole)
    os.truncate(folder / "__0_0.distcp", 5000)
    with pytest.raises(CorruptionError, match=r"__0_0.distcp ends at byte \d+, and the file has 5000 bytes"):
        imported(folder, tmp_path / "r")
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(NotFoundError, match=r"__0_0\.distcp does not exist"):
        imported(folder, tmp_path / "r")


def with_table_of(size: int) -> io.BytesIO:
    """An archive of torch.save whose last bytes claim that its table of records has this size."""
    archive = io.BytesIO()
    torch.save(torch.ones(2), archive)
    whole = archive.getvalue()[:-22] + bytes(size)
    archive.seek(0)
    archive.write(whole + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 4, 4, size, len(whole) - size, 0))
    archive.seek(0)
    return archive


def test_an_archive_of_a_tensor_whose_table_of_records_is_large_is_not_read() -> None:
    archive = with_table_of(200_000)
    with pytest.raises(CorruptionError, match=r"chunk is cut off or damaged: its structure has more than 131072 bytes"):
        torch_source.locate_tensor("chunk", archive, len(archive.getvalue()))


def test_a_sparse_file_whose_table_of_records_is_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_source, "_MAX_STRUCTURE", 100_000)
    (tmp_path / "a.pt").write_bytes(with_table_of(200_000).getvalue())
    with pytest.raises(CorruptionError, match=r"a\.pt is cut off or damaged: its structure has more than 100000 bytes"):
        imported(tmp_path / "a.pt", tmp_path / "r")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        folder = saved(tmp_path / name.strip("."), {"w": torch.ones(3)})
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match=r"is a link to .*elsewhere, outside its folder"):
            imported(folder, tmp_path / "r")


def test_a_value_that_needs_code_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", {"w": torch.ones(3), "nested": {"evil": Evil()}})
    with pytest.raises(UnsupportedError, match=r"'nested.evil' in __0_0.distcp needs the code .*system.*--exclude"):
        imported(folder, tmp_path / "r")
    imported(folder, tmp_path / "r", exclude="nested/evil")
    assert not Path("/tmp/headrace-was-here").exists()


def test_sizes_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "d", {"w": torch.arange(2400.0).view(60, 40).t(), "n": list(range(1000))})
    with monkeypatch.context() as patch:
        patch.setattr(dcp_source, "MAX_VALUE_BYTES", 100)
        with pytest.raises(
            UnsupportedError, match=r"'n' in __0_0.distcp has .* at most 100 B are read .*--exclude 'n'"
        ):
            imported(folder, tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(dcp_source, "MAX_COPIED_BYTES", 100)
        with pytest.raises(UnsupportedError, match=r"'w' in __0_0.distcp has 9.4 KiB that are not contiguous"):
            imported(folder, tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(dcp_metadata, "MAX_BYTES", 100)
        with pytest.raises(UnsupportedError, match=r"\.metadata has .*, and at most 100 B are read"):
            imported(folder, tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(dcp_metadata, "MAX_CELLS", 3)
        changed(folder, chunks(([0, 0], [10, 60]), ([10, 0], [30, 20]), ([10, 20], [30, 40])))
        with pytest.raises(UnsupportedError, match="'w' has 3 chunks that form no grid"):
            imported(folder, tmp_path / "r")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensor = torch.arange(24.0).view(4, 6)
    return (saved(tmp_path_factory.mktemp("d"), {"w": tensor, "n": [3, tensor]}) / ".metadata").read_bytes()


@settings(max_examples=200)
@given(st.data())
def test_changed_metadata_is_read_or_refused_with_our_errors(metadata: bytes, data: st.DataObject) -> None:
    changing = bytearray(metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        changing[data.draw(st.integers(0, len(changing) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(HeadraceError):
        dcp_metadata.read_metadata(bytes(changing))


# folders of safetensors that DCP wrote


def rank_file(folder: Path, rank: int, shards: dict[str, tuple[list[int], torch.Tensor]], info: Any = None) -> Path:
    """The file of one rank, as `HuggingFaceStorageWriter(save_distributed=True)` writes it."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder.mkdir(exist_ok=True)
    places = {name: {"saved_offsets": at} for name, (at, _) in shards.items()} if info is None else info
    path = folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    tensors = {name: tensor.contiguous() for name, (_, tensor) in shards.items()}
    safetensors.save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})
    return path


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}, {"fqn_to_index_mapping": {"a.w": 1, "b.w": 2}}])
def test_folders_of_safetensors_that_dcp_wrote_are_imported(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("safetensors")
    tensors = {"a.w": torch.randn(10, 20), "b.w": torch.randn(3).bfloat16()}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "d"), **options)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert imported(tmp_path / "d", tmp_path / "r").format == "hf"
    with read(tmp_path / "r", run="in") as step:
        assert all(torch.equal(step[f"model/{name}"].read(), tensors[name]) for name in tensors)


def test_shards_of_safetensors_are_joined(tmp_path: Path) -> None:
    whole, small = torch.randn(301, 200), torch.arange(5)
    for rank, first in enumerate(range(0, 301, 101), 1):
        part = {"w": ([first, 0], whole[first : first + 101])}
        rank_file(tmp_path / "d", rank, part | ({"s": ([0], small)} if rank == 2 else {}))
    assert imported(tmp_path / "d", tmp_path / "r").tensors == 2
    with read(tmp_path / "r", run="in") as step:
        assert torch.equal(step["model/w"].read(), whole)
        assert torch.equal(step["model/s"].read(), small)
    with pytest.raises(UsageError, match=r"has the shards of one rank .*give the folder"):
        imported(tmp_path / "d" / "shard-00001-model-00001-of-00001.safetensors", tmp_path / "r", step=1)
    (tmp_path / "d" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptionError, match="the chunks of 'w' do not fill it"):
        imported(tmp_path / "d", tmp_path / "r", step=1)


@pytest.mark.parametrize(
    "info",
    [[], {}, {"w": 3}, {"w": {}}, {"w": {"saved_offsets": [0]}}, {"w": {"saved_offsets": [-1, 0]}}, {"w": [0.0, 1]}],
    ids=str,
)
def test_shards_of_safetensors_with_malformed_places_are_refused(tmp_path: Path, info: Any) -> None:
    path = rank_file(tmp_path / "d", 1, {"w": ([0, 0], torch.ones(2, 3))}, info)
    with pytest.raises(CorruptionError, match=path.name):
        imported(tmp_path / "d", tmp_path / "r")
    assert not (tmp_path / "r").exists()
