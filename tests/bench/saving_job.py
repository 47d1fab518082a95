"""One rank that saves twice and restores, for the tests of the simulator: prints seconds and bytes as lines of JSON.

`save URL KIB`: all of `KIB` a rank, then once more after half of it has changed. `restore URL KIB`: into other memory.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpointer

TENSORS = 4


class Own:
    """What belongs to this rank alone."""

    def __init__(self, rank: int, kib: int) -> None:
        seed = torch.Generator().manual_seed(rank)
        size = kib * 1024 // TENSORS
        self.tensors = {
            str(n): torch.randint(0, 255, (size,), dtype=torch.uint8, generator=seed) for n in range(TENSORS)
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


def main(what: str, url: str, kib: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    own = Own(rank, int(kib))
    with Checkpointer(url, run="simulated", sidecar=None) as checkpointer:
        if what == "restore":
            _restore(checkpointer, own, ranks)
        else:
            _save(checkpointer, own, 1, ranks)
            for number in range(TENSORS // 2):
                own.tensors[str(number)] ^= 255
            _save(checkpointer, own, 2, ranks)
    if ranks > 1:
        dist.destroy_process_group()


def _save(checkpointer: Checkpointer, own: Own, step: int, ranks: int) -> None:
    _together(ranks)
    began = time.perf_counter()
    result = checkpointer.save(step, {"own": own}).result(120)
    print(json.dumps({"seconds": time.perf_counter() - began, "bytes": result.bytes_written}), flush=True)


def _restore(checkpointer: Checkpointer, own: Own, ranks: int) -> None:
    wanted = {name: tensor.clone() for name, tensor in own.tensors.items()}
    for number in range(TENSORS // 2):
        wanted[str(number)] ^= 255
    for tensor in own.tensors.values():
        tensor.zero_()
    _together(ranks)
    began = time.perf_counter()
    assert checkpointer.restore({"own": own}) == 2
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in own.tensors.items())


def _together(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()
