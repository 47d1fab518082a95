"""Measures how all ranks of a large job divide the writes of a first save: real code, in one process, in virtual time.

python -m headrace.bench.control_plane.plan RANKS
"""

from __future__ import annotations

import json
import resource
import sys

from headrace.bench.control_plane.state import PARAMETERS, SLOTS, box_of
from headrace.checkpoint.state.home_plan import Row, divide
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Process, Simulation


def rows_of(rank: int, ranks: int) -> list[Row]:
    """The rows of one rank: its parts of the parameters and moments, and the step counts, which every rank holds."""
    rows = []
    for name, shape in PARAMETERS:
        if (box := box_of(shape, rank, ranks)) is not None:
            for slot, dtype in SLOTS:
                rows.append(Row(f"{slot}/{name}", dtype, shape, box.offset, box.local, False))
        rows.append(Row(f"step/{name}", "float32", (), (), (), False))
    return rows


def measure(ranks: int) -> dict[str, float]:
    """CPU seconds and MiB of one rank, as a mean over the ranks, and the CPU seconds of the slowest rank.

    The memory is that of the process at its peak, divided by the number of ranks. It includes messages in flight.
    """
    simulation = Simulation(1, measure_cpu=True)
    group = Group(simulation, ranks)
    tables = [rows_of(rank, ranks) for rank in range(ranks)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processes = [Process(str(rank)) for rank in range(ranks)]
    tasks = [
        simulation.start(divide, tables[rank], SimulatedRanks(group, rank), process=processes[rank])
        for rank in range(ranks)
    ]
    simulation.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = [process.cpu for process in processes]
    return {
        "ranks": ranks,
        "cpu_seconds": round(sum(cpu) / ranks, 4),
        "most_cpu_seconds": round(max(cpu), 4),
        "mib": round((after - before) / KIB / ranks, 2),
        "most_mib_received_at_once": round(group.bytes / MIB, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
