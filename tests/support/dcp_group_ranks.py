"""Three ranks of which two save and load through DCP in a process group of their own: `group_job.py DIRECTORY`."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.repository import steps as repository
from tests.support.ranks import in_group


@in_group
def main(directory: str) -> None:
    rank, pair = dist.get_rank(), dist.new_group([1, 2])

    def say(what: str, state: dict[str, Any]) -> None:
        print(json.dumps({"what": what, "position": state["position"], "own": state["own"].tolist()}), flush=True)

    def empty(length: int) -> dict[str, Any]:
        return {"weight": torch.zeros(30_000), "position": -1, "own": torch.zeros(length)}

    if rank:
        for step in (1, 2):
            state = {"weight": torch.ones(30_000), "position": 10 * step + rank, "own": torch.full((rank,), step)}
            dcp.save(state, storage_writer=RepositoryWriter(directory, run="a", step=step), process_group=pair)
        asked: tuple[int | str, ...] = (1, "latest")
        for wanted in asked:
            into = empty(rank)
            dcp.load(into, storage_reader=RepositoryReader(directory, run="a", step=wanted), process_group=pair)
            say(f"step {wanted}", into)
        # step 2 was committed between the looks of the two ranks
        real, looks = repository.find, []
        if rank == 2:
            repository.find = lambda store, run, step: looks.append(step) or real(store, run, 1)
        into, reader = empty(rank), RepositoryReader(directory, run="a")
        dcp.load(into, storage_reader=reader, process_group=pair)
        say(f"race {reader.step} {looks}", into)
        repository.find = real
    dist.barrier()
    shared = {"weight": torch.ones(30_000), "position": 30 + rank, "own": torch.full((2,), rank)}
    dcp.save(shared, storage_writer=RepositoryWriter(directory, run="b", step=1))
    into = empty(2)
    dcp.load(into, storage_reader=RepositoryReader(directory, run="b"), no_dist=True)
    say("alone", into)


if __name__ == "__main__":
    main()
