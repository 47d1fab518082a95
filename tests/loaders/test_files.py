"""Files as they are stored: each of them, byte for byte, in the exact order, whatever else is in the dataset."""

from __future__ import annotations

import gc
import io
import random
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataio import index
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import FileLoader, Mixture
from headrace.loaders.batch.batch import JoinedBatch, Output
from headrace.loaders.batch.memory import BufferPool, MemoryBudget
from headrace.loaders.batch.prefetcher import batches_from
from headrace.loaders.batch.sample_builder import PlannedRead, SampleBuilder
from headrace.loaders.cancellation import Cancelled, cancelled_by
from headrace.loaders.fetch.sample_reader import SampleReader, StoreReader
from headrace.loaders.file_loader import FileProcessor
from headrace.loaders.interfaces import FetchedSample, SampleRef
from headrace.loaders.quarantine.quarantine import Quarantine

SAMPLES, SHARD = 40, 9
Make = Callable[..., FileLoader]


def files_of(number: int) -> dict[str, bytes]:
    """What sample `number` consists of; every seventh has no latents, and one has an empty file."""
    rng = random.Random(number)
    length = 0 if number == 3 else rng.randrange(1, 5_000)
    latents = {} if number % 7 == 6 else {"latents.npy": rng.randbytes(length)}
    return {"json": b'{"n": %d}' % number, **latents, "txt": f"sample {number}".encode()}


WITH_LATENTS = [number for number in range(SAMPLES) if "latents.npy" in files_of(number)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds shards/ and the dataset ds/."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "shards").mkdir()
    for first in range(0, SAMPLES, SHARD):
        with tarfile.open(folder / "shards" / f"{first:03}.tar", "w") as tar:
            for number in range(first, min(first + SHARD, SAMPLES)):
                for ext, data in files_of(number).items():
                    member = tarfile.TarInfo(f"{number:03}.{ext}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    index([str(folder / "shards")], str(folder / "ds")).close()
    return folder


@pytest.fixture
def make(packed: Path) -> Iterator[Make]:
    made = []

    def loader(source: Any = None, batch_size: int | None = 4, **options: Any) -> FileLoader:
        options = {
            "files": ["latents.npy", "json"],
            "sidecar": None,
            "num_threads": 2,
            "drop_last": False,
            "trust_mounts": True,
        } | options
        made.append(FileLoader(str(packed / "ds") if source is None else source, batch_size, **options))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def contents(batch: dict[str, Any]) -> list[tuple[str, list[bytes]]]:
    """Every sample's key and files, by the recipe of the documentation."""
    if batch["bytes"] is None:
        return []
    each = [bytes(part.numpy()) for part in batch["bytes"].split(batch["sizes"].flatten().tolist())]
    wide = batch["sizes"].shape[1]
    assert batch["bytes"].dtype == torch.uint8
    assert len(each) == wide * len(batch["key"])
    return [(key, each[n * wide : (n + 1) * wide]) for n, key in enumerate(batch["key"])]


def expected(key: str, *exts: str) -> list[bytes]:
    return [files_of(int(key))[ext] for ext in exts]


@pytest.mark.parametrize("exts", [("latents.npy", "json"), ("json", "txt", "latents.npy"), ("txt",)])
def test_an_epoch_holds_every_file_that_was_asked_for_once_and_byte_for_byte(make: Make, exts: tuple[str, ...]) -> None:
    found = [one for batch in make(files=list(exts)) for one in contents(batch)]
    assert all(files == expected(key, *exts) for key, files in found)
    complete = WITH_LATENTS if "latents.npy" in exts else list(range(SAMPLES))
    assert sorted(key for key, _ in found) == [f"{number:03}" for number in complete]


def test_the_files_of_an_evaluation_are_split_by_their_sizes(make: Make) -> None:
    batches = [batch for rank in range(2) for batch in make(evaluate=True, rank=rank, world_size=2)]
    found = [one for batch in batches for one in contents(batch)]
    assert sorted(key for key, _ in found) == [f"{number:03}" for number in WITH_LATENTS]
    assert all(files == expected(key, "latents.npy", "json") for key, files in found)
    assert {sum(batch["samples_per_rank"]) for batch in batches} <= {8, len(WITH_LATENTS) % 8}


def test_the_rest_of_an_epoch_is_the_same_on_another_world_size(make: Make) -> None:
    whole = [contents(batch) for batch in make(seed=3)]
    first = make(seed=3)
    reader = iter(first)
    for _ in range(3):
        next(reader)
    state = first.state_dict()
    ranks = [make(seed=3, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    for one in ranks:
        one.load_state_dict(state)
    rest = [contents(a) + contents(b) for a, b in zip(*ranks, strict=True)]
    assert rest == whole[3:]
    assert len(rest) == 6


def test_batches_that_are_looked_up_together_are_those_that_are_looked_up_one_by_one(make: Make) -> None:
    plan = make(batch_size=3)._plan
    assert plan.refs(1, range(2, 9)) == [plan.refs(1, range(n, n + 1))[0] for n in range(2, 9)]
    mixed = make(Mixture({"a": str(plan.datasets[0].url), "b": str(plan.datasets[0].url)}), batch_size=5)._plan
    assert mixed.refs(0, range(6)) == [mixed.refs(0, range(n, n + 1))[0] for n in range(6)]


def test_what_is_wrong_with_a_look_up_is_raised_where_its_batch_is_due(make: Make) -> None:
    class FailingPlan:
        """A plan that cannot say what batch 5 holds."""

        def batches_in(self, epoch: int) -> int:
            return plan.batches_in(epoch)

        def refs(self, epoch: int, batches: range) -> list[list[SampleRef]]:
            if 5 in batches:
                raise CorruptionError("torn")
            return plan.refs(epoch, batches)

    plan = make()._plan
    found = batches_from(FailingPlan(), 0, 0)
    assert [next(found) for _ in range(5)] == plan.refs(0, range(5))
    with pytest.raises(CorruptionError, match="torn"):
        next(found)


@pytest.mark.parametrize("exts", [["latents.npy", "json"], ["json", "latents.npy", "txt"]])
def test_a_sample_that_is_drawn_twice_is_twice_in_its_batch(make: Make, packed: Path, exts: list[str]) -> None:
    only = Dataset(str(packed / "ds"), trust_mounts=True).where("key in ('001', '002')")
    (batch,) = make(Mixture({"a": only, "b": only}, epoch_batches=1), batch_size=8, files=exts)
    found = contents(batch)
    assert sorted(key for key, _ in found) == ["001"] * 4 + ["002"] * 4
    assert all(files == expected(key, *exts) for key, files in found)


def test_what_is_known_ahead_is_nothing_that_the_garbage_collector_looks_through(make: Make) -> None:
    """Thousands of objects a second, each held for some batches, had it look through everything that torch has made."""
    loader = make()
    refs = [ref for batch in loader._plan.refs(0, range(3)) for ref in batch]
    located = FileProcessor(["json"]).layout.files_of
    assert located is not None
    files = [located(ref.sample) for ref in refs]
    made = FileProcessor(["json"]).process(
        [FetchedSample(ref, {}, files=one) for ref, one in zip(refs, files, strict=True)]
    )
    reads = [PlannedRead({"json": None}, 1) for _ in refs]
    for one in (*refs, *(ref.sample for ref in refs), *files, *made, *reads):
        assert not gc.is_tracked(one)


def test_batches_that_are_kept_stay_as_they_were(make: Make) -> None:
    kept = list(make())
    assert sorted(key for batch in kept for key, _ in contents(batch)) == [f"{number:03}" for number in WITH_LATENTS]
    assert all(files == expected(key, "latents.npy", "json") for batch in kept for key, files in contents(batch))


@pytest.mark.parametrize("in_place", [True, False])
def test_of_a_slow_store_nothing_more_is_read_once_a_loader_closes(make: Make, in_place: bool) -> None:
    loader, closing, read = make(batch_size=8), threading.Event(), []

    class SlowReader(StoreReader):
        def read(self, key: str, ranges: Any) -> list[memoryview]:
            read.append(key)
            closing.set()
            return super().read(key, ranges)

        def read_into(self, key: str, pieces: Any) -> None:
            read.append(key)
            closing.set()
            super().read_into(key, pieces)

    work, store, output = loader._start_processor(), loader.dataset.store, Output(torch.device("cpu"), pinned=False)
    joined = work.layout.files_of
    assert joined is not None
    (refs,) = loader._plan.refs(0, range(1))
    batch = JoinedBatch(
        [joined(one.sample) for one in refs], layout=work.layout, output=output, buffers=BufferPool(output.device)
    )
    targets = batch.targets(range(8)) if in_place else [None] * 8
    builder = SampleBuilder(
        loader._plan,
        work,
        [SampleReader(SlowReader(store), store)],
        quarantine=Quarantine(0),
        memory=MemoryBudget(1 << 20),
    )
    planned = builder.plan(refs)
    with cancelled_by(closing), pytest.raises(Cancelled):
        builder.build(refs, targets, planned.reads)
    assert len(read) == 1


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    """The dataset with one bit of sample 011's latents turned over."""
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    shutil.rmtree(folder / "ds")
    index([str(folder / "shards")], str(folder / "ds")).close()
    with Dataset(str(folder / "ds"), trust_mounts=True) as dataset:
        member = dataset.find("011").member("latents.npy")
    with (folder / "shards" / "009.tar").open("r+b") as tar:
        tar.seek(member.offset)
        (byte,) = tar.read(1)
        tar.seek(member.offset)
        tar.write(bytes([byte ^ 1]))
    return folder / "ds"


def test_another_sample_of_another_length_stands_in_for_a_damaged_one(make: Make, damaged: Path) -> None:
    loader = make(str(damaged), max_bad_samples=1)
    batches = list(loader)
    found = [one for batch in batches for one in contents(batch)]
    assert all(files == expected(key, "latents.npy", "json") for key, files in found)
    (refusal,) = loader.quarantine
    assert refusal.key == "011"
    assert "not those that were packed" in refusal.reason
    assert len(found) == len(WITH_LATENTS)
    assert "011" not in {key for key, _ in found}


def test_a_damaged_sample_can_be_left_out(make: Make, damaged: Path) -> None:
    loader = make(str(damaged), max_bad_samples=1, on_error="skip")
    found = [one for batch in loader for one in contents(batch)]
    assert all(files == expected(key, "latents.npy", "json") for key, files in found)
    assert sorted(key for key, _ in found) == [f"{number:03}" for number in WITH_LATENTS if number != 11]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "json"}, "not a list of extensions"),
        ({"files": []}, "not a list of extensions"),
        ({"files": ["json", ""]}, "cannot hold ''"),
        ({"files": ["json", ".json"]}, "twice"),
        ({"files": ["json", "flac"]}, r"no sample with \.json, \.flac \(there are: \.json, \.latents\.npy, \.txt\)"),
        ({"transform": lambda tensors, generator: tensors}, "decodes nothing"),
        ({"decode_in_subprocess": True}, "decodes nothing"),
        ({"columns": ["sizes"]}, "columns cannot hold 'sizes'"),
    ],
)
def test_impossible_options_are_refused_with_the_reason(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)
