"""Ranks that save the position of their loaders: `saved_loader_ranks URL REPOSITORY STEPS`.

Each prints the keys that it received in each step.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from headrace.checkpoint import Checkpointer
from tests.support.batches import take
from tests.support.latents import latent_loader
from tests.support.ranks import in_group


@in_group
def main(url: str, repository: str, steps: str) -> None:
    with (
        latent_loader(url, 4 // dist.get_world_size()) as loader,
        Checkpointer(repository, run="ranks", sidecar=None) as checkpointer,
    ):
        keys = [batch["key"] for batch in take(loader, int(steps))]
        checkpointer.save(int(steps), {"loader": loader}).result(timeout=60)
    print(json.dumps({"keys": keys}))
