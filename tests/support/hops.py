"""Counts the modules and functions of this project that one save, one steady batch and one ranged GET pass.

`python -m tests.support.hops` prints one line each. A function counts once, whatever the thread; a call counts each time.
docs/design/0034 has the counts before and after the rooms were rebuilt.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("dataio", "loaders", "checkpoint", "bench", "headrace"))


class Hops:
    """What ran of this project while it was watched: in the main thread, and in all threads that started after `Hops()`."""

    def __init__(self, repeated: int = 1) -> None:
        """`repeated` is how often the operation runs while it is watched. Calls are given for one time."""
        self.calls: dict[CodeType, int] = {}
        self.repeated = repeated
        threading.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.calls[frame.f_code] = self.calls.get(frame.f_code, 0) + 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        self.calls = {}
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.calls = dict(self.calls)

    def __str__(self) -> str:
        ours = {code: n for code, n in self.calls.items() if code.co_filename.startswith(PACKAGES)}
        ours = {code: n for code, n in ours.items() if code.co_name != "<module>"}
        modules = {os.path.realpath(code.co_filename) for code in ours}
        return f"{len(modules)} modules, {len(ours)} functions, {sum(ours.values()) // self.repeated} calls"


def save(folder: Path) -> Hops:
    """The second eager save of a small model and its optimizer to a directory, until it is committed, without a daemon."""
    import torch

    from headrace.checkpoint import Checkpointer

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    hops, state = Hops(), {"model": model, "optimizer": optimizer, "step": 1}
    with Checkpointer(str(folder / "repository"), run="hops", sidecar=None) as checkpointer:
        checkpointer.save(1, state).result()
        with torch.no_grad():
            model.weight.add_(1)
        with hops.watch():
            checkpointer.save(2, state).result()
    return hops


def batch(folder: Path) -> Hops:
    """A batch of a video loader on a directory of clips, on average over the third epoch."""
    from headrace.bench.core.data import make_clip
    from headrace.dataio import pack
    from headrace.loaders import Clip, VideoLoader

    for n in range(48):
        make_clip(folder / "clips", n)
    pack(folder / "clips", folder / "dataset", workers=1)
    hops = Hops(repeated=24)
    options: dict[str, Any] = {"clip": Clip(4), "size": (32, 32), "num_threads": 1, "sidecar": None}
    with VideoLoader(folder / "dataset", 2, **options) as loader:
        batches = iter(forever(loader))
        for _ in range(48):
            next(batches)
        with hops.watch():
            for _ in range(24):
                next(batches)
    return hops


def forever(loader: Iterable[object]) -> Iterator[object]:
    while True:
        yield from loader


def get(folder: Path) -> Hops:
    """A ranged GET from a real S3 server, on a connection that is open."""
    from headrace.dataio.store.open import open_store
    from headrace.dataio.testing.s3_server import start_seaweedfs

    hops = Hops()
    with start_seaweedfs() as server:
        server.create_bucket("hops")
        os.environ.update(server.environment())
        with open_store("s3://hops/folder") as store:
            store.put("key", bytes(1 << 20))
            into = memoryview(bytearray(4096))
            for _ in range(3):
                store.get_into("key", 0, into)
            with hops.watch():
                store.get_into("key", 4096, into)
    return hops


JOURNEYS: dict[str, Callable[[Path], Hops]] = {"save": save, "batch": batch, "get": get}

if __name__ == "__main__":
    for name in sys.argv[1:] or JOURNEYS:
        with tempfile.TemporaryDirectory(prefix="hops-") as scratch:
            print(f"{name}: {JOURNEYS[name](Path(scratch))}", flush=True)
        threading.setprofile(None)
