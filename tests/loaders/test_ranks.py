"""Real gloo ranks: together they train on exactly the batches of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from dataio.shards.dataset import Dataset

RANK = """
import json, sys, hashlib
import torch, torch.distributed as dist
from loaders import Clip, VideoLoader

torch.set_num_threads(1)
url, steps, state = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if state != "-":
    state = json.loads(state)
dist.init_process_group("gloo")
batch_size, clip = 4 // dist.get_world_size(), Clip(2, per_video=2)
with VideoLoader(url, batch_size, clip=clip, size=(16, 16), seed=5, sidecar=None, threads=1) as loader:
    if state != "-":
        loader.load_state_dict(state)
    seen, states = [], []
    while len(seen) < steps:
        for batch in loader:
            parts = [None] * dist.get_world_size()
            mine = [hashlib.sha256(clip.numpy().tobytes()).hexdigest() for clip in batch["video"]]
            dist.all_gather_object(parts, (batch["id"].tolist(), mine))
            seen.append([sum((part[0] for part in parts), []), sum((part[1] for part in parts), [])])
            states.append(loader.state_dict())
            if len(seen) == steps:
                break
    if dist.get_rank() == 0:
        print(json.dumps({"seen": seen, "states": states}))
dist.destroy_process_group()
"""


def run_ranks(world_size: int, url: str, steps: int, state: str = "-") -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    command = [sys.executable, "-c", RANK, url, str(steps), state]
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, outputs
    result: dict[str, Any] = json.loads(outputs[0][0])
    return result


def test_two_gloo_ranks_see_the_global_batches_of_one_and_go_on_from_its_state(dataset: Dataset) -> None:
    url = Path(dataset.url.removeprefix("file://")).as_posix()
    alone = run_ranks(1, url, 6)
    together = run_ranks(2, url, 6)
    assert together == alone
    rest = run_ranks(2, url, 3, json.dumps(alone["states"][2]))
    assert rest["seen"] == alone["seen"][3:]
