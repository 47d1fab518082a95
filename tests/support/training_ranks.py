"""One of several gloo ranks that train on one dataset.

`python -m tests.support.training_ranks URL STEPS STATE`; rank 0 prints what all ranks saw.
"""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from typing import Any

import torch.distributed as dist

from headrace.loaders import Clip, VideoLoader
from tests.support.ranks import in_group


@in_group
def main(url: str, steps: str, state: str) -> None:
    batch_size, clip = 4 // dist.get_world_size(), Clip(2, per_video=2)
    with VideoLoader(url, batch_size, clip=clip, size=(16, 16), seed=5, sidecar=None, num_threads=1) as loader:
        if state != "-":
            loader.load_state_dict(json.loads(state))
        seen, states = list[Any](), list[Any]()
        while len(seen) < int(steps):
            for batch in loader:
                parts: list[Any] = [None] * dist.get_world_size()
                mine = [hashlib.sha256(clip.numpy().tobytes()).hexdigest() for clip in batch["video"]]
                dist.all_gather_object(parts, (batch["id"].tolist(), mine))
                seen.append([list(chain.from_iterable(part[n] for part in parts)) for n in (0, 1)])
                states.append(loader.state_dict())
                if len(seen) == int(steps):
                    break
        if dist.get_rank() == 0:
            print(json.dumps({"seen": seen, "states": states}))
