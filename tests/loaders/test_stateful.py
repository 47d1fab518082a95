"""The loader where others keep states: torchdata's `Stateful` and `StatefulDataLoader`, and torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful import Stateful

from headrace.checkpoint import RNG, Checkpointer
from headrace.dataio.core.errors import MismatchError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Clip, Mixture, VideoLoader
from headrace.loaders.sampling import state as states
from tests.support.batches import take
from tests.support.latents import latent_loader, latents_url

pytestmark = pytest.mark.slow

Make = Callable[..., VideoLoader]
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def make(made_dataset: Dataset) -> Iterator[Make]:
    made = []

    def loader(source: Any = made_dataset, batch_size: int = 4, **options: Any) -> VideoLoader:
        settings: dict[str, Any] = {
            "clip": Clip(2, per_video=3),
            "size": (16, 16),
            "seed": 9,
            "sidecar": None,
            "num_threads": 1,
        }
        made.append(VideoLoader(source, batch_size, prefetch_batches=3, **(settings | options)))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def some(batches: Any, count: int) -> list[tuple[list[int], list[float]]]:
    return [(batch["id"].tolist(), batch["clip"].tolist()) for _, batch in zip(range(count), batches, strict=False)]


def test_a_loader_is_stateful(make: Make) -> None:
    assert isinstance(make(), Stateful)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_stateful_dataloader_resumes_at_the_very_next_batch(make: Make, stop: int) -> None:
    whole = some(make(), 6)
    first = StatefulDataLoader(make(), batch_size=None)
    before = some(first, stop)
    second = StatefulDataLoader(make(), batch_size=None)
    second.load_state_dict(first.state_dict())
    assert before + some(second, 6 - stop) == whole


def test_a_plain_dataloader_passes_batches_through(make: Make) -> None:
    assert some(DataLoader(make(), batch_size=None), 6) == some(make(), 6)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_dataloader_with_a_batch_size_is_refused_with_a_hint(make: Make, kind: Any, batch_size: int) -> None:
    with pytest.raises(UsageError, match="batches of batches") as caught:
        next(iter(kind(make(), batch_size=batch_size)))
    assert "batch_size=None" in caught.value.hint
    (only,) = next(iter(kind(make(), batch_size=1, collate_fn=list)))  # a collate_fn of the caller is used as it is
    assert set(only) >= {"video", "key"}


def test_a_loader_that_is_older_than_its_world_does_not_read_everything_on_every_rank(make: Make) -> None:
    older, ranked = make(), make(rank=0, world_size=1)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        with pytest.raises(UsageError, match="now there are 2") as caught:
            next(iter(older))
        assert "train_dataloader" in caught.value.hint
        assert len(some(ranked, 6)) == 6
        assert len(next(iter(make(batch_size=2)))["key"]) == 2
    finally:
        dist.destroy_process_group()
    assert len(some(older, 6)) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_dataloader_are_refused(make: Make, kind: Any, start: str) -> None:
    with pytest.raises(UsageError, match="num_threads=") as caught:
        next(iter(kind(make(), batch_size=None, num_workers=1, multiprocessing_context=start)))
    assert "num_workers=0" in str(caught.value)


def test_a_loader_is_not_copied(make: Make) -> None:
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="it decodes in its own threads"):
            copying(make())


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> str:
    return latents_url(tmp_path_factory)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stop", [1, 4, 6, 7, 12])
def test_a_stateful_dataloader_keeps_the_state_that_the_loader_alone_has(latents: str, stop: int) -> None:
    """Steps 6 and 12 are ends of epochs, before the loop has found that nothing is left."""
    with latent_loader(latents) as alone, latent_loader(latents) as inner, latent_loader(latents) as resumed:
        whole = [batch["key"] for batch in take(alone, stop)]
        first, second = StatefulDataLoader(inner, batch_size=None), StatefulDataLoader(resumed, batch_size=None)
        seen = [batch["key"] for batch in take(first, stop)]
        state = first.state_dict()
        assert alone.state_dict() in (state["dataset_state"], state["fetcher_state"]["dataset_iter_state"])
        second.load_state_dict(json.loads(json.dumps(state)))
        assert seen + [batch["key"] for batch in take(second, 8)] == whole + [batch["key"] for batch in take(alone, 8)]


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0), torch.device("cpu")], ids=str)
def test_the_cpu_may_have_a_number(latents: str, device: Any) -> None:
    with latent_loader(latents, device=device) as loader:
        assert next(iter(loader))["latent"].device == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_dataloader_goes_on_with_the_next_epoch_after_a_finished_one(latents: str) -> None:
    with latent_loader(latents) as alone, latent_loader(latents) as inner, latent_loader(latents) as resumed:
        epochs = [[batch["key"] for batch in alone] for _ in range(3)]
        first, second = StatefulDataLoader(inner, batch_size=None), StatefulDataLoader(resumed, batch_size=None)
        assert [batch["key"] for batch in first] == epochs[0]
        second.load_state_dict(first.state_dict())
        assert [[batch["key"] for batch in second] for _ in range(2)] == epochs[1:]


@alone
@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_goes_through_torch_distributed_checkpoint(
    make: Make, made_dataset: Dataset, tmp_path: Path, mixed: bool
) -> None:
    source = Mixture({"a": made_dataset, "b": made_dataset}, weights={"a": 1, "b": 3}) if mixed else made_dataset
    loader, weight = make(source), torch.arange(4.0)
    before = some(loader, 4)
    dcp.save({"loader": loader, "weight": weight}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other, empty = make(source), torch.zeros(4)
    dcp.load({"loader": other, "weight": empty}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(empty, weight)
    assert other.state_dict() == loader.state_dict()
    assert before + some(other, 2) == some(make(source), 6)


@alone
def test_a_state_that_became_shorter_goes_where_states_are_kept(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, first, second = make(), make(), make()
    before = some(loader, 4)
    with monkeypatch.context() as shorter, Checkpointer(tmp_path / "ckpt", run="one", sidecar=None) as checkpointer:
        shorter.setattr(states, "MAX_BYTES", 0)  # as far into a run as takes digests for clip and order
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        checkpointer.save(4, {"loader": loader}).result()
    with Checkpointer(tmp_path / "ckpt", run="one", sidecar=None) as checkpointer:
        assert checkpointer.restore({"loader": first}) == 4
    dcp.load({"loader": second}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    whole = some(make(), 6)
    assert before + some(first, 2) == before + some(second, 2) == whole


@alone
def test_a_quarantine_goes_through_torch_distributed_checkpoint(make: Make, tmp_path: Path) -> None:
    loader = make()
    loader.load_state_dict(loader.state_dict() | {"quarantine": [3, 5]})
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = make()
    dcp.load({"loader": other}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert other.state_dict()["quarantine"] == [3, 5]


def test_a_state_goes_through_our_own_checkpoints(make: Make, tmp_path: Path) -> None:
    loader = make()
    before = some(loader, 5)
    with Checkpointer(tmp_path / "ckpt", run="one", sidecar=None) as checkpointer:
        checkpointer.save(5, {"loader": loader}).result()
        other = make()
        assert checkpointer.restore({"loader": other}) == 5
    assert before + some(other, 1) == some(make(), 6)


def test_a_loader_that_does_not_fit_leaves_the_whole_state_as_it_was(make: Make, tmp_path: Path) -> None:
    def trained(loader: VideoLoader, rate: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=int(1 / rate))
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "rng": RNG()}

    loader = make()
    some(loader, 3)
    with Checkpointer(tmp_path / "ckpt", run="one", sidecar=None) as checkpointer:
        checkpointer.save(3, trained(loader, 0.5)).result()
        into = trained(make(batch_size=2), 0.25)
        before = str({name: part.state_dict() for name, part in into.items()})
        with pytest.raises(MismatchError, match=r"^loader: the loader's global_batch was 4") as caught:
            checkpointer.restore(into)
        assert 'restore(..., force="loader")' in (caught.value.hint or "")
        assert str({name: part.state_dict() for name, part in into.items()}) == before
        assert checkpointer.restore(into, force="loader") == 3
    assert into["optimizer"].param_groups[0]["initial_lr"] == 0.5
    assert into["loader"].state_dict()["batch"] == 6
