"""Each pitfall of torch.distributed.checkpoint (2.13) that we know, by name.

That ours has it not; and where that is cheap, that DCP does.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.restoring import restorer
from headrace.dataio.core.errors import (
    ConflictError,
    CorruptionError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import Wrapped, flip
from tests.support.ranks import launch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def ours(where: Path | Store, state: dict[str, Any], step: int = 1, **more: Any) -> None:
    url = where if isinstance(where, Store) else str(where)
    dcp.save(state, storage_writer=RepositoryWriter(url, run="a", step=step), **more)


def load(where: Path | Store, state: dict[str, Any], step: int | str = "latest") -> None:
    url = where if isinstance(where, Store) else str(where)
    dcp.load(state, storage_reader=RepositoryReader(url, run="a", step=step))


def cause(work: Callable[[], object]) -> BaseException:
    """The error of ours inside of DCP's."""
    with pytest.raises(CheckpointException) as caught:
        work()
    return caught.value.failures[0][0]


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_values_are_pickles_that_execute(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    dcp.save({"x": Trap(str(mark))}, checkpoint_id=tmp_path / "theirs")
    dcp.load({"x": 0}, checkpoint_id=tmp_path / "theirs")
    assert mark.exists()
    error = cause(lambda: ours(tmp_path / "ours", {"x": Trap("never")}))
    assert isinstance(error, UsageError)
    assert "values/x: a value of type" in str(error)


def test_nothing_that_is_stored_is_a_pickle_and_nothing_from_the_store_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours(tmp_path, {"w": torch.ones(9), "n": {"a": (1, "x"), "b": 2.5, "c": None}})
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        with pytest.raises(Exception):  # noqa: B017 - whatever says that it is none
            pickle.loads(path.read_bytes())  # noqa: S301
    state = {"w": torch.zeros(9), "n": {"a": 0, "b": 0, "c": 0}}
    seen: list[bytes] = []
    planner = DefaultLoadPlanner()
    real = planner.load_bytes
    monkeypatch.setattr(planner, "load_bytes", lambda item, value: (seen.append(value.getvalue()), real(item, value)))
    dcp.load(state, storage_reader=RepositoryReader(str(tmp_path), run="a"), planner=planner)
    assert state["n"] == {"a": (1, "x"), "b": 2.5, "c": None}
    stored = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert seen
    assert all(value not in stored for value in seen)  # pickled in this process, for DCP's planner alone


def test_bit_flips_load_silently(tmp_path: Path) -> None:
    state = {"w": torch.arange(300_000.0)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    ours(tmp_path / "ours", state)
    flip(next((tmp_path / "theirs").glob("*.distcp")), 200_000)
    flip(next((tmp_path / "ours" / "packs").rglob("*.pack")), 200_000)
    into = {"w": torch.zeros(300_000)}
    dcp.load(into, checkpoint_id=tmp_path / "theirs")
    assert not torch.equal(into["w"], state["w"])
    error = cause(lambda: load(tmp_path / "ours", into))
    assert isinstance(error, CorruptionError)
    assert "step 1 of run a is damaged: tensor 'w'" in str(error)


def test_saving_again_overwrites(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "theirs")
    dcp.save({"w": torch.zeros(9)}, checkpoint_id=tmp_path / "theirs")
    ours(tmp_path / "ours", {"w": torch.ones(9)})
    assert isinstance(cause(lambda: ours(tmp_path / "ours", {"w": torch.zeros(9)})), ConflictError)
    into = {"w": torch.zeros(9)}
    load(tmp_path / "ours", into)
    assert torch.equal(into["w"], torch.ones(9))


def test_a_mixture_of_two_saves_loads_silently(tmp_path: Path) -> None:
    for step in (1, 2):
        state = {"a": torch.full((70_000,), float(step)), "b": torch.full((70_000,), float(step))}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / f"theirs{step}", single_file_per_rank=False))
        ours(tmp_path / "ours", state, step)
    file = sorted((tmp_path / "theirs2").glob("*.distcp"))[0]
    file.write_bytes((tmp_path / "theirs1" / file.name).read_bytes())
    into = {"a": torch.zeros(70_000), "b": torch.zeros(70_000)}
    dcp.load(into, checkpoint_id=tmp_path / "theirs2")
    assert {int(into["a"][0]), int(into["b"][0])} == {1, 2}
    old, new = sorted((tmp_path / "ours" / "runs").rglob("*.manifest"), key=lambda path: path.parts)
    new.write_bytes(old.read_bytes())
    with pytest.raises(CheckpointException, match=r"rank-00000\.manifest is damaged"):
        load(tmp_path / "ours", into)


def test_no_folder_is_synced_so_that_a_crash_takes_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: Any) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "theirs")
    assert not any(os.path.isdir(path) for path in synced)
    ours(tmp_path / "ours", {"w": torch.ones(9)})
    commit = next((tmp_path / "ours").rglob("COMMIT"))
    assert {str(tmp_path / "ours"), str(commit.parent), str(commit.parent.parent)} <= set(synced)


def test_its_private_names_change_without_notice(tmp_path: Path) -> None:
    """`_extension`, `_experimental`, `_StorageInfo`, `use_collectives`: of DCP's private names one is used here."""
    import ast

    import headrace.checkpoint.dcp as room

    used = set()
    for path in Path(room.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                used |= {f"{node.module}.{name.name}" for name in node.names}
    assert {name for name in used if "._" in name} == {"torch.distributed.checkpoint._nested_dict.flatten_state_dict"}


def test_a_save_that_fails_takes_the_previous_one_with_it(tmp_path: Path) -> None:
    class Failing(Wrapped):
        def put_multipart(self, key: str, parts: Any) -> int:
            raise OSError("no space")

    with open_store(tmp_path) as store:
        ours(store, {"w": torch.ones(99_999)})
        assert isinstance(cause(lambda: ours(Failing(store), {"w": torch.zeros(99_999)}, 2)), OSError)
        into = {"w": torch.zeros(99_999)}
        load(store, into)
    assert torch.equal(into["w"], torch.ones(99_999))
    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [1]


def test_the_whole_host_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise AssertionError("os.sync() was called")

    monkeypatch.setattr(os, "sync", refused)
    ours(tmp_path, {"w": torch.ones(9)})


def test_a_small_slice_reads_a_whole_large_chunk(tmp_path: Path) -> None:
    read = 0

    class Counting(Wrapped):
        def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
            nonlocal read
            read += sum(len(view) for _, view in ranges)
            self.inner.get_ranges_into(key, ranges)

    whole = torch.arange(4 * MIB, dtype=torch.float32)
    with open_store(tmp_path) as store:
        ours(store, {"w": whole})
        reader = RepositoryReader(Counting(store), run="a")
        planner = DefaultLoadPlanner()
        part = {"w": torch.zeros(4 * KIB)}
        planner.set_up_planner(part, reader.read_metadata())
        index, zero, size = MetadataIndex("w", (0,)), torch.Size([0]), torch.Size([4 * KIB])
        item = ReadItem(LoadItemType.TENSOR, index, zero, index, torch.Size([3 * MIB]), size)
        reader.read_data(LoadPlan([item]), planner).wait()
    assert torch.equal(part["w"], whole[3 * MIB : 3 * MIB + 4 * KIB])
    assert 16 * KIB <= read <= 4 * MIB


def test_rank_and_collectives_arrive_only_if_a_parameter_is_literally_named_kwargs(tmp_path: Path) -> None:
    assert "kwargs" in inspect.signature(RepositoryWriter.set_up_storage_writer).parameters
    with pytest.raises(UnsupportedError, match="use_collectives=True"):
        RepositoryWriter(str(tmp_path), run="a", step=1).set_up_storage_writer(True, rank=0, use_collectives=False)


def test_a_rank_that_misses_the_metadata_looks_for_its_own_and_leaves_the_others_waiting(tmp_path: Path) -> None:
    assert "kwargs" not in inspect.signature(RepositoryReader.read_metadata).parameters  # which is what DCP goes by
    with open_store(tmp_path) as store:
        error = cause(lambda: load(store, {"w": torch.ones(1)}, 7))
    assert "run a has no step 7" in str(error)


def test_its_exception_is_no_exception(tmp_path: Path) -> None:
    assert not issubclass(CheckpointException, Exception)
    ours(tmp_path, {"w": torch.ones(2)})
    with pytest.raises(NotFoundError):  # asked directly, ours is
        RepositoryReader(str(tmp_path), run="a", step=2).read_metadata()


def test_the_writer_is_pickled_for_process_mode(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(RepositoryWriter(str(tmp_path), run="a", step=1)))  # noqa: S301
    with open_store(tmp_path) as store, pytest.raises(UsageError, match="give RepositoryWriter the URL"):
        pickle.dumps(RepositoryWriter(store, run="a", step=1))


def test_a_file_system_writer_selects_the_legacy_stager(tmp_path: Path) -> None:
    assert isinstance(dcp.FileSystemWriter(tmp_path), AsyncStager)
    assert not isinstance(RepositoryWriter(str(tmp_path), run="a", step=1), AsyncStager)


def test_balancing_goes_by_the_size_of_the_global_tensor(tmp_path: Path) -> None:
    def item(name: str, rows: int, of: int) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 1000]))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([of, 1000]))
        return WriteItem(MetadataIndex(name, (0, 0)), WriteItemType.SHARD, tensor_data=data)

    # two ranks hold all of it; "a" is a small part of a tensor that is huge
    items = [item("a", 1, 1000), item("b", 100, 100), item("c", 100, 100)]
    writer = RepositoryWriter(str(tmp_path), run="a", step=1)
    plans = [writer.prepare_local_plan(SavePlan(list(items))) for _ in range(2)]
    spread = writer.prepare_global_plan([plans[0], SavePlan([], storage_data=plans[1].storage_data)])
    sizes = [sum(i.tensor_data.chunk.sizes.numel() for i in plan.items if i.tensor_data) for plan in spread]
    assert sorted(sizes) == [100_000, 101_000]


def test_a_cached_plan_hides_the_new_save_from_the_storage(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    error = cause(lambda: ours(tmp_path, {"w": torch.ones(9)}, planner=planner))
    assert isinstance(error, UnsupportedError)
    assert "enable_plan_caching=False" in str(error)


def test_a_planner_that_only_gives_pickles_is_refused_by_name(tmp_path: Path) -> None:
    class Hiding(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

    error = cause(lambda: ours(tmp_path, {"n": 1}, planner=Hiding()))
    assert "Hiding gives values other than tensors as pickles only" in str(error)


def test_another_shape_is_refused_and_another_type_converted_as_by_dcp(tmp_path: Path) -> None:
    ours(tmp_path, {"w": torch.arange(9.0)})
    into = {"w": torch.zeros(9, dtype=torch.float64)}
    load(tmp_path, into)
    assert torch.equal(into["w"], torch.arange(9.0).double())
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(tmp_path, {"w": torch.zeros(8)})


def test_a_step_that_a_checkpointer_saved_is_loaded_through_dcp_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer:
        checkpointer.save(4, {"model": model, "optim": optimizer, "n": [1, {"a": 2}]}).result(60)
    other = torch.nn.Linear(300, 40)
    into: dict[str, Any] = {"model": other.state_dict(), "n": [0, {"a": 0}]}
    load(tmp_path, into)
    assert torch.equal(other.weight, model.weight)
    assert into["n"] == [1, {"a": 2}]


def test_a_checkpointer_says_how_to_load_a_step_of_dcp_if_the_ranks_divide_the_manifests(tmp_path: Path) -> None:
    ours(tmp_path, {"w": torch.ones(9)})
    with read(tmp_path, run="a") as step, pytest.raises(MismatchError, match=r"dcp\.load"):
        restorer._document(step._opened.manifests[0])


@pytest.mark.parametrize(("given", "step"), [("12", 12), (12, 12), ("s3://b/run/step-1200", 1200), (Path("a/7"), 7)])
def test_a_checkpoint_id_names_the_step(given: Any, step: int) -> None:
    assert step_of(given) == step


def test_a_checkpoint_id_without_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match="names no step"):
        step_of("latest")


def test_two_ranks_keep_what_is_their_own_in_every_mode_and_fail_together(tmp_path: Path) -> None:
    lines = launch(2, "tests.support.dcp_ranks", str(tmp_path / "ours"))
    found = [{line.pop("what"): line for line in rank} for rank in lines]
    for rank, output in enumerate(found):
        assert output["loaded"].pop("step") == 1
        assert output["loaded"] == output["saved"] == output["processed"]
        assert output["saved"]["loader"] == [100 + rank, [100 + rank] * 5]
        assert output["refused"]["why"] == found[0]["refused"]["why"]  # all ranks know all failures
        assert "1: UsageError: values/bad: a value of type builtins.object" in output["refused"]["why"]
        assert "was aborted: rank 1 failed: values/bad" in output["refused"]["why"]
        assert output["refused"]["seconds"] < 30  # the other rank did not wait for one that had failed
        assert "run nothing has no step 9" in output["missing"]["why"]
        assert "ConflictError" in output["again"]["why"]
    assert found[0]["theirs"]["weights"] == found[0]["saved"]["weights"]
    assert [output["theirs"]["loader"] for output in found] != [
        output["saved"]["loader"] for output in found
    ]  # DCP lost one
    with Checkpointer(str(tmp_path / "ours"), run="a", sidecar=None) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 5]
    with open_store(tmp_path / "ours") as store:
        assert timeline.numbers(store, "a") == [1], "a process saved step 3 for the trainer"
