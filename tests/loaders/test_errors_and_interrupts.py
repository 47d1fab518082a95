"""What goes wrong, or is interrupted, on the way to the trainer leaves the loader before that batch, and nothing begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import Clip, VideoLoader
from headrace.loaders import loader as loader_module
from headrace.loaders.batch.batch import Batch
from headrace.loaders.batch.prefetcher import Prefetcher
from headrace.loaders.fetch.sample_reader import StoreReader
from headrace.loaders.sampling.plan import OrderPlan
from tests.support.waiting import wait_for

Make = Callable[..., VideoLoader]


@pytest.fixture
def make(made_dataset: Dataset) -> Iterator[Make]:
    made = []

    def loader(source: Any = made_dataset) -> VideoLoader:
        options: dict[str, Any] = {"clip": Clip(2, per_video=3), "size": (16, 16), "seed": 9, "sidecar": None}
        made.append(VideoLoader(source, 4, num_threads=2, **options))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def some(loader: VideoLoader, count: int) -> list[tuple[list[int], list[float]]]:
    return [(batch["id"].tolist(), batch["clip"].tolist()) for _, batch in zip(range(count), loader, strict=False)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(("where", "name"), [(Batch, "tensors"), (OrderPlan, "about"), (Prefetcher, "plan")])
def test_a_batch_that_does_not_reach_the_trainer_is_delivered_again(
    make: Make, where: Any, name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, loader = some(make(), 5), make()
    before = some(loader, 2)
    state = loader.state_dict()

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        with pytest.raises(error):
            next(iter(loader))
    assert loader.state_dict() == state
    assert before + some(loader, 3) == whole


def test_closing_lets_go_of_everything_although_a_part_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make()
    some(loader, 1)
    assert loader._prefetcher is not None
    work, (source,) = loader._prefetcher._builder._processor, loader._prefetcher._builder._readers
    closed: list[object] = []
    monkeypatch.setattr(work, "close", lambda: 1 / 0)
    monkeypatch.setattr(source, "close", lambda: closed.append(source))
    monkeypatch.setattr(loader, "_close_datasets", lambda: closed.append(loader))
    with pytest.raises(ZeroDivisionError):
        loader.close()
    assert closed == [source, loader]


def test_a_loader_whose_end_was_interrupted_can_go_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, loader = some(make(), 5), make()
    some(loader, 2)
    state = loader.state_dict()
    assert loader._prefetcher is not None
    prefetcher = loader._prefetcher._executor
    real, threads = prefetcher.close, list(prefetcher._pool._threads)

    def interrupted() -> None:
        real()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loader.load_state_dict(state)
    assert some(loader, 3) == whole[2:]
    wait_for(lambda: not any(thread.is_alive() for thread in threads))


def test_a_thread_that_waits_while_the_loader_closes_gets_no_partial_batch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    class SlowReader(StoreReader):
        def read(self, key: str, ranges: Any) -> list[memoryview]:
            begun.set()
            assert go.wait(60)
            return super().read(key, ranges)

    monkeypatch.setattr(loader_module, "open_shard_reader", lambda store, *_: SlowReader(store))
    loader = make()

    def close() -> None:
        assert begun.wait(60)
        ahead = loader._prefetcher
        assert ahead is not None
        stop = ahead._executor.stop
        monkeypatch.setattr(ahead._executor, "stop", lambda: (stop(), go.set()))
        loader.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(UsageError, match="the loader is closed"):
        next(iter(loader))
    closing.join(60)
    assert loader.state_dict()["batch"] == 0
