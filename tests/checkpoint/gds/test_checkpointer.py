"""Saves and restores by way of device memory: here host memory takes its place, and the path is the same.

Those of a real GPU are marked `gpu`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.format.chunking import whole
from headrace.checkpoint.gds import GdsStore, direct_for, saving
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.check import check
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Want
from headrace.checkpoint.state.tensors import TensorSink
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import flip
from tests.support.gds_host import Counts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]  # DCP's own
RING = 64 * MIB


def state(device: str = "cpu", elements: int = 16 * MIB + 5) -> dict[str, Any]:
    """A little more than the ring holds, in tensors that lie in packs in every way."""
    torch.manual_seed(1)
    return {
        "large": torch.randn(elements, device=device),  # ends within a block of the file
        "bf16": torch.randn(999, 1001, device=device).to(torch.bfloat16),
        "columns": torch.randn(700, 300, device=device).t(),  # not one run of memory
        "view": torch.randn(600, 600, device=device)[100:200],  # not from the beginning of its memory
        "small": [torch.randn(7, device=device), torch.tensor(3.5, device=device), torch.ones(3, device=device).bool()],
        "step": 5,
    }


def zeros(like: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(like)
    for value in [*made.values(), *made["small"]]:
        if isinstance(value, torch.Tensor):
            value.zero_()
    return made | {"step": 0}


def assert_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    for key in ("large", "bf16", "columns", "view"):
        assert torch.equal(one[key], two[key]), key
    assert all(torch.equal(a, b) for a, b in zip(one["small"], two["small"], strict=True))
    assert one["step"] == two["step"]


def small() -> dict[str, Any]:
    """For DCP, which always saves in slices."""
    return state(elements=3 * MIB + 5)


def dcp_saved(where: Path, counts: Counts, given: dict[str, Any], **more: Any) -> None:
    dcp.save(given, storage_writer=RepositoryWriter(str(where), run="a", step=1, gds=counts.direct(), **more))


def dcp_loaded(where: Path, counts: Counts, like: dict[str, Any]) -> dict[str, Any]:
    into = zeros(like)
    dcp.load(into, storage_reader=RepositoryReader(str(where), run="a", gds=counts.direct()))
    return into


def restored(where: Path, counts: Counts, like: dict[str, Any]) -> dict[str, Any]:
    into = zeros(like)
    with Checkpointer(str(where), run="a", sidecar=None, gds=counts.direct()) as checkpointer:
        checkpointer.restore(into)
    return into


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_what_goes_straight_both_ways_is_the_same_to_the_bit(tmp_path: Path, staging: str) -> None:
    given, counts = state(), Counts()
    with Checkpointer(
        str(tmp_path), run="a", sidecar=None, gds=counts.direct(), staging_bytes=RING, staging=staging
    ) as checkpointer:
        checkpointer.save(1, given).result(120)
    assert counts.written >= given["large"].nbytes - 4096
    assert_equal(restored(tmp_path, counts, given), given)
    assert counts.read >= given["large"].nbytes
    as_ever = zeros(given)
    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer:
        checkpointer.restore(as_ever)
    assert_equal(as_ever, given)
    with open_store(tmp_path) as store:
        assert check(store).clean


def test_damage_is_found_before_it_reaches_a_tensor(tmp_path: Path) -> None:
    given, counts = small(), Counts()
    dcp_saved(tmp_path, counts, given)
    flip(next((tmp_path / "packs").rglob("*.pack")), 7 * MIB)
    into = zeros(given)
    with pytest.raises(CheckpointException, match="step 1 of run a is damaged: tensor 'large'"):
        dcp.load(into, storage_reader=RepositoryReader(str(tmp_path), run="a", gds=counts.direct()))
    assert counts.read
    wrong = (into["large"] != given["large"]) & (into["large"] != 0)
    assert not wrong.any()  # every element is as it was, or as it was saved


def test_a_transfer_that_fails_at_restoring_is_made_through_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, counts = small(), Counts()
    dcp_saved(tmp_path, counts, given)
    counts.failing = 2
    with caplog.at_level(logging.WARNING):
        assert_equal(dcp_loaded(tmp_path, counts, given), given)
    assert counts.failing == 0  # the fault fired
    output = [line for line in caplog.messages if "reading through host memory" in line]
    why = "cuFileRead failed: GPUDirect Storage not supported"
    assert output == [f"cuFile could not read from {tmp_path}, reading through host memory: {why}"]
    assert counts.read  # and the others went straight


def test_a_transfer_that_fails_at_saving_fails_that_save_alone(tmp_path: Path) -> None:
    given, counts = state(), Counts()
    changed = state() | {"large": given["large"] + 1}
    with Checkpointer(str(tmp_path), run="a", sidecar=None, gds=counts.direct(), staging_bytes=RING) as checkpointer:
        checkpointer.save(1, given).result(120)
        counts.failing = 1
        with pytest.raises(
            TransientError, match="by cuFile failed: cuFileRead failed: GPUDirect Storage not supported"
        ):
            checkpointer.save(2, changed).result(120)
        assert counts.failing == 0
        assert_equal(restored(tmp_path, counts, given), given)
        checkpointer.save(3, changed).result(120)
        assert_equal(restored(tmp_path, counts, given), changed)


def test_dcp_goes_straight_by_one_argument(tmp_path: Path) -> None:
    given: dict[str, Any] = {"w": torch.randn(3 * MIB), "b": torch.randn(500, 30).t(), "n": 3}
    counts = Counts()
    dcp_saved(tmp_path, counts, given)
    assert counts.written == 12 * MIB + 4096 * (60_000 // 4096)
    into: dict[str, Any] = {"w": torch.zeros(3 * MIB), "b": torch.zeros(500, 30).t(), "n": 0}
    dcp.load(into, storage_reader=RepositoryReader(str(tmp_path), run="a", gds=counts.direct()))
    assert counts.read == 12 * MIB  # what is not contiguous goes through host memory
    assert torch.equal(into["w"], given["w"])
    assert torch.equal(into["b"], given["b"])


def test_a_tensor_of_which_other_ranks_send_a_part_goes_through_host_memory(tmp_path: Path) -> None:
    counts, given = Counts(), {"w": torch.randn(4 * MIB), "v": torch.randn(2 * MIB)}
    with Checkpointer(str(tmp_path), run="a", sidecar=None) as checkpointer:
        checkpointer.save(1, given).result(60)
    with open_store(tmp_path) as store:
        base = repository.find(store, "a", 1)
        assert base is not None
        with chunk_reader.LeasedStep(store, "a", base) as step:
            into = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
            saved = chunk_reader.tensors_of(step, 0)
            wants = [Want(saved[name], whole(tuple(t.shape)), TensorSink(t)) for name, t in into.items()]
            reading = chunk_reader.ChunkReader(step, wants)
            places = reading.needed()
            sent = next(place for place in places if [use.want for use in place[1].uses] == [0])
            rest = GdsStore(store, counts.direct()).read_directly(reading, [p for p in places if p is not sent])
            assert {use.want for _, chunk in rest for use in chunk.uses} == {0}
            assert counts.read == given["v"].nbytes
            reading.fetch(store, [*rest, sent])
    assert torch.equal(into["w"], given["w"])
    assert torch.equal(into["v"], given["v"])


def test_compressed_chunks_arrive_too(tmp_path: Path) -> None:
    given, counts = small() | {"counting": torch.arange(MIB)}, Counts()
    dcp_saved(tmp_path, counts, given, compression="zstd")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pack")) < 18 * MIB  # of 24
    into = dcp_loaded(tmp_path, counts, given)
    assert_equal(into, given)
    assert torch.equal(into["counting"], given["counting"])


def test_without_a_gpu_or_a_directory_one_line_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Bucket:
        location = type("L", (), {"url": "s3://bucket/ckpt"})

    with caplog.at_level(logging.WARNING):
        assert direct_for(Bucket(), True) is None  # type: ignore[arg-type]
        assert direct_for(Bucket(), False) is None  # type: ignore[arg-type]
    assert "s3://bucket/ckpt is no directory; copies go through host memory" in caplog.text
    if not torch.cuda.is_available():
        with open_store(tmp_path) as store:
            assert direct_for(store, True) is None
        with Checkpointer(str(tmp_path), run="a", sidecar=None, gds=True) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(9)}).result(60)


def test_the_gpu_drill_measures_saves_and_restores_that_go_straight(tmp_path: Path) -> None:
    from headrace.bench.drill import checkpoints as drill
    from headrace.bench.drill.result import PartResult

    part, counts = PartResult("gds", "GPUDirect Storage"), Counts()
    part.metric("save", "save", "GB/s")
    part.metric("restore", "restore", "GB/s")
    size, gds = RING + 4 * MIB, counts.direct()
    drill.save_and_restore(part, "cuFile", tmp_path, size, gds, device="cpu", rounds=1, staging_bytes=RING)
    assert counts.written >= size
    assert counts.read >= size
    assert [len(values) for values in part.candidates["cuFile"]["metrics"].values()] == [1, 1]


def test_slices_are_gathered_on_a_stream_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the trainer's stream each would wait for the steps that were queued meanwhile."""
    inside, seen = threading.local(), list[bool]()

    @contextlib.contextmanager
    def stream(_: torch.device) -> Iterator[None]:
        inside.yes = True
        yield
        inside.yes = False

    gather = saving.DeviceSlices._gather

    def spied(self: saving.DeviceSlices, *given: Any) -> None:
        seen.append(getattr(inside, "yes", False))
        gather(self, *given)

    monkeypatch.setattr(saving, "_new_stream", stream)
    monkeypatch.setattr(saving.DeviceSlices, "_gather", spied)
    with Checkpointer(str(tmp_path), run="a", sidecar=None, gds=Counts().direct(), staging_bytes=RING) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(RING + MIB, dtype=torch.uint8)}).result(60)
    assert seen
    assert all(seen)


def test_a_write_of_which_the_end_is_missing_is_made_again_and_commits_nothing_that_is_damaged(tmp_path: Path) -> None:
    counts, given = Counts(), torch.randn(RING // 4 + MIB)  # more than the ring holds
    counts.short = 1
    with Checkpointer(str(tmp_path), run="a", sidecar=None, gds=counts.direct(), staging_bytes=RING) as checkpointer:
        try:
            checkpointer.save(1, {"w": given}).result(60)
        except TransientError:
            assert checkpointer.steps() == []
            checkpointer.save(1, {"w": given}).result(60)
        assert not counts.short, "no write was cut short"
        into = {"w": torch.zeros_like(given)}
        checkpointer.restore(into)
    assert torch.equal(into["w"], given)


@pytest.mark.gpu
@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_a_gpu_saves_and_restores_by_what_the_probe_allows(tmp_path: Path, staging: str) -> None:
    given = state("cuda")
    with Checkpointer(
        str(tmp_path), run="a", sidecar=None, gds=True, staging_bytes=RING, staging=staging
    ) as checkpointer:
        checkpointer.save(1, given).result(120)
    into = zeros(given)
    with Checkpointer(str(tmp_path), run="a", sidecar=None, gds=True) as checkpointer:
        checkpointer.restore(into)
    assert_equal(into, given)
    with open_store(tmp_path) as store:
        assert check(store).clean
