"""Batches from an S3 server whose answers are cut, reset, refused, changed or never end: exact, or one clear error."""

from __future__ import annotations

import contextlib
import random
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.dataio import Dataset, open_store, pack
from headrace.dataio.core.errors import SlowDownError
from headrace.dataio.store.retry import Policy, Retry
from headrace.dataio.store.s3 import S3Store
from headrace.dataio.store.s3_config import parse
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from headrace.loaders import FileLoader

pytestmark = pytest.mark.s3
SAMPLES, BATCH = 24, 4
POLICY = Policy(attempts=6, first=0.01, longest=0.05)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clips/ and a dataset of them, ds/, of several shards."""
    folder = tmp_path_factory.mktemp("distant")
    (folder / "clips").mkdir()
    for number in range(SAMPLES):
        with wave.open(str(folder / "clips" / f"{number:02}.wav"), "wb") as out:
            out.setparams((1, 2, 8000, 0, "NONE", ""))
            out.writeframes(random.Random(number).randbytes(60_000))
    pack([str(folder / "clips")], str(folder / "ds"), shard_bytes=400_000).close()
    return folder


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def url(recordings: Path, s3_url: str) -> str:
    """The dataset on the server."""
    with open_store(s3_url) as target:
        for path in (recordings / "ds").glob("*/*.*"):
            target.put(str(path.relative_to(recordings / "ds")), path.read_bytes())
    return s3_url


@pytest.fixture
def loader(url: str, proxy: FaultProxy) -> Iterator[FileLoader]:
    """One that reads it through the proxy, and waits 0.7 seconds for an answer."""
    options = {"endpoint_url": proxy.endpoint, "config_kwargs": {"read_timeout": 0.7, "connect_timeout": 5}}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Retry(S3Store(parse(url, options)), POLICY))
        dataset = stack.enter_context(Dataset(store))
        yield stack.enter_context(
            FileLoader(dataset, BATCH, files=["wav"], sidecar=None, num_threads=2, drop_last=False)
        )


def read(loader: FileLoader) -> dict[str, bytes]:
    """Every sample's bytes, by its key."""
    found = dict[str, bytes]()
    for batch in loader:
        assert not set(batch["key"]) & set(found)
        each = torch.split(batch["bytes"], batch["sizes"].flatten().tolist())
        found |= {key: data.numpy().tobytes() for key, data in zip(batch["key"], each, strict=True)}
    return found


@pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.REFUSE])
def test_batches_are_exact_whatever_happens_to_an_answer(
    recordings: Path, loader: FileLoader, proxy: FaultProxy, fault: Fault
) -> None:
    times = 1 if fault is Fault.FLIP_BIT else 2  # what is wrong twice is taken for damage
    proxy.inject(fault, times=times, method="GET", path="/shards/")
    found = read(loader)
    assert proxy.fired == {fault: times}
    assert found == {path.stem: path.read_bytes() for path in (recordings / "clips").iterdir()}
    assert not loader.quarantine


def test_a_store_that_stays_overloaded_is_one_error_and_the_loader_goes_on_where_it_was(
    recordings: Path, loader: FileLoader, proxy: FaultProxy
) -> None:
    proxy.inject(Fault.SLOW_DOWN, times=10**6, method="GET", path="/shards/")
    with pytest.raises(SlowDownError, match=r"gave up after 6 attempts"):
        next(iter(loader))
    assert proxy.fired[Fault.SLOW_DOWN] >= POLICY.attempts
    assert loader.state_dict()
    proxy.forget()
    assert read(loader) == {path.stem: path.read_bytes() for path in (recordings / "clips").iterdir()}


def test_the_first_batch_takes_four_round_trips_and_no_object_is_asked_after(
    url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    with FileLoader(url, BATCH, files=["wav"], sidecar=None, num_threads=2) as loader:
        next(iter(loader))
        first = [_kind(request.path) for request in proxy.requests]
        assert first[: 3 + BATCH] == ["list-type=2", "/versions/", "/index/"] + ["/shards/"] * BATCH
        assert all(len(batch["key"]) == BATCH for batch in loader)
    assert {request.method for request in proxy.requests} == {"GET"}


def _kind(path: str) -> str:
    return next(kind for kind in ("list-type=2", "/versions/", "/index/", "/shards/") if kind in path)
