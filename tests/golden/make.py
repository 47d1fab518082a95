"""Writes the golden files of one format version: `python -m tests.golden.make FOLDER`.

Purpose: a repository, two datasets, loader states and a dialogue on the sidecar's socket, with what a reader must find in them.
`tests/golden/test_golden.py` reads the files of every version with the present code. Run this only for a new version of a format,
from the commit that is to be remembered, into a new folder; files that exist are never written again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.checkpoint import RNG, Checkpointer, Keep, read
from headrace.checkpoint.repository import tags
from headrace.checkpoint.restoring.saved_step import LazyTensor
from headrace.checkpoint.saving import compression
from headrace.dataio import index, pack
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.store.open import open_store
from headrace.loaders import AudioLoader, Bucket, Buckets, Clip, FileLoader, Mixture, VideoLoader, Window
from tests.golden import dialogue
from tests.support import video_corpus as clips

RUN, FORK, PRUNED = "pretrain", "finetune", "pruned"

STEPS = [(RUN, 20), (RUN, 30), (RUN, 40), (FORK, 1), (PRUNED, 3)]


class Position:
    """A value of one rank, as the state of a loader."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


def training(step: int) -> dict[str, Any]:
    """A state with something of every kind that a repository holds. `step` 0 is a fresh one, to restore into."""

    def some(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> torch.Tensor:
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * bool(step)
        return torch.from_numpy(values).to(dtype)

    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(some(tuple(parameter.shape), torch.float32, step, number))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if step else 0.5)
    if step:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = some(tuple(parameter.shape), torch.float32, step, number, 9)
        with torch.no_grad():
            optimizer.step()
    embedding = some((64, 128), torch.float32, 1)  # the same in every step: deduplicated
    tied = some((16,), torch.float64, step, 77)
    dtypes = [torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    return {
        "model": model,
        "optimizer": optimizer,
        "frozen": embedding,
        "drift": some((160, 256), torch.bfloat16, 2)
        * (1 + 2**-7 * (step // 10)),  # small differences from step to step
        "smooth": torch.linspace(0, step, 20_000),
        "tied": {"a": tied, "b": tied},
        "half": {str(kind).removeprefix("torch."): some((5, 3), kind, step, 5) for kind in dtypes},
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5 * step),
        "strided": some((6, 8), torch.float32, step, 6).t(),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.0, 2.0]) * step, (3, 2), check_invariants=True
        ),
        "position": Position(step * 11),
        "values": {
            "text": f"step {step}",
            "bytes": b"\x00\xff" * bool(step),
            "numbers": [step, -(2**70), 0.1, float("inf"), True, None],
            "pair": (1, "two"),
            3: "an integer key",
        }
        if step
        else {"text": "", "bytes": b"", "numbers": [0, 0, 0.0, 0.0, False, None], "pair": (0, ""), 3: ""},
        "rng": RNG(),
    }


def digest(tensor: torch.Tensor) -> str:
    """Of shape, type and bytes."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:32]}"


def tensors_of(url: str, run: str, step: int | str) -> dict[str, str]:
    """Digests of all tensors of a step, by path."""
    with read(url, run=run, step=step) as saved:
        return {path: digest(saved[path].read()) for path in sorted(saved) if isinstance(saved[path], LazyTensor)}


def _slow_store() -> None:
    """So that every save compresses, and stores differences where it may."""
    compression.UploadSpeed.speed = property(lambda _: 1e5)  # type: ignore[method-assign, assignment]


def repository(folder: Path) -> dict[str, Any]:
    """Two timelines of one run, a fork, tags, a removed step, every encoding of a chunk, and a save that never ended."""
    _slow_store()
    url = str(folder)
    for timeline, (first, kind) in enumerate([(10, "zstd"), (20, "auto"), (30, "delta")]):
        with Checkpointer(url, run=RUN, sidecar=None, compression=kind) as checkpointer:
            if timeline:
                checkpointer.restore(training(0))
            checkpointer.save(first, training(first)).result(60)
    for changed in (
        39,
        40,
    ):  # the second trainer goes back to 30, so that the first one's step 40 is of an abandoned timeline
        with Checkpointer(url, run=RUN, sidecar=None) as checkpointer:
            assert checkpointer.restore(training(0), step=30) == 30
            checkpointer.save(40, training(changed)).result(60)
    with Checkpointer(url, run=FORK, sidecar=None, base=(RUN, 40)) as checkpointer:
        checkpointer.save(1, training(1)).result(60)
    with Checkpointer(url, run=PRUNED, sidecar=None, keep=Keep(last=1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, training(step)).result(60)
    with open_store(url) as store:
        tags.tag(store, "best", RUN, 40)
        tags.tag(store, "first", RUN, 10)
    _cut_off(url)
    steps = {f"{run} {step}": tensors_of(url, run, step) for run, step in STEPS}
    return {
        "tensors": steps,
        "tags": {"best": 40, "first": 10},
        "steps": {RUN: [10, 20, 30, 40], FORK: [1], PRUNED: [3]},
    }


def _cut_off(url: str) -> None:
    """A trainer that dies when its manifest is written and the decision is not."""
    program = (
        "import sys; from headrace.checkpoint import Checkpointer; from tests.golden.make import training\n"
        f"Checkpointer({url!r}, run='lost', sidecar=None).save(5, training(5)).result(60)"
    )
    environment = {**os.environ, "HEADRACE_CRASH": os.environ.get("GOLDEN_CRASH", "ckpt.manifest-written")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == -9, done


def _media(folder: Path) -> None:
    folder.mkdir()
    for number in range(4):
        clip = clips.Made("", "libx264", "mp4", width=32, height=32, frames=16 + 4 * number, options={"g": "8"})
        (folder / f"clip{number}.mp4").write_bytes(clips.make(clip))
        (folder / f"clip{number}.json").write_text(json.dumps({"caption": f"clip {number}", "score": number / 2}))
    for number in range(6):
        with wave.open(str(folder / f"tone{number}.wav"), "wb") as file:
            file.setnchannels(1), file.setsampwidth(2), file.setframerate(8000)
            samples = np.random.default_rng(number).integers(-9000, 9000, 800 + 400 * number)
            file.writeframes(samples.astype(np.int16).tobytes())
        data = io.BytesIO()
        np.save(data, np.arange(number + 3, dtype=np.float32))
        (folder / f"tone{number}.npy").write_bytes(data.getvalue())


def datasets(folder: Path) -> dict[str, Any]:
    """One that was packed, with two versions and a tag, and an index of tars in place."""
    with tempfile.TemporaryDirectory() as scratch:
        _media(Path(scratch, "media"))
        with pack([Path(scratch, "media")], folder / "packed", shard_bytes=1 << 15, workers=1) as packed:
            packed.tag("all")
            fewer = packed.remove(where="key = 'clip0'")
            fewer.close()
        tars = sorted((folder / "packed" / "shards").glob("*.tar"))
        index([str(tar) for tar in tars], folder / "indexed").close()
    return {name: described(Dataset(folder / name)) for name in ("packed", "indexed")}


def described(dataset: Dataset) -> dict[str, Any]:
    """What a reader finds: every file of every sample, with its digest, and the versions."""
    with dataset:
        columns = ["key", "members"]
        rows = [row for table in dataset.index.tables(columns) for row in table.select(columns).to_pylist()]
        files = {row["key"]: sorted((m["ext"], m["length"]) for m in row["members"]) for row in rows}
        return {"version": dataset.version, "samples": len(dataset), "files": json.loads(json.dumps(files))}


def loaders_of(folder: Path) -> dict[str, Any]:
    """One loader of each kind of order. What they deliver is told by key, so that a newer decoder changes nothing."""
    packed = str(folder / "packed")
    common: dict[str, Any] = {"sidecar": None, "num_threads": 1, "seed": 7}
    small: dict[str, Any] = {"clip": Clip(2, 2), "size": (16, 16)}
    shapes = Buckets((Bucket((16, 16)), Bucket((24, 16), 4)), budget=16 * 16 * 2 * 4)
    clips_, tones = Dataset(packed).where("key like 'clip%'"), Dataset(packed).where("key like 'tone%'")
    return {
        "video": VideoLoader(packed, 2, **small, **common),
        "video in buckets": VideoLoader(packed, buckets=shapes, clip=Clip(2, 2), drop_last=False, **common),
        "video of a mixture": VideoLoader(Mixture({"a": clips_, "b": packed}, {"a": 2, "b": 1}), 2, **small, **common),
        "evaluation": VideoLoader(packed, 2, evaluate=True, **small, **common),
        "audio": AudioLoader(packed, 2, window=Window(0.05), sample_rate=8000, **common),
        "audio of a view": AudioLoader(tones, 3, window=Window(0.05), sample_rate=8000, **common),
        "files": FileLoader(packed, 2, files=["npy"], **common),
    }


def states(folder: Path) -> dict[str, Any]:
    """State after three batches, and the keys of the next eight."""
    found = {}
    for name, loader in loaders_of(folder).items():
        with loader:
            endless = batches(loader)
            for _ in range(3):
                next(endless)
            state = loader.state_dict()
            found[name] = {"state": state, "next": [next(endless) for _ in range(8)]}
    return found


def batches(loader: Any) -> Any:
    """Keys of batch after batch, epoch after epoch."""
    while True:
        yield from (list(batch["key"]) for batch in loader)


def main(folder: str) -> None:
    target = Path(folder)
    target.mkdir(parents=True)
    expected = {"repository": repository(target / "repository"), "datasets": datasets(target / "datasets")}
    expected |= {"loaders": states(target / "datasets"), "dialogue": dialogue.record(target / "datasets" / "packed")}
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
