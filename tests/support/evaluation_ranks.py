"""Three gloo ranks that evaluate: `python -m tests.support.evaluation_ranks URL BATCH` prints what they counted together.

Every step ends in a collective, as a metric or DDP's forward has it: if one rank took a step more or less than the others, all
would hang and the time limit would tell.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # DDP imports it; here once, before the ranks are forked
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from headrace.loaders import Clip, VideoLoader

RANKS = 3


def evaluate(url: str, batch_size: int, rank: int, port: int) -> dict[str, Any]:
    """What this rank knows in the end: the steps, the samples of all, and which ranks were without samples when."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), rank=rank, world_size=RANKS)
    seen, empty = torch.zeros(8, dtype=torch.int64), []
    clip = Clip(1, start="center")
    with VideoLoader(url, batch_size, clip=clip, size=(16, 16), evaluate=True, sidecar=None, num_threads=1) as loader:
        for batch in loader:
            mine = torch.bincount(batch["id"], minlength=8)
            dist.all_reduce(mine)
            seen += mine
            empty.append(batch["empty_ranks"])
        with_model = _forward(loader)
    dist.destroy_process_group()
    return {"seen": seen.tolist(), "empty": empty, "forward": with_model}


def _forward(loader: VideoLoader) -> int:
    """Steps of a DDP model inside `Join`, ranks without samples included: they leave early, and the others go on."""
    model = DistributedDataParallel(torch.nn.Linear(3 * 16 * 16, 1))
    steps = 0
    with Join([model]):
        for batch in loader:
            if batch["video"] is None:
                break
            model(batch["video"].flatten(1).float()).sum().backward()
            steps += 1
    return steps


def main() -> None:
    torch.set_num_threads(1)
    url, batch_size = sys.argv[1], int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = []
    for rank in range(1, RANKS):
        pid = os.fork()
        if not pid:
            evaluate(url, batch_size, rank, port)
            os._exit(0)
        others.append(pid)
    print(json.dumps(evaluate(url, batch_size, 0, port)))
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    sys.exit(max(map(abs, ends)))


if __name__ == "__main__":
    main()
