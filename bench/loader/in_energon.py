"""Energon's way to deliver the clips: its own index beside hard links of our tars, a cooker that decodes by hand.

Its pins and ours can meet in one environment or not, so it may run in an interpreter of its own (`--peer-python energon=…`).
Invariant: as `bench.loader.candidates`. Failure behaviour: exceptions of its libraries; `RuntimeError` when it cannot index.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.loader.place import Place

BATCH = 8


def index(folder: Path, python: str) -> None:
    """Write what Energon wants to know before it reads."""
    target = folder / "energon"
    target.mkdir()
    for shard in (folder / "dataset" / "shards").iterdir():
        os.link(shard, target / shard.name)
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1")
    command = [str(Path(python).parent / "energon"), "prepare", str(target), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"energon prepare: {done.stderr[-500:]}")


def batches(decode: Callable[[bytes], torch.Tensor], place: Place) -> Iterator[torch.Tensor]:
    """Shuffled within a buffer, by two workers."""
    energon: Any = importlib.import_module("megatron.energon")

    def cook(sample: Any) -> Any:
        torch.set_num_threads(1)
        return {**energon.basic_sample_keys(sample), "video": decode(sample["mp4"])}

    encoder = type(
        "Encoder",
        (energon.DefaultTaskEncoder,),
        {"decoder": None, "cookers": [energon.Cooker(energon.stateless(cook))]},
    )
    dataset = energon.get_train_dataset(
        str(place.folder / "energon"),
        batch_size=BATCH,
        shuffle_buffer_size=64,
        max_samples_per_sequence=None,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=encoder(),
        repeat=False,
    )
    for batch in energon.get_savable_loader(dataset):
        yield batch["video"]
