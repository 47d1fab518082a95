"""`headrace bench resume`: measures how fast and how exactly loaders resume in the middle of an epoch.

It also measures the size of the state. Every candidate reads the same small clips in shuffled batches of 8 and decodes
them. Headrace uses its own decoder. The peers use plain PyAV in the reading process, as their documentation shows. The
lower bound ("floor") opens the same dataset, then looks up, reads and decodes the next samples one after the other,
without threads.

Invariant: a candidate delivers one epoch, and keeps its state and the ids of the next batches at 50 % and at 99 %. Then
a new loader in the same process loads that state, after a round trip through JSON, and is timed until its first batch.
Imports do not count. The resume is exact if the next batches have the same ids.

Failure behaviour: an exception ends the candidate's process, and `headrace.bench.core.measure` reports it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.data import write_video
from headrace.bench.core.measure import Candidate, alternate, command_of
from headrace.bench.core.results import Metric, Part
from headrace.dataio import Dataset, index
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.errors import UsageError

CLIPS, DISTINCT, BATCH, AFTER = 4000, 16, 8, 3
OURS, TORCHDATA, LITDATA, MOSAIC = "headrace", "torchdata StatefulDataLoader", "litdata", "mosaicml-streaming"
FLOOR = "floor"
METRICS = {
    "before_read_50_ms": Metric("to the first read, 50 %, ms", "ms"),
    "before_read_99_ms": Metric("99 %, ms", "ms", group="to the first read"),
    "resume_50_ms": Metric("open, load, first batch, 50 %, ms", "ms"),
    "resume_99_ms": Metric("99 %, ms", "ms", group="open, load, first batch"),
    "state_bytes": Metric("state, bytes", "B"),
    "exact": Metric("exact", "", "higher"),
}


class Loader(Protocol):
    """The methods that all candidates have."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...

    def __iter__(self) -> Iterator[Any]: ...


@benchmark(
    "resume",
    "Resuming in the middle of an epoch, compared with other loaders.",
    argument("--clips", type=positive_int, default=CLIPS, help="in the dataset (default: %(default)s)"),
    argument("--mosaic-python", metavar="PATH", help="the interpreter of an environment with mosaicml-streaming"),
)
def resume(job: Job, part: Part) -> None:
    """Write the clips in the format of each candidate, and measure all candidates in turn."""
    clips, folder = job.args.clips, str(job.scratch)
    if clips // BATCH <= AFTER:
        raise UsageError(f"{clips} clips are too few to resume", hint=f"--clips {BATCH * (AFTER + 1)} or more")
    job.progress("making clips", 0)
    prepare(job.scratch, clips)
    pythons = {OURS: "", TORCHDATA: "", LITDATA: "", FLOOR: ""}
    if importlib.util.find_spec("litdata") is None:
        del pythons[LITDATA]
    if job.args.mosaic_python:
        pythons[MOSAIC] = job.args.mosaic_python
    part.title = f"Resume: {clips} small clips, shuffled, batches of {BATCH}, local disk"
    part.settings = {"clips": clips, "batch": BATCH, "compared batches": AFTER}
    part.metrics, part.against = METRICS, TORCHDATA
    for peer in (LITDATA, MOSAIC):
        if peer in pythons:
            _convert(peer, folder, pythons[peer])
    module = "headrace.bench.workloads.resume"
    candidates = [
        Candidate(name, f"{module}:measure", (name, folder), python=python) for name, python in pythons.items()
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)


def prepare(folder: Path, count: int) -> None:
    """Write `count` clips of two frames into four tars, and index them in place."""
    clips = [_clip(number) for number in range(DISTINCT)]
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(count // 4):
                header = tarfile.TarInfo(f"{shard}-{number:05}.avi")
                header.size = len(clips[number % DISTINCT])
                tar.addfile(header, io.BytesIO(clips[number % DISTINCT]))
    index(f"{folder}/*.tar", folder / "ds").close()


def measure(candidate: str, where: str) -> dict[str, float]:
    """Measure one candidate: the first epoch, then both resumes."""
    makers = {OURS: _headrace, TORCHDATA: _torchdata, LITDATA: _litdata, MOSAIC: _mosaic, FLOOR: _Floor}
    make: Callable[[Path], Loader] = makers[candidate]
    folder = Path(where)
    batches = _count(folder) // BATCH
    marks = {percent: min(batches * percent // 100, batches - AFTER) for percent in (50, 99)}
    with _closed(make(folder)) as loader:
        states, following = _walk(loader, set(marks.values()))
    del loader
    figures: dict[str, float] = {"exact": 1.0, "state_bytes": max(map(len, states.values()))}
    for percent, batch in marks.items():
        ids = _resume(lambda: make(folder), states[batch], figures, percent)
        figures["exact"] = min(figures["exact"], float(ids == following[batch]))
    return figures


def _resume(make: Callable[[], Loader], state: str, figures: dict[str, float], percent: int) -> list[list[int]]:
    """Resume from `state`, add the times to `figures`, and return the ids of the first batches."""
    began = time.perf_counter()
    with _closed(make()) as loader:
        loader.load_state_dict(json.loads(state))
        batches = iter(loader)
        ids = [_ids(next(batches))]
        figures[f"resume_{percent}_ms"] = (time.perf_counter() - began) * 1e3
        if _READS:
            figures[f"before_read_{percent}_ms"] = (_READS[-1] - began) * 1e3
        return ids + [_ids(next(batches)) for _ in range(AFTER - 1)]


@contextlib.contextmanager
def _closed(loader: Loader) -> Iterator[Loader]:
    """Close the loader and end its threads after the block, so that no other measurement includes this."""
    try:
        yield loader
    finally:
        if isinstance(loader, AbstractContextManager):  # ours; the peers have nothing to close
            loader.__exit__(None, None, None)


def _count(folder: Path) -> int:
    with Dataset(str(folder / "ds"), trust_mounts=True) as dataset:
        return len(dataset)


def _walk(loader: Loader, marks: set[int]) -> tuple[dict[int, str], dict[int, list[list[int]]]]:
    """Deliver one epoch. Return the states after `marks` batches, and the ids of the batches that follow each."""
    states, ids = dict[int, str](), list[list[int]]()
    for number, batch in enumerate(loader, 1):
        ids.append(_ids(batch))
        if number in marks:
            states[number] = json.dumps(loader.state_dict())
    return states, {mark: ids[mark : mark + AFTER] for mark in marks}


def _ids(batch: Any) -> list[int]:
    return [int(one) for one in batch["id"]]


_READS: list[float] = []
"""The time of the first read of each Headrace loader of this process."""


def _decoded(data: bytes) -> Any:
    """Decode the clip: uint8 (2, 16, 16, 3)."""
    import av
    import numpy as np

    with av.open(io.BytesIO(data), "r") as container:
        container.streams.video[0].codec_context.thread_count = 1
        frames = [
            one.reformat(16, 16, "rgb24").to_ndarray()
            for one, _ in zip(container.decode(video=0), range(2), strict=False)
        ]
    return np.stack(frames)


def _headrace(folder: Path) -> Loader:
    import headrace.loaders.loader as loader_module
    from headrace.loaders import Clip, VideoLoader
    from headrace.loaders.fetch.sample_reader import StoreReader

    class Timed(StoreReader):
        def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
            if self not in readers:
                readers.append(self)
                _READS.append(time.perf_counter())
            return super().read(key, ranges)

    readers: list[Timed] = []
    vars(loader_module)["open_shard_reader"] = lambda store, *_: Timed(store)
    return VideoLoader(str(folder / "ds"), BATCH, clip=Clip(2), size=(16, 16), seed=1, num_threads=2, trust_mounts=True)


class _Floor:
    """The floor: samples in a shuffled order, read one after the other, without threads or prefetching."""

    def __init__(self, folder: Path) -> None:
        self._dataset, self._at = Dataset.open_lazy(str(folder / "ds"), trust_mounts=True), 0

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._at}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._at = state["batch"]

    def __iter__(self) -> Iterator[Any]:
        import numpy as np

        order = np.random.default_rng(1).permutation(len(self._dataset))
        while (self._at + 1) * BATCH <= len(order):
            ids = order[self._at * BATCH : (self._at + 1) * BATCH].tolist()
            self._at += 1
            samples = self._dataset.samples(ids)
            yield {"id": ids, "data": [_decoded(self._dataset.read(one, "avi")) for one in samples]}


def _torchdata(folder: Path) -> Loader:
    """Make torchdata's loader: samples by number, in torch's shuffled order."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Members(torch.utils.data.Dataset[dict[str, Any]]):
        def __init__(self) -> None:
            self.dataset = Dataset(str(folder / "ds"), trust_mounts=True)

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"id": number, "data": _decoded(self.dataset.read(self.dataset.sample(number), "avi"))}

    torch.manual_seed(1)
    loader: Loader = StatefulDataLoader(Members(), BATCH, shuffle=True, drop_last=True)
    return _Encoded(loader)


class _Encoded:
    """Encodes a state that contains tensors as JSON."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def state_dict(self) -> dict[str, Any]:
        import base64
        import pickle

        return {"pickled": base64.b64encode(pickle.dumps(self._inner.state_dict())).decode()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        import base64
        import pickle

        self._inner.load_state_dict(pickle.loads(base64.b64decode(state["pickled"])))  # noqa: S301 (our own, a moment ago)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)


def _litdata(folder: Path) -> Loader:
    import litdata
    from torch.utils.data import default_collate

    def collate(samples: Sequence[dict[str, Any]]) -> Any:
        return default_collate([{"id": one["id"], "data": _decoded(one["data"])} for one in samples])

    dataset = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, seed=1, drop_last=True)
    loader: Loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, collate_fn=collate)
    return loader


def _mosaic(folder: Path) -> Loader:
    from torch.utils.data import default_collate

    streaming: Any = importlib.import_module("streaming")

    def collate(samples: Sequence[dict[str, Any]]) -> Any:
        return default_collate([{"id": one["id"], "data": _decoded(one["data"])} for one in samples])

    local = folder / f"mosaic-{time.monotonic_ns()}"  # it accepts each folder only once in a process
    local.symlink_to(folder / MOSAIC)
    options = {"shuffle_seed": 1, "num_canonical_nodes": 1, "batch_size": BATCH}
    dataset = streaming.StreamingDataset(local=str(local), shuffle=True, **options)
    loader: Loader = streaming.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, collate_fn=collate)
    return loader


def _convert(peer: str, folder: str, python: str) -> None:
    """Write the same samples in the peer's own format, with an interpreter that has the peer installed."""
    quiet = {**os.environ, "LITDATA_DISABLE_VERSION_CHECK": "1"}
    command = command_of("headrace.bench.workloads.resume:convert", peer, folder, python=python)
    subprocess.run(command, env=quiet, check=True, capture_output=True)


def convert(peer: str, folder: str) -> None:
    """Write the samples of `folder`/ds in the peer's format, in its own process."""
    {LITDATA: _to_litdata, MOSAIC: _to_mosaic}[peer](Path(folder))


def _to_litdata(folder: Path) -> None:
    from headrace.bench.peers.source import write_litdata

    write_litdata(_Read(str(folder / "ds")), list(range(_count(folder))), folder / LITDATA, "1MB")


def _to_mosaic(folder: Path) -> None:
    streaming: Any = importlib.import_module("streaming")
    rows, columns = _Read(str(folder / "ds")), {"id": "int", "data": "bytes"}
    with streaming.MDSWriter(out=str(folder / MOSAIC), columns=columns, size_limit=1_000_000) as out:
        for number in range(_count(folder)):
            out.write(rows(number))


class _Read:
    """Maps a sample number to a row for a peer. Each worker opens the dataset itself."""

    def __init__(self, url: str) -> None:
        self._url = url

    @cached_property
    def _dataset(self) -> Dataset:
        return Dataset(self._url, trust_mounts=True)

    def __call__(self, number: int) -> dict[str, Any]:
        return {"id": number, "data": self._dataset.read(self._dataset.sample(number), "avi")}


def _clip(number: int) -> bytes:
    """Encode two frames as MJPEG."""
    import numpy as np

    target, rngs = io.BytesIO(), [np.random.default_rng([number, frame]) for frame in range(2)]
    pictures = (rng.integers(0, 255, (32, 32, 3), np.uint8) for rng in rngs)
    write_video(target, "mjpeg", pictures, pixel_format="yuvj420p", container="avi")
    return target.getvalue()
