"""Energon's way to deliver the clips: its own index beside hard links of our tars, a cooker that decodes by hand.

Its pins and ours can meet in one environment or not, so it may run in an interpreter of its own (`--peer-python energon=…`).
Invariant: as `headrace.bench.loader.candidates`. Failure behaviour: exceptions of its libraries; `RuntimeError` when it
cannot index.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.bench.loader.data import AnyKind, whole
from headrace.bench.loader.place import Place, part_at_fork, the_file


def index(folder: Path, python: str) -> None:
    """Write what Energon wants to know before it reads."""
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1")
    with whole(folder / "energon") as made:
        made.mkdir()
        for shard in (folder / "dataset" / "shards").iterdir():
            os.link(shard, made / shard.name)
        command = [str(Path(python).parent / "energon"), "prepare", str(made), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"energon prepare: {done.stderr[-500:]}")


def batches(decode: Callable[[bytes], torch.Tensor], place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """Shuffled within a buffer, by two workers."""
    energon: Any = importlib.import_module("megatron.energon")

    def cook(sample: Any) -> Any:
        torch.set_num_threads(1)
        return {**energon.basic_sample_keys(sample), "made": decode(the_file(sample))}

    encoder = type(
        "Encoder",
        (energon.DefaultTaskEncoder,),
        {"decoder": None, "cookers": [energon.Cooker(energon.stateless(cook))]},
    )
    dataset = energon.get_train_dataset(
        _from_s3(place) if place.port else str(place.folder / "energon"),
        batch_size=kind.batch,
        shuffle_buffer_size=kind.buffer,
        max_samples_per_sequence=None,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=encoder(),
        repeat=False,
    )
    for batch in energon.get_savable_loader(dataset):
        yield batch["made"].flatten(0, 1)


def _from_s3(place: Place) -> str:
    """Its name for our folder on the server, which its storage client is told of by a file."""
    names = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY"}
    keys = {"type": "S3Credentials", "options": {name: os.environ[variable] for name, variable in names.items()}}
    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "base_path": place.folder.name,
        "region_name": "us-east-1",
    }
    profile = {"storage_provider": {"type": "s3", "options": options}, "credentials_provider": keys}
    told = place.folder / "energon.json"
    told.write_text(json.dumps({"profiles": {"bench": profile}}))
    part_at_fork()
    os.environ["MSC_CONFIG"] = str(told)
    return "msc://bench/energon"
