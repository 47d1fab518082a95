"""Measures how all ranks of a large job find what they restore: real code, in one process and in virtual time.

It ends with the list of chunks that each rank reads. The store answers after a set time. Three parts are left out: the
search for the step, the comparison with tensors in memory, and the reading of packs.

    python -m headrace.bench.control_plane.restore SAVED RESTORING
"""

from __future__ import annotations

import json
import resource
import sys
from functools import partial
from unittest import mock

from headrace.bench.control_plane.state import ATTEMPT, RUN, boxes_of, save
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.repository import fetch, lease
from headrace.checkpoint.restoring import chunk_homes, divided_step
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, StepLease, Want
from headrace.checkpoint.restoring.opening import open_found, read_decision
from headrace.checkpoint.restoring.shared_reads import _needed_by_several
from headrace.checkpoint.state import tree
from headrace.checkpoint.tier.restoring import Found
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched


class NoSink:
    """Memory that is never filled."""

    def open(self) -> memoryview:
        raise AssertionError("nothing is read")

    def close(self) -> None:
        pass


def restore(store: SimulatedStore, ranks: SimulatedRanks, clock: object) -> int:
    """One rank, up to the list of its chunks; their number."""
    base = Base(1, 1, ATTEMPT)
    with StepLease(store, RUN, base, clock, writes=ranks.rank == 0):  # type: ignore[arg-type]
        opening = open_found(RUN, 1, lambda: (Found(base), read_decision(store, RUN, base)), ranks)
        assert opening is not None
        opened = divided_step.open_divided(store, opening[1], ranks)
        document = tree.decode(opened.own.tree)
        types = opened.types(list(tree.tensor_names(document)))
        boxes = {name: [box] for name, box in boxes_of(ranks.rank, ranks.world_size)}
        saved = opened.tensors(types, boxes)
        wants = [Want(saved[name], box, NoSink()) for name, its in boxes.items() for box in its]
        reading = ChunkReader(fetch.Step(RUN, base, ()), wants)
        chunk_homes.find_routes([(), _needed_by_several(reading)], ranks)
        with ranks.agreed():
            return len(reading.needed())


def measure(saved: int, restoring: int, latency: float = 0.02) -> dict[str, float]:
    """Requests of all ranks, and CPU seconds and MiB of one rank, as a mean over the ranks."""
    simulation = Simulation(1, measure_cpu=True)
    bucket = Bucket(simulation, latency=latency)
    save(bucket, saved)
    store, ranks_of = SimulatedStore(bucket), Group(simulation, restoring)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processes = [Process(str(rank)) for rank in range(restoring)]
    with gc_paused(), patched(simulation, lease, fetch), mock.patch.object(divided_step, "WHOLE_RANKS", 0):
        tasks = [
            simulation.start(
                partial(restore, store, SimulatedRanks(ranks_of, rank), simulation.clock), process=processes[rank]
            )
            for rank in range(restoring)
        ]
        simulation.run()
    errors = [task.error for task in tasks if task.error is not None]
    if errors:
        raise errors[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = [process.cpu for process in processes]
    return {
        "saved": saved,
        "restoring": restoring,
        "requests": sum(bucket.requests.values()),
        "cpu_seconds": round(sum(cpu) / len(cpu), 3),
        "mib_per_rank": round((after - before) / KIB / restoring, 1),
        "most_mib_received_at_once": round(ranks_of.bytes / MIB, 1),
        "virtual_seconds": round(simulation.now, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))))
