"""Ranks that meet, and say who is there."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from tests.support.ranks import in_group


@in_group
def main() -> None:
    there: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(there, dist.get_rank())
    print(json.dumps({"ranks": there}))
